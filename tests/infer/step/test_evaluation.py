# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Gradients are added, left alone and changed by hooks as Pyro's ``SVI`` does it."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import RenyiELBO, Trace_ELBO, TraceGraph_ELBO

from pyro_radial.infer.step.evaluation import after_hooks
from tests.helpers.programs import Graphed, Program, eager_svi, recorded_svi

X = torch.linspace(-1.0, 1.0, 8)
pytestmark = pytest.mark.filterwarnings("ignore:the program runs uncompiled")


def model(x):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w, 1.0), obs=x)


def guide(x):
    pyro.sample("w", dist.Normal(pyro.param("loc", torch.zeros(())), 1.0))


def both(loss):
    """Steps of Pyro's and ours."""
    for make_svi in (eager_svi, recorded_svi):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        yield make_svi(Program(model, guide, loss))


@pytest.mark.parametrize("loss", [Trace_ELBO(), RenyiELBO(num_particles=2)], ids=["graph", "eager"])
def test_gradients_of_several_batches_add_up(loss):
    outcomes = []
    for svi in both(loss):
        losses = [float(svi.loss_and_grads(model, guide, x)) for x in (X[:4], X[4:], X[:4], X[:4])]
        outcomes.append([*losses, float(pyro.param("loc").grad)])
        assert float(pyro.param("loc").detach()) == 0.0
    assert outcomes[1] == pytest.approx(outcomes[0], rel=1e-5)


def test_gradients_from_before_are_not_added_to_those_of_a_loss():
    loss = Graphed(model, guide, TraceGraph_ELBO(), compile=False)
    gradients = []
    for earlier in (None, torch.tensor(5.0)):
        pyro.set_rng_seed(0)
        pyro.param("loc", torch.zeros(())).grad = earlier
        gradients += [gradient for _, gradient in loss((X,))[1]]
    assert torch.equal(*gradients)


def double_gradient(calls, parameter):
    calls.append(float(parameter.grad))
    parameter.grad.mul_(2.0)


@pytest.mark.parametrize("make_loss", [Trace_ELBO, TraceGraph_ELBO])
def test_hooks_after_a_gradient_are_called(make_loss):
    outcomes = []
    for svi in both(make_loss()):
        calls = []
        for step in range(5):
            svi.step(X)
            if step == 1:
                pyro.param("loc").register_hook(lambda gradient: 3.0 * gradient)
                hook = pyro.param("loc").register_post_accumulate_grad_hook(partial(double_gradient, calls))
            if step == 3:
                hook.remove()
        outcomes.append([*calls, float(pyro.param("loc").detach())])
    assert len(outcomes[0]) == 3
    assert outcomes[1] == pytest.approx(outcomes[0], rel=1e-5)


def test_what_hooks_leave_of_a_gradient_is_what_torch_adds():
    parameter, other = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    gradients = [(parameter, torch.full((2,), 2.0)), (other, torch.ones(1))]
    assert after_hooks(gradients) == gradients
    parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", 3.0 * p.grad))
    (2.0 * parameter).sum().backward()
    added, parameter.grad = parameter.grad, torch.zeros(2)
    (_, changed), (_, usual) = after_hooks(gradients)
    assert torch.equal(changed, added)
    assert usual is gradients[1][1]
    assert torch.equal(parameter.grad, torch.zeros(2))
    parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    assert after_hooks(gradients) == gradients[1:]


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_of_several_parameters_is_called_once(mode):
    parameters = [torch.ones(2, requires_grad=True) for _ in range(3)]
    gradients = [(parameter, torch.full((2,), float(number))) for number, parameter in enumerate(parameters)]
    seen = []
    torch.autograd.graph.register_multi_grad_hook(parameters, seen.append, mode=mode)
    for (_, left), (_, gradient) in zip(after_hooks(gradients), gradients, strict=True):
        assert torch.equal(left, gradient)
    (value,) = seen
    given = [gradient for _, gradient in gradients]
    assert all(map(torch.equal, value, given)) if mode == "all" else any(torch.equal(value, own) for own in given)
    assert [parameter.grad for parameter in parameters] == [None] * 3
