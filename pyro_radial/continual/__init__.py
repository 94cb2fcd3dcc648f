# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Learning one task after another: the posterior as the next prior."""

from pyro_radial.continual.coresets import Coreset, k_center_coreset, random_coreset, split_coreset
from pyro_radial.continual.function_memory import FunctionChainELBO, FunctionMemory
from pyro_radial.continual.measures import AccuracyMatrix
from pyro_radial.continual.plots import plot_accuracy_matrix, plot_average_accuracy, plot_final_accuracy
from pyro_radial.continual.prior_chain import PriorChain
from pyro_radial.continual.standard_streams import class_split_stream, permuted_stream
from pyro_radial.continual.streams import Task, TaskStream
from pyro_radial.continual.train_stream import train_stream

__all__ = [
    "AccuracyMatrix",
    "Coreset",
    "FunctionChainELBO",
    "FunctionMemory",
    "PriorChain",
    "Task",
    "TaskStream",
    "class_split_stream",
    "k_center_coreset",
    "permuted_stream",
    "plot_accuracy_matrix",
    "plot_average_accuracy",
    "plot_final_accuracy",
    "random_coreset",
    "split_coreset",
    "train_stream",
]
