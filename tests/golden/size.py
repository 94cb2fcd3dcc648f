# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The size of the package, for this checkout or another: ``python -m tests.golden.size [CHECKOUT]``."""

import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstring_lines(tree: ast.AST) -> set[int]:
    """The numbers of the lines of all docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | Function) and body and ast.get_docstring(node) is not None:
            lines |= {*range(body[0].lineno, body[0].end_lineno + 1)}
    return lines


def code_lines(source: str) -> set[int]:
    """The numbers of the lines that hold code: no docstring, comment or blank line."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in skipped]
    found = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return found - docstring_lines(ast.parse(source))


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function and method, with its dotted name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | Function):
            if isinstance(node, Function):
                yield prefix + node.name, node
            yield from functions(node, f"{prefix}{node.name}.")


def imported(tree: ast.AST, modules: set[str]) -> set[str]:
    """The modules of the package that a module imports, also inside functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return found & modules


def exported(tree: ast.AST) -> set[str]:
    """The names in a module's ``__all__``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(getattr(target, "id", None) == "__all__" for target in node.targets):
            return {*ast.literal_eval(node.value)}
    return set()


def measure(package: Path) -> dict[str, Any]:
    """Every count, by its name."""
    sources = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    names = {path: ".".join(path.relative_to(package.parent).with_suffix("").parts) for path in sources}
    own_lines = {
        f"{names[path]}.{name}": len(lines & {*range(node.lineno, (node.end_lineno or 0) + 1)})
        for path, tree in trees.items()
        for lines in [code_lines(sources[path])]
        for name, node in functions(tree)
    }
    longest = max(own_lines, key=lambda name: own_lines[name])
    importers = defaultdict(set)
    for path, tree in trees.items():
        for module in imported(tree, {*names.values()}):
            importers[module].add(names[path])
    in_infer = [name for name in names.values() if name.startswith("pyro_radial.infer.") and "__init__" not in name]
    packages = [path for path in sources if path.name == "__init__.py" and "testing" not in path.parts]
    fit = next(node for tree in trees.values() for name, node in functions(tree) if name == "fit")
    return {
        "lines": sum(len(source.splitlines()) for source in sources.values()),
        "code lines": sum(len(code_lines(source)) for source in sources.values()),
        "AST statements": sum(isinstance(node, ast.stmt) for tree in trees.values() for node in ast.walk(tree)),
        "characters": sum(map(len, sources.values())),
        "modules": len(sources),
        "flat files in infer": sum(path.parent == package / "infer" and path.stem != "__init__" for path in sources),
        "infer modules with one importer": sum(len(importers[name]) == 1 for name in in_infer),
        "public names": len({name for path in packages for name in exported(trees[path])}),
        "parameters of fit": len(fit.args.args) + len(fit.args.kwonlyargs),
        "longest function": f"{own_lines[longest]} ({longest})",
    }


if __name__ == "__main__":
    checkout = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    for what, count in measure(checkout / "pyro_radial").items():
        print(f"{what:34}{count}")
