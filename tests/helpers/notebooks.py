# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Run a notebook's cells in this process, which takes seconds less than a kernel of its own."""

import ast
import sys
import warnings
from pathlib import Path
from types import ModuleType

import matplotlib
import nbformat
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
