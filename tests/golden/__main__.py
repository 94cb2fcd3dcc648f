# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Store what the programs return, dump it to the bit, or compare two checkouts.

python -m tests.golden --write             # store the values that the suite compares with
python -m tests.golden --dump FILE         # every bit of this checkout's results
python -m tests.golden --compare CHECKOUT  # this checkout against another one with the same programs
"""

import argparse
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import torch

from tests.golden.programs import all_programs, run
from tests.golden.stored import write


def dumped(names) -> dict[str, dict[str, torch.Tensor]]:
    """Return the results of the named programs, or of all; none of a program that fails."""
    results = {}
    for name, function in all_programs().items():
        if names and name not in names:
            continue
        try:
            results[name] = run(function)
        except Exception:
            traceback.print_exc()
            results[name] = {}
    return results


def of_checkout(folder: Path, names) -> dict[str, dict[str, torch.Tensor]]:
    """Return the results of the programs of another checkout, which runs them in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "results.pt"
        command = [sys.executable, "-m", "tests.golden", "--dump", str(file), *names]
        subprocess.run(command, cwd=folder, check=True)
        return torch.load(file, weights_only=True)


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest relative change of each result that is not equal bit for bit; infinite for another shape."""
    found = {}
    for name in sorted(set(one) | set(other)):
        if name not in one or name not in other or one[name].shape != other[name].shape:
            found[name] = float("inf")
        elif one[name].dtype != other[name].dtype or not same_bits(one[name], other[name]):
            a, b = one[name].double(), other[name].double()
            size = torch.maximum(a.abs(), b.abs()).clamp_min(1e-300)
            found[name] = ((a - b).abs() / size).nan_to_num(float("inf")).max().item()
    return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numpy().tobytes() == other.numpy().tobytes()


def compare(one, other) -> int:
    """Print the programs that differ, and return how many do."""
    differing = 0
    for name in sorted(set(one) | set(other)):
        found = differences(one.get(name, {}), other.get(name, {}))
        if found:
            differing += 1
            worst = max(found, key=found.__getitem__)
            results = len(set(one.get(name, {})) | set(other.get(name, {})))
            print(f"{name}: {len(found)} of {results} results differ, by up to {found[worst]:.1e} ({worst})")
    print(f"{differing} of {len(set(one) | set(other))} programs differ")
    return differing


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="store the values that the suite compares with")
    what.add_argument("--dump", type=Path, metavar="FILE", help="write all results of this checkout to a file")
    what.add_argument("--compare", type=Path, metavar="CHECKOUT", help="compare with the checkout in this folder")
    parser.add_argument("names", nargs="*", help="programs, all of them by default")
    arguments = parser.parse_args()
    if arguments.write:
        results = dumped(arguments.names)
        write(results)
        return int(not all(results.values()))
    if arguments.dump:
        torch.save(dumped(arguments.names), arguments.dump)
        return 0
    here = Path(__file__).resolve().parents[2]
    return int(
        compare(of_checkout(here, arguments.names), of_checkout(arguments.compare.resolve(), arguments.names)) > 0
    )


if __name__ == "__main__":
    sys.exit(main())
