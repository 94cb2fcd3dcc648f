# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A network cut down to the units that matter."""

from pyro_radial.compression.counts import Counts, count_flops, count_weights
from pyro_radial.compression.cuts import CutRecord, best_on_path, cut_path, evaluate_path, gap_cut, largest_gap
from pyro_radial.compression.graph import IndexSelect
from pyro_radial.compression.mean_network import mean_network
from pyro_radial.compression.plots import plot_frontier, plot_scores
from pyro_radial.compression.scores import unit_scores
from pyro_radial.compression.surgery import complete_cut, cut_network, mask_network
from pyro_radial.compression.units import Cut, Scores

__all__ = [
    "Counts",
    "Cut",
    "CutRecord",
    "IndexSelect",
    "Scores",
    "best_on_path",
    "complete_cut",
    "count_flops",
    "count_weights",
    "cut_network",
    "cut_path",
    "evaluate_path",
    "gap_cut",
    "largest_gap",
    "mask_network",
    "mean_network",
    "plot_frontier",
    "plot_scores",
    "unit_scores",
]
