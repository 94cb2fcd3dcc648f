# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Moments of linearized networks, against Jacobians row by row and against draws."""

import pytest
import torch
from torch import nn

from pyro_radial import BayesianModule
from pyro_radial.nn import MultiHead
from pyro_radial.nn.linearized import layers, linearization
from pyro_radial.nn.linearized.linearization import CovarianceBlock, Linearization
from tests.helpers.networks import Net
from tests.helpers.scale_priors import LearnedScale


def tied():
    """An autoencoder that uses its weight twice, once outside of its layer."""
    return Net(
        lambda net, x: nn.functional.linear(net.encoder(x).tanh(), net.encoder.weight.mT), encoder=nn.Linear(3, 2)
    )


def twice():
    return Net(lambda net, x: net.layer(net.layer(x).tanh()), layer=nn.Linear(3, 3))


def residual():
    return Net(lambda net, x: net.last(x + net.inner(x).tanh()), inner=nn.Linear(3, 3), last=nn.Linear(3, 2))


def recurrent():
    return Net(lambda net, x: net.lstm(x)[0][:, -1], lstm=nn.LSTM(3, 2, batch_first=True))


def shared():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer)


class Shifted(nn.Linear):
    """A layer with a forward of its own."""

    def forward(self, x):
        return super().forward(x) + self.weight.sum()


VECTORS, IMAGES = (3,), (1, 5, 5)
# The network, the shape of an input, and whether its noise can go layer by layer.
NETWORKS = {
    "linear layers": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False)), VECTORS, True),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)),
        VECTORS,
        True,
    ),
    "heads": (lambda: MultiHead(nn.Linear(3, 4), [nn.Linear(4, 2), nn.Linear(4, 5)]), VECTORS, True),
    "residual": (residual, VECTORS, True),
    "images, flattened": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(25, 2)), IMAGES, True),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)),
        IMAGES,
        True,
    ),
    "convolutions with gaps": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, (3, 2), padding=(1, 2), stride=(2, 1), bias=False),
            nn.ReLU(),
            nn.Conv2d(3, 2, 2, dilation=(1, 3)),
            nn.Flatten(),
        ),
        IMAGES,
        True,
    ),
    "convolutions in groups": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3, groups=2, padding="same"), nn.Flatten()),
        IMAGES,
        False,
    ),
    "sequences": (lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Flatten()), (4, 3), False),
    "recurrent": (recurrent, (4, 3), False),
    "tied": (tied, VECTORS, False),
    "called twice": (twice, VECTORS, False),
    "shared": (shared, VECTORS, False),
    "a subclass": (lambda: Shifted(3, 2), VECTORS, False),
}
each_network = pytest.mark.parametrize("name", NETWORKS)


def linearized(name, **kwargs):
    """A network with moments, in evaluation mode, and inputs."""
    make, shape, _ = NETWORKS[name]
    bnn = BayesianModule(make().double(), **kwargs).eval()
    mean = {site: 0.7 * torch.randn_like(value) for site, value in bnn.sample_parameters().items()}
    mean = {site: value for site, value in mean.items() if site in bnn.sites_in_use}
    for value in mean.values():
        value.requires_grad_()
    variance = {site: (0.01 + torch.rand_like(value)).detach().requires_grad_() for site, value in mean.items()}
    blocks = [CovarianceBlock((site,), value) for site, value in variance.items()]
    return Linearization(bnn, mean, blocks), torch.randn(6, *shape, dtype=torch.double)


def row_by_row(linear, x):
    """The Jacobian of plain networks, ``[N, O, P]``, and the variances, ``[P]``."""
    net = linear.function.model.to_module({site: value.detach() for site, value in linear.mean.items()})
    parameters = [dict(net.named_parameters(remove_duplicate=False))[site] for site in linear.mean]
    values = net(x)
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters, retain_graph=True)])
        for value in values.flatten()
    ]
    variance = torch.cat([block.covariance.detach().flatten() for block in linear.blocks])
    return values.detach(), torch.stack(rows).unflatten(0, values.shape), variance


@each_network
def test_moments_are_those_of_the_jacobian(name):
    linear, x = linearized(name)
    values, jacobian, variance = row_by_row(linear, x)
    assert (linear.structure(x).layers is not None) == NETWORKS[name][2]
    mean, spread = linear.marginals(x)
    torch.testing.assert_close(mean.detach(), values)
    torch.testing.assert_close(spread.detach(), (jacobian.square() * variance).sum(-1))
    mean, joint = linear.joint_marginals(x)
    torch.testing.assert_close(mean.detach(), values)
    torch.testing.assert_close(joint.detach(), (jacobian * variance) @ jacobian.mT)
    _, covariance = linear.moments(x)
    torch.testing.assert_close(covariance.detach(), torch.einsum("nop,mop->onm", jacobian * variance, jacobian))


@pytest.mark.parametrize("name", ["linear layers", "batch norm", "convolutions", "convolutions in groups", "tied"])
def test_gradients_run_through_the_jacobian_in_means_variances_and_points(name):
    linear, x = linearized(name)
    x = x[:2].requires_grad_()
    if name == "linear layers":
        # Finite differences need a smooth function.
        linear.function.model.skeleton[1] = nn.Softplus()
    tensors = (*linear.mean.values(), *(block.covariance for block in linear.blocks), x)

    def marginals(*tensors):
        return linear.marginals(tensors[-1])

    assert torch.autograd.gradcheck(marginals, tensors, fast_mode=True)


@pytest.mark.parametrize("name", ["linear layers", "convolutions", "tied"])
def test_chunks_of_rows_make_no_difference(name, monkeypatch):
    linear, x = linearized(name)

    def moments():
        return *linear.marginals(x), *linear.joint_marginals(x), *linear.moments(x)

    before = moments()
    monkeypatch.setattr(linearization, "MAX_JACOBIAN", 200)
    monkeypatch.setattr(layers, "MAX_GRADIENTS", 200)
    for found, expected in zip(moments(), before, strict=True):
        torch.testing.assert_close(found, expected)


def structure_of(bnn):
    values = {site: torch.randn_like(value) for site, value in bnn.sample_parameters().items()}
    blocks = [CovarianceBlock((site,), value.square()) for site, value in values.items()]
    return Linearization(bnn.eval(), values, blocks).structure(torch.randn(1, 3))


def test_layers_are_known_by_their_places_and_random_sites_and_no_hook_stays():
    bnn = BayesianModule(NETWORKS["linear layers"][0]())
    assert structure_of(bnn).layers == (("0", "0.weight", "0.bias", (4,)), ("2", "2.weight", None, (2,)))
    assert not any(module._forward_hooks for module in bnn.skeleton.modules())
    bnn = BayesianModule(NETWORKS["linear layers"][0](), select="weight")
    assert structure_of(bnn).layers == (("0", "0.weight", None, (4,)), ("2", "2.weight", None, (2,)))


def test_a_prior_that_makes_weights_of_sites_of_its_own_is_differentiated_in_these():
    assert structure_of(BayesianModule(nn.Linear(3, 1), LearnedScale())).layers is None
