# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The site builds without a warning, and has what it says."""

import os
import re
import subprocess
import sys

import pytest

from tests.helpers.pages import DOCS, ROOT, module_of_site

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


def test_the_site_builds_and_has_every_name(tmp_path):
    pytest.importorskip("sphinx")
    from sphinx.util.inventory import InventoryFile

    build = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", str(DOCS), str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, env=os.environ | {"DOCS_ONLINE": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", os.path.join)
    # A dict, or an object that holds one, by the version of Sphinx.
    by_kind = getattr(inventory, "data", inventory)
    found = {name for kind, names in by_kind.items() if kind.startswith("py:") for name in names}
    assert set(reference.public_names().values()) <= found
