# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of a guide have its distributions, or are those that its own runs make, of sites that the model has."""

import sys
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, AutoRadialDirectional, BayesianModule, PriorChain, SupervisedModel
from pyro_radial import predict as predict_function
from pyro_radial.infer import SampledNetwork
from pyro_radial.infer.autoguide import families
from pyro_radial.infer.prediction.guide_draws import GuideDraws
from pyro_radial.nn import MultiHead, likelihoods, use_head
from pyro_radial.nn.priors import RadialDirectionalPrior
from pyro_radial.poutine import swap_prior

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


class Recording(AutoRadial):
    """A guide whose forward is its own: it shifts a site."""

    def forward(self, *args, **kwargs):
        result = super().forward(*args, **kwargs)
        result["shift"] = pyro.sample("shift", dist.Normal(result["weight"].sum(), 1.0), infer={"is_auxiliary": True})
        return result


def listed(model, bias=AutoMeanField):
    guide = AutoGuideList(model)
    guide.append(AutoRadial(poutine.block(model, expose=["weight"])))
    guide.append(bias(poutine.block(model, expose=["bias"])))
    return guide


PRIOR = dist.Normal(0.0, 1.0)
# A guide, a prior, and whether its distributions say all.
GUIDES = {
    "radial": (AutoRadial, PRIOR, True),
    "mean field": (AutoMeanField, PRIOR, True),
    "several sites a parameter": (AutoRadialDirectional, RadialDirectionalPrior("row"), True),
    "list": (listed, PRIOR, True),
    "point": (partial(AutoRadial, families={"bias": families.Delta()}), PRIOR, True),
    "list with one of Pyro's": (partial(listed, bias=AutoNormal), PRIOR, False),
    "forward of its own": (Recording, PRIOR, False),
    "Pyro's": (AutoNormal, PRIOR, False),
}


def made(kind):
    guide, prior, says_all = GUIDES[kind]
    model = BayesianModule(nn.Linear(3, 2), prior)
    guide = guide(model)
    guide(X)
    return guide, says_all


@pytest.mark.parametrize("kind", [kind for kind, (*_, says_all) in GUIDES.items() if not says_all])
@torch.no_grad()
def test_draws_are_the_numbers_that_runs_of_the_guide_make(kind):
    guide, _ = made(kind)
    pyro.set_rng_seed(3)
    draws = GuideDraws(guide)
    blocks = [draws.block(4, X) for _ in range(3)]
    assert draws.distributions is None
    pyro.set_rng_seed(3)
    for block in blocks:
        expected = dict(poutine.trace(guide).get_trace(X).iter_stochastic_nodes())
        assert len(block.seeds) == 1
        assert block.seeds == torch.randint(2**62, (1,)).tolist()
        for name, site in block.trace(0).iter_stochastic_nodes():
            assert torch.equal(site["value"], expected.pop(name)["value"])
            assert torch.equal(block.values[name][0], site["value"])
        assert not expected


@pytest.mark.parametrize("kind", [kind for kind, (*_, says_all) in GUIDES.items() if says_all])
@torch.no_grad()
def test_draws_of_known_distributions_are_made_in_blocks(kind):
    guide, _ = made(kind)
    sites = dict(poutine.trace(guide).get_trace(X).iter_stochastic_nodes())
    draws = GuideDraws(guide)
    block = draws.block(1000, X)
    assert len(block.seeds) == len(set(block.seeds)) == 1000
    assert block.values.keys() == sites.keys()
    for name, site in sites.items():
        values = block.values[name]
        assert values.shape == (1000, *site["value"].shape)
        assert torch.equal(block.trace(7).nodes[name]["value"], values[7])
        distribution = site["fn"]
        expected = distribution.sample((1000,))
        error = (expected.var(0) / 1000).sqrt().clamp_min(1e-6)
        assert ((values.mean(0) - expected.mean(0)).abs() < 6 * error).all()
        # Radii have heavy tails in no case: the variance of a variance is at most ten times its square.
        ratio = (values.var(0) + 1e-9) / (expected.var(0) + 1e-9)
        assert ((ratio - 1.0).abs() < 6 * (2 * 10 / 1000) ** 0.5).all()
    # Memory bounds the number, but a pair fits always.
    small = [draws.block(5, X), draws.block(2, X)]
    assert [len(block.seeds) for block in small] == [5, 2]


@torch.no_grad()
def test_memory_bounds_a_block(monkeypatch):
    # The package's attribute of this name is the function.
    monkeypatch.setattr(sys.modules[GuideDraws.__module__], "NUMBERS_IN_BLOCK", 40)
    guide, _ = made("radial")  # 8 numbers
    draws = GuideDraws(guide)
    assert [len(draws.block(most, X).seeds) for most in (64, 3)] == [5, 3]
    monkeypatch.setattr(sys.modules[GuideDraws.__module__], "NUMBERS_IN_BLOCK", 1)
    assert [len(draws.block(most, X).seeds) for most in (64, 1)] == [2, 1]


@torch.no_grad()
def test_a_guide_that_calls_itself_differently_runs_for_every_draw():
    guide, _ = made("radial")
    plain = guide.forward
    guide.forward = lambda *args: plain(*args)
    draws = GuideDraws(guide)
    draws.block(4, X)
    assert draws.distributions is None


@torch.no_grad()
def test_rows_of_a_plate_are_drawn_anew():
    def model(x):
        with pyro.plate("rows", 10, subsample_size=4):
            return pyro.sample("z", PRIOR)

    guide = AutoRadial(model, event_dim=0, create_plates=lambda x: pyro.plate("rows", 10, subsample_size=4))
    with pytest.warns(UserWarning, match="plain mean field"):
        guide.setup(X)
    draws = GuideDraws(guide)
    rows = {tuple(draws.block(4, X).values["rows"][0].tolist()) for _ in range(20)}
    assert draws.distributions is None
    assert len(rows) > 5


# ------------------------------------------------------------------------------------------- sites of another model


def two_heads(wrap=lambda model: model):
    net = MultiHead(nn.Linear(3, 4), [nn.Linear(4, 2), nn.Linear(4, 2)])
    model = wrap(SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=5, scale=0.1)))
    guide = AutoRadial(model)
    guide.setup(X, torch.zeros(5, 2))
    return model, guide


ASK = {
    "predict": lambda model, guide: predict_function(model, guide, X, num_samples=2).samples,
    "SampledNetwork": lambda model, guide: SampledNetwork(model, guide, 2)(X),
}


@pytest.mark.parametrize("who", ASK)
def test_a_guide_may_leave_sites_out_or_have_more(who):
    model, guide = two_heads()
    fewer = AutoRadial(poutine.block(model, hide=["heads.0.weight"]))
    fewer.setup(X, torch.zeros(5, 2))
    assert ASK[who](model, fewer).shape == (2, 5, 2)
    assert ASK[who](model, lambda *args: None).shape == (2, 5, 2)

    def more(*args):
        guide(*args)
        pyro.sample("extra", PRIOR)

    assert ASK[who](model, more).shape == (2, 5, 2)


@pytest.mark.parametrize("who", ASK)
def test_a_head_with_a_chained_prior_is_drawn_from_it(who):
    model, guide = two_heads()
    chain = PriorChain(model)
    guide.load_means({name: torch.full_like(value, 3.0) for name, value in guide.median().items()})
    with torch.no_grad():
        guide.scales.trunk.weight_unconstrained.sub_(1.0)
    with pytest.warns(UserWarning, match="never moved"):
        chain.advance(guide)
    use_head(chain, 1)
    other = AutoRadial(chain)
    other.setup(X, torch.zeros(5, 2))
    # Head 1 has no chained prior, head 0 has one.
    with pytest.raises(ValueError, match=r"none for \['heads.1.weight', 'heads.1.bias'\]"):
        ASK[who](chain, guide)
    use_head(chain, 0)
    assert ASK[who](chain, other).shape == (2, 5, 2)
    swapped = swap_prior(model, {name: posterior for name, posterior in guide.posterior().items() if "heads" in name})
    assert ASK[who](swapped, other).shape == (2, 5, 2)
