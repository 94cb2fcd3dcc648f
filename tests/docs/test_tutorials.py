# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The quickstart and the notebooks run, and show what they promise."""

import ast
import importlib.util
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

import matplotlib
import nbformat
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

WRITE = "%%writefile "
# What a kernel does not show either.
NOT_SHOWN = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


def run_notebook(path: Path) -> int:
    """Run all cells of code in the current folder, with warnings as errors.

    Every figure is drawn at the end of its cell and closed. Modules that the notebook imports from the current folder
    are forgotten afterwards.

    :returns: how many figures were drawn.
    """
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    # A module, so that what the notebook defines can be pickled.
    module = ModuleType(path.stem)
    before = set(sys.modules)
    sys.modules[module.__name__] = module
    sys.path.insert(0, "")
    drawn = 0
    try:
        with warnings.catch_warnings(), matplotlib.rc_context({"backend": "agg"}):
            warnings.resetwarnings()
            warnings.simplefilter("error")
            for category in NOT_SHOWN:
                warnings.simplefilter("ignore", category)
            cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
            for number, source in enumerate(cells):
                drawn += _run_cell(source, f"{path.name}, cell {number + 1}", vars(module))
    finally:
        plt.close("all")
        sys.path.remove("")
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if name == module.__name__ or (file is not None and Path(file).parent == Path.cwd()):
                del sys.modules[name]
    return drawn


def _run_cell(source: str, where: str, scope: dict) -> int:
    """Run one cell and return how many figures it leaves to show."""
    if source.startswith(WRITE):
        name, text = source.removeprefix(WRITE).split("\n", 1)
        Path(name).write_text(text)
        return 0
    plain = "\n".join("" if line.startswith("%") else line for line in source.splitlines())
    tree = ast.parse(plain, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, where, "exec"), scope)
    shown = None if last is None else eval(compile(ast.Expression(last.value), where, "eval"), scope)
    figures = [plt.figure(number) for number in plt.get_fignums()]
    if isinstance(shown, Figure) and shown not in figures:
        figures.append(shown)
    elif shown is not None:
        repr(shown)
    for figure in figures:
        figure.canvas.draw()
    plt.close("all")
    return len(figures)


pytestmark = pytest.mark.site

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
PLOTS = ("by_prior.png", "misread.png", "images.png")


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


def table_rows(output: str) -> list[list[float]]:
    """The numbers in the printed table, a list for each method."""
    rows = re.findall(r"^\w[^\n]*, (?:decay[^\n]*²\)|nothing chosen)((?: +[\d.]+){2})$", output, flags=re.MULTILINE)
    return [[float(cell) for cell in cells.split()] for cells in rows]


def test_quickstart_prints_both_methods_and_saves_plots(quickstart, tmp_path, capsys):
    quickstart.main(["--epochs", "5", "--output-dir", str(tmp_path / "new")])
    output = capsys.readouterr().out
    rows = table_rows(output)
    assert len(rows) == len(quickstart.PRIOR_STDDEVS) + 1
    for nll, misread in rows:
        assert nll > 0
        assert 0 <= misread <= 100
    assert len(re.findall(r"\d ± \d", output)) == 2
    for name in PLOTS:
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")
        assert str(tmp_path / "new" / name) in output


def test_quickstart_shows_a_gain_over_the_plain_network(quickstart):
    task = quickstart.make_task(10)
    plain = quickstart.train_plain(1.0, task, quickstart.EPOCHS, 10)
    radial = quickstart.train_radial(task, quickstart.EPOCHS, 10)
    gain = quickstart.nll(plain, task) - quickstart.nll(radial, task)
    # Over five seeds it is 0.45 to 0.67.
    assert gain.mean() > 0.3
    assert gain.mean() > 2 * gain.std() / len(gain) ** 0.5
    # Over five seeds 0.8 to 6.6 % fewer.
    assert quickstart.misread(radial, task.digits) < quickstart.misread(plain, task.digits) - 2


def test_quickstart_gives_one_label_in_five_a_wrong_digit(quickstart):
    task = quickstart.make_task(0)
    assert len(task.labels) == quickstart.NUM_TRAIN
    wrong = float((task.later_labels != task.digits).double().mean())
    # The standard error of a share of 0.2 of 1,597 is 0.01.
    assert abs(wrong - quickstart.SHARE_WRONG) < 0.04


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
