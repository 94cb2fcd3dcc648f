# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The plots of the tutorials."""

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from pyro_radial.continual.measures import AccuracyMatrix
from pyro_radial.uncertainty.referral import ReferralCurve
from tutorials.plots import plot_accuracy_matrix, plot_images, plot_referral

NAMES = ("first", "second", "third")
PARTIAL = AccuracyMatrix.empty(NAMES).with_row(0, [1.0]).with_row(1, [0.875, 0.5])
DONE = PARTIAL.with_row(2, [0.25, 0.5, 0.75])
SHARES = torch.tensor([0.0, 0.1, 0.3]).double()
SCORES = torch.tensor([0.8, 0.85, 0.9]).double()
REFERRAL = {
    "radial": ReferralCurve(SHARES, SCORES, torch.stack([SCORES - 0.01, SCORES + 0.01]), 0),
    "normal": ReferralCurve(SHARES, SCORES - 0.2, torch.stack([SCORES - 0.3, SCORES - 0.1]), 3),
}


def assert_draws(figure):
    """The plot can be rendered (warnings are errors) and is not blank."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert len(np.unique(canvas.buffer_rgba())) > 2


def test_images_are_shown_in_order_with_their_pixels():
    images = torch.rand(5, 3, 4, 6)
    axes = plot_images(images, list("abcde"), num_columns=3, row_labels=["top", "bottom"])
    assert [ax.get_title() for ax in axes] == list("abcde")
    assert [ax.get_ylabel() for ax in axes] == ["top", "", "", "bottom", ""]
    for image, ax in zip(images, axes, strict=True):
        (shown,) = ax.images
        torch.testing.assert_close(torch.tensor(shown.get_array()), image.permute(1, 2, 0))
    assert_draws(axes[0].figure)


def test_referral_has_a_line_and_a_band_per_method():
    ax = plot_referral(REFERRAL, "AUC")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["radial", "normal"]
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


@pytest.mark.parametrize(("plot", "results"), [(plot_accuracy_matrix, DONE), (plot_referral, REFERRAL)])
def test_given_axes_are_used(plot, results):
    ax = Figure().subplots()
    assert plot(results, ax=ax) is ax
