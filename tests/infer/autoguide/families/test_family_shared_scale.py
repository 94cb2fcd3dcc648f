# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One scale for a site: the same as equal scales for all of its elements, at the memory of one number."""

import copy
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.distributions import kl_divergence
from torch.optim import SGD

from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    BayesianModule,
    CompiledSVI,
    PriorChain,
    SupervisedModel,
    TermsELBO,
    diagnose,
    predict,
)
from pyro_radial.compression.scores import tensor_scores
from pyro_radial.nn import likelihoods

GUIDES = {"normal": AutoMeanField, "radial": AutoRadial, "a radius for each row": partial(AutoRadial, event_dim=1)}
each_guide = pytest.mark.parametrize("make", GUIDES.values(), ids=GUIDES)
GENERATOR = torch.Generator().manual_seed(1)
DATA = torch.randn(12, 3, generator=GENERATOR), torch.randint(2, (12,), generator=GENERATOR)


def classifier(prior=0.7, **kwargs):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    bnn = BayesianModule(net, prior=dist.Normal(0.0, prior))
    return SupervisedModel(bnn, likelihoods.Categorical(num_data=40), **kwargs)


def pair_of_guides(make, model):
    """A guide with a scale for each weight, all equal within a site, and one that stores this scale once."""
    full, shared = (make(model, init_stddev=0.2, widths=widths) for widths in ("elbo", "predictive"))
    for number, guide in enumerate((full, shared)):
        guide.setup(*DATA)
        for index, site in enumerate(guide.loc_scale_sites().values()):
            assert site.scale.requires_grad == (not number)
            site.scale.requires_grad_()
            nn.init.constant_(site.scale, -2.0 - 0.25 * index)
            assert site.scale.numel() == (1 if number else site.loc.numel())
    return full, shared


def seeded(function):
    torch.manual_seed(2)
    return function()


@each_guide
def test_draws_are_those_of_equal_scales_to_the_last_bit(make):
    _, guide = pair_of_guides(make, classifier())
    for family, site, loc, unconstrained in guide.loc_scale_sites().values():
        scale = torch.nn.functional.softplus(unconstrained)
        own = family.distribution(site, loc=loc, scale=scale)
        full = family.distribution(site, loc=loc, scale=scale.expand_as(loc).contiguous())
        draw = seeded(full.rsample)
        assert torch.equal(seeded(own.rsample), draw)
        assert torch.equal(own.log_prob(draw), full.log_prob(draw))
        assert torch.equal(own.variance, full.variance)


@each_guide
@pytest.mark.parametrize("is_local", [False, True], ids=["drawn", "local"])
@pytest.mark.parametrize("particles", [1, 3])
def test_loss_and_gradients_are_those_of_equal_scales(make, is_local, particles):
    model = classifier(local_reparameterization=is_local)
    elbo = TermsELBO(particles, vectorize_particles=particles > 1, max_plate_nesting=1)
    full, shared = pair_of_guides(make, model)
    loss, shared_loss = (seeded(lambda guide=guide: elbo(model, guide)(*DATA)) for guide in (full, shared))
    torch.testing.assert_close(shared_loss, loss, rtol=1e-6, atol=0.0)
    (loss + shared_loss).backward()
    for site, own in zip(full.loc_scale_sites().values(), shared.loc_scale_sites().values(), strict=True):
        torch.testing.assert_close(own.loc.grad, site.loc.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(own.scale.grad.sum(), site.scale.grad.sum(), rtol=1e-4, atol=1e-4)


@each_guide
def test_posterior_predictions_and_scores_are_those_of_equal_scales(make):
    model = classifier()
    full, shared = pair_of_guides(make, model)
    for name, q in full.posterior().items():
        own = shared.posterior()[name]
        prior = dist.Normal(0.3, 0.7).expand(q.shape()).to_event(q.event_dim)
        value, own_value = seeded(q.sample), seeded(own.sample)
        close = partial(torch.testing.assert_close, rtol=2e-6, atol=2e-7)
        close(own_value, value)
        close(own.variance, q.variance)
        close(own.log_prob(value), q.log_prob(value))
        close(own.entropy(), q.entropy())
        close(kl_divergence(own, prior), kl_divergence(q, prior))
    for method in ("draws", "linearized", "probit"):
        one, other = (
            seeded(partial(predict, model, guide, DATA[0], num_samples=4, method=method)) for guide in (full, shared)
        )
        torch.testing.assert_close(other.mean, one.mean)
    torch.testing.assert_close(tensor_scores(shared), tensor_scores(full))
    torch.testing.assert_close(shared.quantiles([0.1]), full.quantiles([0.1]))
    pulls, own_pulls = (
        seeded(lambda guide=guide: diagnose(model, guide, DATA, num_particles=8).scale_pulls)
        for guide in (full, shared)
    )
    assert own_pulls
    assert own_pulls == pytest.approx(pulls, rel=1e-3)


@each_guide
def test_training_holds_twelve_bytes_a_weight(make, recorded_only):
    model = classifier()
    guide = make(model, widths="predictive")
    guide.setup(*DATA)
    svi = CompiledSVI(model, guide, partial(SGD, lr=1e-4, momentum=0.9), TermsELBO())
    for _ in range(5):
        svi.step(*DATA)
    assert not svi.eager_reasons
    sites = guide.loc_scale_sites()
    held = [*guide.parameters(), *guide.buffers()]
    held += [parameter.grad for parameter in guide.parameters() if parameter.grad is not None]
    held += [state["momentum_buffer"] for state in svi.optimizer.state.values()]
    weights = sum(site.loc.numel() for site in sites.values())
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) <= 12 * (weights + len(sites))
    # The loss leaves them alone.
    assert max(guide.scale_change().values()) < 1e-6
    twin = copy.deepcopy(guide)
    twin.load_state_dict(guide.state_dict())
    assert torch.equal(twin.scales.get_parameter("0.weight_unconstrained"), sites["0.weight"].scale)


@pytest.mark.parametrize(("form", "weight"), [("normal", 1.0), ("normal", 2.0), ("exact", 1.0)])
@each_guide
def test_a_chain_keeps_one_scale_and_starts_there(make, form, weight):
    chain = PriorChain(classifier(), form, weight)
    _, guide = pair_of_guides(make, chain)
    for _ in range(2):
        chain.advance(guide)
    sites = guide.loc_scale_sites()
    kept = sum(buffer.untyped_storage().nbytes() for buffer in chain.chained.buffers())
    assert kept <= 4 * sum(site.loc.numel() + 1 for site in sites.values())
    following = chain.guide(make, widths="predictive")
    following.setup(*DATA)
    for name, q in following.posterior().items():
        torch.testing.assert_close(q.variance, chain.prior[name].variance.expand(q.shape()))


@each_guide
def test_a_start_at_several_scales_has_the_least_kl(make):
    start = {"w": dist.Normal(torch.zeros(2, 3), torch.tensor([0.1, 0.5, 2.0])).to_event(2)}
    guide = make(lambda: pyro.sample("w", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2)), widths="predictive")
    guide.start_at(start)
    guide.setup()
    scale = guide.loc_scale_sites()["w"].scale.requires_grad_()
    guide_distribution = pyro.poutine.trace(guide).get_trace().nodes["w"]["fn"]
    (by_scale,) = torch.autograd.grad(kl_divergence(guide_distribution, start["w"]), scale)
    torch.testing.assert_close(by_scale, torch.zeros(1, 1), rtol=0.0, atol=1e-4)
    guide.set_stddevs({"w": torch.tensor(0.3)})
    assert torch.equal(guide.posterior()["w"].variance, guide.posterior()["w"].variance[0, 0].expand(2, 3))
    assert float(guide.posterior()["w"].variance[0, 0]) == pytest.approx(0.09)


@each_guide
def test_rows_of_a_plate_have_a_scale_each(make):
    def model():
        with pyro.plate("rows", 5, subsample_size=2):
            pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))

    guide = make(model, widths="predictive")
    guide.setup()
    scale = guide.loc_scale_sites()["w"].scale.requires_grad_()
    assert scale.shape == (5, 1)
    TermsELBO()(model, guide)().backward()
    assert int((scale.grad != 0).sum()) == 2
