# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How the files are built: which package may import which, which names mean one thing, the order of docstrings."""

import ast
import graphlib
import itertools
import re
from collections import Counter
from pathlib import Path

import pytest

from tools import size

PACKAGE = Path(__file__).resolve().parents[1] / "pyro_radial"
MODULES = sorted(PACKAGE.rglob("*.py"))

LOW = {"_pyro", "distributions", "poutine", "nn"}
#: What each package or module may import besides itself; ``infer`` stands for the other files directly in that folder.
MAY_IMPORT = {
    "_version": set(),
    "_pyro": set(),
    "distributions": {"_pyro"},
    "nn": {"_pyro", "distributions"},
    "poutine": {"_pyro", "distributions", "nn"},
    "infer.data": {"_pyro"},
    "infer.loss": LOW,
    "infer.autoguide": LOW,
    "infer.step": LOW | {"infer.loss"},
    "infer.compiler": LOW | {"infer.loss", "infer.step"},
    "infer.compiled": LOW | {"infer.loss", "infer.step", "infer.compiler"},
    "infer.prediction": LOW | {"infer.data", "infer.autoguide"},
    "infer.diagnose": LOW | {"infer.data", "infer.loss", "infer.autoguide"},
    "infer.posthoc": LOW | {"infer.data", "infer.prediction"},
    "infer.prediction.linearized_network": LOW | {"infer.prediction", "infer.posthoc"},
}
# Nobody else opens the compiler.
MAY_IMPORT["infer.training"] = {*MAY_IMPORT} - {"_version", "infer.compiled", "infer.posthoc"}
MAY_IMPORT["infer"] = {*MAY_IMPORT} - {"_version", "infer.compiler"}
MAY_IMPORT["functional"] = LOW | {"infer.data", "infer.loss", "infer.posthoc", "infer.prediction"}
BELOW_TASKS = {*MAY_IMPORT} - {"_version", "infer.compiler"}
MAY_IMPORT |= {
    "uncertainty": BELOW_TASKS,
    "compression": BELOW_TASKS,
    "continual": BELOW_TASKS | {"uncertainty"},
    "botorch": {"_pyro"},
    "_columns": {"_pyro"},
    "sklearn": BELOW_TASKS | {"_columns"},
    "testing": BELOW_TASKS,
}
TESTS = Path(__file__).resolve().parent
#: Folders of tests of no single module; the files directly in ``tests`` have their own subjects too.
OWN_SUBJECTS = {
    "behavior",
    "benchmarks",
    "calls",
    "devices",
    "docs",
    "golden",
    "pyro_suite",
    "soak",
    "tools",
    "tutorials",
}
#: Functions and classes of one name in two modules, each a thing of its own. Rename rather than add to them.
SHARED_NAMES = {"_tensors"}
PARTS = (r"^Source: ", r"^:param ", r"^:returns?: ", r"^:raises ", r"^Example.*::")


def dotted(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def package_of(module):
    fits = [name for name in MAY_IMPORT if module == name or module.startswith(f"{name}.")]
    return max(fits, key=len, default=None)


def imports(path):
    """The modules of the package that a file imports, also inside functions; examples in docstrings do not count."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyro_radial."):
            base = node.module.removeprefix("pyro_radial.")
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if (PACKAGE / f"{inner.replace('.', '/')}.py").exists() else base
        elif isinstance(node, ast.ImportFrom) and node.module == "pyro_radial":
            yield from (alias.name for alias in node.names)


def documented(path):
    """``(name, docstring)`` of the module, and of its public classes, functions and methods."""
    tree = ast.parse(path.read_text())

    def below(node, prefix):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
                yield f"{prefix}{child.name}", ast.get_docstring(child) or ""
                if isinstance(child, ast.ClassDef):
                    yield from below(child, f"{prefix}{child.name}.")

    return [("module", ast.get_docstring(tree) or ""), *below(tree, "")]


def test_every_module_is_in_a_package_of_the_table():
    assert [dotted(path) for path in MODULES if dotted(path) and package_of(dotted(path)) is None] == []


def test_a_package_imports_only_what_the_table_allows():
    offenders = [
        f"{own} imports {module}"
        for own, module in ((dotted(path), module) for path in MODULES for module in imports(path))
        if own and package_of(module) not in MAY_IMPORT[package_of(own)] | {package_of(own)}
    ]
    assert offenders == []


def test_no_module_imports_itself_by_way_of_others():
    """Without the ``__init__`` files, which only pass names on; ``static_order`` raises and shows a cycle."""
    graph = {dotted(path): {*imports(path)} for path in MODULES if path.name != "__init__.py"}
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_only_packages_and_modules_that_users_import_from_list_their_names():
    """A list marks what is public. ``compat`` lists what it passes on, so that the linter keeps those imports."""
    listing = {path for path in MODULES if "\n__all__ = " in path.read_text()}
    others = {path for path in listing if path.name not in ("__init__.py", "plots.py", *size.PUBLIC_MODULES)}
    assert [dotted(path) for path in others] == ["_pyro.compat"]


def test_a_name_means_one_thing():
    definitions = Counter(
        node.name
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name != "_"
    )
    assert {name for name, count in definitions.items() if count > 1} <= SHARED_NAMES


def test_docstrings_keep_the_order_of_their_parts():
    offenders = []
    for module, name, docstring in ((dotted(path), *item) for path in MODULES for item in documented(path)):
        found = [[m.start() for m in re.finditer(part, docstring, flags=re.MULTILINE)] for part in PARTS]
        if any(max(earlier) > min(later) for earlier, later in itertools.pairwise(filter(None, found))):
            offenders.append(f"{module}: {name}")
    assert offenders == []


@pytest.mark.parametrize("module", ["infer/step/stepper.py", "infer/compiler/program.py"])
def test_the_page_for_contributors_shows_the_code_as_it_is(module):
    page = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    _, _, after = page.partition(f"`{module}`")
    block = after.partition("```python\n")[2].partition("```")[0]
    assert len(block.splitlines()) > 10
    # The page has wider lines.
    assert "".join(block.split()) in "".join((PACKAGE / module).read_text().split())


def test_every_module_has_a_docstring():
    assert [dotted(path) for path in MODULES if not documented(path)[0][1].strip()] == []


def test_a_test_file_begins_with_the_name_of_its_module_or_is_in_a_folder_of_behaviors():
    def is_of_a_module(path):
        modules = (PACKAGE / path.parent.relative_to(TESTS)).glob("*.py")
        return any(f"{path.stem}_".startswith(f"test_{module.stem}_") for module in modules)

    files = [path for path in TESTS.rglob("test_*.py") if path.parent != TESTS]
    mirroring = [path for path in files if path.relative_to(TESTS).parts[0] not in OWN_SUBJECTS]
    assert [str(path.relative_to(TESTS)) for path in mirroring if not is_of_a_module(path)] == []
