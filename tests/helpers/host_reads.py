# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Counts values that the host reads from tensors, each of which would wait for a GPU."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default)


class CountHostReads(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in READS
        return func(*args, **(kwargs or {}))
