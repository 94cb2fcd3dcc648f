# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Pruning: a smaller plain network from a trained Bayesian one."""

from pyro_radial.compression.prune import mean_network, prune
from pyro_radial.compression.scores import unit_scores
from pyro_radial.compression.surgery import cut_network

__all__ = ["cut_network", "mean_network", "prune", "unit_scores"]
