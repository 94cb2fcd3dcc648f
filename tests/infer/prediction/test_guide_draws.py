# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of a guide are those that its own runs make, and of sites that the model has."""

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


@pytest.mark.parametrize("kind", GUIDES)
@torch.no_grad()
def test_draws_are_the_numbers_that_runs_of_the_guide_make(kind):
    guide, says_all = made(kind)
    pyro.set_rng_seed(3)
    expected = [dict(poutine.trace(guide).get_trace(X).iter_stochastic_nodes()) for _ in range(4)]
    state = torch.get_rng_state()
    pyro.set_rng_seed(3)
    draws = GuideDraws(guide)
    found = [dict(draws.draw(X).iter_stochastic_nodes()) for _ in range(4)]
    assert (draws.distributions is not None) == says_all
    assert torch.equal(torch.get_rng_state(), state)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name]["value"], theirs[name]["value"]) for name in ours)
    if kind != "point":
        assert not torch.equal(found[0]["bias"]["value"], found[1]["bias"]["value"])


@torch.no_grad()
def test_a_guide_that_calls_itself_differently_runs_for_every_draw():
    guide, _ = made("radial")
    plain = guide.forward
    guide.forward = lambda *args: plain(*args)
    draws = GuideDraws(guide)
    draws.draw(X)
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
    rows = {tuple(draws.draw(X).nodes["rows"]["value"].tolist()) for _ in range(20)}
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
