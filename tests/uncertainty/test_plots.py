# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

from pyro_radial.uncertainty.calibration import Reliability
from pyro_radial.uncertainty.intervals import QuantileCalibration
from pyro_radial.uncertainty.plots import (
    plot_images,
    plot_quantile_calibration,
    plot_referral,
    plot_reliability,
)
from pyro_radial.uncertainty.referral import ReferralCurve

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
SHARES = torch.tensor([0.0, 0.1, 0.3]).double()
SCORES = torch.tensor([0.8, 0.85, 0.9]).double()
REFERRAL = {
    "radial": ReferralCurve(SHARES, SCORES, torch.stack([SCORES - 0.01, SCORES + 0.01]), 0),
    "normal": ReferralCurve(SHARES, SCORES - 0.2, torch.stack([SCORES - 0.3, SCORES - 0.1]), 3),
}
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


def test_reliability_diagram_has_a_diagonal_and_a_line_per_method():
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


def test_images_are_shown_in_order_with_their_pixels():
    images = torch.rand(5, 3, 4, 6)
    axes = plot_images(images, list("abcde"), num_columns=3, row_labels=["top", "bottom"])
    assert [ax.get_title() for ax in axes] == list("abcde")
    assert [ax.get_ylabel() for ax in axes] == ["top", "", "", "bottom", ""]
    for image, ax in zip(images, axes, strict=True):
        (shown,) = ax.images
        torch.testing.assert_close(torch.tensor(shown.get_array()), image.permute(1, 2, 0))
    assert [(spec.rowspan.start, spec.colspan.start) for spec in (ax.get_subplotspec() for ax in axes)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
    ]
    assert_draws(axes[0].figure)


@pytest.mark.parametrize(
    ("images", "options", "message"),
    [
        (torch.rand(3, 4, 4), {}, "images must have shape"),
        (torch.rand(3, 2, 4, 4), {}, "images must have shape"),
        (torch.rand(0, 1, 4, 4), {}, "images must have shape"),
        (torch.full((1, 1, 4, 4), 1.1), {}, r"images must be in \[0, 1\]"),
        (torch.full((1, 1, 4, 4), NAN), {}, r"images must be in \[0, 1\]"),
        (torch.rand(2, 1, 4, 4), {"titles": ["one"]}, "titles must be 2"),
        (torch.rand(2, 1, 4, 4), {"num_columns": 0}, "num_columns"),
        (torch.rand(2, 1, 4, 4), {"row_labels": ["one", "two"]}, "row_labels must be 1"),
    ],
)
def test_bad_images_are_named(images, options, message):
    with pytest.raises(ValueError, match=message):
        plot_images(images, **options)


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


def test_pyplot_is_never_imported_and_the_extras_only_when_used():
    code = (
        "import sys, pyro_radial.uncertainty.plots as u\n"
        "assert not {'matplotlib', 'sklearn'} & sys.modules.keys()\n"
        "u.new_axes((1.0, 1.0)).figure.canvas.draw()\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
