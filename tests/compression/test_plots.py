# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Plots of scores and cuts."""

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pyro_radial.compression.plots import plot_scores
from pyro_radial.compression.scores import Cut, Scores

SCORES = Scores(
    outputs={"0": torch.tensor([-1.0, -8.0, 0.0, -9.0]), "2": torch.tensor([1.0, 2.0, 3.0])},
    inputs={"2": torch.tensor([-torch.inf, 2.0, -3.0, 2.5])},
)


def assert_draws(figure):
    """The plot can be rendered (warnings are errors) and is not blank."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert len(np.unique(canvas.buffer_rgba())) > 2


def test_scores_are_sorted_in_two_colors_with_the_cut_between():
    axes = plot_scores(SCORES, Cut(outputs={"0": torch.tensor([True, False, True, False])}))
    kept, cut, line = axes[0].lines
    assert kept.get_xydata().tolist() == [[1, 0], [2, -1]]
    assert cut.get_xydata().tolist() == [[3, -8], [4, -9]]
    assert list(line.get_ydata()) == [-4.5, -4.5]
    assert kept.get_color() != cut.get_color()
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["kept", "cut"]
    assert axes[0].get_ylabel() == "Score (log scale)"
    assert all(ax.get_xlabel() for ax in axes)
    assert_draws(axes[0].figure)


def test_panels_are_named_and_outputs_stand_above_inputs():
    scores = Scores(SCORES.outputs, SCORES.inputs)
    axes = plot_scores(scores, Cut(outputs={"0": torch.tensor([True, False, True, False])}))
    assert [ax.get_title() for ax in axes] == [
        "Layer 0, outputs: 2 of 4 kept",
        "Layer 2, outputs: 3 of 3 kept",
        "Layer 2, inputs: 4 of 4 kept",
    ]
    assert [ax.get_subplotspec().rowspan.start for ax in axes] == [0, 0, 1]
    # Nothing is cut in the second, and the score of minus infinity has no point in the third.
    assert len(axes[1].lines) == 2
    assert axes[2].lines[0].get_xydata().tolist() == [[1, 2.5], [2, 2], [3, -3]]


def test_no_line_where_other_things_than_the_scores_decided():
    cut = Cut(outputs={"0": torch.tensor([False, True, True, False])})
    assert len(plot_scores(SCORES, cut)[0].lines) == 2


def test_scores_of_one_side_make_one_row():
    figure = Figure()
    axes = plot_scores(Scores(inputs={"fc": torch.randn(5)}), Cut(), figure=figure)
    assert len(axes) == 1
    assert axes[0].figure is figure
    assert_draws(figure)


def test_a_cut_that_does_not_fit_the_scores_is_refused():
    with pytest.raises(ValueError, match=r"cut.outputs\['2'\] must be of 3 units, got 1"):
        plot_scores(SCORES, Cut(outputs={"2": torch.tensor([True])}))
