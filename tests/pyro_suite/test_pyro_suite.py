# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Pyro's own tests, on our guides and distributions, from a checkout of Pyro that ``PYRO_CHECKOUT`` names.

``RESULTS.md`` beside this file has the last results.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKOUT = os.environ.get("PYRO_CHECKOUT")

# What to put into Pyro's tests, and the tests.
RUNS = {
    "AutoRadial": "tests/infer/test_autoguide.py",
    "AutoMeanField": "tests/infer/test_autoguide.py",
    "distributions": "tests/distributions",
}


@pytest.mark.skipif(CHECKOUT is None, reason="set PYRO_CHECKOUT to a checkout of Pyro to run its tests on our classes")
@pytest.mark.parametrize("what", RUNS)
def test_pyros_tests_pass_with_our_classes(what, tmp_path):
    # Pyro itself is the installed one, and this project's configuration of pytest must not apply.
    shutil.copytree(Path(CHECKOUT) / "tests", tmp_path / "tests")
    shutil.copy(Path(CHECKOUT) / "setup.cfg", tmp_path)
    # A site of one element is what Pyro's tests are about; our guide warns of it.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "our_classes", "-p", "no:cacheprovider"]
    command += ["-W", "ignore:AutoRadial:UserWarning", "--tb=short", RUNS[what]]
    places = os.pathsep.join((str(HERE), str(HERE.parents[1])))
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": places, "PYRO_SUITE": what},
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-5_000:] + done.stderr[-2_000:]
