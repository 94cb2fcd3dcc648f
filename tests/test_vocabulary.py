# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

from tests.vocabulary import left, texts


def test_no_old_word_is_left():
    assert dict(left(texts(None))) == {}


def test_old_words_are_found_in_prose_names_and_identifiers():
    found = left(
        {"laws.md": "The law of x, with a standard\n    # deviation; its deviation", "b.py": "prior_law = Law()"}
    )
    assert found == {("distribution", "laws.md"): 2, ("standard deviation", "laws.md"): 1, ("distribution", "b.py"): 2}
