# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The site builds without a warning, and has what it says."""

import os
import pickle
import re
import subprocess
import sys

import pytest

from tests.helpers.pages import DOCS, ROOT, module_of_site

pytestmark = pytest.mark.site

reference = module_of_site("reference")


def test_every_page_is_in_a_list_of_pages():
    listed = set()
    for page in DOCS.rglob("*.md"):
        for block in re.findall(r"^```{toctree}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
            names = [line for line in block.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / name).resolve() for name in names}
    pages = {page.with_suffix("") for page in DOCS.rglob("*.md")} - {DOCS / "index"}
    # Making the site puts the notebooks beside its pages.
    notebooks = {DOCS / "tutorials" / notebook.stem for notebook in (ROOT / "tutorials").glob("*.ipynb")}
    assert listed == pages | notebooks


def build(builder, out):
    """Build the site with warnings as errors."""
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "--builder", builder, "--quiet", "--fail-on-warning", "--keep-going"]
    environment = os.environ | {"DOCS_ONLINE": "0"}
    done = subprocess.run([*command, str(DOCS), str(out)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_site_builds_and_has_every_name(tmp_path):
    # The dummy builder reads all pages and resolves all references, but writes no page.
    build("dummy", tmp_path)
    environment = pickle.loads((tmp_path / ".doctrees" / "environment.pickle").read_bytes())
    found = set(environment.domaindata["py"]["objects"])
    assert set(reference.public_names().values()) <= found


@pytest.mark.slow
def test_the_site_is_written(tmp_path):
    build("html", tmp_path)
    assert (tmp_path / "index.html").exists()
    assert (tmp_path / "objects.inv").exists()
