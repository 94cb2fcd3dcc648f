# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A chain whose prior is made of the last posteriors of each site."""

import copy
import io
import itertools

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from torch import nn
from torch.distributions import kl_divergence

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, RadialELBO, SupervisedModel, predict
from pyro_radial.continual import PriorChain, stream_run
from pyro_radial.distributions import RadialNormal
from pyro_radial.distributions.logarithmic_pool import LogarithmicPool
from pyro_radial.nn import likelihoods
from pyro_radial.nn.multi_head import use_head
from tests.helpers.local_reparameterization import X, Y, regression
from tests.helpers.runs import assert_same as assert_same_state
from tests.helpers.streams import CORESET, assert_same, chain, killed, learn

OWN = dist.Normal(0.0, 1.0).expand([3]).to_event(1)
FORMS = ("exact", "normal")
DECAYS = (1.0, 0.4)


def model():
    pyro.sample("w", OWN)


def posterior(number):
    """One radial posterior after another, with means and scales of its own."""
    generator = torch.Generator().manual_seed(number)
    return RadialNormal(torch.randn(3, generator=generator), 0.2 + torch.rand(3, generator=generator))


def advanced(number, form="exact", **kwargs):
    one = PriorChain(model, form, **kwargs)
    for task in range(number):
        one.advance({"w": posterior(task)})
    return one


def prior_at(one, name="w"):
    return poutine.trace(one).get_trace().nodes[name]["fn"]


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# What the prior is


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("form", FORMS)
def test_the_kl_is_the_weighted_sum_over_the_last_posteriors_and_at_first_the_own_prior(form, decay):
    q = RadialNormal(torch.tensor([0.3, -0.2, 0.8]), torch.tensor([0.5, 0.6, 0.4]))
    for done in range(6):
        one = advanced(done, form, memory=3, memory_decay=decay)
        last = [posterior(task) for task in reversed(range(done))]
        if form == "normal":
            last = [dist.Normal(p.mean, p.stddev).to_event(1) for p in last]
        members = [*last, OWN][:3]
        weights = [decay**age for age in range(len(members))]
        expected = sum(w * kl_divergence(q, p) for w, p in zip(weights, members, strict=True)) / sum(weights)
        torch.testing.assert_close(kl_divergence(q, prior_at(one)), expected)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("memory", [2, 3])
def test_with_the_likelihoods_of_the_paper_every_step_is_bayes_rule(memory, decay):
    """Those of the task i steps back, weighted as the KLs to posteriors from before it are, sum to all data's."""
    x = torch.randn(4, 6, 3)
    y = torch.randn(4, 6)
    one = PriorChain(model, "exact", memory=memory, memory_decay=decay)
    points = torch.randn(5, 3)

    def log_likelihood(task):
        return dist.Normal(points @ x[task].T, 0.5).log_prob(y[task]).sum(-1)

    def exact(number):
        """The posterior of the first tasks."""
        rows, targets = x[:number].flatten(0, 1), y[:number].flatten()
        precision = torch.eye(3) + rows.T @ rows / 0.25
        return dist.MultivariateNormal(torch.linalg.solve(precision, rows.T @ targets / 0.25), torch.inverse(precision))

    for task in range(4):
        count = min(memory, task + 1)
        weights = [decay**age for age in range(count)]
        joint = prior_at(one).log_prob(points)
        for back in range(count):
            joint = joint + sum(weights[back:]) / sum(weights) * log_likelihood(task - back)
        difference = joint - exact(task + 1).log_prob(points)
        # Log-densities of some hundreds in float32.
        assert difference.max() - difference.min() < 5e-3
        one.advance({"w": exact(task + 1)})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("guide_type", [AutoRadial, AutoMeanField])
def test_both_losses_take_the_analytic_kl(form, guide_type):
    one = advanced(4, form, memory=3)
    guide = one.guide(guide_type)
    guide.setup()
    expected = kl_divergence(guide.posterior()["w"], prior_at(one)).detach()
    elbo = RadialELBO(strict_kl=True)
    elbo.differentiable_loss(one, guide)
    torch.testing.assert_close(elbo.terms.kl.detach(), expected)
    # The same at every draw.
    for _ in range(2):
        assert TraceMeanField_ELBO().loss(one, guide) == pytest.approx(float(expected), rel=1e-5)


def test_a_memory_of_one_is_the_last_posterior_itself():
    plain, one = advanced(3), advanced(3, memory=1)
    assert_same_state(plain.state_dict(), one.state_dict())
    assert list(plain.state_dict()) == [f"chained.[w].{name}" for name in ("loc", "scale", "_extra_state")]
    assert type(prior_at(one)) is RadialNormal


def test_under_a_prior_without_a_closed_kl_only_the_first_tasks_are_sampled():
    def wide():
        pyro.sample("w", dist.Laplace(0.0, 1.0).expand([3]).to_event(1))

    one = PriorChain(wide, memory=2)
    for done in range(3):
        guide = one.guide(AutoRadial)
        guide.setup()
        elbo = RadialELBO()
        elbo.differentiable_loss(one, guide)
        assert bool(elbo.terms.sampled_kl) is (done < 2)
        one.advance({"w": posterior(done)})


# Guides and predictions


def test_guides_start_and_predictions_are_drawn_at_the_last_posterior():
    one = advanced(3, memory=3)
    guide = one.guide(AutoRadial)
    guide.setup()
    torch.testing.assert_close(guide.locs.w, posterior(2).loc)
    torch.testing.assert_close(guide.scales.w, posterior(2).scale)
    assert torch.equal(one.prior["w"].mean, posterior(2).mean)
    net = SupervisedModel(BayesianModule(nn.Linear(3, 1, bias=False)), likelihoods.Gaussian(num_data=3))
    two = PriorChain(net, memory=2)
    for value in (-5.0, 2.0):
        two.advance({"weight": dist.Normal(torch.full((1, 3), value), 0.01).to_event(2)})
    draws = predict(two, lambda *_: None, torch.eye(3), num_samples=50).samples
    assert (draws - 2.0).abs().max() < 0.08


def test_vectorized_particles_masks_and_plates_are_as_with_one_posterior():
    mask = torch.tensor([True, True, False, True])

    def plated():
        with pyro.plate("rows", 4, dim=-1):
            pyro.sample("z", OWN.mask(mask))

    one = PriorChain(plated, "exact", memory=2)
    for task in range(2):
        one.advance({"z": posterior(task).expand([4])})
    guide = one.guide(AutoRadial)
    kls = []
    for vectorize in (False, True):
        elbo = RadialELBO(3, vectorize_particles=vectorize, max_plate_nesting=1, strict_kl=True)
        elbo.differentiable_loss(one, guide)
        kls.append(float(elbo.terms.kl))
    q = guide.posterior()["z"]
    expected = sum(0.5 * float(kl_divergence(q, posterior(task).expand([4]).mask(mask)).sum()) for task in range(2))
    assert kls == pytest.approx([expected, expected], rel=1e-4)


def test_training_follows_the_pull_of_all():
    """Without data the best normal is the geometric mean of the normals of the memory."""
    one = PriorChain(model, memory=2, memory_decay=0.5)
    for loc, scale in [(1.0, 0.5), (3.0, 1.0)]:
        one.advance({"w": dist.Normal(torch.full((3,), loc), scale).to_event(1)})
    guide = one.guide(AutoMeanField)
    svi = SVI(one, guide, pyro.optim.Adam({"lr": 0.02}), RadialELBO(strict_kl=True))
    for _ in range(400):
        svi.step()
    precision = 1 / 3 / 0.25 + 2 / 3
    trained = guide.posterior()["w"]
    # What is left of the way after so many steps.
    assert (trained.mean - (1 / 3 / 0.25 + 2 / 3 * 3.0) / precision).abs().max() < 0.01
    assert (trained.stddev * precision**0.5 - 1.0).abs().max() < 0.01


# Each site has a history of its own


def test_sites_that_are_excluded_or_come_later_count_their_own_posteriors():
    def two():
        pyro.sample("a", OWN)
        pyro.sample("b", OWN)

    one = PriorChain(two, memory=3)
    one.advance({"a": posterior(0), "b": posterior(1)})
    one.advance({"a": posterior(2), "b": posterior(3)}, exclude=["b"])
    one.advance({"a": posterior(4)})
    expected = {"a": [posterior(4), posterior(2), posterior(0)], "b": [posterior(1), OWN]}
    for name, members in expected.items():
        pool = prior_at(one, name)
        assert len(pool.distributions) == len(members)
        for member, known in zip(pool.distributions, members, strict=True):
            assert torch.equal(member.mean, known.mean)
        assert pool.weights == (1 / len(members),) * len(members)


def test_heads_keep_the_posteriors_of_their_own_tasks():
    one = chain(memory=3)
    learn(one)
    for head in range(2):
        use_head(one, head)
        pool = prior_at_input(one, f"heads.{head}.weight")
        assert len(pool.distributions) == 2
        assert torch.equal(pool.distributions[1].mean, torch.zeros(2, 5))
    assert len(prior_at_input(one, "trunk.0.weight").distributions) == 3


def test_no_more_is_kept_than_the_memory_holds():
    sizes = [len(list(advanced(number, memory=3).buffers())) for number in range(7)]
    assert sizes[3:] == sizes[3:4] * 4
    assert [b - a for a, b in itertools.pairwise(sizes[:4])] == [2, 2, 2]


def test_what_is_refused_leaves_the_memory_as_it_was():
    one = advanced(3, memory=3)
    before = copy.deepcopy(one.state_dict())
    with pytest.raises(ValueError, match="'w'"):
        one.advance({"w": dist.Delta(torch.zeros(3)).to_event(1)})
    assert_same_state(one.state_dict(), before)


# States and copies


@pytest.mark.parametrize("form", FORMS)
def test_a_state_brings_the_memory_back(form):
    for done in range(5):
        one = advanced(done, form, memory=3, memory_decay=0.5)
        other = advanced(4 - done, form, memory=3, memory_decay=0.5)
        other.load_state_dict(through_a_file(one.state_dict()))
        assert_same_state(other.state_dict(), one.state_dict())
        value = torch.randn(3)
        assert torch.equal(prior_at(other).log_prob(value), prior_at(one).log_prob(value))
        other.advance({"w": posterior(9)})
        one.advance({"w": posterior(9)})
        assert torch.equal(prior_at(other).log_prob(value), prior_at(one).log_prob(value))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "memory must be 3, as in the chain whose state is loaded, got 1"),
        ({"memory": 2, "memory_decay": 0.5}, "memory must be 3, .* got 2"),
        ({"memory": 3}, r"memory_decay must be 0\.5, .* got 1\.0"),
    ],
)
def test_the_state_of_another_memory_is_refused_before_any_of_it_is_loaded(kwargs, message):
    saved = advanced(2, memory=3, memory_decay=0.5).state_dict()
    one = advanced(3, **kwargs)
    before = copy.deepcopy(one.state_dict())
    with pytest.raises(ValueError, match=f"PriorChain: {message}"):
        one.load_state_dict(saved)
    assert_same_state(one.state_dict(), before)
    outer = nn.ModuleDict({"chain": one})
    with pytest.raises(ValueError, match=f"PriorChain: {message}"):
        outer.load_state_dict({f"chain.{name}": value for name, value in saved.items()})
    with pytest.raises(ValueError, match=r"memory must be 1, .* got 3"):
        advanced(0, memory=3, memory_decay=0.5).load_state_dict(advanced(1).state_dict())


def test_copies_are_independent_and_a_cast_moves_all_posteriors():
    one = advanced(4, memory=3)
    other = copy.deepcopy(one)
    other.advance({"w": posterior(8)})
    assert torch.equal(prior_at(one).distributions[1].mean, posterior(2).mean)
    assert torch.equal(prior_at(other).distributions[1].mean, posterior(3).mean)
    one.double()
    assert {p.mean.dtype for p in prior_at(one).distributions} == {torch.float64}


def test_a_chain_around_a_chain_counts_the_inner_prior_as_the_model_s_own():
    inner = advanced(2, memory=2)
    outer = PriorChain(inner, "exact", memory=2)
    assert isinstance(prior_at(outer), LogarithmicPool)
    outer.advance({"w": posterior(7)})
    q = posterior(5)
    inner_kl = 0.5 * (kl_divergence(q, posterior(1)) + kl_divergence(q, posterior(0)))
    torch.testing.assert_close(kl_divergence(q, prior_at(outer)), 0.5 * (kl_divergence(q, posterior(7)) + inner_kl))


def test_only_what_is_the_model_s_own_is_its_state():
    assert advanced(3, memory=3).model_state() == {}


# Streams


def test_a_killed_stream_goes_on_with_its_memory(monkeypatch, tmp_path):
    options = {"coreset": CORESET, "checkpoint": tmp_path}
    undisturbed = learn(chain(memory=2, memory_decay=0.5), coreset=CORESET)
    killed(monkeypatch, chain(memory=2, memory_decay=0.5), stream_run, "fit", 4, "after", **options)
    assert_same(learn(chain(memory=2, memory_decay=0.5), **options), undisturbed)
    with pytest.raises(ValueError, match=r"made with memory=\[2, 0.5\]"):
        learn(chain(memory=3), **options)


def test_local_reparameterization_trains_under_a_memory():
    one = PriorChain(regression(), memory=2)
    for done in range(3):
        guide = one.guide(AutoRadial, init_stddev=0.2)
        svi = SVI(one, guide, pyro.optim.Adam({"lr": 0.01}), RadialELBO(strict_kl=True))
        for _ in range(3):
            svi.step(X, Y)
        if done:
            assert len(poutine.trace(one).get_trace(X).nodes["weight"]["fn"].distributions) == 2
        one.advance(guide)


def prior_at_input(one, name):
    return poutine.trace(one).get_trace(torch.zeros(2, 4)).nodes[name]["fn"]


# Bad input


@pytest.mark.parametrize("memory", [0, -1, 1.5, True, None, "2"])
def test_the_memory_is_a_positive_integer(memory):
    with pytest.raises(ValueError, match="PriorChain: memory must be a positive integer, got"):
        PriorChain(model, memory=memory)


@pytest.mark.parametrize("decay", [0.0, -0.5, 1.5, float("nan"), None, True, "x"])
def test_the_decay_is_above_zero_and_at_most_one(decay):
    with pytest.raises(ValueError, match=r"memory_decay must be (a positive finite number|at most one), got"):
        PriorChain(model, memory=2, memory_decay=decay)
    with pytest.raises(ValueError, match=r"memory_decay must be left out with memory=1, got 0\.5"):
        PriorChain(model, memory_decay=0.5)
