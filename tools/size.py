# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How large and how dense the package is, and what its names say: ``python -m tools.size [FOLDER]``, also for others.

Every node of the syntax tree that is a statement (``ast.stmt``) counts as one, docstrings and nested statements too: a
function with a docstring and a ``return`` counts as three. Lines do not count, so squeezing them gains nothing.

A public name is in the ``__all__`` of a package or of one of ``PUBLIC_MODULES``; it counts once, wherever it is. Names
that plots share with other plots do not count.

The next four numbers are for 100 statements: comprehensions (generator expressions are among them), nested ones (inside
another one, or with two ``for``), assignments of several values to several names (``a, b = 1, 2``), and uses of the
name ``Any``. Then comes the percentage of code lines (no docstring, comment or blank line) with more than 100 columns.

The last two numbers are percentages of the bound names: parameters, assigned names, loop targets, ``with ... as``,
attributes of ``self``, and names of functions and classes. A name is vague if it is a word of ``FILLERS``, which says
nothing about the value: ``found`` may be gradients or files. Underscores at its ends do not count. The last number is
that of the worst file, whose vague names the command prints.

``LIMITS`` has the most that the package may have of each, and ``tests/tools/test_size.py`` holds it to them. Folders
named ``test`` or ``tests`` and files such as ``step_test.py`` do not count.
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LIMITS = {
    "statements": 15_800,
    "public names": 90,
    "comprehensions": 3,
    "nested comprehensions": 0.15,
    "tuple assignments": 0.6,
    "Any": 4,
    "long lines": 4,
    "vague names": 1,
    "vague names in a file": 3,
}
#: Single files that users import from.
PUBLIC_MODULES = ("likelihoods.py", "recipes.py", "botorch.py", "botorch_models.py", "sklearn.py")
#: Words that fit any value. They are vague as whole names; ``last_layer`` says something.
FILLERS = """\
added after again alone also apart asked before beside both broken chosen done earlier every first fits found
given held here holds inside it kept known last later left made mended moved near new next_one now old one ones
other others outside own owned part parts place places present put ready rest said seen share taken there thing
things told used wanted way ways what which
""".split()  # noqa: SIM905
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
    comprehensions: set[ast.AST] = set()
    for outer in ast.walk(tree):
        if not isinstance(outer, COMPREHENSIONS):
            continue
        if len(outer.generators) > 1:
            comprehensions.add(outer)
        inner_nodes = (node for node in ast.walk(outer) if node is not outer)
        comprehensions.update(node for node in inner_nodes if isinstance(node, COMPREHENSIONS))
    return len(comprehensions)


def assigns_several(node: ast.AST) -> bool:
    """Return whether this assigns several values to several names."""
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield each name that the code binds, as often as it binds it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def is_vague(name: str) -> bool:
    """Return whether a name is a filler, with or without underscores at its ends."""
    return name.strip("_") in FILLERS


def vague_percentage(names: list[str]) -> float:
    """Return the percentage of names that are vague."""
    return 100 * sum(map(is_vague, names)) / max(1, len(names))


def syntax_trees(package: Path) -> dict[Path, ast.Module]:
    """Return the parsed files of a package without its tests."""
    trees: dict[Path, ast.Module] = {}
    for path in sorted(package.rglob("*.py")):
        folders = {*path.relative_to(package).parts}
        if not folders & {"test", "tests"} and not path.stem.endswith("_test"):
            trees[path] = ast.parse(path.read_text())
    return trees


def measure(package: Path) -> dict[str, float]:
    """Return every count by its name."""
    trees = syntax_trees(package)
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    names_of_files = [[*bound_names(tree)] for tree in trees.values()]
    lines = [line for path in trees for line in code_lines(path.read_text())]
    statements = sum(isinstance(node, ast.stmt) for node in nodes)
    return {
        "statements": statements,
        "public names": len(public_names(trees)),
        "comprehensions": 100 * sum(isinstance(node, COMPREHENSIONS) for node in nodes) / statements,
        "nested comprehensions": 100 * sum(nested(tree) for tree in trees.values()) / statements,
        "tuple assignments": 100 * sum(map(assigns_several, nodes)) / statements,
        "Any": 100 * sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes) / statements,
        "long lines": 100 * sum(len(line) > COLUMNS for line in lines) / len(lines),
        "vague names": vague_percentage([name for names in names_of_files for name in names]),
        "vague names in a file": max(map(vague_percentage, names_of_files)),
    }


def vaguest_file(package: Path) -> tuple[Path, Counter[str]]:
    """Return the file with the highest percentage of vague names, and how often it binds each of them."""
    names_by_file = {path: [*bound_names(tree)] for path, tree in syntax_trees(package).items()}
    vaguest = max(names_by_file, key=lambda path: vague_percentage(names_by_file[path]))
    return vaguest, Counter(filter(is_vague, names_by_file[vaguest]))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own_package = Path(__file__).resolve().parents[1] / "pyro_radial"
    parser.add_argument("folder", type=Path, nargs="?", default=own_package, help="folder of a package's code")
    package = parser.parse_args().folder
    for property_name, count in measure(package).items():
        limit = f"    at most {LIMITS[property_name]:g}" if package == own_package else ""
        print(f"{property_name:24}{count:10.5g}{limit}")
    path, names = vaguest_file(package)
    if names:
        listed = ", ".join(f"{name} {count}" for name, count in names.most_common())
        print(f"vague names of {path.relative_to(package)}: {listed}")


if __name__ == "__main__":
    main()
