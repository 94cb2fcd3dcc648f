# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A diagnosis finds what was made wrong on purpose, and changes nothing."""

import random
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.optim import Adam

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, TermsELBO, diagnose, fit
from pyro_radial.nn import likelihoods
from tests.helpers.scale_priors import scale_mixture

ROWS = 40
X = torch.linspace(-1, 1, ROWS)[:, None]
DATA = X, (3 * X).sin()


def problem(width=20, num_data=ROWS, net=None, prior=None, guide=AutoRadial, **kwargs):
    net = net or nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))
    prior = dist.Normal(0.0, 1.0) if prior is None else prior
    model = SupervisedModel(BayesianModule(net, prior=prior), likelihoods.Gaussian(num_data=num_data))
    return model, guide(model, **kwargs)


def says(diagnosis, words):
    return any(words in finding for finding in diagnosis.findings)


def test_a_network_far_too_large_for_its_data_is_dominated_by_the_kl():
    diagnosis = diagnose(*problem(width=2000, num_data=10), (X[:10], DATA[1][:10]))
    assert says(diagnosis, "KL dominates")
    assert says(diagnosis, "num_data")
    assert not says(diagnosis, "likelihood dominates")


def test_the_kl_weight_of_the_training_counts():
    pair = problem(num_data=ROWS)
    assert says(diagnose(*pair, DATA), "KL dominates")
    tempered = diagnose(*pair, DATA, kl_weight=1e-3)
    assert says(tempered, "likelihood dominates")
    assert tempered.terms.kl_weight == 1e-3


@pytest.mark.parametrize("guide", [AutoRadial, AutoMeanField])
def test_scales_have_not_moved_before_training_and_have_after_it(guide):
    pair = problem(guide=guide)
    before = diagnose(*pair, DATA)
    assert before.unmoved_scales == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert says(before, "No scale has moved")
    fit(*pair, DATA, epochs=15, optim=partial(Adam, lr=1e-2), progress=False)
    after = diagnose(*pair, DATA)
    assert after.unmoved_scales == []
    assert not says(after, "moved")


@pytest.mark.parametrize(("stddev", "words"), [(0.01, "too narrow"), (3.0, "too wide"), (None, None)])
def test_widths_far_from_the_best_are_named_with_the_way_to_go(stddev, words):
    """A linear regression has known best widths, at which nothing is said."""
    x = torch.randn(100, 3)
    data = x, x.sum(-1, keepdim=True)
    model = SupervisedModel(BayesianModule(nn.Linear(3, 1)), likelihoods.Gaussian(num_data=100, scale=1.0))
    guide = AutoMeanField(model, init_stddev=0.5)
    guide.setup(*data)
    best = {"weight": (1 + x.square().sum(0, keepdim=True)).rsqrt(), "bias": torch.tensor([101.0]).rsqrt()}
    guide.load_means({"weight": torch.ones(1, 3), "bias": torch.zeros(1)})
    guide.set_stddevs({name: torch.full_like(own, stddev) if stddev else own for name, own in best.items()})
    diagnosis = diagnose(model, guide, data, num_particles=64)
    assert set(diagnosis.scale_pulls) == (set(best) if words else set())
    assert says(diagnosis, f"weight, bias are {words}") == bool(words)


@pytest.mark.parametrize(("unseen", "shift"), [(10.0, 0.0), (3.7, 0.0), (10.0, 1.5)])
def test_a_share_of_narrow_widths_and_means_off_their_best_are_named(unseen, shift):
    """Rows of an embedding have known best means and widths; a third is never seen and has those of the prior."""
    torch.manual_seed(0)
    users = torch.arange(200) % 20
    prior = dist.Normal(0.0, 10.0)
    model = SupervisedModel(BayesianModule(nn.Embedding(30, 1), prior), likelihoods.Gaussian(num_data=200, scale=1.0))
    guide = AutoMeanField(model, init_stddev=0.5)
    data = users, torch.randn(200, 1)
    guide.setup(*data)
    stddev = torch.full((30, 1), unseen)
    stddev[:20] = (10 + 0.01) ** -0.5
    mean = torch.zeros(30, 1).index_add(0, *data) / 10.01
    mean[:20] += shift * stddev[:20]
    guide.load_means({"weight": mean})
    guide.set_stddevs({"weight": stddev})
    diagnosis = diagnose(model, guide, data)
    assert says(diagnosis, "scales of 33% of weight are too narrow") == (unseen == 3.7)
    assert diagnosis.mean_distances == (
        {} if shift == 0.0 else {"weight": pytest.approx(shift * (2 / 3) ** 0.5, rel=0.2)}
    )
    assert says(diagnosis, "means of weight (1.") == (shift > 0.0)


@pytest.mark.parametrize("guide", [AutoRadial, AutoMeanField])
@pytest.mark.parametrize(("stddev", "found"), [(0.99, False), (1.01, True)])
def test_posteriors_half_as_wide_as_their_priors_are_found(guide, stddev, found):
    pair = problem(prior=dist.Normal(0.0, 2.0), guide=guide, init_stddev=stddev)
    assert says(diagnose(*pair, DATA), "as wide as their priors") is found


def test_a_guide_without_scales_of_ours_is_not_said_to_have_unmoved_ones():
    diagnosis = diagnose(*problem(guide=AutoNormal), DATA)
    assert diagnosis.unmoved_scales == []
    assert not says(diagnosis, "moved")
    # Its auxiliary sites have no analytic KL.
    assert diagnosis.sampled_kl


def test_a_huge_spread_is_found_to_predict_a_constant():
    noisy = diagnose(*problem(init_stddev=3.0), DATA)
    assert noisy.noise > noisy.signal
    assert says(noisy, "nearly constant")
    steady = diagnose(*problem(init_stddev=1e-3), DATA)
    assert steady.noise < steady.signal
    assert not says(steady, "nearly constant")


def test_signal_and_noise_are_the_spreads_over_inputs_and_draws():
    """f(x) = w x with w ~ N(1, 0.1^2): the function varies like x, and at x by 0.1 |x|."""
    model, guide = problem(net=nn.Linear(1, 1, bias=False), guide=AutoMeanField, init_stddev=0.1)
    guide.setup(*DATA)
    guide.load_means({"weight": torch.ones(1, 1)})
    draws = 200
    diagnosis = diagnose(model, guide, DATA, num_particles=draws)
    assert diagnosis.signal == pytest.approx(float(X.std(unbiased=False)), rel=1e-5)
    # A standard deviation from S draws has the relative error 1 / sqrt(2 S); four of them.
    assert diagnosis.noise == pytest.approx(0.1 * float(X.square().mean().sqrt()), rel=4 / (2 * draws) ** 0.5)


def test_sampled_kls_are_named_and_closed_ones_are_not():
    diagnosis = diagnose(*problem(prior=scale_mixture()), DATA)
    assert diagnosis.sampled_kl == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert says(diagnosis, "The KL of 0.weight, 0.bias, 2.weight, 2.bias is estimated from samples")
    closed = diagnose(*problem(), DATA)
    assert closed.sampled_kl == []
    assert not says(closed, "estimated from samples")


def test_a_missing_plate_is_found():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        pyro.sample("y", dist.Normal(x @ w, 1.0).to_event(1), obs=y)

    diagnosis = diagnose(model, AutoMeanField(model, init_stddev=0.1), (X, DATA[1][:, 0]))
    assert says(diagnosis, "No observation is inside a plate")
    # There is no site "f" either.
    assert (diagnosis.signal, diagnosis.noise) == (None, None)
    assert "per datum" not in str(diagnosis)
    assert not says(diagnose(*problem(), DATA), "plate")


def test_the_terms_are_an_average_over_particles_of_the_loss():
    model, guide = problem(init_stddev=0.3)
    diagnosis = diagnose(model, guide, DATA, num_particles=20)
    elbo = TermsELBO(num_particles=20)
    with torch.no_grad():
        elbo(model, guide)(*DATA)
    assert float(diagnosis.terms.kl) == pytest.approx(float(elbo.terms.kl), rel=1e-5)
    # Two averages of 50 draws: the draws of the likelihood differ by less than their mean here.
    expected = float(elbo.terms.negative_log_likelihood)
    assert float(diagnosis.terms.negative_log_likelihood) == pytest.approx(expected, rel=4 * (2 / 20) ** 0.5)


@pytest.mark.parametrize("fail", [False, True])
def test_a_diagnosis_leaves_everything_as_it_was(fail):
    net = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    model, guide = problem(net=net)
    guide.setup(*DATA)
    model.likelihood.eval()

    def everything():
        modules = [*model.modules(), *guide.modules()]
        tensors = [*model.state_dict().values(), *guide.state_dict().values(), torch.get_rng_state()]
        return [m.training for m in modules], [t.clone() for t in tensors], random.getstate()

    modes, tensors, python = everything()
    if fail:
        with pytest.raises(ValueError, match=r"given x of shape"):
            diagnose(model, guide, (torch.zeros(ROWS, 7), DATA[1]))
    else:
        diagnose(model, guide, DATA)
    modes_after, tensors_after, python_after = everything()
    assert modes_after == modes
    assert all(torch.equal(a, b) for a, b in zip(tensors, tensors_after, strict=True))
    assert python_after == python
    assert all(p.grad is None for p in [*model.parameters(), *guide.parameters()])


def test_a_likelihood_that_is_not_finite_is_named():
    diagnosis = diagnose(*problem(), (X, torch.full_like(X, 1e30)))
    assert says(diagnosis, "Not finite: log-likelihood of site 'y'")
    assert not says(diagnosis, "dominates")


def test_a_parameter_that_is_not_finite_is_named():
    model, guide = problem()
    guide.setup(*DATA)
    dict(guide.named_parameters())["locs.0.bias_unconstrained"].data.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"guide must have finite .* got NaN or infinity in locs.0.bias_unconstrained"):
        diagnose(model, guide, DATA)


def test_the_report_says_what_was_measured_and_what_was_found():
    diagnosis = diagnose(*problem(num_data=60_000), DATA)
    lines = str(diagnosis).splitlines()
    assert lines[0].startswith("loss, from 40 rows for num_data=60000: negative log-likelihood ")
    assert lines[0].endswith("(weight 1), in nats per datum")
    nll = float(diagnosis.terms.per_datum().negative_log_likelihood)
    assert f"negative log-likelihood {nll:.4g}, KL " in lines[0]
    assert lines[1].startswith("largest KL: ")
    assert lines[1].count(",") == 2
    assert lines[2].startswith("function: varies by ")
    assert lines[3:] == [f"- {finding}" for finding in diagnosis.findings]
