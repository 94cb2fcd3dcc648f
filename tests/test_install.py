# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What a plain ``pip install .`` gives runs the first example of the README."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.oldest import oldest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[1]
# What the extras bring, by the names they are imported by.
EXTRAS = ("matplotlib", "sklearn", "gpytorch", "joblib", "arviz", "ivon", "botorch", "PIL", "sphinx")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def run(python, code, folder):
    done = subprocess.run(
        [str(python), "-c", code], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_example_imports_nothing_of_the_extras():
    hide = f"import sys\nsys.modules.update(dict.fromkeys({EXTRAS}))\n"
    run(sys.executable, hide + EXAMPLE.replace("range(500)", "range(3)"), ROOT)


@pytest.mark.slow
def test_a_plain_installation_runs_the_first_example(tmp_path):
    source, environment = tmp_path / "source", tmp_path / "environment"
    source.mkdir()
    shutil.copytree(ROOT / "pyro_radial", source / "pyro_radial", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        str(ROOT / "constraints.txt"),
        str(source),
    ]
    subprocess.run(install, check=True, env=ENVIRONMENT)
    found = f"import importlib.util\nprint([name for name in {EXTRAS} if importlib.util.find_spec(name)])"
    assert run(python, found, tmp_path) == "[]\n"
    assert "environment" in run(python, "import pyro_radial\nprint(pyro_radial.__file__)", tmp_path)
    run(python, EXAMPLE + "print(draws.mean.shape)", tmp_path)


def test_every_dependency_has_a_lower_bound():
    names = [pinned.split("==")[0] for pinned in oldest()]
    assert names == ["torch", "pyro-ppl", "numpy", "scipy", "tqdm"]
