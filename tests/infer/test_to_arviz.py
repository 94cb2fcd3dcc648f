# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Posteriors as ArviZ's data tree: groups, names, numbers against closed forms, and ArviZ's own functions on it."""

import math
import sys
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import MCMC, NUTS, SVI
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from torch import nn

from pyro_radial import AutoMeanField, BayesianModule, SupervisedModel
from pyro_radial.infer import to_arviz
from pyro_radial.nn import likelihoods

pytest.importorskip("arviz_base")

GROUP = torch.arange(12) % 3
X = torch.linspace(-1.0, 1.0, 12)
Y = 2.0 * X + torch.tensor([-1.0, 0.0, 1.0])[GROUP]


def model(x, group, y=None):
    """A slope, an offset of each group and a spread: a vector, a plate, a positive site and a computed one."""
    slope = pyro.sample("slope", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.3))
    with pyro.plate("groups", 3):
        offset = pyro.sample("offset", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(x)):
        mean = pyro.deterministic("mean", slope[0] * x + slope[1] * x**2 + offset[group])
        pyro.sample("y", dist.Normal(mean, noise), obs=y)


@pytest.fixture(scope="module")
def tree():
    """The tree of a trained guide."""
    pyro.set_rng_seed(0)
    guide = AutoMeanField(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), pyro.infer.Trace_ELBO())
    for _ in range(100):
        svi.step(X, GROUP, Y)
    return to_arviz(guide, model, X, GROUP, y=Y, num_samples=100, coords={"groups": ["a", "b", "c"]})


def flat(array):
    """Draws of all chains, one after another, in double precision."""
    values = torch.as_tensor(np.asarray(array)).double()
    return values.flatten(0, 1)


def check_log_likelihood(tree):
    """Each number is the log-density of one row under the draw at its place."""
    mean = flat(tree.posterior["mean"])
    noise = flat(tree.posterior["noise"]).unsqueeze(-1)
    expected = dist.Normal(mean, noise).log_prob(Y.double())
    torch.testing.assert_close(flat(tree.log_likelihood["y"]), expected, rtol=1e-4, atol=1e-4)


def test_a_guide_has_all_groups_with_the_names_of_plates(tree):
    assert set(tree.children) == {
        "posterior",
        "posterior_predictive",
        "log_likelihood",
        "prior",
        "prior_predictive",
        "observed_data",
        "constant_data",
    }
    for group in ("posterior", "prior"):
        assert {name: values.dims[2:] for name, values in tree[group].data_vars.items()} == {
            "slope": ("slope_dim_0",),
            "noise": (),
            "offset": ("groups",),
            "mean": ("rows",),
        }
        assert tree[group].sizes["draw"] == 100
    assert tree.log_likelihood["y"].dims == ("chain", "draw", "rows")
    assert tree.posterior_predictive["y"].shape == tree.prior_predictive["y"].shape == (1, 100, 12)
    assert tree.observed_data["y"].dims == ("rows",)
    np.testing.assert_array_equal(tree.observed_data["y"], Y)
    assert set(tree.constant_data.data_vars) == {"x", "group"}
    np.testing.assert_array_equal(tree.constant_data["group"], GROUP)
    check_log_likelihood(tree)


@pytest.mark.parametrize("make", [AutoMeanField, AutoNormal, AutoMultivariateNormal])
def test_draws_are_those_of_the_guide(make):
    guide = make(model)
    guide(X, GROUP, Y)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(torch.randn_like(parameter))
    draws = flat(to_arviz(guide, model, X, GROUP, Y, num_samples=100).posterior["offset"])
    # The standard error of a normal median is 1.25 times that of the mean.
    error = 1.25 * draws.std(0) / math.sqrt(100)
    assert bool(((draws.median(0).values - guide.median(X, GROUP, Y)["offset"]).abs() < 4 * error).all())


def test_the_prior_is_that_of_the_model(tree):
    prior = flat(tree.prior["offset"])
    assert (prior.mean(0).abs() < 4 / math.sqrt(100)).all()
    # The relative standard error of a standard deviation is one over the root of twice the number of draws.
    torch.testing.assert_close(prior.std(0), torch.ones(3).double(), rtol=0, atol=4 / math.sqrt(200))


def test_chains_stay_apart_and_samples_are_kept_as_they_are():
    mcmc = MCMC(NUTS(model), num_samples=8, warmup_steps=4, num_chains=1, disable_progbar=True)
    mcmc.run(X, GROUP, Y)
    samples = {name: torch.stack([values, -values.abs()]) for name, values in mcmc.get_samples().items()}
    samples["noise"] = samples["noise"].abs()
    # As if it had run two chains, without the processes.
    mcmc._samples = samples
    mcmc.num_chains = 2
    tree = to_arviz(mcmc, model, X, GROUP, Y, num_samples=5)
    for name, values in samples.items():
        np.testing.assert_array_equal(tree.posterior[name], values)
    assert tree.prior.sizes["draw"] == 5
    check_log_likelihood(tree)
    joined = to_arviz(mcmc.get_samples(), model, X, GROUP, Y, num_samples=5)
    np.testing.assert_array_equal(flat(joined.log_likelihood["y"]), flat(tree.log_likelihood["y"]))
    assert joined.posterior.sizes["chain"] == 1


def test_arviz_summarizes_and_compares_it(tree):
    stats = pytest.importorskip("arviz_stats")
    with warnings.catch_warnings():
        # Large shape parameters are no matter here.
        warnings.simplefilter("ignore")
        table = stats.summary(tree, var_names=["offset", "noise"])
        loo = stats.loo(tree)
    assert list(table.index) == ["offset[a]", "offset[b]", "offset[c]", "noise"]
    draws = flat(tree.log_likelihood["y"])
    log_pointwise = draws.logsumexp(0) - math.log(len(draws))
    # Leaving a row out costs something, and at most a few nats for each of seven parameters.
    assert log_pointwise.sum() - 20 < loo.elpd < log_pointwise.sum()


def test_factors_are_no_data_and_scales_do_not_count():
    def scaled(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.factor("penalty", -w.square())
        with pyro.plate("rows", 4), poutine.scale(scale=3.0):
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    w, y = torch.randn(6), torch.randn(4)
    tree = to_arviz({"w": w}, scaled, y, num_samples=3)
    expected = dist.Normal(w.unsqueeze(-1), 1.0).log_prob(y)
    np.testing.assert_allclose(tree.log_likelihood["y"][0], expected, rtol=1e-5)
    assert list(tree.log_likelihood.data_vars) == ["y"]
    assert "constant_data" not in tree.children


@pytest.mark.parametrize("way", ["mask", "distribution", "obs_mask", "event"])
def test_observations_under_a_mask_are_left_out(way):
    stats = pytest.importorskip("arviz_stats")
    seen = torch.tensor([[True, False, True], [False, False, True], [False, False, False], [True, True, True]])
    w, y = 0.1 * torch.randn(200), torch.randn(4, 3)

    def masked(y, is_seen):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y), dim=-1 if way == "event" else -2):
            if way == "event":
                pyro.sample("y", dist.Normal(w.expand(len(y), 3), 1.0).mask(is_seen).to_event(1), obs=y)
                return
            with pyro.plate("columns", 3, dim=-1), poutine.mask(mask=is_seen if way == "mask" else True):
                normal = dist.Normal(w, 1.0).mask(is_seen) if way == "distribution" else dist.Normal(w, 1.0)
                pyro.sample("y", normal, obs=y, obs_mask=is_seen if way == "obs_mask" else None)

    posterior = {"w": w} | ({"y_unobserved": torch.zeros(200, 4, 3)} if way == "obs_mask" else {})
    tree = to_arviz(posterior, masked, y, seen, num_samples=3)
    site = "y_observed" if way == "obs_mask" else "y"
    expected = dist.Normal(w[:, None, None], 1.0).log_prob(y).masked_fill(~seen, 0.0)
    data = y.masked_fill(~seen, torch.nan)
    rows = seen.flatten()
    if way == "event":
        rows = seen.any(1)
        expected, data = expected.sum(-1)[:, rows], data[rows]
    else:
        expected, data = expected[:, seen], y[seen]
    np.testing.assert_allclose(tree.log_likelihood[site][0], expected, rtol=1e-5)
    np.testing.assert_array_equal(tree.observed_data[site], data)
    np.testing.assert_array_equal(tree.log_likelihood[f"{site}_id"], rows.nonzero()[:, 0])
    for group in (tree.posterior_predictive, tree.prior_predictive):
        assert group[site].shape[2:] == data.shape
    assert list(tree.constant_data.data_vars) == ["is_seen"]
    assert stats.loo(tree).n_data_points == rows.sum()


def test_missing_targets_of_a_network_are_left_out():
    x, y = torch.randn(4, 1), torch.tensor([[1.0], [torch.nan], [0.0], [2.0]])
    net = SupervisedModel(BayesianModule(nn.Linear(1, 1)), likelihoods.Gaussian())
    guide = AutoMeanField(net)
    guide.setup(x, y)
    tree = to_arviz(guide, net, x, y, num_samples=4)
    np.testing.assert_array_equal(tree.observed_data["y"], y[[0, 2, 3]])
    expected = dist.Normal(flat(tree.posterior["f"])[:, [0, 2, 3], 0], 1.0).log_prob(y[[0, 2, 3], 0])
    torch.testing.assert_close(flat(tree.log_likelihood["y"]), expected, rtol=1e-5, atol=1e-5)
    assert list(tree.constant_data.data_vars) == ["x"]


def test_nested_plates_and_events_have_their_own_dimensions():
    def crossed(counts):
        genes = pyro.plate("genes", 3, dim=-1)
        samples = pyro.plate("samples", 4, dim=-2)
        with genes:
            base = pyro.sample("base", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with samples:
            size = pyro.sample("size", dist.Normal(0.0, 1.0))
        with genes, samples:
            pyro.sample("counts", dist.Poisson((base.sum(-1) + size).exp()), obs=counts)

    counts = torch.ones(4, 3)
    guide = AutoMeanField(crossed)
    guide.setup(counts)
    tree = to_arviz(guide, crossed, counts, num_samples=5, dims={"base": ["genes", "part"]})
    assert tree.posterior["base"].dims == ("chain", "draw", "genes", "part")
    assert tree.posterior["size"].dims[:3] == ("chain", "draw", "samples")
    assert tree.log_likelihood["counts"].dims == ("chain", "draw", "samples", "genes")


def test_a_network_runs_in_evaluation_mode():
    net = SupervisedModel(
        BayesianModule(nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.5), nn.Linear(3, 1))), likelihoods.Gaussian()
    )
    guide = AutoMeanField(net, init_stddev=1e-6)
    guide.setup(X[:, None], Y[:, None])
    tree = to_arviz(guide, net, X[:, None], Y[:, None], num_samples=4)
    draws = flat(tree.posterior["f"])
    torch.testing.assert_close(draws, draws[:1].expand_as(draws), rtol=0, atol=1e-4)
    assert set(tree.constant_data.data_vars) == {"x"}
    assert net.training


def test_what_does_not_fit_is_refused_by_name(monkeypatch):
    samples = {name: torch.ones(5, *shape) for name, shape in (("slope", [2]), ("noise", []), ("offset", [3]))}
    with pytest.raises(ValueError, match=r"model must observe a site, got .*'slope', 'y'. without a value"):
        to_arviz(samples, model, X, GROUP)
    with pytest.raises(ValueError, match=r"samples must have one number of draws .*'offset': 4"):
        to_arviz(samples | {"offset": torch.ones(4, 3)}, model, X, GROUP, Y)
    with pytest.raises(ValueError, match=r"posterior must have draws of shape \(3,\) .*'offset'.*, got \(2,\)"):
        to_arviz(samples | {"offset": torch.ones(5, 2)}, model, X, GROUP, Y, num_samples=2)
    del samples["offset"]
    with pytest.raises(ValueError, match=r"posterior must have draws .*'offset', got none"):
        to_arviz(samples, model, X, GROUP, Y, num_samples=2)
    with pytest.raises(ValueError, match="posterior must have its parameters, got AutoNormal without any yet"):
        to_arviz(AutoNormal(model), model, X, GROUP, Y)
    monkeypatch.setitem(sys.modules, "arviz_base", None)
    with pytest.raises(ImportError, match=r"pip install 'pyro-radial\[arviz\]'"):
        to_arviz(samples, model, X, GROUP, Y)


def test_a_mini_batch_is_refused():
    def batched(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 4, subsample_size=2) as rows:
            pyro.sample("y", dist.Normal(w, 1.0), obs=y[rows])

    with pytest.raises(ValueError, match="args must have all rows of the plate 'rows', got 2 of 4"):
        to_arviz({"w": torch.ones(3)}, batched, torch.ones(4))
