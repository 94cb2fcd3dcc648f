# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Each example of the README runs after those that it continues from, all run in a row, and the text is short."""

import contextlib
import io
import re
from pathlib import Path

import pyro
import pytest
import torch

from pyro_radial.compression import mean_network

README = Path(__file__).resolve().parents[2] / "README.md"
LAYOUT = README.with_name("CONTRIBUTING.md")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", README.read_text(), re.DOTALL | re.MULTILINE))
EXAMPLES = {
    title: re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    for title, text in SECTIONS.items()
    if "```python" in text
}


def goes_on_from(title):
    """The titles of the sections whose examples come first, as the text says."""
    before = re.findall(r"[Cc]ontinues from \[([^\]]+)\]", SECTIONS[title])
    return [first for name in before for first in goes_on_from(name)] + [title]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The variables of a section's example and what it alone prints; each example runs once."""
    done = {}

    def run(title):
        if title in done:
            return done[title]
        *earlier, _ = goes_on_from(title)
        # The names, not the objects: sections that go on from one do not change what it has made.
        scope = dict(run(earlier[-1])[0]) if earlier else {}
        printed = io.StringIO()
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        with contextlib.chdir(tmp_path_factory.mktemp("readme")), contextlib.redirect_stdout(printed):
            exec(EXAMPLES[title][0], scope)
        done[title] = scope, printed.getvalue()
        return done[title]

    return run


def test_a_section_has_one_example():
    assert len(EXAMPLES) == 6
    assert {len(examples) for examples in EXAMPLES.values()} == {1}


def test_the_readme_is_short():
    prose = re.sub(r"```python\n.*?```", "", README.read_text(), flags=re.DOTALL)
    assert len(prose.split()) <= 1250
    lines = [line for examples in EXAMPLES.values() for line in examples[0].splitlines() if line.strip()]
    assert len(lines) <= 120
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
    accuracy = (scope["draws"].mean.argmax(-1) == scope["y"]).double().mean()
    # The labels are exclusive-or of two signs: no linear function and no constant gets far above one half.
    assert accuracy > 0.9
    assert torch.isfinite(scope["draws"].log_prob(scope["y"])).all()
    assert f"accuracy {accuracy:.2f}" in printed


def test_a_posterior_of_the_last_layer_mends_a_network_that_learned_wrong_labels(run):
    scope, printed = run("A network that is already trained")
    before, after = scope["before"], scope["score"](scope["sure"], scope["tested"])
    # With four other seeds the gain is 0.02 to 0.10.
    assert after > before
    # One label in five is wrong: log(2) is what guessing has.
    assert after > -0.69
    assert f"{before:.2f}, with the posterior {after:.2f}" in printed


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


def test_the_chain_has_a_prior_for_each_posterior(run):
    scope, _ = run("One task after another")
    assert scope["chain"].prior.keys() == scope["task_guide"].posterior().keys()


def test_the_network_that_is_left_is_smaller_and_nearly_as_good(run):
    scope, _ = run("Networks that prune themselves")
    assert scope["small"][0].out_features < 40
    errors = (scope["small"](scope["x"]).argmax(-1) != scope["y"]).double().mean()
    whole = mean_network(scope["sparse"].bnn, scope["directions"])
    assert errors <= (whole(scope["x"]).argmax(-1) != scope["y"]).double().mean() + 0.02


def test_the_functional_prior_brings_the_network_near_the_exact_process(run):
    scope, _ = run("Priors on functions")
    stddev = scope["covariance"][0].diagonal().sqrt()
    functions = scope["curves"].samples.squeeze(-1)
    # Among the data a few hundredths; beyond them, in standard deviations that are nearly those of the prior.
    assert stddev[0] < 0.1 < 0.9 < stddev[1]
    gap = (functions.mean(0) - scope["mean"].squeeze(-1)).abs()
    assert gap[0] < 0.1
    assert gap[1] < 0.5
    assert ((functions.std(0) / stddev - 1).abs() < 0.5).all()


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
