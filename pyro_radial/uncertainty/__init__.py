# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Scores and plots of predictive uncertainty."""

from pyro_radial.uncertainty.calibration import (
    Reliability,
    adaptive_calibration_error,
    expected_calibration_error,
    reliability,
)
from pyro_radial.uncertainty.crps import crps_from_draws, crps_normal
from pyro_radial.uncertainty.curve_plots import plot_quantile_calibration, plot_referral, plot_risk_coverage
from pyro_radial.uncertainty.detection import auroc, class_auroc, fpr_at_tpr
from pyro_radial.uncertainty.intervals import QuantileCalibration, interval_coverage, quantile_calibration
from pyro_radial.uncertainty.metrics import accuracy, brier_score, negative_log_likelihood
from pyro_radial.uncertainty.plots import plot_images, plot_reliability, plot_training_terms
from pyro_radial.uncertainty.referral import ReferralCurve, referral_curve
from pyro_radial.uncertainty.risk_coverage import RiskCoverage, risk_coverage
from pyro_radial.uncertainty.scale_plots import plot_scale_search
from pyro_radial.uncertainty.temperature import TemperatureScaling

__all__ = [
    "QuantileCalibration",
    "ReferralCurve",
    "Reliability",
    "RiskCoverage",
    "TemperatureScaling",
    "accuracy",
    "adaptive_calibration_error",
    "auroc",
    "brier_score",
    "class_auroc",
    "crps_from_draws",
    "crps_normal",
    "expected_calibration_error",
    "fpr_at_tpr",
    "interval_coverage",
    "negative_log_likelihood",
    "plot_images",
    "plot_quantile_calibration",
    "plot_referral",
    "plot_reliability",
    "plot_risk_coverage",
    "plot_scale_search",
    "plot_training_terms",
    "quantile_calibration",
    "referral_curve",
    "reliability",
    "risk_coverage",
]
