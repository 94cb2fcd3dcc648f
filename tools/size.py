# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How large and how dense the package is, or another: ``python -m tools.size [PACKAGE]`` with the folder of its code.

Every node of the syntax tree that is a statement (``ast.stmt``) counts as one, docstrings and nested statements too: a
function with a docstring and a ``return`` counts as three. Lines do not count, so squeezing them gains nothing.

A public name is in the ``__all__`` of a package or of one of ``PUBLIC_MODULES``; it counts once, wherever it is. Names
that plots share with other plots do not count.

The next four numbers are for 100 statements: comprehensions (generator expressions are among them), nested ones (inside
another one, or with two ``for``), assignments of several values to several names (``a, b = 1, 2``), and uses of the
name ``Any``. The last number is the percentage of code lines (no docstring, comment or blank line) with more than 100
columns.

``LIMITS`` has the most that the package may have of each, and ``tests/tools/test_size.py`` holds it to them.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

LIMITS = {
    "statements": 16_657,
    "public names": 97,
    "comprehensions": 3,
    "nested comprehensions": 0.15,
    "tuple assignments": 0.6,
    "Any": 4,
    "long lines": 4,
}
#: Single files that users import from.
PUBLIC_MODULES = ("likelihoods.py", "recipes.py", "botorch.py", "botorch_models.py", "sklearn.py")
COLUMNS = 100
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines of all docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return lines


def code_lines(source: str) -> list[str]:
    """Return the lines that hold code."""
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            numbers.update(range(token.start[0], token.end[0] + 1))
    numbers -= docstring_lines(ast.parse(source))
    lines = source.splitlines()
    return [lines[number - 1] for number in sorted(numbers)]


def exported(tree: ast.Module) -> set[str]:
    """Return the names in the ``__all__`` of a module."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return {*ast.literal_eval(node.value)}
    return set()


def public_names(trees: dict[Path, ast.Module]) -> set[str]:
    """Return the names that users import."""
    names: set[str] = set()
    for path, tree in trees.items():
        if path.name == "plots.py":
            names.update(name for name in exported(tree) if name.startswith("plot_"))
        elif path.name in ("__init__.py", *PUBLIC_MODULES):
            names |= exported(tree)
    return names


def nested(tree: ast.AST) -> int:
    """Return the number of comprehensions that are inside another one or have two ``for``."""
    found: set[ast.AST] = set()
    for outer in ast.walk(tree):
        if not isinstance(outer, COMPREHENSIONS):
            continue
        if len(outer.generators) > 1:
            found.add(outer)
        found.update(inner for inner in ast.walk(outer) if inner is not outer and isinstance(inner, COMPREHENSIONS))
    return len(found)


def assigns_several(node: ast.AST) -> bool:
    """Return whether this assigns several values to several names."""
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def measure(package: Path) -> dict[str, float]:
    """Return every count by its name."""
    sources = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    lines: list[str] = []
    for source in sources.values():
        lines += code_lines(source)
    statements = sum(isinstance(node, ast.stmt) for node in nodes)
    return {
        "statements": statements,
        "public names": len(public_names(trees)),
        "comprehensions": 100 * sum(isinstance(node, COMPREHENSIONS) for node in nodes) / statements,
        "nested comprehensions": 100 * sum(nested(tree) for tree in trees.values()) / statements,
        "tuple assignments": 100 * sum(map(assigns_several, nodes)) / statements,
        "Any": 100 * sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes) / statements,
        "long lines": 100 * sum(len(line) > COLUMNS for line in lines) / len(lines),
    }


def main() -> None:
    """Run the command line."""
    own = Path(__file__).resolve().parents[1] / "pyro_radial"
    package = Path(sys.argv[1]) if len(sys.argv) > 1 else own
    for what, count in measure(package).items():
        print(f"{what:24}{count:10.5g}    at most {LIMITS[what]:g}")


if __name__ == "__main__":
    main()
