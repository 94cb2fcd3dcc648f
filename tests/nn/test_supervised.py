# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A network and a likelihood as one model, in which the network is found by types."""

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_radial import AutoRadial, PriorChain
from pyro_radial.nn import BayesianModule, SupervisedModel, likelihoods
from pyro_radial.nn.supervised import find_network, network_of
from pyro_radial.poutine import swap_prior
from tests.helpers.networks import Net, classifier, data, draws_of


def test_the_log_density_is_prior_plus_scaled_likelihood():
    model, (x, y) = classifier(num_data=40), data(10)
    trace = poutine.trace(model).get_trace(x, y)
    draw = {site: trace.nodes[site]["value"] for site in model.bnn.sites}
    prior = torch.zeros(())
    for value in draw.values():
        # The default: a standard deviation of 3 over the root of a layer's inputs, and 1 for biases.
        stddev = 3.0 / value.shape[1] ** 0.5 if value.dim() > 1 else 1.0
        prior = prior + dist.Normal(0.0, stddev).log_prob(value).sum()
    logits = model.bnn.to_module(draw)(x)
    likelihood = -nn.functional.cross_entropy(logits, y, reduction="sum")
    torch.testing.assert_close(trace.log_prob_sum(), prior + 40 / 10 * likelihood)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(5, 4), r"x of shape \[5, 4\], torch.float32 on cpu: .*mat1 and mat2 shapes"),
        (torch.zeros(5, 3).double(), r"in torch.float32 on cpu, failed in .*given x of shape .* torch.float64"),
        (torch.zeros(5, 3).long(), r"in torch.float32 on cpu, failed in .*given x of shape .* torch.int64"),
    ],
)
def test_inputs_that_the_network_cannot_take_are_named(x, message):
    with pytest.raises(ValueError, match=rf"the network of bnn, .*{message}"):
        classifier()(x, torch.zeros(5, dtype=torch.long))


def block(size):
    """It cannot take more than five rows, and its last layer takes no size but four."""

    def call(net, x):
        return net.rest(net.first(x) + torch.ones(len(x) if len(x) > 5 else 1))

    return Net(call, first=nn.Linear(3, 4), rest=nn.Sequential(nn.ReLU(), nn.Linear(size, 2)))


@pytest.mark.parametrize("draws", [(), (2,)])
@pytest.mark.parametrize(
    ("net", "rows", "message"),
    [
        (
            lambda: block(5),
            5,
            r" failed in 'rest\.1', Linear\(in_features=5, .*\), given x of shape \[5, 3\].*: .*mat1",
        ),
        (lambda: nn.Sequential(block(4)), 6, r" failed in '0', Net\(\), given x of shape .*: .*The size of"),
        (lambda: block(4), 6, r"the network of bnn, in torch.float32 on cpu, failed, given x .*: .*The size of"),
    ],
)
def test_an_error_inside_the_network_is_shown_with_its_layer(net, rows, message, draws):
    model = classifier(net=net())
    values = draws_of(model.bnn, *draws)
    with pytest.raises(ValueError, match=message), poutine.condition(data=values):
        model(torch.zeros(rows, 3))


def test_a_dict_is_inputs_by_name():
    layers = {"left": nn.Linear(3, 1), "right": nn.Linear(2, 1)}
    net = Net(lambda net, a, b: net.left(a) + net.right(b), **layers)
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian())
    assert model({"b": torch.randn(5, 2), "a": torch.randn(5, 3)}, torch.randn(5, 1)).shape == (5, 1)
    with pytest.raises(ValueError, match=r"given b of shape \[5, 9\], torch.float32 on cpu, a of shape \[5, 3\]"):
        model({"b": torch.randn(5, 9), "a": torch.randn(5, 3)})


def made():
    likelihood = likelihoods.Gaussian(num_data=5, scale=None, precision_prior=dist.Gamma(6.0, 6.0))
    model = SupervisedModel(BayesianModule(nn.Linear(3, 2)), likelihood)
    guide = AutoRadial(model)
    guide.setup(torch.zeros(5, 3), torch.zeros(5, 2))
    return model, guide


@pytest.mark.parametrize("wrap", [lambda model: model, PriorChain, lambda model: swap_prior(PriorChain(model), {})])
@torch.no_grad()
def test_parameters_and_noise_are_those_of_the_draw(wrap):
    model, guide = made()
    network = network_of(wrap(model))
    drawn = poutine.trace(guide).get_trace()
    draw = network.draw(drawn)
    assert network.bnn is model.bnn
    assert network.likelihood is model.likelihood
    assert draw.parameters.keys() == {"weight", "bias"}
    assert all(torch.equal(value, drawn.nodes[name]["value"]) for name, value in draw.parameters.items())
    assert torch.equal(draw.noise["scale"], drawn.nodes["precision"]["value"].rsqrt().reshape(1))
    assert {"weight", "bias", "precision", "noise_scale"} <= draw.trace.nodes.keys()
    x = torch.randn(4, 3)
    assert torch.equal(network(x, draw.parameters), poutine.condition(model.bnn, data=draw.parameters)(x))
    # The model runs as ever afterwards.
    assert wrap(model)(torch.zeros(4, 3)).shape == (4, 2)


@torch.no_grad()
def test_a_mistake_of_a_prior_is_shown_as_it_is():
    class Broken:
        def sample_parameter(self, name, parameter):
            raise KeyError(name)

    model = BayesianModule(nn.Linear(3, 2), Broken())
    with pytest.raises(KeyError, match="weight"):
        network_of(model).draw(poutine.Trace())
    assert not poutine.runtime._PYRO_STACK


def doubled(cls, method):
    """A class with a method of its own, which doubles the first argument."""

    def own(self, first, *others):
        return getattr(super(own_class, self), method)(2 * first, *others)

    own_class = type("Own", (cls,), {method: own})
    return own_class


OwnForward, OwnOutput = doubled(SupervisedModel, "forward"), doubled(SupervisedModel, "output")


def patched(model):
    plain = model.forward
    model.forward = lambda *args: plain(*args)
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda model: OwnForward(model.bnn, model.likelihood),
        lambda model: OwnOutput(model.bnn, model.likelihood),
        lambda model: PriorChain(OwnForward(model.bnn, model.likelihood)),
        doubled(PriorChain, "forward"),
        lambda model: SupervisedModel(model.bnn, doubled(likelihoods.Gaussian, "forward")()),
        lambda model: SupervisedModel(doubled(BayesianModule, "forward")(nn.Linear(3, 2)), model.likelihood),
        nn.Sequential,
        poutine.block,
        patched,
        lambda model: nn.ModuleList([model, made()[0]]),
    ],
)
def test_a_model_that_may_do_something_else_has_no_network(change):
    model = change(made()[0])
    assert find_network(model) is None
    with pytest.raises(ValueError, match="model must be a SupervisedModel of a BayesianModule"):
        network_of(model)


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.bnn, lambda model: model.likelihood])
@pytest.mark.parametrize("before", [False, True])
def test_a_network_whose_call_is_changed_by_a_hook_is_none(part, before):
    model, _ = made()
    register = part(model).register_forward_pre_hook if before else part(model).register_forward_hook
    handle = register(lambda *args: None)
    with pytest.raises(ValueError, match="without hooks, got SupervisedModel"):
        network_of(model)
    handle.remove()
    assert network_of(model).bnn is model.bnn
