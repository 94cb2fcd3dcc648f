# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What Pyro asks of its own automatic guides, asked of ours."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam

from pyro_radial import AutoMeanField, AutoRadial, AutoRadialDirectional, PriorChain, TermsELBO


@pytest.mark.parametrize(
    ("guide_type", "loss"),
    [(AutoRadial, Trace_ELBO), (AutoMeanField, TraceMeanField_ELBO), (AutoRadialDirectional, TermsELBO)],
)
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


def test_pyros_name_for_the_initial_standard_deviation_is_taken():
    def model():
        pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    guide = AutoMeanField(model, init_scale=0.3)
    guide()
    torch.testing.assert_close(guide.posterior()["w"].stddev, torch.full((3,), 0.3))
    with pytest.raises(ValueError, match="give init_scale or init_stddev, not both"):
        AutoMeanField(model, init_scale=0.3, init_stddev=0.3)
    with pytest.raises(ValueError, match="init_scale must be a positive finite number, got 0"):
        AutoMeanField(model, init_scale=0)


def with_a_simplex():
    pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
    pyro.sample("tau", dist.HalfNormal(1.0))
    pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))


@pytest.mark.parametrize("guide_type", [AutoRadial, AutoMeanField])
def test_quantiles_of_named_sites_need_no_quantiles_of_the_others(guide_type):
    guide = guide_type(with_a_simplex)
    guide()
    with pytest.raises(ValueError, match=r"'shares' .* mixes its elements.*name other sites with sites=\[...\]"):
        guide.quantiles([0.1, 0.9])
    quantiles = guide.quantiles([0.1, 0.9], sites=["w", "tau"])
    assert {name: value.shape for name, value in quantiles.items()} == {"w": (2, 3), "tau": (2,)}
    assert torch.equal(guide.quantiles([0.1, 0.9], sites="tau")["tau"], quantiles["tau"])
    with pytest.raises(ValueError, match=r"sites must be among \['shares', 'tau', 'w'\], got \['sigma'\]"):
        guide.quantiles([0.5], sites=["sigma"])


@pytest.mark.parametrize("guide_type", [AutoRadial, AutoMeanField, AutoNormal])
def test_a_moment_without_a_closed_form_says_how_to_get_it(guide_type):
    chain = PriorChain(with_a_simplex)
    guide = guide_type(chain)
    svi = SVI(chain, guide, Adam({"lr": 0.05}), Trace_ELBO())
    svi.step()
    chain.advance(guide)
    posterior = guide.posterior() if guide_type is not AutoNormal else {}
    for distributions in (chain.prior, posterior):
        for name in {"tau", "shares"} & distributions.keys():
            for moment in ("mean", "variance", "stddev"):
                with pytest.raises(NotImplementedError, match=r"mean and variance .* average draws.*guide.median"):
                    getattr(distributions[name], moment)
            # What the error says to do.
            assert distributions[name].sample((100,)).mean(0).isfinite().all()
