# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Scores of predictive uncertainty; :mod:`pyro_radial.uncertainty.plots` draws them."""

from pyro_radial.uncertainty.calibration import expected_calibration_error, reliability
from pyro_radial.uncertainty.evaluate import evaluate
from pyro_radial.uncertainty.intervals import (
    crps_from_draws,
    interval_coverage,
    quantile_calibration,
)
from pyro_radial.uncertainty.metrics import auroc
from pyro_radial.uncertainty.referral import referral_curve
from pyro_radial.uncertainty.temperature import TemperatureScaling

__all__ = [
    "TemperatureScaling",
    "auroc",
    "crps_from_draws",
    "evaluate",
    "expected_calibration_error",
    "interval_coverage",
    "quantile_calibration",
    "referral_curve",
    "reliability",
]
