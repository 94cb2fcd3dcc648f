# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What Pyro asks of its own automatic guides, asked of ours."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam

from pyro_radial import AutoMeanField, AutoRadial, PriorChain


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
