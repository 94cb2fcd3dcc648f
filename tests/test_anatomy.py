# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How every file of the package is built: what may import what, and what stands where in a docstring."""

import ast
import itertools
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "pyro_radial"
MODULES = sorted(PACKAGE.rglob("*.py"))
# From the bottom up, as in the README; those of one row do not know each other.
ROWS = (
    ("_version",),
    ("_capturing", "_checks", "_compat", "_state"),
    ("_naming",),
    ("distributions",),
    ("poutine",),
    ("nn",),
    ("functional",),
    ("infer.autoguide.families",),
    ("infer.autoguide",),
    ("infer",),
    ("uncertainty",),
    ("compression", "continual", "datasets", "decisions"),
    ("testing",),
)
HEIGHT = {name: row for row, names in enumerate(ROWS) for name in names}
PARTS = (r"^Source: ", r"^:param ", r"^:returns?: ", r"^:raises ", r"^Example.*::")


def dotted(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def row_of(module):
    """The row's name that a module of the package belongs to, the longest that fits."""
    fits = [name for name in HEIGHT if module == name or module.startswith(f"{name}.")]
    return max(fits, key=len, default=None)


def imports(path):
    """What of the package a file imports, also inside functions; docstrings' examples are no imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyro_radial."):
            yield node.module.removeprefix("pyro_radial.")
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


def identify(path):
    return dotted(path) or "__init__"


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_imports_go_downward(path):
    own = dotted(path)
    if not own:
        return
    here = row_of(own)
    assert here is not None, f"{own} is in no row of the package layout"
    for module in imports(path):
        there = row_of(module)
        assert there is not None, module
        assert there == here or HEIGHT[there] < HEIGHT[here], f"{own} imports {module}, which is not below it"


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_a_public_module_says_what_it_exports(path):
    private = any(part.startswith("_") and part != "__init__.py" for part in path.relative_to(PACKAGE).parts)
    assert private or "\n__all__ = " in path.read_text()


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_docstrings_keep_their_order(path):
    for name, docstring in documented(path):
        positions = []
        for part in PARTS:
            found = [match.start() for match in re.finditer(part, docstring, flags=re.MULTILINE)]
            positions += [found] if found else []
        for earlier, later in itertools.pairwise(positions):
            assert max(earlier) < min(later), f"{identify(path)}: {name}"


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_a_module_s_docstring_is_of_a_sentence_or_two(path):
    docstring = documented(path)[0][1]
    # A source has its own full stops; abbreviations and names with dots are no ends of sentences.
    text = re.sub(r"Source: .*", "", docstring, flags=re.DOTALL)
    text = re.sub(r"``.*?``|:\w+:`.*?`|\bet al\.|\be\.g\.|\beq\.", "x", text, flags=re.DOTALL)
    assert text.strip()
    assert len(re.findall(r"[.!?](?=\s|$)", text)) <= 2, docstring


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_a_module_has_at_most_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400


def test_rows_are_those_of_the_readme():
    readme = (PACKAGE.parent / "README.md").read_text()
    layout = re.findall(r"^ {2,4}(\w+)/  ", readme, flags=re.MULTILINE)
    top = [name for names in ROWS for name in names if not name.startswith("_") and "." not in name]
    assert [name for name in layout if name in top] == sorted(top, key=lambda name: layout.index(name))
    assert set(top) <= set(layout)
    heights = [HEIGHT[name] for name in layout if name in HEIGHT]
    # The guides are part of infer, which is named first.
    assert heights == sorted(heights)
