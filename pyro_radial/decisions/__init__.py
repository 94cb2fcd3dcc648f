# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Posteriors to act on: contextual bandits, and in :mod:`pyro_radial.decisions.optimization` Bayesian optimization."""

from pyro_radial.decisions.bandits import BanditResult, run_bandit
from pyro_radial.decisions.environments import ContextualBandit, classification_bandit, mushroom_bandit, wheel_bandit
from pyro_radial.decisions.gp_policy import GaussianProcessThompson
from pyro_radial.decisions.history import History
from pyro_radial.decisions.linear_model import LinearModel
from pyro_radial.decisions.network_policies import (
    EnsembleSampling,
    EpsilonGreedy,
    NetworkPolicy,
    NeuralLinear,
    ThompsonSampling,
)
from pyro_radial.decisions.policies import LinearThompson, Policy, UniformPolicy
from pyro_radial.decisions.pulled_arm import PulledArm
from pyro_radial.decisions.refits import Refits

__all__ = [
    "BanditResult",
    "ContextualBandit",
    "EnsembleSampling",
    "EpsilonGreedy",
    "GaussianProcessThompson",
    "History",
    "LinearModel",
    "LinearThompson",
    "NetworkPolicy",
    "NeuralLinear",
    "Policy",
    "PulledArm",
    "Refits",
    "ThompsonSampling",
    "UniformPolicy",
    "classification_bandit",
    "mushroom_bandit",
    "run_bandit",
    "wheel_bandit",
]
