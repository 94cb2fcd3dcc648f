# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Of two processes that train together, one is killed at random moments: the other ends, and both go on bit for bit."""

import os
import random
import signal
import threading
import time
from functools import partial

import pytest

from tests.helpers.ranks import Failed, assert_same_everywhere, on_ranks, run_kind
from tests.helpers.runs import assert_same

COUNT = 20


def killed_after(rank, kind, victim, seconds, **settings):
    if rank == victim:
        threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    return run_kind(rank, kind, **settings)


@pytest.mark.parametrize("kind", ["dropout", "batch norm", "walking points"])
def test_processes_of_which_one_is_killed_go_on_bit_for_bit(kind, tmp_path):
    settings, generator, killed = {"epochs": 8, "patience": None, "checkpoint_every": 1}, random.Random(0), 0
    start = time.monotonic()
    undisturbed = partial(run_kind, kind=kind, checkpoint=tmp_path / "undisturbed.pt", **settings)
    state, result = assert_same_everywhere(on_ranks(undisturbed))
    took = time.monotonic() - start
    while killed < COUNT:
        path = tmp_path / f"{killed}.pt"
        kept = partial(killed_after, kind=kind, checkpoint=path, **settings)
        ends = on_ranks(partial(kept, victim=generator.randrange(2), seconds=generator.uniform(0.1, 0.9) * took))
        if not any(isinstance(end, Failed) for end in ends):
            path.unlink()
            continue
        # Where it was killed at its very end, the other may have ended well.
        assert sorted(end.kind for end in ends if isinstance(end, Failed))[-1] == "signal", ends
        killed += 1
        resumed_state, resumed = assert_same_everywhere(on_ranks(partial(kept, victim=None, seconds=0)))
        assert resumed == result
        assert_same(resumed_state, state)
