# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Decisions under a posterior: contextual bandits, and ``decisions.botorch_models`` for Bayesian optimization."""

from pyro_radial.decisions.bandits import run_bandit
from pyro_radial.decisions.policies import Policy, ThompsonSampling

__all__ = ["Policy", "ThompsonSampling", "run_bandit"]
