# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The quickstart and the notebooks run, and show what they promise."""

import importlib.util
import math
import re
from pathlib import Path

import nbformat
import pytest
from matplotlib import pyplot as plt

from tests.helpers.notebooks import run_notebook
from tutorials.image_sets import load

pytestmark = pytest.mark.site

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
PLOTS = ("reliability.png", "certainty.png", "training_terms.png")


@pytest.fixture(scope="module", autouse=True)
def beside_the_tutorials():
    """As for a script or a notebook, modules are searched in the folder of the tutorials."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TUTORIALS)
        yield


@pytest.fixture(scope="module")
def quickstart(beside_the_tutorials):
    spec = importlib.util.spec_from_file_location("quickstart", TUTORIALS / "quickstart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table_rows(output: str) -> dict[str, list[float]]:
    """The numbers in the printed table by method."""
    rows = re.findall(r"^(plain network|Auto\w+)((?: +(?:[\d.]+|-)){5})$", output, flags=re.MULTILINE)
    return {method: [float(cell) for cell in cells.split() if cell != "-"] for method, cells in rows}


# Five epochs have 35 steps.
SHORT = pytest.mark.filterwarnings("ignore:.*trains widths in:UserWarning")


@SHORT
def test_quickstart_prints_all_methods_and_saves_plots(quickstart, tmp_path, capsys):
    quickstart.main(["--epochs", "5", "--output-dir", str(tmp_path / "new")])
    output = capsys.readouterr().out
    rows = table_rows(output)
    assert {method: len(row) for method, row in rows.items()} == {
        "plain network": 4,
        "AutoMeanField": 5,
        "AutoRadial": 5,
    }
    for accuracy, nll, *shares in rows.values():
        # Five epochs beat the eighth that guessing gets, and log 8 nats.
        assert 1 / 8 < accuracy <= 1
        assert 0 < nll < math.log(8)
        assert all(0 <= share <= 1 for share in shares)
    assert "classes 8 and 9" in output
    assert re.search(r"\d ± \d.*than the plain network", output)
    for name in PLOTS:
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")
        assert str(tmp_path / "new" / name) in output


def test_quickstart_never_trains_on_classes_of_another_kind(quickstart):
    task = quickstart.make_task(load("digits"))
    for _, labels in (task.train, task.validation, task.test):
        assert set(labels.tolist()) == set(range(8))
    assert set(task.unseen[1].tolist()) == {8, 9}
    assert len(task.train[1]) + len(task.validation[1]) == int((load("digits").train_labels < 8).sum())


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "retinamnist"])
def test_quickstart_network_fits_images_of_every_set(quickstart, data_dir, name):
    task = quickstart.make_task(load(name, data_dir))
    images = task.train[0][:3]
    num_classes = len(task.class_names)
    assert quickstart.make_net(images, num_classes)(images).shape == (3, num_classes)
    assert num_classes == int(task.test[1].max()) + 1
    assert int(task.unseen[1].min()) == num_classes


@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs_without_errors_or_warnings(path, tmp_path, monkeypatch, request, capsys):
    monkeypatch.setenv("SMOKE_TEST", "1")
    if "PYRO_RADIAL_DATA" in path.read_text():
        # Without the data beside the checkout the notebook would download it; the test is skipped then.
        monkeypatch.setenv("PYRO_RADIAL_DATA", str(request.getfixturevalue("data_dir")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: None)
    assert run_notebook(path) > 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_is_stored_small_and_executed(path):
    notebook = nbformat.read(path, as_version=4)
    assert path.stat().st_size < 400_000
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
