# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Pruning: a smaller plain network from a trained Bayesian one; needs the extra ``pruning``."""

try:
    import torch_pruning  # noqa: F401
except ImportError as error:
    raise ImportError("Pruning needs Torch-Pruning: pip install 'pyro-radial[pruning]'") from error

from pyro_radial.compression.prune import mean_network, prune
from pyro_radial.compression.scores import PosteriorImportance

__all__ = ["PosteriorImportance", "mean_network", "prune"]
