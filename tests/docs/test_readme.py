# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Each example of the README runs by itself and all run in a row, and the text is short."""

import contextlib
import io
import re
from pathlib import Path

import pyro
import pytest
import torch

README = Path(__file__).resolve().parents[2] / "README.md"
LAYOUT = README.with_name("CONTRIBUTING.md")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", README.read_text(), re.DOTALL | re.MULTILINE))
EXAMPLES = {
    title: re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    for title, text in SECTIONS.items()
    if "```python" in text
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The variables of a section's example and what it prints; each example runs once."""
    done = {}

    def run(title):
        if title not in done:
            scope = {}
            printed = io.StringIO()
            pyro.clear_param_store()
            pyro.set_rng_seed(0)
            with contextlib.chdir(tmp_path_factory.mktemp("readme")), contextlib.redirect_stdout(printed):
                exec(EXAMPLES[title][0], scope)
            done[title] = scope, printed.getvalue()
        return done[title]

    return run


def test_a_section_has_one_example():
    assert len(EXAMPLES) == 2
    assert {len(examples) for examples in EXAMPLES.values()} == {1}


def test_the_readme_is_short():
    prose = re.sub(r"```python\n.*?```", "", README.read_text(), flags=re.DOTALL)
    assert len(README.read_text().splitlines()) <= 150
    assert len(prose.split()) <= 900
    assert len([line for line in EXAMPLES["A Bayesian network"][0].splitlines() if line.strip()]) < 15


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_runs_by_itself_and_prints(run, title):
    _, printed = run(title)
    assert re.search(r"\d", printed)


@pytest.mark.slow
def test_all_examples_run_in_one_session(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    scope = {}
    for examples in EXAMPLES.values():
        exec(examples[0], scope)
        assert re.search(r"\d", capsys.readouterr().out)


def test_the_first_example_learns_what_a_constant_cannot(run):
    scope, printed = run("A Bayesian network")
    rows = scope["predict"](scope["model"], scope["guide"], scope["x"])
    accuracy = (rows.mean.argmax(-1) == scope["y"]).double().mean()
    # The labels are exclusive-or of two signs: no linear function and no constant gets far above one half.
    assert accuracy > 0.9
    assert torch.isfinite(rows.log_prob(scope["y"])).all()
    # The README shows what it prints: sure of the first row, not of the second, where one input is zero.
    (shown,) = re.findall(r"# ([0-9.]+) and ([0-9.]+):", EXAMPLES["A Bayesian network"][0])
    probabilities = scope["draws"].mean[:, 1].tolist()
    assert f"{scope['draws'].mean[:, 1]}\n{scope['draws'].entropy}" in printed
    assert abs(float(shown[0]) - probabilities[0]) < 0.01
    assert abs(float(shown[1]) - probabilities[1]) < 0.25
    assert scope["draws"].entropy[1] > 5 * scope["draws"].entropy[0]


def test_compiled_steps_find_the_offsets_on_graphs_alone(run):
    scope, _ = run("Any Pyro model, faster")
    assert scope["svi"].compiled
    assert not scope["svi"].eager_reasons
    posterior = scope["groups_guide"].posterior()
    weights = torch.zeros(20)
    weights[:2] = torch.tensor([1.0, -1.0])
    # Noise 0.5 and 400 rows: a standard error of 0.025 for a weight, 0.07 for an offset of 50 rows.
    assert (posterior["weights"].mean - weights).abs().max() < 0.15
    assert (posterior["offset"].mean - torch.linspace(-1, 1, 8)).abs().max() < 0.35


@pytest.mark.parametrize("name", re.findall(r"^ {2,4}(\w+(?:/|\.py))", LAYOUT.read_text(), flags=re.MULTILINE))
def test_every_module_of_the_package_layout_exists(name):
    package = README.parent / "pyro_radial"
    assert (package / name).exists() or (package / "infer" / name).exists()


def test_every_package_is_in_the_package_layout():
    package = README.parent / "pyro_radial"
    packages = [path.name for path in package.iterdir() if path.is_dir() and (path / "__init__.py").exists()]
    assert all(f"  {name}/" in LAYOUT.read_text() for name in packages)


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https?:|#)([^)#]+)", README.read_text()))
def test_every_file_that_is_linked_exists(target):
    assert (README.parent / target).exists()
