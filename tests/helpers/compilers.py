# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What tests of ``torch.compile`` and ``torch.export`` need of torch."""

import pytest
import torch

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

recent_compiler = pytest.mark.skipif(
    VERSION < (2, 13), reason="torch.compile and torch.export are tested with torch 2.13; that of 2.7 follows less"
)
