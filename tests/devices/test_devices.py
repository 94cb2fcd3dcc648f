# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Runs the suite of the pretend accelerator in a process of its own, because torch can never forget a device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.devices import recent_compiler

pytestmark = pytest.mark.site

SUITE = Path(__file__).with_name("suite.py")


@recent_compiler
def test_everything_runs_on_another_device():
    # The settings of all tests may run a backward pass before the device exists.
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "--tb=short", str(SUITE)]
    root = SUITE.parents[2]
    done = subprocess.run(command, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
