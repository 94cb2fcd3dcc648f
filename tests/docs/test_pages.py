# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The blocks of Python on each page run, in order and in one scope, and print what the page says they print."""

import pytest

from tests.helpers.pages import DOCS, examples

PAGES = [page for page in sorted(DOCS.rglob("*.md")) if examples(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": page.stem}
    for number, example in enumerate(examples(page)):
        exec(compile(example, f"{page.name}, example {number + 1}", "exec"), scope)
