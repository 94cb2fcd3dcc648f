# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A plot of a search shows its numbers."""

import pytest

from pyro_radial import AutoRadial
from pyro_radial.infer import calibrate_scales
from pyro_radial.uncertainty.plots import new_axes
from pyro_radial.uncertainty.scale_plots import plot_scale_search
from tests.helpers.trained import guide_of, overfitted


def test_the_lines_are_the_curves():
    network, model, data, validation = overfitted()
    guide = guide_of(AutoRadial, network, model, data)
    searches = {
        "one": calibrate_scales(model, guide, validation),
        "by site": calibrate_scales(model, guide, validation, "norm", site_sweeps=1),
    }
    ax = new_axes((4.0, 3.0))
    assert plot_scale_search(searches, ax) is ax
    plain, first, best, *_ = ax.lines
    assert plain.get_ydata()[0] == searches["one"].plain_nll
    assert (first.get_xdata() == searches["one"].curve.numbers.numpy()).all()
    assert (first.get_ydata() == searches["one"].curve.nll.numpy()).all()
    assert best.get_xdata() == [searches["one"].curve.best]
    assert ax.lines[-1].get_ydata()[0] == searches["by site"].nll
    assert [text.get_text().split(" (")[0] for text in ax.get_legend().get_texts()] == ["one", "by site"]
    low, high = ax.get_ylim()
    assert low < searches["by site"].nll < searches["one"].plain_nll < high


def test_no_search_is_an_error():
    with pytest.raises(ValueError, match="searches must hold at least one search, got none"):
        plot_scale_search({})
