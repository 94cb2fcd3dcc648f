# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import copy
import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import constraints
from pyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoGuideList, AutoNormal
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, AutoRadialDirectional, BayesianModule, FunctionalELBO, TermsELBO
from pyro_radial.distributions import RadialNormal
from pyro_radial.functional import GaussianKL, GaussianProcess
from pyro_radial.infer.autoguide import families
from pyro_radial.nn.priors import RadialDirectionalPrior
from pyro_radial.poutine import local_reparameterization
from tests.helpers.local_reparameterization import X, Y, closed_loss, each_loss, mlp, regression
from tests.helpers.scale_priors import scale_mixture


@pytest.mark.parametrize("loss", [Trace_ELBO, TraceGraph_ELBO, partial(RenyiELBO, num_particles=2)])
def test_losses_of_densities_at_draws_are_refused_by_name(loss):
    model = regression()
    guide = AutoRadial(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss())
    for evaluate in (svi.step, svi.evaluate_loss):
        with pytest.raises(ValueError, match=r"site 'weight'.*Trace_ELBO"):
            evaluate(X, Y)


def test_functional_elbo_is_refused_by_name():
    model = regression(nn.Linear(3, 1))
    prior = GaussianProcess(lambda a, b: torch.exp(-torch.cdist(a, b)))
    elbo = FunctionalELBO(prior, divergence=GaussianKL(), num_functions=20)
    with pytest.raises(ValueError, match=r"guide must draw whole functions.*'weight'"):
        elbo(model, AutoMeanField(model))(X, Y[:, :1])


class Laplace(families.LocScale):
    def distribution(self, site, *, loc, scale):
        return dist.Laplace(loc, scale, validate_args=False).to_event(site.event_dim)


class Shifted:
    def sample_parameter(self, name, parameter):
        return 1.0 + pyro.sample(name, dist.Normal(torch.zeros_like(parameter), 1.0).to_event(parameter.dim()))


def positive_bias():
    net = nn.Linear(3, 2)
    nn.init.ones_(net.bias)
    return regression(net, prior={"weight": dist.Normal(0.0, 1.0), "bias": dist.HalfNormal(torch.ones(2))})


@pytest.mark.parametrize(
    ("make_model", "make", "loss", "message"),
    [
        (lambda: regression(prior=scale_mixture()), AutoMeanField, TermsELBO, r"closed form.*'weight'"),
        (lambda: regression(prior=scale_mixture()), AutoMeanField, TraceMeanField_ELBO, "'weight'.*closed form"),
        (regression, partial(AutoRadial, families={"bias": Laplace()}), TermsELBO, r"site 'bias'.*Laplace"),
        (positive_bias, AutoRadial, TermsELBO, r"site 'bias'.*got Transformed"),
        # Priors without a site for the parameter, or that compute the parameter from its site.
        (lambda: regression(prior=RadialDirectionalPrior("row")), AutoRadialDirectional, TermsELBO, "site 'weight'"),
        (lambda: regression(prior=Shifted()), AutoRadial, TermsELBO, "site 'weight'"),
    ],
)
def test_what_has_no_unit_noise_or_closed_kl_is_refused_by_name(make_model, make, loss, message):
    model = make_model()
    with pytest.raises(ValueError, match=message):
        loss()(model, make(model))(X, Y)


@pytest.mark.parametrize("make", [AutoNormal, AutoDiagonalNormal, AutoDelta])
def test_guides_that_draw_otherwise_are_refused_by_name(make):
    model = regression()
    with pytest.raises(ValueError, match=r"site 'weight'.*local_reparameterization=True"):
        TraceMeanField_ELBO()(model, make(model))(X, Y)
    drawn = regression(local_reparameterization=False)
    guide = make(drawn)
    guide(X, Y)
    with pytest.raises(ValueError, match="local_reparameterization: guide must offer"):
        local_reparameterization(guide)(X, Y)
    with pytest.raises(ValueError, match=r"site 'weight'.*Delta"):
        local_reparameterization(guide, sites=drawn.bnn.sites)(X, Y)


def hand_written(cls):
    def guide(x, y=None):
        loc = pyro.param("loc", torch.full((2, 3), 0.1))
        scale = pyro.param("scale", torch.full((2, 3), 0.3), constraint=constraints.positive)
        pyro.sample("weight", cls(loc, scale))
        pyro.sample("bias", dist.Normal(pyro.param("bias_loc", torch.zeros(2)), 0.2).to_event(1))

    return guide


@pytest.mark.parametrize(
    ("cls", "asked"),
    [(lambda loc, scale: dist.Normal(loc, scale).to_event(2), True), (partial(RadialNormal, event_dim=2), False)],
)
@each_loss
def test_a_guide_by_hand_names_its_sites(cls, asked, loss):
    model = regression(local_reparameterization=asked)
    guide = hand_written(cls)
    svi = SVI(model, local_reparameterization(guide, sites=model.bnn.sites), pyro.optim.Adam({"lr": 0.01}), loss())
    assert math.isfinite(svi.step(X, Y))
    if loss is TermsELBO:
        x, y = X.repeat(1000, 1), Y.repeat(1000, 1)
        values = [float(svi.evaluate_loss(x, y)) for _ in range(10)]
        expected = closed_loss(guide, 1000).item()
        assert sum(values) / 10 == pytest.approx(expected, rel=1e-2)


def test_the_handler_around_a_guide_is_the_model_s_setting():
    asked, handled = regression(mlp()), regression(mlp(), local_reparameterization=False)
    values = []
    for model, wrap in ((asked, lambda guide: guide), (handled, local_reparameterization)):
        torch.manual_seed(0)
        guide = AutoRadial(model, init_loc_fn=lambda site: torch.full(site["fn"].shape(), 0.1))
        guide.setup(X, Y)
        torch.manual_seed(1)
        values.append(TermsELBO()(model, wrap(guide))(X, Y).item())
    assert values[0] == values[1]


def test_what_is_not_drawn_cannot_pass_for_a_draw():
    model = regression(nn.Linear(3, 1))
    guide = AutoMeanField(model)
    guide.setup(X, Y[:, :1])
    assert not torch.isfinite(guide(X, Y[:, :1])["weight"]).any()
    assert torch.isfinite(guide(X)["weight"]).all()


def test_lists_of_guides_and_copies_work():
    model = regression(mlp())
    guide = AutoGuideList(model)
    guide.append(AutoRadial(pyro.poutine.block(model, expose=["0.weight", "0.bias"])))
    guide.append(AutoMeanField(pyro.poutine.block(model, expose=["2.weight", "2.bias"])))
    assert torch.isfinite(TermsELBO()(model, guide)(X, Y).detach())
    model = copy.deepcopy(model)
    guide = AutoRadial(model)
    guide.setup(X, Y)
    assert torch.isfinite(TermsELBO()(model, copy.deepcopy(guide))(X, Y).detach())


def test_draws_in_plates_of_the_model_keep_their_own_means():
    bnn = BayesianModule(nn.Linear(3, 1))

    def model(x, y):
        with pyro.plate("networks", 4, dim=-2):
            f = bnn(x)
            with pyro.plate("rows", len(x), dim=-1):
                pyro.sample("y", dist.Normal(f[..., 0], 0.1), obs=y)

    guide = AutoMeanField(model, init_stddev=1e-4)
    guide.setup(X, Y[:, 0])
    with torch.no_grad():
        guide.locs.weight_unconstrained.copy_(torch.randn(4, 1, 1, 3))
    for elbo in (TermsELBO(), TermsELBO(2, vectorize_particles=True)):
        drawn, local = (elbo(model, g)(X, Y[:, 0]) for g in (guide, local_reparameterization(guide)))
        torch.testing.assert_close(local, drawn, rtol=1e-2, atol=0.0)
