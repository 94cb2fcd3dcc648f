# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Pruning: a smaller plain network from a trained Bayesian one."""

from pyro_radial.compression.graph import count_flops, count_weights
from pyro_radial.compression.prune import cut_path, evaluate_path, mean_network, prune
from pyro_radial.compression.scores import unit_scores
from pyro_radial.compression.surgery import cut_network, mask_network

__all__ = [
    "count_flops",
    "count_weights",
    "cut_network",
    "cut_path",
    "evaluate_path",
    "mask_network",
    "mean_network",
    "prune",
    "unit_scores",
]
