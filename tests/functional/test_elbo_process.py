# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The functional ELBO with divergences of processes, at measurement points alone, and with the KL of weights too."""

import math

import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoIAFNormal, AutoNormal
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, PriorChain, SupervisedModel, TermsELBO
from pyro_radial.continual.prior_chain import posterior_of
from pyro_radial.functional import FunctionalELBO, GaussianKL, GaussianProcess, LinearizedKL, PosteriorProcess
from pyro_radial.nn import MultiHead, likelihoods
from pyro_radial.poutine import local_reparameterization
from tests.helpers.devices import CountHostReads

X, Y = torch.randn(8, 3), torch.randint(2, (8,))
KEPT = torch.randn(5, 3)


def trunk():
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5))


def net():
    return nn.Sequential(*trunk(), nn.Linear(6, 2))


def convolutional():
    return nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 2))


def heads():
    return MultiHead(trunk(), [nn.Linear(6, 2), nn.Linear(6, 2)])


def second_task(guide_type, make=net, local=False):
    """The model of a second task, its guide, and the process after the first."""
    chain = PriorChain(
        SupervisedModel(BayesianModule(make()), likelihoods.Categorical(num_data=40), local_reparameterization=local),
        form="normal",
    )
    first = AutoRadial(chain, init_stddev=0.1)
    first.setup(X, Y)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    process = PosteriorProcess(chain, first.posterior())
    chain.advance(first)
    guide = chain.guide(guide_type)
    TermsELBO()(chain, guide)(X, Y)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.mul_(1.1)
    return chain, guide, process


def loss_of(prior, **kwargs):
    options = {
        "divergence": LinearizedKL(0.1),
        "compare_at": "measurement_points",
        "num_functions": 1,
        "kl_weight": 2.0,
    }
    return FunctionalELBO(prior, lambda x: KEPT, **options | kwargs)


@pytest.mark.parametrize(
    ("guide_type", "make"), [(AutoRadial, net), (AutoMeanField, convolutional), (AutoNormal, heads)]
)
def test_the_divergence_is_that_of_the_guide_s_posterior_at_the_context(guide_type, make):
    chain, guide, process = second_task(guide_type, make)
    elbo = loss_of(process)
    loss = elbo(chain, guide)(X, Y)
    expected = LinearizedKL(0.1)(PosteriorProcess(chain, posterior_of(guide)), KEPT, process).value
    torch.testing.assert_close(elbo.terms.kl_by_site["f"], expected)
    assert list(elbo.terms.kl_by_site) == ["f"]
    assert float(elbo.terms.weight_space_kl) == 0.0
    torch.testing.assert_close(loss.detach(), elbo.terms.negative_log_likelihood + 2.0 * expected)


@pytest.mark.parametrize("guide_type", [AutoRadial, AutoNormal])
def test_the_kl_of_the_weights_is_a_second_term(guide_type):
    chain, guide, process = second_task(guide_type)
    pyro.set_rng_seed(1)
    alone = TermsELBO()
    alone(chain, guide)(X, Y)
    pyro.set_rng_seed(1)
    elbo = loss_of(process, weight_space_kl=0.3)
    loss = elbo(chain, guide)(X, Y)
    terms = elbo.terms
    assert terms.weight_space_kl_by_site.keys() == alone.terms.kl_by_site.keys()
    if guide_type is AutoRadial:
        torch.testing.assert_close(terms.weight_space_kl, alone.terms.kl)
    expected = terms.negative_log_likelihood + 2.0 * terms.kl + 0.3 * terms.weight_space_kl
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(terms.loss, expected)
    torch.testing.assert_close(terms.per_datum().loss, expected / 40)


@pytest.mark.parametrize(("guide_type", "make"), [(AutoRadial, convolutional), (AutoMeanField, heads)])
def test_local_reparameterization_leaves_both_terms_as_they_are(make, guide_type):
    chain, guide, process = second_task(guide_type, make)
    # Batch norm in train mode mixes rows.
    chain.eval()
    found = []
    for noisy in (guide, local_reparameterization(guide)):
        elbo = loss_of(process, weight_space_kl=0.3)
        elbo(chain, noisy)(X, Y).backward()
        found.append((elbo.terms.kl, elbo.terms.weight_space_kl))
        assert math.isfinite(elbo.terms.negative_log_likelihood)
    torch.testing.assert_close(*found)


def test_a_loss_reads_nothing_on_the_host():
    chain, guide, process = second_task(AutoRadial, net)
    elbo = loss_of(process, weight_space_kl=0.3)
    elbo(chain, guide)(X, Y)
    with pyro.validation_enabled(False), CountHostReads() as reads:
        elbo.differentiable_loss(chain, guide, X, Y).backward()
    # One for each Cholesky factor: whether it exists.
    assert reads.count == 2


def test_a_divergence_of_draws_can_be_at_the_context_alone():
    chain, guide, _ = second_task(AutoRadial, convolutional)
    kernel = lambda a, b: torch.exp(-0.5 * torch.cdist(a, b).square())  # noqa: E731
    seen = []

    def noting(f, x, prior):
        seen.append((f.shape, x))
        return GaussianKL()(f, x, prior)

    loss_of(GaussianProcess(kernel), divergence=noting, num_functions=40)(chain, guide)(X, Y)
    ((shape, points),) = seen
    assert shape == (40, 5, 2)
    assert torch.equal(points, KEPT)


def test_what_does_not_fit_is_named():
    chain, _, process = second_task(AutoMeanField)
    with pytest.raises(ValueError, match="measurement_points must be given to compare at them alone, got None"):
        FunctionalELBO(process, compare_at="measurement_points")
    with pytest.raises(ValueError, match="posterior must have a mean and a variance at site"):
        loss_of(process)(chain, AutoIAFNormal(chain))(X, Y)
