# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from torch import nn

from pyro_radial import AutoRadial, TermsELBO
from pyro_radial.infer import CompiledELBO
from tests.helpers.networks import classifier, data

X, Y = data(8)


def problem():
    model = classifier()
    guide = AutoRadial(model)
    guide.setup(X, Y)
    return model, guide


def losses_and_gradients(module, number):
    """The losses and gradients of steps with a backward by the user."""
    pyro.set_rng_seed(0)
    outcomes = []
    for _ in range(number):
        module.zero_grad()
        loss = module(X, Y)
        (3.0 * loss).backward()
        outcomes.append([loss.detach(), *(p.grad for p in module.parameters() if p.grad is not None)])
    return outcomes


@pytest.mark.parametrize("loss", [Trace_ELBO, TermsELBO])
def test_the_loss_and_gradients_are_those_of_the_elbo(loss):
    model, guide = problem()
    elbo = CompiledELBO(loss(), compile=False)
    expected = losses_and_gradients(loss()(model, guide), 3)
    # In the second step the program itself runs.
    torch.testing.assert_close(losses_and_gradients(elbo(model, guide), 3), expected, rtol=1e-3, atol=1e-3)
    assert elbo.compiled
    assert elbo.num_graphs == 1
    assert elbo.eager_reasons == []


class Encoded(nn.Module):
    """A model behind a network that no param statement names."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 1)

    def forward(self, x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(w + self.encoder(x)[:, 0], 1.0), obs=x[:, 0])


def guide_of_w(x):
    loc = pyro.param("loc", torch.zeros(()))
    pyro.sample("w", dist.Normal(loc, 1.0))


def test_a_program_that_runs_as_it_is_has_all_gradients():
    pyro.clear_param_store()
    model = Encoded()
    elbo = CompiledELBO(Trace_ELBO())
    with pytest.warns(UserWarning, match="no param statement names it"):
        elbo.differentiable_loss(model, guide_of_w, X).backward()
    first = model.encoder.weight.grad.clone()
    assert not elbo.compiled
    assert first.abs().sum() > 0
    elbo.differentiable_loss(model, guide_of_w, X).backward()
    assert (model.encoder.weight.grad - first).abs().sum() > 0


@pytest.mark.filterwarnings("ignore:the program runs uncompiled. it runs inside of TraceMessenger")
def test_pyros_svi_takes_it_as_its_loss():
    losses = []
    for make in (TraceMeanField_ELBO, lambda: CompiledELBO(TraceMeanField_ELBO(), compile=False)):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model, guide = problem()
        elbo = make()
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), elbo.loss, elbo.loss_and_grads)
        losses.append([])
        for seed in range(2):
            pyro.set_rng_seed(seed)
            losses[-1] += [svi.step(X, Y), svi.evaluate_loss(X, Y)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_without_gradients_it_only_evaluates():
    model, guide = problem()
    elbo = CompiledELBO(TermsELBO(), compile=False)
    with torch.no_grad():
        loss = elbo.differentiable_loss(model, guide, X, Y)
    assert not loss.requires_grad
    assert type(elbo.loss(model, guide, X, Y)) is float


@pytest.mark.parametrize("loss", [TraceMeanField_ELBO, "elbo", None])
def test_what_is_no_loss_is_named(loss):
    with pytest.raises(ValueError, match="loss must be an ELBO"):
        CompiledELBO(loss)
