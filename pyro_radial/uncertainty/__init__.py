# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Scores and plots of predictive uncertainty."""

from pyro_radial.uncertainty.metrics import (
    Reliability,
    accuracy,
    auroc,
    brier_score,
    expected_calibration_error,
    negative_log_likelihood,
    reliability,
)
from pyro_radial.uncertainty.plots import plot_images, plot_reliability, plot_training_terms

__all__ = [
    "Reliability",
    "accuracy",
    "auroc",
    "brier_score",
    "expected_calibration_error",
    "negative_log_likelihood",
    "plot_images",
    "plot_reliability",
    "plot_training_terms",
    "reliability",
]
