# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The distances that the README's plot shows are those of draws of the library's posteriors."""

import importlib.util
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import pytest
import torch

from pyro_radial.distributions import RadialNormal

SCRIPT = Path(__file__).resolve().parents[2] / "tutorials" / "why_radial.py"
NUM_DRAWS = 20_000


@pytest.fixture(scope="module")
def why_radial():
    spec = importlib.util.spec_from_file_location("why_radial", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_band_holds_nine_tenths_of_the_draws_and_its_line_halves_them(why_radial, size):
    loc, scale = torch.zeros(size), torch.ones(size)
    posteriors = (RadialNormal(loc, scale), dist.Normal(loc, scale).to_event(1))
    for posterior, band in zip(posteriors, why_radial.distances(size), strict=True):
        distance = posterior.sample((NUM_DRAWS,)).norm(dim=-1).numpy()
        for quantile, value in zip(why_radial.BAND, band, strict=True):
            # Four standard errors of a share.
            error = 4 * (quantile * (1 - quantile) / NUM_DRAWS) ** 0.5
            assert np.mean(distance < value) == pytest.approx(quantile, abs=error)


def test_the_plot_is_drawn_and_the_stored_one_is_small(why_radial, tmp_path):
    path = tmp_path / "plot.png"
    why_radial.draw().savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert 10_000 < why_radial.PLOT.stat().st_size < 100_000
