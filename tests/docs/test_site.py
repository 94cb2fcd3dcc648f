# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The site builds without a warning, and has what it says."""

import inspect
import os
import pydoc
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
            listed |= {(page.parent / f"{name}.md").resolve() for name in names}
    assert listed == set(DOCS.rglob("*.md")) - {DOCS / "index.md"}


def test_the_site_builds_and_has_every_name(tmp_path):
    pytest.importorskip("sphinx")
    from sphinx.util.inventory import InventoryFile

    build = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", str(DOCS), str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, env=os.environ | {"DOCS_ONLINE": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", os.path.join)
    # A dict, or from Sphinx 8.2 on an object that holds one.
    by_kind = getattr(inventory, "data", inventory)
    found = {name for kind, names in by_kind.items() if kind.startswith("py:") for name in names}
    missing = set(reference.public_names().values()) - found
    # No page is made for values and type aliases.
    objects = {name: pydoc.locate(name) for name in missing}
    assert not [name for name, value in objects.items() if inspect.isroutine(value) or inspect.isclass(value)]
