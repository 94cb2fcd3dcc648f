# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The terms of a loss are what they are called and add up to it."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI

from pyro_radial import AutoMeanField, AutoRadial, TermsELBO
from pyro_radial.infer.loss.terms import LossTerms, average
from tests.helpers.models import X, Y, network
from tests.helpers.scale_priors import scale_mixture


def test_the_terms_add_up_to_the_loss_for_the_whole_data_set():
    model = network(dist.Normal(0.0, 1.0))
    guide = AutoRadial(model, init_stddev=0.1)
    elbo = TermsELBO(kl_weight=0.3)
    pyro.set_rng_seed(0)
    loss = elbo(model, guide)(X, Y)
    terms = elbo.terms
    torch.testing.assert_close(loss.detach(), terms.negative_log_likelihood + 0.3 * terms.kl)
    torch.testing.assert_close(loss.detach(), terms.loss)
    assert terms.num_data == 40
    torch.testing.assert_close(terms.per_datum().loss * 40, terms.loss)
    # By hand: the likelihood of these 8 of 40 points at the same draw, and the KL of the guide's posteriors.
    pyro.set_rng_seed(0)
    trace = poutine.trace(guide).get_trace(X, Y)
    f = X @ trace.nodes["weight"]["value"].T + trace.nodes["bias"]["value"]
    by_hand = -40 / 8 * dist.Normal(f, 1.0).log_prob(Y).sum()
    torch.testing.assert_close(terms.negative_log_likelihood, by_hand.detach())
    posterior = guide.posterior()
    prior = {name: dist.Normal(0.0, 1.0).expand(q.event_shape).to_event(q.event_dim) for name, q in posterior.items()}
    kl = sum(torch.distributions.kl_divergence(posterior[name], prior[name]) for name in posterior)
    torch.testing.assert_close(terms.kl, kl)
    entropy = sum(q.entropy() for q in posterior.values())
    torch.testing.assert_close(terms.entropy, entropy)
    torch.testing.assert_close(terms.cross_entropy, kl + entropy)


def test_without_an_entropy_there_is_no_split_and_without_a_plate_no_loss_per_datum():
    def model():
        pyro.sample("rate", dist.LogNormal(0.0, 1.0))

    elbo = TermsELBO()
    elbo(model, AutoMeanField(model, init_stddev=0.5))()
    assert elbo.terms.entropy is None
    assert elbo.terms.cross_entropy is None
    assert elbo.terms.num_data is None
    with pytest.raises(ValueError, match="plate"):
        elbo.terms.per_datum()


def test_the_names_of_broken_terms_are_given():
    model = network()
    guide = AutoRadial(model)
    elbo = TermsELBO()
    with pyro.validation_enabled(False), pytest.warns(UserWarning, match="NaN"):
        SVI(model, guide, pyro.optim.Adam({}), elbo).evaluate_loss(X * math.nan, Y)
    assert elbo.terms.not_finite() == ["log-likelihood of site 'y'"]


def test_the_terms_say_which_kls_were_sampled_and_why():
    model = network(scale_mixture())
    elbo = TermsELBO(num_particles=2)
    elbo(model, AutoRadial(model))(X, Y)
    assert list(elbo.terms.sampled_kl) == ["weight", "bias"]
    assert elbo.terms.sampled_kl["weight"].startswith("without a closed-form KL from ")
    assert elbo.terms.per_datum().sampled_kl == elbo.terms.sampled_kl
    # Of the latest loss alone.
    closed = network()
    elbo(closed, AutoRadial(closed))(X, Y)
    assert elbo.terms.sampled_kl == {}


def test_a_kl_that_is_sampled_in_some_particles_is_listed():
    priors_in_turn = itertools.cycle([dist.Normal(0.0, 1.0), dist.StudentT(3.0)])

    def model():
        pyro.sample("w", next(priors_in_turn))

    guide = AutoMeanField(model, init_stddev=0.5)
    guide.setup()
    elbo = TermsELBO(num_particles=2)
    for _ in range(2):
        elbo(model, guide)()
        assert elbo.terms.sampled_kl == {"w": "without a closed-form KL from Normal to StudentT"}
        next(priors_in_turn)  # So that the other particle comes first.


def test_a_kl_of_weights_besides_has_a_weight_of_its_own():
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    terms = LossTerms(0.5, {"y": one}, {"f": two}, dict, 10, {}, 0.3, {"w": torch.tensor(4.0), "b": one})
    assert float(terms.weight_space_kl) == 5.0
    assert float(terms.kl) == 2.0
    assert float(terms.loss) == pytest.approx(1.0 + 0.5 * 2.0 + 0.3 * 5.0)
    assert float(terms.per_datum().loss) == pytest.approx(0.35)
    assert float(average([terms, terms], 2).loss) == pytest.approx(float(terms.loss))
    broken = LossTerms(0.5, {"y": one}, {"f": two}, dict, 10, {}, 0.3, {"w": torch.tensor(math.nan)})
    assert broken.not_finite() == ["weight-space KL of site 'w'"]
    # An infinite KL without weight is no part of the loss.
    without = LossTerms(0.5, {"y": one}, {"f": two}, dict, 10, {}, 0.0, {"w": torch.tensor(math.inf)})
    assert float(without.loss) == 2.0
