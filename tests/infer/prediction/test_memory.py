# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What does not fit is refused before it is made."""

import pytest
import torch

from pyro_radial.infer.prediction import memory


def test_free_memory_is_a_number_of_bytes_or_unknown():
    free = memory.free_memory(torch.device("cpu"))
    assert free is None or free > 2**20


@pytest.mark.parametrize(("free", "fits"), [(23, False), (24, True), (None, True)])
def test_as_much_as_is_free_may_be_asked_for(monkeypatch, free, fits):
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    if fits:
        # 3 draws x 2 inputs x 4 bytes.
        assert memory.allocate("who", 3, 2, torch.zeros(1)).shape == (3, 2)
    else:
        with pytest.raises(MemoryError, match=r"who: 3 draws at 2 inputs, \[3, 2\], need 0.0 GiB on cpu"):
            memory.allocate("who", 3, 2, torch.zeros(1))
