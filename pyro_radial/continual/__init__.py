# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Continual learning: one task after another, with the posterior as the next prior."""

from pyro_radial.continual.coresets import Coreset
from pyro_radial.continual.prior_chain import PriorChain
from pyro_radial.continual.streams import Task, TaskStream
from pyro_radial.continual.train_stream import train_stream

__all__ = [
    "Coreset",
    "PriorChain",
    "Task",
    "TaskStream",
    "train_stream",
]
