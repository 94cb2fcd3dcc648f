# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import itertools
import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDiagonalNormal, AutoGuideList, AutoMultivariateNormal, AutoNormal
from torch import nn

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, TermsELBO
from pyro_radial.continual import PriorChain
from pyro_radial.distributions import RadialNormal
from pyro_radial.infer.autoguide import AutoMeanField
from pyro_radial.nn import likelihoods
from tests.helpers.files import through_a_file
from tests.helpers.runs import data

NOISE = 0.5
EULER = 0.5772156649015329

CONSTRAINED = {
    "log normal": dist.LogNormal(0.0, 1.0).expand([3]).to_event(1),
    "bounds of tensors": dist.Uniform(torch.full((3,), 2.0), torch.full((3,), 3.0)).to_event(1),
    "rows of dirichlets": dist.Dirichlet(torch.ones(2, 4)).to_event(1),
}
SITES = CONSTRAINED | {
    "normal": dist.Normal(0.0, 1.0).expand([3]).to_event(1),
    "matrix": dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2),
    "multivariate": dist.MultivariateNormal(torch.zeros(3), torch.eye(3)),
}


def summed(prior, name="w"):
    """A model of one latent site whose elements' sum is observed a few times, at a place away from the prior's."""

    def model():
        w = pyro.sample(name, prior)
        with pyro.plate("data", 5):
            total = w.square().sum(tuple(range(-prior.event_dim, 0)))
            pyro.sample("y", dist.Normal(total, 1.0), obs=torch.full((5,), 4.0))

    return model


W = SITES["normal"]


def train(chain, guide, *args, steps=25, lr=0.05):
    svi = SVI(chain, guide, pyro.optim.Adam({"lr": lr}), TermsELBO())
    for _ in range(steps):
        svi.step(*args)
    return guide


def learned(model, family=AutoRadial, *args, form="exact", **kwargs):
    """A chain that has learned one task."""
    chain = PriorChain(model, form)
    chain.advance(train(chain, chain.guide(family, **kwargs), *args))
    return chain


def first_terms(chain, guide, *args, strict=True):
    elbo = TermsELBO(strict_kl=strict)
    elbo.differentiable_loss(chain, guide, *args)
    return elbo.terms


def buffers_of(chain):
    return {name: buffer.clone() for name, buffer in chain.named_buffers()}


def assert_unchanged(chain, before):
    after = dict(chain.named_buffers())
    assert list(after) == list(before)
    for name, buffer in before.items():
        assert torch.equal(after[name], buffer), name


# The prior is the posterior


@pytest.mark.parametrize(
    ("prior", "family"),
    list(zip(SITES.values(), itertools.cycle([AutoRadial, AutoMeanField]), strict=False)),
    ids=SITES,
)
def test_the_exact_prior_is_the_posterior_and_the_next_guide_starts_there(prior, family):
    model = summed(prior)
    chain = PriorChain(model, "exact")
    guide = train(chain, chain.guide(family))
    posterior = guide.posterior()["w"]
    chain.advance(guide)
    trace = poutine.trace(chain).get_trace()
    trace.compute_log_prob()
    value = trace.nodes["w"]["value"].clone()
    # The inverse of an affine map of float32 rounds.
    torch.testing.assert_close(trace.nodes["w"]["log_prob_sum"], posterior.log_prob(value).sum(), rtol=1e-4, atol=1e-4)
    assert prior.support.check(value).all()
    after = chain.guide(family)
    # Closed, also on constrained sites, and zero up to rounding.
    assert abs(first_terms(chain, after).kl) < 1e-3
    assert type(after.posterior()["w"]) is type(posterior)
    chain.advance(train(chain, after, steps=5))


@pytest.mark.parametrize("prior", SITES.values(), ids=SITES.keys())
def test_the_normal_prior_is_the_nearest_and_its_first_kl_closed(prior):
    chain = learned(summed(prior), form="normal")
    # One radius for the whole site of D elements: -H(q) + D/2 (1 + log 2 pi) + sum(log(scale / sqrt(D))).
    elements = chain.guide(AutoRadial)
    elements.setup()
    size = elements.locs.w.numel()
    log_area = math.log(2) + size / 2 * math.log(math.pi) - math.lgamma(size / 2)
    entropy = 0.5 * math.log(math.pi / 2) + 0.5 - (size - 1) * (EULER + math.log(2)) / 2 + log_area
    closed = size / 2 * (1 + math.log(2 * math.pi) - math.log(size)) - entropy
    assert closed > 0.0
    assert float(first_terms(chain, elements).kl) == pytest.approx(closed, abs=1e-3)
    mean_field = learned(summed(prior), AutoMeanField, form="normal")
    assert abs(first_terms(mean_field, mean_field.guide(AutoMeanField)).kl) < 1e-3


def with_local_latents(rows, groups):
    shared = pyro.sample("shared", W)
    with pyro.plate("groups", 2):
        offset = pyro.sample("offset", dist.Normal(0.0, 1.0))
        pyro.deterministic("twice", 2 * offset)
    with pyro.plate("rows", len(rows)):
        own = pyro.sample("own", dist.Normal(shared.sum(), 1.0))
        pyro.sample("y", dist.Normal(own + offset[..., groups], 1.0), obs=rows)


@pytest.mark.parametrize("family", [AutoRadial, AutoNormal])
def test_the_latents_of_rows_keep_their_prior(family):
    chain = PriorChain(with_local_latents)
    with pytest.warns(UserWarning, match=r"\['own'\] .* belong to the rows"):
        chain.advance(train(chain, chain.guide(family), torch.arange(4.0), torch.tensor([0, 1, 0, 1])))
    assert {name: prior.batch_shape for name, prior in chain.prior.items()} == {"shared": (), "offset": (2,)}
    guide = train(chain, chain.guide(AutoRadial), torch.arange(4.0), torch.tensor([0, 1, 0, 1]))
    chain.advance(guide, exclude=["own"])  # without a warning
    chain.advance(guide.posterior())
    assert sorted(chain.prior) == ["offset", "own", "shared"]


@pytest.mark.parametrize("prefix", ["net.", "y"])
def test_names_that_are_not_sites_of_the_network_are_refused_at_once(prefix):
    chain = PriorChain(SupervisedModel(BayesianModule(nn.Linear(3, 1, bias=False)), likelihoods.Gaussian()))
    weight = dist.Normal(torch.ones(1, 3), 0.1).to_event(2)
    with pytest.raises(ValueError, match=rf"must have sites of the model.*weight.*got \['{prefix}weight'\]"):
        chain.advance({f"{prefix}weight": weight})
    assert chain.prior == {}


def test_names_that_are_not_sites_of_a_function_are_refused_by_its_next_run():
    chain = PriorChain(summed(W))
    chain.advance({"w": W, "v": W})
    with pytest.raises(ValueError, match=r"latent sites of the model, got \['v'\]"):
        chain()


def local(rows):
    with pyro.plate("rows", 20, subsample=rows):
        pyro.sample("z", W)


def test_a_site_of_a_subsampled_plate_is_refused_and_may_be_excluded():
    chain = PriorChain(local)
    rows = torch.arange(5)
    guide = chain.guide(AutoRadial, create_plates=lambda rows: pyro.plate("rows", 20, subsample=rows))
    train(chain, guide, rows)
    with pytest.raises(ValueError, match=r"'z'.*belongs to its rows"):
        chain.advance(guide)
    with pytest.raises(ValueError, match="a site that is neither excluded nor"):
        chain.advance(guide, exclude=["z"])
    assert chain.prior == {}
    chain.advance({"z": dist.Normal(torch.zeros(20, 3), 1.0).to_event(1)})
    with pytest.raises(ValueError, match=r"'z'.*belongs to its rows"):
        chain(rows)


# Guides


def test_a_list_of_guides_is_chained_part_by_part():
    def model():
        a = pyro.sample("a", W)
        b = pyro.sample("b", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
        with pyro.plate("data", 3):
            pyro.sample("y", dist.Normal(a.sum() + b.sum(), 1.0), obs=torch.ones(3))

    def nested(model):
        outer, inner = AutoGuideList(model), AutoGuideList(poutine.block(model, expose=["b"]))
        inner.append(AutoMeanField(poutine.block(model, expose=["b"])))
        outer.append(AutoRadial(poutine.block(model, expose=["a"])))
        outer.append(inner)
        return outer

    chain = PriorChain(model, "exact")
    untrained = chain.guide(nested)
    untrained()
    with pytest.raises(ValueError, match="never trained"):
        chain.advance(untrained)
    chain.advance(train(chain, chain.guide(nested)))
    assert sorted(chain.prior) == ["a", "b"]
    assert isinstance(chain.prior["a"], RadialNormal)
    again = chain.guide(nested)
    assert abs(first_terms(chain, again).kl) < 1e-3
    torch.testing.assert_close(again[0].locs.a, chain.prior["a"].mean)
    torch.testing.assert_close(again[1][0].locs.b, chain.prior["b"].base_dist.mean)


def test_pyro_s_factorized_normals_are_parts_of_a_list():
    def guides(model):
        guide = AutoGuideList(model)
        guide.append(AutoNormal(poutine.block(model, expose=["a"])))
        guide.append(AutoDiagonalNormal(poutine.block(model, hide=["a"])))
        return guide

    chain = PriorChain(two_sites)
    untrained = chain.guide(guides)
    with pytest.raises(RuntimeError, match="AutoNormal has no parameters yet"):
        chain.advance(untrained)
    untrained()
    with pytest.raises(ValueError, match="AutoNormal was never trained"):
        chain.advance(untrained)
    guide = train(chain, chain.guide(guides))
    chain.advance(guide)
    torch.testing.assert_close(chain.prior["a"].mean, guide[0].locs.a.detach())
    torch.testing.assert_close(chain.prior["w"].mean, guide[1].loc.detach())
    torch.testing.assert_close(chain.prior["w"].stddev, guide[1].scale.detach())


# Models with parameters of their own, optimizers, prediction


def own_parameters():
    torch.manual_seed(1)
    bnn = BayesianModule(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)))
    return SupervisedModel(bnn, likelihoods.Categorical(num_data=20))


def test_the_model_s_own_parameters_are_trained_through_the_chain_and_saved():
    x, y = data()
    chain = PriorChain(own_parameters())
    guide = chain.guide(AutoRadial)
    guide.setup(x, y)
    module = TermsELBO()(chain, guide)
    own = {name: p.detach().clone() for name, p in chain.model.named_parameters()}
    assert sorted(own) == ["bnn.net.1.bias", "bnn.net.1.weight"]
    assert {id(p) for p in chain.model.parameters()} < {id(p) for p in module.parameters()}
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        module(x, y).backward()
        optimizer.step()
    chain.advance(guide)
    for name, parameter in chain.model.named_parameters():
        assert not torch.equal(parameter, own[name])
    fresh = PriorChain(own_parameters())
    fresh.load_state_dict(through_a_file(chain.state_dict()))
    assert list(fresh.state_dict()) == list(chain.state_dict())
    for one, other in zip(chain.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, other)
    for name, distribution in fresh.prior.items():
        assert torch.equal(distribution.mean, guide.posterior()[name].mean)


# Chains, copies, states


def test_a_state_brings_its_own_sites_and_they_are_compared_anew():
    def model():
        return {name: pyro.sample(name, W) for name in ("a", "b.c", "d/e", "f%2F")}

    distribution = dist.Normal(torch.ones(3), 2.0).to_event(1)
    one, two, three = PriorChain(model), PriorChain(model), PriorChain(model)
    one.advance({"a": distribution, "f%2F": distribution})
    two.advance({"b.c": distribution, "d/e": distribution})
    three.advance({"a": dist.LogNormal(torch.zeros(3), 1.0).to_event(1)})
    one()
    one.load_state_dict(two.state_dict())
    assert sorted(one.prior) == ["b.c", "d/e"]
    one()
    one.load_state_dict(PriorChain(model).state_dict())
    assert one.prior == {}
    two.advance({"a": distribution})
    two()
    two.load_state_dict(three.state_dict())
    with pytest.raises(ValueError, match=r"'a'.*zero density"):
        two()


# Bad input


# The map that keeps scales positive rounds, to one side or the other.
@pytest.mark.parametrize(("stddev", "family"), [(0.001, AutoRadial), (0.77, AutoMeanField), (3.0, AutoRadial)])
def test_a_guide_that_was_never_trained_is_refused(stddev, family):
    for chain in (PriorChain(summed(W)), learned(summed(W))):
        guide = chain.guide(family, init_stddev=stddev)
        with pytest.raises(RuntimeError, match="no parameters yet"):
            chain.advance(guide)
        guide.setup()
        with pytest.raises(ValueError, match=r"was never trained.*\['w'\]"):
            chain.advance(guide)


def test_scales_that_hardly_moved_are_warned_of_by_name():
    chain = PriorChain(two_sites)
    guide = chain.guide(AutoRadial)
    guide.setup()
    with torch.no_grad():
        guide.scales.w_unconstrained += 1.0
        guide.scales.a_unconstrained += 1e-3
    with pytest.warns(UserWarning, match=r"scales of \['a'\] never moved") as caught:
        chain.advance(guide)
    assert caught[0].filename == __file__


def two_sites():
    return pyro.sample("a", W), pyro.sample("w", W)


def test_a_new_site_of_a_later_task_may_move_as_little_as_the_others(recwarn):
    chain = PriorChain(two_sites)
    guide = chain.guide(AutoRadial)
    guide.setup()
    with torch.no_grad():
        guide.scales.w_unconstrained += 1.0
        guide.scales.a_unconstrained += 1.0
    chain.advance(guide, exclude="a")
    later = chain.guide(AutoRadial)
    later.setup()
    with torch.no_grad():
        later.scales.w_unconstrained += 1e-3
        later.scales.a_unconstrained += 1e-3
    chain.advance(later)
    assert not recwarn.list


REFUSED = {
    "a point": (dist.Delta(torch.zeros(3)).to_event(1), "'w' is a point"),
    "no distribution": (torch.zeros(3), "'w' must have a Pyro distribution, got Tensor"),
    "torch's own": (torch.distributions.Normal(0.0, 1.0), "'w' must have a Pyro distribution, got Normal"),
    "not finite": (dist.Normal(torch.full((3,), torch.nan), 1.0, validate_args=False).to_event(1), "'w'.*not finite"),
}


@pytest.mark.parametrize(("distribution", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_posterior_that_cannot_be_a_prior_is_refused_and_nothing_changes(distribution, message):
    chain = PriorChain(two_sites)
    chain.advance({"a": W})
    before = buffers_of(chain)
    with pytest.raises(ValueError, match=message):
        chain.advance({"a": dist.Normal(torch.ones(3), 1.0).to_event(1), "w": distribution})
    assert_unchanged(chain, before)


WRONG_PLACE = {
    "shape": (dist.Normal(torch.zeros(4), 1.0).to_event(1), r"'w' has event shape \(4,\)"),
    "interval": (dist.Uniform(-torch.ones(3), 1.0).to_event(1), "'w'.*zero density"),
    "half": (dist.LogNormal(torch.zeros(3), 1.0).to_event(1), "'w'.*zero density"),
}


@pytest.mark.parametrize(("distribution", "message"), WRONG_PLACE.values(), ids=WRONG_PLACE.keys())
def test_a_posterior_of_another_place_is_refused_by_the_first_run_or_at_once(distribution, message):
    chain = PriorChain(summed(W), "exact")
    chain.advance({"w": W})
    chain()  # What was compared before is compared again.
    chain.advance({"w": distribution})
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            chain()
    # A guide knows its site.
    chain = PriorChain(summed(W), "exact")
    guide = train(chain, chain.guide(AutoRadial))
    guide.posterior = lambda: {"w": distribution}
    with pytest.raises(ValueError, match=message):
        chain.advance(guide)
    assert chain.prior == {}


@pytest.mark.parametrize(
    "exclude", ["^a$", ["a"], {"a"}, lambda name: name != "w"], ids=["pattern", "names", "set", "function"]
)
def test_sites_may_keep_their_prior(exclude):
    posterior = dict.fromkeys("aw", dist.Normal(torch.ones(3), 2.0).to_event(1))
    chain = PriorChain(two_sites)
    chain.advance(posterior, exclude=exclude)
    assert list(chain.prior) == ["w"]
    chain.advance({"a": posterior["a"]})
    assert sorted(chain.prior) == ["a", "w"]
    with pytest.raises(ValueError, match="a site that is neither excluded nor"):
        chain.advance(posterior, exclude="")


# A normal with a full covariance


def correlated_regression(x, y):
    w = pyro.sample("w", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, NOISE), obs=y)


def set_to(guide, mean, covariance):
    """Give a guide the posterior of these moments."""
    factor = torch.linalg.cholesky(covariance)
    guide.loc.data.copy_(mean)
    guide.scale = factor.diagonal()
    guide.scale_tril = factor / factor.diagonal().unsqueeze(-1)


def bayes(x, y, mean, precision):
    """Bayes' rule for rows of a linear regression, as mean and precision."""
    new = precision + x.T @ x / NOISE**2
    return torch.linalg.solve(new, precision @ mean + x.T @ y / NOISE**2), new


def test_a_chain_of_full_covariance_normals_is_bayes_rule_exactly():
    x = torch.randn(30, 3, dtype=torch.double) @ (torch.eye(3, dtype=torch.double) + 0.8)
    y = x @ torch.tensor([0.7, -1.2, 0.3], dtype=torch.double) + NOISE * torch.randn(30, dtype=torch.double)
    chain = PriorChain(correlated_regression, "exact")
    mean, precision = torch.zeros(3, dtype=torch.double), torch.eye(3, dtype=torch.double)
    for rows in (slice(0, 5), slice(5, 12), slice(12, 30)):
        guide = chain.guide(AutoMultivariateNormal)
        guide(x[rows], y[rows])
        prior = chain.prior.get("w", dist.MultivariateNormal(mean, precision_matrix=precision))
        posterior = bayes(x[rows], y[rows], prior.mean, prior.precision_matrix)
        set_to(guide, posterior[0], posterior[1].inverse())
        chain.advance(guide)
    expected_mean, expected_precision = bayes(x, y, mean, precision)
    torch.testing.assert_close(chain.prior["w"].mean, expected_mean, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(chain.prior["w"].precision_matrix, expected_precision, rtol=1e-12, atol=1e-12)
    # The loss of the right posterior is the evidence, at any draw.
    guide, rows = chain.guide(AutoMultivariateNormal), (x[:5], y[:5])
    guide(*rows)
    posterior = bayes(*rows, chain.prior["w"].mean, chain.prior["w"].precision_matrix)
    set_to(guide, posterior[0], posterior[1].inverse())
    losses = [TermsELBO().loss(chain, guide, *rows) for _ in range(3)]
    assert max(losses) - min(losses) < 1e-11


# Every pair of a guide and a form.
NORMAL_CHAINS = zip(
    SITES.values(),
    itertools.cycle([AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal]),
    itertools.cycle(["exact", "normal"]),
    strict=False,
)


@pytest.mark.parametrize(("prior", "family", "form"), list(NORMAL_CHAINS), ids=SITES)
def test_pyro_s_normals_are_chained_on_the_site_s_own_support(prior, family, form):
    chain = PriorChain(summed(prior), form)
    guide = train(chain, chain.guide(family))
    chain.advance(guide)
    trace = poutine.trace(guide).get_trace()
    value = trace.nodes["w"]["value"].detach()
    assert chain.prior["w"].event_shape == prior.event_shape
    if form == "exact" or family is not AutoMultivariateNormal:
        # What the guide gives a value: the density of its auxiliary normal, and of the map to the support.
        sites = [site for site in trace.nodes.values() if site["type"] == "sample"]
        density = sum(site["fn"].log_prob(site["value"]).sum() for site in sites)
        torch.testing.assert_close(chain.prior["w"].log_prob(value).sum(), density.detach(), atol=1e-4, rtol=1e-4)
    loaded = PriorChain(summed(prior), form)
    loaded.load_state_dict(through_a_file(chain.state_dict()))
    torch.testing.assert_close(loaded.prior["w"].log_prob(value), chain.prior["w"].log_prob(value))
    following = loaded.guide(family)
    following()
    # It starts at the mean in unconstrained space.
    means = [g.locs.w if family is AutoNormal else g.loc for g in (following, guide)]
    torch.testing.assert_close(*means, rtol=1e-4, atol=1e-4)
    # By elements the KL is closed; so it is on a vector that is not constrained.
    closed = form == "normal" or (prior.event_dim == 1 and prior.support is dist.constraints.real_vector)
    closed = closed and family is AutoMultivariateNormal
    assert math.isfinite(first_terms(loaded, loaded.guide(AutoMeanField), strict=closed).loss)


def test_a_full_covariance_normal_keeps_the_covariance_of_each_event():
    def model():
        pyro.sample("a", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 2):
            pyro.sample("b", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))

    chain = PriorChain(model, "exact")
    guide = chain.guide(AutoMultivariateNormal)
    guide()
    square = torch.randn(13, 13)
    covariance = square @ square.T + torch.eye(13)
    set_to(guide, torch.arange(13.0), covariance)
    with pytest.warns(UserWarning, match="correlations between sites, which the prior of each site cannot keep"):
        chain.advance(guide)
    assert float(chain.prior["a"].variance) == pytest.approx(float(covariance[0, 0]))
    b = chain.prior["b"]
    assert (b.batch_shape, b.event_shape) == ((2,), (3, 2))
    for row, own in enumerate((slice(1, 7), slice(7, 13))):
        torch.testing.assert_close(b.base_dist.covariance_matrix[row], covariance[own, own], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(b.base_dist.mean[row], torch.arange(13.0)[own])
    # By elements nothing but the documented is lost, so nothing is said.
    chain = PriorChain(model)
    chain.advance(guide)
    torch.testing.assert_close(chain.prior["b"].variance.flatten(), covariance.diagonal()[1:], rtol=1e-4, atol=1e-4)


def test_chained_priors_follow_the_model():
    model = SupervisedModel(BayesianModule(nn.Linear(3, 2)), likelihoods.Categorical(num_data=5))
    chain = PriorChain(model)
    chain.advance({"weight": dist.Normal(torch.zeros(2, 3), 1.0).to_event(2)})
    model.to("meta")
    assert chain.prior["weight"].mean.device == torch.device("meta")
