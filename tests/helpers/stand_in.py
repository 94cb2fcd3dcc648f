# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A device with graphs, for tests on a CPU: it replays a step by calling it again."""

import torch

from pyro_radial._pyro.compat import tree_leaves
from pyro_radial.infer.step import inductor, loss_graphs
from pyro_radial.infer.step.captured import Device


class CalledAgain(Device):
    """As with a CUDA graph, a capture does nothing yet, and each replay writes its results into the same memory."""

    def __init__(self):
        self.captures = 0

    def warm_up(self, body):
        return body()

    def capture(self, body):
        self.captures += 1
        kept = None

        def replay():
            nonlocal kept
            found = body()
            if kept is None:
                kept = found
            for own, new in zip(tree_leaves(kept), tree_leaves(found), strict=True):
                if isinstance(own, torch.Tensor) and own is not new:
                    own.copy_(new)
            return kept

        return replay


def use(monkeypatch):
    """Let all graphs capture by a stand-in, and run as recorded instead of compiled; returns the stand-in."""
    device = CalledAgain()
    monkeypatch.setattr(loss_graphs, "device_graphs", lambda _: device)
    monkeypatch.setattr(inductor, "compile_graph", lambda module, *_: module)
    inductor.forget()
    return device
