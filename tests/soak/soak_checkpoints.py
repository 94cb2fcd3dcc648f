# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The full counts of what the suite shows in a small form; ``make soak`` runs them."""

import pytest

from tests.helpers.kills import KINDS, flip_bits, kill_and_resume


def test_four_hundred_flipped_bits_are_refused(tmp_path):
    outcomes = flip_bits(tmp_path, count=400, seed=1)
    assert outcomes == {"refused": 400, "named": 400}


@pytest.mark.parametrize("kind", KINDS)
def test_thirty_killed_runs_end_as_the_undisturbed_one(kind):
    assert kill_and_resume(kind, 30) == (30, 30)
