# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Single bits of a checkpoint flipped, for the suite and for the soak."""

import random
from collections import Counter

import torch

from tests.helpers.runs import FIT, assert_same, data, problem, state_of, trained


def flip_bits(folder, count, seed=0):
    """How often one flipped bit of a checkpoint was refused or harmless; anything else fails the assertion.

    :param folder: where the checkpoint goes.
    :param int count: bits to flip, each alone.
    :param int seed: of the choice of bits.
    """
    path, generator, outcomes = folder / "run.pt", random.Random(seed), Counter()
    trained(*problem("batch norm"), checkpoint=path)
    whole = path.read_bytes()
    longer = FIT["epochs"] + 1
    expected, _ = trained(*problem("batch norm"), epochs=longer, checkpoint=path)
    for _ in range(count):
        spoiled = bytearray(whole)
        spoiled[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(bytes(spoiled))
        model, guide = problem("batch norm")
        guide.setup(*data())
        before, generators = state_of(model, guide), torch.get_rng_state()
        try:
            state, _ = trained(model, guide, epochs=longer, checkpoint=path)
        except ValueError as error:
            outcomes["named"] += "run.pt" in str(error)
            assert_same(state_of(model, guide), before)
            assert path.read_bytes() == bytes(spoiled)
            outcomes["refused"] += 1
        else:
            assert_same(state, expected)
            outcomes["unchanged"] += 1
        torch.set_rng_state(generators)
    return outcomes
