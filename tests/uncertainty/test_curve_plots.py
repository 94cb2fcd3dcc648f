# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import sys

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from pyro_radial.uncertainty import (
    QuantileCalibration,
    ReferralCurve,
    plot_quantile_calibration,
    plot_referral,
    plot_risk_coverage,
    risk_coverage,
)
from tests.uncertainty.test_plots import assert_draws

SHARES = torch.tensor([0.0, 0.1, 0.3]).double()
SCORES = torch.tensor([0.8, 0.85, 0.9]).double()
REFERRAL = {
    "radial": ReferralCurve(SHARES, SCORES, torch.stack([SCORES - 0.01, SCORES + 0.01]), 0),
    "normal": ReferralCurve(SHARES, SCORES - 0.2, torch.stack([SCORES - 0.3, SCORES - 0.1]), 3),
}
RISK = {
    "radial": risk_coverage(torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.arange(4.0)),
    "normal": risk_coverage(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.arange(4.0)),
}
QUANTILES = {
    "radial": QuantileCalibration(torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.1, 0.4, 1.0]), 100),
    "normal": QuantileCalibration(torch.tensor([0.1, 0.9]), torch.tensor([0.3, 0.7]), 400),
}


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_referral_has_a_line_and_a_band_per_method():
    ax = plot_referral(REFERRAL, "AUC")
    assert labels(ax) == ["radial", "normal"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Referred to an expert, %", "AUC of what is left")
    for line, band, curve in zip(ax.lines, ax.collections, REFERRAL.values(), strict=True):
        assert line.get_xdata().tolist() == pytest.approx([0, 10, 30])
        assert line.get_ydata().tolist() == pytest.approx(curve.score.tolist())
        corners = band.get_paths()[0].vertices
        error = curve.stderr.tolist()
        assert corners[:, 1].max() == pytest.approx(curve.score[2].item() + error[2])
        assert corners[:, 1].min() == pytest.approx(curve.score[0].item() - error[0])
        assert band.get_facecolor()[0, :3].tolist() == pytest.approx(to_rgb(line.get_color()))
    assert_draws(ax.figure)


def test_risk_coverage_has_a_line_per_method_with_its_area():
    ax = plot_risk_coverage(RISK, "Error rate")
    assert labels(ax) == ["radial (area 0.208)", "normal (area 0.583)"]
    assert ax.get_ylabel() == "Error rate"
    assert ax.get_ylim()[0] == 0
    for line, curve in zip(ax.lines, RISK.values(), strict=True):
        assert line.get_xdata().tolist() == [0.25, 0.5, 0.75, 1.0]
        assert line.get_ydata().tolist() == curve.risk.tolist()
    assert_draws(ax.figure)
    one = plot_risk_coverage({"radial": risk_coverage(torch.ones(1), torch.ones(1))})
    assert one.lines[0].get_marker() == "o"
    # A loss below zero, as a log-likelihood turned over may be, is not cut off.
    below = plot_risk_coverage({"radial": risk_coverage(torch.tensor([-2.0, -1.0]), torch.arange(2.0))})
    assert below.get_ylim()[0] == -2


def test_quantile_calibration_has_a_diagonal_a_band_of_chance_and_a_line_per_method():
    ax = plot_quantile_calibration(QUANTILES)
    diagonal, radial, normal = ax.lines
    assert diagonal.get_xydata().tolist() == [[0, 0], [1, 1]]
    assert radial.get_ydata().tolist() == pytest.approx([0.1, 0.4, 1.0])
    assert normal.get_xdata().tolist() == pytest.approx([0.1, 0.9])
    assert labels(ax) == ["radial (gap 0.067)", "normal (gap 0.200)"]
    corners = ax.collections[0].get_paths()[0].vertices
    middle = corners[abs(corners[:, 0] - 0.5) < 1e-9, 1]
    # Of the fewer targets, 100: two times 0.05.
    assert sorted({round(value, 9) for value in middle.tolist()}) == [0.4, 0.6]
    assert_draws(ax.figure)


@pytest.mark.parametrize(
    ("plot", "curves"),
    [(plot_referral, REFERRAL), (plot_risk_coverage, RISK), (plot_quantile_calibration, QUANTILES)],
)
def test_given_axes_are_used_and_none_is_an_error(monkeypatch, plot, curves):
    ax = Figure().subplots()
    assert plot(curves, ax=ax) is ax
    with pytest.raises(ValueError, match="curves must hold at least one method, got none"):
        plot({})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pyro-radial\[plots\]"):
        plot(curves)
