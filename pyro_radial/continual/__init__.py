# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Learning one task after another: the posterior as the next prior."""

from pyro_radial.continual.coresets import Coreset, k_center_coreset, random_coreset, split_coreset
from pyro_radial.continual.function_chain import FunctionChainELBO, KeptFunctions
from pyro_radial.continual.learning import learn_stream
from pyro_radial.continual.measures import AccuracyMatrix
from pyro_radial.continual.plots import plot_accuracy_matrix, plot_average_accuracy, plot_final_accuracy
from pyro_radial.continual.prior_chain import PriorChain
from pyro_radial.continual.standard_streams import permuted, split_by_class
from pyro_radial.continual.streams import Task, TaskStream

__all__ = [
    "AccuracyMatrix",
    "Coreset",
    "FunctionChainELBO",
    "KeptFunctions",
    "PriorChain",
    "Task",
    "TaskStream",
    "k_center_coreset",
    "learn_stream",
    "permuted",
    "plot_accuracy_matrix",
    "plot_average_accuracy",
    "plot_final_accuracy",
    "random_coreset",
    "split_by_class",
    "split_coreset",
]
