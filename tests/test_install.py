# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The wheel of ``make dist`` alone runs the README; what is released says the same everywhere."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest

import pyro_radial
from tests.oldest import oldest

pytestmark = pytest.mark.site

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
# What the extras bring, by the names they are imported by.
EXTRAS = ("matplotlib", "sklearn", "gpytorch", "joblib", "ivon", "botorch", "arviz_base", "PIL", "sphinx")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def run(python, code, folder):
    done = subprocess.run(
        [str(python), "-c", code], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_example_imports_nothing_of_the_extras_and_the_library_no_compiler():
    hide = f"import sys\nsys.modules.update(dict.fromkeys({(*EXTRAS, 'torch_pruning')}))\n"
    # A second of each start; an optimizer imports it when it is made.
    alone = "import pyro_radial\nassert 'torch._dynamo' not in sys.modules\n"
    run(sys.executable, hide + alone + EXAMPLES[0].replace("range(500)", "range(3)"), ROOT)


def test_the_checks_to_inherit_say_what_they_need():
    hide = "import sys\nsys.modules['pytest'] = None\n"
    expect = "try:\n    import pyro_radial.testing\nexcept ImportError as error:\n    print(error)"
    assert "pip install 'pyro-radial[testing]'" in run(sys.executable, hide + expect, ROOT)


def copy_of_source(folder):
    """What git has of the package and beside it, and the tests, so that the archive is of no build before."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in (name for name in files if name.startswith(("pyro_radial/", "tests/")) or "/" not in name):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def test_the_source_archive_holds_no_tests_without_their_helpers(tmp_path):
    pytest.importorskip("setuptools")
    copy_of_source(tmp_path)
    run(sys.executable, "import setuptools; setuptools.setup(script_args=['-q', 'egg_info'])", tmp_path)
    files = (tmp_path / "pyro_radial.egg-info" / "SOURCES.txt").read_text().split()
    assert {"CHANGELOG.md", "constraints.txt", "pyro_radial/py.typed", "pyro_radial/infer/compiled.py"} <= {*files}
    assert [name for name in files if name.startswith("tests/")] == []


@pytest.mark.slow
def test_the_wheel_runs_the_readme(tmp_path):
    source, environment = tmp_path / "source", tmp_path / "environment"
    copy_of_source(source)
    build = [sys.executable, "-m", "build", "--outdir", str(tmp_path / "dist"), str(source)]
    subprocess.run(build, check=True, env=ENVIRONMENT, capture_output=True)
    (archive,), (wheel,) = ((tmp_path / "dist").glob(form) for form in ("*.tar.gz", "*.whl"))
    with tarfile.open(archive) as members:
        archived = {name.partition("/")[2] for name in members.getnames()}
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "constraints.txt", "pyro_radial/py.typed"} <= archived
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    constraints = str(ROOT / "constraints.txt")
    install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", constraints, f"{wheel}[pruning]"]
    subprocess.run(install, check=True, env=ENVIRONMENT)
    found = f"import importlib.util\nprint([name for name in {EXTRAS} if importlib.util.find_spec(name)])"
    assert run(python, found, tmp_path) == "[]\n"
    assert "environment" in run(python, "import pyro_radial\nprint(pyro_radial.__file__)", tmp_path)
    run(python, "\n".join(EXAMPLES), tmp_path)


def test_one_version_is_released():
    number = r"(\d+\.\d+\.\d+)"
    cited = re.search(rf"^version: {number}$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)[1]
    changes = re.search(rf"^## \[{number}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert cited == changes == pyro_radial.__version__


def test_dev_brings_what_every_test_needs_of_the_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (joined,) = (
        re.fullmatch(r"pyro-radial\[(.*)\]", line)[1] for line in extras["dev"] if line.startswith("pyro-radial[")
    )
    assert {*joined.split(",")} == extras.keys() - {"dev"}


def test_every_dependency_has_a_lower_bound():
    names = [pinned.split("==")[0] for pinned in oldest()]
    assert names == ["torch", "pyro-ppl", "numpy", "scipy", "tqdm"]
