# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import sys

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from pyro_radial.continual.measures import AccuracyMatrix
from pyro_radial.continual.plots import plot_accuracy_matrix, plot_average_accuracy, plot_final_accuracy

NAMES = ("first", "second", "third")
PARTIAL = AccuracyMatrix.empty(NAMES).with_row(0, [1.0]).with_row(1, [0.875, 0.5])
DONE = PARTIAL.with_row(2, [0.25, 0.5, 0.75])
OTHER = AccuracyMatrix.empty(NAMES).with_row(0, [0.5]).with_row(1, [0.5, 0.5]).with_row(2, [0.75, 1.0, 0.5])
LINES = [plot_average_accuracy, plot_final_accuracy]


def assert_draws(figure):
    """The plot can be rendered (warnings are errors) and is not blank."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert len(np.unique(canvas.buffer_rgba())) > 2


def test_matrix_has_a_figure_per_measured_cell_and_blanks_elsewhere():
    ax = plot_accuracy_matrix(PARTIAL)
    (image,) = ax.images
    assert image.get_clim() == (0, 1)
    shown = image.get_array()
    assert shown.mask.tolist() == [[False, True, True], [False, False, True], [True, True, True]]
    assert shown.compressed().tolist() == [1.0, 0.875, 0.5]
    # A cell is at (column, row).
    assert {text.get_position(): text.get_text() for text in ax.texts} == {
        (0, 0): "1.000",
        (0, 1): "0.875",
        (1, 1): "0.500",
    }
    assert_draws(ax.figure)


def test_matrix_is_labeled_with_the_tasks():
    ax = plot_accuracy_matrix(DONE)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Accuracy on", "After learning")
    for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
        assert [label.get_text() for label in labels] == list(NAMES)
    assert ax.yaxis_inverted()  # The first task is at the top.


def contrast(one, other):
    """The contrast ratio of two colors as the Web Content Accessibility Guidelines define it, from 1 to 21."""

    def luminance(color):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_figures_are_readable_on_every_color():
    size = 41
    names = tuple(str(i) for i in range(size))
    values = torch.full((size, size), float("nan"))
    values[-1] = torch.linspace(0, 1, size)
    ax = plot_accuracy_matrix(AccuracyMatrix(values, names))
    (image,) = ax.images
    for text in ax.texts:
        background = image.cmap(float(values[-1, text.get_position()[0]]))[:3]
        assert contrast(text.get_color(), background) > 4.5, text.get_text()
    assert {text.get_color() for text in ax.texts} == {"white", "black"}


def test_average_accuracy_by_number_of_tasks():
    ax = plot_average_accuracy({"one": DONE, "many": [DONE, OTHER]})
    one, many = ax.lines
    assert one.get_xydata().tolist() == [[1, 1.0], [2, 0.6875], [3, 0.5]]
    assert many.get_ydata().tolist() == [0.75, 0.59375, 0.625]
    # The band reaches from the lowest to the highest seed; one seed has none.
    (band,) = ax.collections
    corners = band.get_paths()[0].vertices
    for x, low, high in [(1, 0.5, 1.0), (2, 0.5, 0.6875), (3, 0.5, 0.75)]:
        ys = corners[corners[:, 0] == x, 1]
        assert (ys.min(), ys.max()) == (low, high)
    assert one.get_color() != many.get_color()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["one", "many"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("Tasks learned", "Average accuracy")
    assert all(tick == int(tick) for tick in ax.get_xticks())
    assert_draws(ax.figure)


def test_average_accuracy_so_far():
    ax = plot_average_accuracy({"unfinished": PARTIAL})
    assert np.isnan(ax.lines[0].get_ydata()).tolist() == [False, False, True]
    assert_draws(ax.figure)


def test_final_accuracy_by_task():
    ax = plot_final_accuracy({"one": DONE, "many": [DONE, OTHER]})
    one, many = ax.containers
    assert one.lines[0].get_ydata().tolist() == [0.25, 0.5, 0.75]
    assert many.lines[0].get_ydata().tolist() == [0.5, 0.75, 0.625]
    assert one.lines[2] == ()
    (bars,) = many.lines[2]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[0.25, 0.75], [0.5, 1.0], [0.5, 0.75]]
    # Side by side, so that no bar hides another.
    assert many.lines[0].get_xdata() == pytest.approx(one.lines[0].get_xdata() + 0.1)
    assert [label.get_text() for label in ax.get_xticklabels()] == list(NAMES)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["one", "many"]
    assert ax.get_ylabel() == "Accuracy after the last task"
    assert_draws(ax.figure)


def test_one_method_is_right_above_its_tasks():
    assert plot_final_accuracy({"one": DONE}).lines[0].get_xdata().tolist() == [0, 1, 2]


def test_given_axes_are_used():
    first, second, third = Figure().subplots(1, 3)
    assert plot_accuracy_matrix(DONE, first) is first
    assert plot_average_accuracy({"one": DONE}, second) is second
    assert plot_final_accuracy({"one": DONE}, third) is third


@pytest.mark.parametrize("plot", LINES)
def test_bad_runs_are_named(plot):
    with pytest.raises(ValueError, match="runs must hold at least one method"):
        plot({})
    with pytest.raises(ValueError, match="runs: 'many' holds no matrix"):
        plot({"one": DONE, "many": []})
    with pytest.raises(ValueError, match="runs must be of the same tasks"):
        plot({"one": DONE, "many": [AccuracyMatrix.empty(("first", "second", "other"))]})


def test_final_accuracy_needs_the_last_task():
    with pytest.raises(ValueError, match="'many' holds a matrix whose last task is not learned"):
        plot_final_accuracy({"one": DONE, "many": [DONE, PARTIAL]})


@pytest.mark.parametrize("draw", [lambda: plot_accuracy_matrix(DONE), *(lambda p=p: p({"one": DONE}) for p in LINES)])
def test_without_matplotlib_the_extra_is_named(monkeypatch, draw):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pyro-radial\[plots\]"):
        draw()
