# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import sys

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pyro_radial.uncertainty.calibration import Reliability
from pyro_radial.uncertainty.intervals import QuantileCalibration
from pyro_radial.uncertainty.plots import plot_quantile_calibration, plot_reliability

NAN = float("nan")
RADIAL = Reliability(
    confidence=torch.tensor([NAN, 0.3, 0.6, 0.9]),
    accuracy=torch.tensor([NAN, 0.5, 0.5, 0.7]),
    count=torch.tensor([0, 4, 16, 20]),
)
NORMAL = Reliability(
    confidence=torch.tensor([0.2, 0.4, 0.7, 1.0]),
    accuracy=torch.tensor([0.1, 0.2, 0.6, 1.0]),
    count=torch.tensor([10, 10, 10, 10]),
)
QUANTILES = {
    "radial": QuantileCalibration(torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.1, 0.4, 1.0]), 100),
    "normal": QuantileCalibration(torch.tensor([0.1, 0.9]), torch.tensor([0.3, 0.7]), 400),
}


def labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def assert_draws(figure):
    """The plot can be rendered (warnings are errors) and is not blank."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert len(np.unique(canvas.buffer_rgba())) > 2


def test_reliability_diagram_has_a_diagonal_and_a_line_and_bars_per_method():
    ax = plot_reliability({"radial": RADIAL, "normal": NORMAL})
    diagonal, radial, radial_few, normal, normal_few = ax.lines
    assert diagonal.get_xydata().tolist() == [[0, 0], [1, 1]]
    torch.testing.assert_close(torch.tensor(radial.get_xydata()).float(), torch.tensor([[0.6, 0.5], [0.9, 0.7]]))
    torch.testing.assert_close(torch.tensor(normal.get_xdata()), NORMAL.confidence.double())
    torch.testing.assert_close(torch.tensor(normal.get_ydata()), NORMAL.accuracy.double())
    # Four predictions are too few for the line; a bin of ten is not, and empty bins have no point.
    torch.testing.assert_close(torch.tensor(radial_few.get_xydata()).float(), torch.tensor([[0.3, 0.5]]))
    assert radial_few.get_linestyle() == "None"
    assert radial_few.get_fillstyle() == "none"
    assert len(normal_few.get_xdata()) == 0
    assert radial.get_color() == radial_few.get_color() != normal.get_color()
    assert_draws(ax.figure)
    assert ax.get_xlabel() == "Confidence"
    assert ax.get_ylabel().startswith("Accuracy")
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 1), (0, 1))
    # (4 * 0.2 + 16 * 0.1 + 20 * 0.2) / 40 and (0.1 + 0.2 + 0.1 + 0) / 4.
    assert labels(ax) == ["radial (ECE 0.160)", "normal (ECE 0.100)"]
    # Bars are shares, side by side.
    radial, normal = ax.containers
    assert [bar.get_height() for bar in radial] == pytest.approx([0, 0.1, 0.4, 0.5])
    assert [bar.get_height() for bar in normal] == pytest.approx([0.25] * 4)
    assert [bar.get_x() for bar in radial] == pytest.approx([0, 0.25, 0.5, 0.75])
    assert [bar.get_x() for bar in normal] == pytest.approx([0.125, 0.375, 0.625, 0.875])
    assert {bar.get_width() for bar in [*radial, *normal]} == {0.125}


def test_reliability_diagrams_fit_side_by_side():
    figure = Figure(figsize=(8, 4), layout="constrained")
    for ax in figure.subplots(1, 2):
        plot_reliability({"normal": NORMAL}, ax)
    # Without a bin of few predictions, and so with a line of no points, which must not reach for the figure's corner.
    assert_draws(figure)
    for ax in figure.axes:
        assert ax.get_position().width > 0.3


def test_bars_of_equal_counts_are_as_wide_as_their_bins():
    edges = torch.tensor([0.0, 0.02, 0.1, 0.4, 1.0])
    ax = plot_reliability({"rare": Reliability(NORMAL.confidence, NORMAL.accuracy, NORMAL.count, edges, 1)})
    (bars,) = ax.containers
    assert [bar.get_x() for bar in bars] == pytest.approx([0.0, 0.02, 0.1, 0.4])
    assert [bar.get_width() for bar in bars] == pytest.approx([0.02, 0.08, 0.3, 0.6])
    assert ax.get_xlabel() == "Probability of the class"
    assert ax.get_ylabel().startswith("Share of the class")
    assert_draws(ax.figure)


def test_quantile_calibration_has_a_diagonal_a_band_of_chance_a_line_per_method_and_ends_of_intervals():
    ax = plot_quantile_calibration(QUANTILES, level=0.9)
    diagonal, radial, normal = ax.lines
    assert diagonal.get_xydata().tolist() == [[0, 0], [1, 1]]
    assert radial.get_ydata().tolist() == pytest.approx([0.1, 0.4, 1.0])
    assert normal.get_xdata().tolist() == pytest.approx([0.1, 0.9])
    assert labels(ax) == ["radial (gap 0.067)", "normal (gap 0.200)", "ends of 90 % intervals"]
    corners = ax.collections[0].get_paths()[0].vertices
    middle = corners[abs(corners[:, 0] - 0.5) < 1e-9, 1]
    # Of the fewer targets, 100: two times 0.05.
    assert sorted({round(value, 9) for value in middle.tolist()}) == [0.4, 0.6]
    places = [line[:, 0].tolist() for line in ax.collections[-1].get_segments()]
    assert places == [pytest.approx([0.05, 0.05]), pytest.approx([0.95, 0.95])]
    assert_draws(ax.figure)
    without = plot_quantile_calibration(QUANTILES)
    assert (len(without.collections), labels(without)) == (1, ["radial (gap 0.067)", "normal (gap 0.200)"])


def test_pyplot_is_not_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert_draws(plot_reliability({"radial": RADIAL}).figure)
    assert_draws(plot_quantile_calibration(QUANTILES).figure)
