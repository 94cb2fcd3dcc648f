# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Generators go back to where they were, and numbers from a seed repeat."""

import random

import numpy as np
import pytest
import torch

from pyro_radial._pyro.random_numbers import rng_state, seeded, set_rng_state
from pyro_radial.infer.training.checkpoint import Checkpoint

CPU = torch.device("cpu")


def draw():
    return torch.randn(2).tolist(), random.random(), np.random.rand()  # noqa: NPY002


def test_a_state_of_the_generators_brings_back_their_numbers_also_from_a_file(tmp_path):
    checkpoint = Checkpoint(tmp_path / "rng.pt", "numbers")
    checkpoint.save({"rng": rng_state(CPU)})
    expected = draw()
    assert draw() != expected
    set_rng_state(checkpoint.load()["rng"], CPU)
    assert draw() == expected


@pytest.mark.parametrize("fail", [False, True])
def test_seeded_numbers_repeat_and_leave_the_generator_alone_also_after_an_error(fail):
    def use():
        with seeded(4, CPU):
            seen.append(torch.randn(3))
            if fail:
                raise KeyError

    torch.manual_seed(4)
    seen, state = [torch.randn(3)], torch.get_rng_state()
    for _ in range(2):
        if fail:
            with pytest.raises(KeyError):
                use()
        else:
            use()
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
