# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import sys

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from pyro_radial.continual.measures import AccuracyMatrix
from pyro_radial.continual.plots import plot_accuracy_matrix

NAMES = ("first", "second", "third")
PARTIAL = AccuracyMatrix.empty(NAMES).with_row(0, [1.0]).with_row(1, [0.875, 0.5])
DONE = PARTIAL.with_row(2, [0.25, 0.5, 0.75])


def assert_draws(figure):
    """The plot can be rendered (warnings are errors) and is not blank."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert len(np.unique(canvas.buffer_rgba())) > 2


def test_matrix_has_a_number_per_measured_cell_and_blanks_elsewhere():
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


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pyro-radial\[plots\]"):
        plot_accuracy_matrix(DONE)
