# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What Pyro asks of its own automatic guides, asked of ours."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide.initialization import init_to_feasible, init_to_mean, init_to_median, init_to_sample
from pyro.infer.reparam import ProjectedNormalReparam
from pyro.optim import Adam

from pyro_radial import AutoMeanField, AutoRadial, AutoRadialDirectional, RadialELBO


@pytest.mark.parametrize("guide_type", [AutoRadial, AutoMeanField, AutoRadialDirectional])
@pytest.mark.parametrize("loss", [Trace_ELBO, TraceMeanField_ELBO, RadialELBO])
def test_a_hundred_steps_find_the_quantiles_of_a_prior(guide_type, loss):
    """With the steps, the rate and the tolerances of Pyro's own test."""
    wide = {"y": dist.LogNormal(0.0, 1.0), "z": dist.Beta(2.0, 2.0).expand([2]).to_event(1), "x": dist.Normal(0.0, 1.0)}

    def model():
        for name, distribution in wide.items():
            pyro.sample(name, distribution)

    guide = guide_type(model)
    svi = SVI(model, guide, Adam({"lr": 0.05, "betas": (0.8, 0.99)}), loss(num_particles=100, vectorize_particles=True))
    for _ in range(100):
        svi.step()
    levels = [0.1, 0.5, 0.9]
    quantiles, median = guide.quantiles(levels), guide.median()
    for name in wide:
        low, middle, high = quantiles[name]
        assert not median[name].requires_grad
        assert bool((low <= median[name]).all())
        assert bool((median[name] <= high).all())
        torch.testing.assert_close(middle, median[name])
    expected = {"x": torch.tensor([-1.2816, 0.0, 1.2816]), "y": torch.tensor([0.2776, 1.0, 3.6022])}
    torch.testing.assert_close(quantiles["x"], expected["x"], atol=0.2, rtol=0.0)
    torch.testing.assert_close(quantiles["y"].log(), expected["y"].log(), atol=0.4, rtol=0.0)
    normal = dist.Normal(0.0, 1.0)
    for level, quantile in zip(levels, quantiles["x"], strict=True):
        assert normal.cdf(quantile) == pytest.approx(level, abs=0.05)


@pytest.mark.parametrize("guide_type", [AutoRadial, AutoMeanField])
@pytest.mark.parametrize("init_loc_fn", [init_to_feasible, init_to_mean, init_to_median, init_to_sample])
def test_a_direction_is_refused_with_the_way_out(guide_type, init_loc_fn):
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        y = pyro.sample("y", dist.ProjectedNormal(x))
        pyro.sample("obs", dist.Normal(y, 1).to_event(1), obs=torch.tensor([1.0, 0.0]))

    with pytest.raises(ValueError, match="ProjectedNormalReparam"):
        guide_type(model, init_loc_fn=init_loc_fn)()
    reparametrized = pyro.poutine.reparam(model, {"y": ProjectedNormalReparam()})
    guide = guide_type(reparametrized, init_loc_fn=init_loc_fn)
    guide()
    assert TraceMeanField_ELBO().loss(reparametrized, guide) < float("inf")
