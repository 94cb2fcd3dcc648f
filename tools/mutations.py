# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Forty changes of one operator each: does some test fail? Compare what two checkouts catch.

    python -m tools.mutations run CHECKOUT RESULT   # apply each to a copy of a checkout, and run its tests
    python -m tools.mutations compare BEFORE AFTER  # the changes that were caught before and are not now
    python -m tools.mutations choose CHECKOUT       # choose forty again and store them beside this file

A change is a line of the package and what replaces it. It is found by the text of the line, wherever the line is now;
a line that a checkout does not have, or has twice, is skipped. Its tests are the programs of ``tests.golden``, the
tests that mirror the file, and those in the same folder.
"""

import argparse
import ast
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "pyro_radial"
STORED = Path(__file__).with_suffix(".json")
COUNT = 40
SECONDS = 600.0
#: No numbers are computed there.
LEFT_OUT = ("plots.py", "_plots.py", "__init__.py", "testing/")
SWAPPED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"}
COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}


class Mutation(NamedTuple):
    """A line without its indentation, and what is put in its place."""

    kind: str
    old: str
    new: str


def lines_of(checkout: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield file, number and text of each line of the package."""
    for path in sorted((checkout / PACKAGE).rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines()):
            yield path, number, line.strip()


def mutations_of(path: Path) -> Iterator[Mutation]:
    """Yield every change of one operator or decimal number in the functions of a file, where it is on one line."""
    text = path.read_text()
    lines = text.splitlines()

    def changed(kind: str, line: int, start: int, end: int, replacement: str) -> Mutation:
        old = lines[line - 1]
        return Mutation(kind, old.strip(), (old[:start] + replacement + old[end:]).strip())

    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in (inner for statement in function.body for inner in ast.walk(statement)):
            if getattr(node, "lineno", 0) != getattr(node, "end_lineno", -1):
                continue
            if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
                between = lines[node.lineno - 1][node.left.end_col_offset : node.right.col_offset]
                symbol = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}[type(node.op)]
                if symbol in between:
                    at = node.left.end_col_offset + between.index(symbol)
                    yield changed("operator", node.lineno, at, at + 1, SWAPPED[type(node.op)])
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not is_whole(node.operand):
                yield changed("sign", node.lineno, node.col_offset, node.col_offset + 1, "")
            elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
                start, end = node.left.end_col_offset, node.comparators[0].col_offset
                yield changed("comparison", node.lineno, start, end, f" {COMPARED[type(node.ops[0])]} ")
            elif isinstance(node, ast.Constant) and isinstance(node.value, float):
                yield changed("number", node.lineno, node.col_offset, node.end_col_offset, repr(2 * node.value or 1.0))


def is_whole(node: ast.expr) -> bool:
    """Return whether this is an integer, such as the number of a dimension."""
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def choose(checkout: Path, also_in: Path | None = None, seed: int = 0) -> list[Mutation]:
    """Choose changes of lines that a checkout, and another one, have once each; ten of each kind where there are."""
    line_counts = [Counter(line for *_, line in lines_of(folder)) for folder in (checkout, also_in or checkout)]
    by_kind: dict[str, dict[str, Mutation]] = {}
    for path in sorted((checkout / PACKAGE).rglob("*.py")):
        if any(folder in str(path.relative_to(checkout)) for folder in LEFT_OUT):
            continue
        for mutation in mutations_of(path):
            if all(counts[mutation.old] == 1 for counts in line_counts):
                by_kind.setdefault(mutation.kind, {})[mutation.old] = mutation
    generator = random.Random(seed)
    return [
        mutation
        for kind in sorted(by_kind)
        for mutation in generator.sample(sorted(by_kind[kind].values()), COUNT // len(by_kind))
    ]


def location_of(mutation: Mutation, checkout: Path) -> tuple[Path, int] | None:
    """Return file and line of a change, or None if the checkout does not have the line exactly once."""
    matches = [(path, number) for path, number, line in lines_of(checkout) if line == mutation.old]
    return matches[0] if len(matches) == 1 else None


def tests_of(path: Path, checkout: Path) -> list[list[str]]:
    """Return the tests of a file: those of its name, and the others in the same folder."""
    module = path.relative_to(checkout / PACKAGE)
    folder = checkout / "tests" / module.parent
    mirrored = sorted(folder.rglob(f"test_{module.stem}*.py"))
    neighbors = sorted(set(folder.glob("test_*.py")) - set(mirrored))
    return [[str(test.relative_to(checkout)) for test in tests] for tests in (mirrored, neighbors)]


def is_caught(mutation: Mutation, checkout: Path) -> bool | None:
    """Return whether a test of a checkout fails with a change; None if the checkout does not have its line."""
    location = location_of(mutation, checkout)
    if location is None:
        return None
    path, number = location
    original = path.read_text()
    lines = original.splitlines(keepends=True)
    indentation = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
    lines[number] = f"{indentation}{mutation.new}\n"
    command = [sys.executable, "-m", "pytest", "--quiet", "-x", "-p", "no:cacheprovider"]
    try:
        path.write_text("".join(lines))
        for tests in (["tests/golden/test_golden.py"], *tests_of(path, checkout)):
            if (
                tests
                and subprocess.run([*command, *tests], cwd=checkout, capture_output=True, timeout=SECONDS).returncode
            ):
                return True
        return False
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(original)


def stored() -> list[Mutation]:
    """Return the forty changes."""
    return [Mutation(*row) for row in json.loads(STORED.read_text())]


def run(checkout: Path, result: Path) -> None:
    """Run all changes on a copy of a checkout, and write which were caught, after each."""
    outcomes = {}
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "checkout"
        left_out = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "build", "*.png", ".*_cache")
        shutil.copytree(checkout, copy, ignore=left_out)
        for mutation in stored():
            outcomes[mutation.old] = is_caught(mutation, copy)
            result.write_text(json.dumps(outcomes, indent=1))
            print(f"{outcomes[mutation.old]!s:5} {mutation.kind:10} {mutation.old}  ->  {mutation.new}", flush=True)


def compare(first_result: Path, second_result: Path) -> int:
    """Print counts, and the changes that only the first result caught; return how many these are."""
    first_outcomes, second_outcomes = (json.loads(path.read_text()) for path in (first_result, second_result))
    for name, outcomes in (("first", first_outcomes), ("second", second_outcomes)):
        counts = Counter(outcomes.values())
        print(f"{name}: {counts[True]} caught, {counts[False]} not, {counts[None]} not there")
    lost = [line for line, caught in first_outcomes.items() if caught and second_outcomes.get(line) is False]
    print("".join(f"no longer caught: {line}\n" for line in lost), end="")
    return len(lost)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutations", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("checkout", type=Path)
    runs.add_argument("result", type=Path)
    compares = commands.add_parser("compare")
    compares.add_argument("first_result", type=Path)
    compares.add_argument("second_result", type=Path)
    chooses = commands.add_parser("choose")
    chooses.add_argument("checkout", type=Path)
    chooses.add_argument("also_in", type=Path, nargs="?")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.checkout.resolve(), arguments.result)
        return 0
    if arguments.command == "compare":
        return int(compare(arguments.first_result, arguments.second_result) > 0)
    rows = ",\n".join(f" {json.dumps(row)}" for row in choose(arguments.checkout, arguments.also_in))
    STORED.write_text(f"[\n{rows}\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
