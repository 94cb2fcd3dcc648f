# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Single bits of a checkpoint flipped, for the suite and for the soak."""

import random
from collections import Counter

import torch

from tests.helpers.runs import FIT, assert_same, data, problem, state_of, trained


def flip_bits(folder, count, seed=0):
    """How often one flipped bit of a checkpoint was refused, and named; anything else fails the assertion.

    :param folder: where the checkpoint goes.
    :param int count: bits to flip, each alone.
    :param int seed: of the choice of bits.
    """
    path, generator, outcomes = folder / "run.pt", random.Random(seed), Counter()
    trained(*problem("batch norm"), checkpoint=path)
    content = path.read_bytes()
    model, guide = problem("batch norm")
    guide.setup(*data())
    start = state_of(model, guide)
    for _ in range(count):
        damaged = bytearray(content)
        damaged[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(bytes(damaged))
        generators = torch.get_rng_state()
        try:
            trained(model, guide, epochs=FIT["epochs"] + 1, checkpoint=path)
        except ValueError as error:
            outcomes["refused"] += 1
            outcomes["named"] += "run.pt" in str(error)
        assert_same(state_of(model, guide), start)
        assert path.read_bytes() == bytes(damaged)
        torch.set_rng_state(generators)
    return outcomes
