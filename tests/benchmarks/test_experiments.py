# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import ast
import inspect
import platform
import re
from pathlib import Path

import mpmath
import pytest
import scipy
import torch

from benchmarks.common import Claim, Results
from benchmarks.report import HERE, MAIN, PAGE, claims_of, committed, experiments, is_main, page

pytestmark = pytest.mark.site

EXPERIMENTS = experiments()


# One of each subject, a quick one; ``make soak`` runs the small form of all.
IN_THE_SUITE = {
    "compression.lenet_mnist",
    "continual.permuted_mnist",
    "distributions.vmf_accuracy",
    "functional.uci",
    "guides.step_time",
    "uncertainty.retinopathy",
}


def name_of(experiment):
    return experiment.__name__.partition(".")[2]


def subject_of(experiment):
    return name_of(experiment).partition(".")[0]


each_small_form = pytest.mark.parametrize(
    "experiment",
    [
        pytest.param(experiment, id=name, marks=[] if name in IN_THE_SUITE else pytest.mark.slow)
        for experiment, name in ((experiment, name_of(experiment)) for experiment in EXPERIMENTS)
    ],
)
each_experiment = pytest.mark.parametrize("experiment", EXPERIMENTS, ids=name_of)


def options_of(experiment, **wanted):
    """Those of these options that the experiment has."""
    return {name: value for name, value in wanted.items() if name in inspect.signature(experiment.run).parameters}


def test_experiments_are_found_by_their_place():
    subjects = {path.parent.name for path in HERE.glob("*/__init__.py")}
    assert subjects == {subject_of(experiment) for experiment in EXPERIMENTS}
    assert all(hasattr(experiment, function) for experiment in EXPERIMENTS for function in ("run", "report"))
    assert all(committed(experiment).rows for experiment in EXPERIMENTS)


def test_every_saved_result_belongs_to_an_experiment():
    paths = {committed(experiment).path for experiment in EXPERIMENTS}
    assert {path for path in HERE.rglob("*.json") if not path.stem.endswith("_paper")} == paths


def test_the_suite_runs_one_small_form_of_each_subject():
    run = [experiment for experiment in EXPERIMENTS if name_of(experiment) in IN_THE_SUITE]
    assert len(run) == len(IN_THE_SUITE)
    assert {subject_of(experiment) for experiment in run} == {subject_of(experiment) for experiment in EXPERIMENTS}


@each_small_form
def test_the_smallest_form_runs_and_is_reported(experiment, tiny_data, tmp_path):
    output = tmp_path / "results.json"
    dtype = torch.get_default_dtype()
    experiment.run(
        output, **options_of(experiment, form="small", data_dir=tiny_data, workers=1, threads=1, device="cpu")
    )
    assert torch.get_default_dtype() == dtype
    results = Results(output)
    assert results.rows
    if hasattr(experiment, "draw"):
        experiment.draw(results)
    section = experiment.report(results)
    plots = re.findall(r"!\[.+\]\((.+)\)", section)
    assert sorted(map(Path, plots)) == sorted(tmp_path.glob("*.png"))


@each_experiment
def test_the_section_of_the_page_names_its_command_and_its_plots(experiment):
    section = experiment.report(committed(experiment))
    assert section.startswith("### ")
    assert re.search(rf"`python -m {re.escape(experiment.__name__)}( --data-dir DIR)?`", section)
    data_dir = inspect.signature(experiment.run).parameters.get("data_dir")
    needs_data = data_dir is not None and data_dir.default is data_dir.empty
    assert ("--data-dir DIR" in section) == needs_data
    plots = re.findall(r"!\[.+\]\((.+)\)", section)
    assert bool(plots) == hasattr(experiment, "draw")
    assert all((HERE / plot).exists() for plot in plots)


@each_experiment
def test_claims_are_made_of_saved_rows(experiment):
    for claim in claims_of(experiment):
        assert isinstance(claim, Claim)
        assert claim.text
        assert claim.ours
        assert isinstance(claim.supported, bool)


@each_experiment
def test_the_saved_rows_are_those_of_the_default_form(experiment, tiny_data, monkeypatch):
    if hasattr(experiment, "NEEDS"):
        pytest.skip(f"needs {experiment.NEEDS}")
    results = committed(experiment)
    for package in (torch, scipy, mpmath):
        saved = results.setting.get(package.__name__, package.__version__)
        monkeypatch.setattr(package, "__version__", saved)
    saved = results.setting.get("python", platform.python_version())
    monkeypatch.setattr(platform, "python_version", lambda: saved)
    monkeypatch.setattr(Results, "_save", lambda self, rows, keys: pytest.fail(f"not saved: {list(keys)}"))
    experiment.run(results.path, **options_of(experiment, data_dir=tiny_data))


def test_the_page_is_made_of_the_saved_results():
    assert PAGE.read_text() == page()


@pytest.mark.parametrize(("name", "words"), MAIN, ids=str)
def test_each_claim_of_the_summary_is_one_of_its_experiment(name, words):
    (experiment,) = (candidate for candidate in EXPERIMENTS if candidate.__name__.endswith(f".{name}"))
    claims = claims_of(experiment)
    assert [claim.text for claim in claims if is_main(name, claim) and claim.text.startswith(words)][1:] == []
    assert any(claim.text.startswith(words) for claim in claims)


def test_no_module_imports_an_experiment_or_the_report():
    taboo = {experiment.__name__ for experiment in EXPERIMENTS} | {"benchmarks.report"}
    offenders = {str(path.relative_to(HERE)): sorted(imports_of(path) & taboo) for path in sorted(HERE.rglob("*.py"))}
    assert {path: imported for path, imported in offenders.items() if imported} == {}


def imports_of(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, path
            imported |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return imported


def test_the_example_of_the_readme_is_an_experiment(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), flags=re.DOTALL)
    scope = {"__name__": "addition"}
    exec(code, scope)
    scope["run"](tmp_path / "addition.json", form="small")
    results = Results(tmp_path / "addition.json")
    assert results.distinct("size") == [10]
    assert scope["report"](results).startswith("### Addition")
    assert len(scope["claims"](results)) == 1
