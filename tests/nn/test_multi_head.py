# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Networks with several heads, and parameters that a call leaves idle."""

import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_radial import AutoRadial, TermsELBO
from pyro_radial.nn import BayesianModule, MultiHead, use_head
from pyro_radial.nn.multi_head import under_head
from tests.helpers.networks import call_with, classifier, data, draws_of

TRUNK = ["trunk.0.weight", "trunk.0.bias"]


def head(index):
    return [f"heads.{index}.weight", f"heads.{index}.bias"]


def network():
    return MultiHead(nn.Sequential(nn.Linear(3, 6), nn.Tanh()), [nn.Linear(6, 2) for _ in range(3)])


def sites_of(model, *args):
    return poutine.trace(model).get_trace(*args).stochastic_nodes


def test_the_network_is_the_head_on_the_trunk():
    net, x = network(), torch.randn(5, 3)
    assert net.head == 0
    for index in (0, 2, 1):
        net.head = index
        assert torch.equal(net(x), net.heads[index](net.trunk(x)))
    for index in (3, -1):
        with pytest.raises(ValueError, match="index of one of 3 heads"):
            net.head = index
    assert net.head == 1


def test_the_head_is_no_part_of_the_state():
    net, other = network(), network()
    names = list(net.state_dict())
    net.head = 2
    assert list(net.state_dict()) == names
    other.load_state_dict(net.state_dict())
    assert other.head == 0


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_trunk_and_the_head_in_use_have_sites_and_make_the_output(index):
    bnn, x = BayesianModule(network()), torch.randn(5, 3)
    draw = draws_of(bnn)
    use_head(bnn, index)
    assert sites_of(bnn, x) == TRUNK + head(index)
    assert bnn.sites_in_use == (*TRUNK, *head(index))
    assert bnn.sites == (*TRUNK, *head(0), *head(1), *head(2))
    hidden = torch.tanh(x @ draw[TRUNK[0]].T + draw[TRUNK[1]])
    weight, bias = (draw[name] for name in head(index))
    torch.testing.assert_close(call_with(bnn, draw, x), hidden @ weight.T + bias)


def test_a_head_may_be_looked_under():
    bnn = BayesianModule(network())
    use_head(bnn, 1, other_heads=[0])
    with under_head(bnn, 2):
        assert bnn.sites_in_use == (*TRUNK, *head(2))
    assert bnn.sites_in_use == (*TRUNK, *head(0), *head(1))
    with under_head(nn.Linear(2, 2), 3):  # Here the network has no heads.
        pass


def test_any_network_may_leave_parameters_idle():
    class Halved(nn.Linear):
        def uses_parameter(self, name):
            return name == "weight"

    net, x = Halved(3, 2), torch.randn(5, 3)
    bnn = BayesianModule(net)
    assert sites_of(bnn, x) == ["weight"]
    weight = torch.randn(2, 3)
    torch.testing.assert_close(call_with(bnn, {"weight": weight}, x), x @ weight.T + net.bias)


def test_guides_and_losses_have_the_sites_in_use():
    model, (x, y) = classifier(net=network()), data(10)
    use_head(model, 1)
    guide = AutoRadial(model, init_stddev=0.3)
    elbo = TermsELBO(3, vectorize_particles=True, max_plate_nesting=1, strict_kl=True)
    elbo.differentiable_loss(model, guide, x, y)
    assert list(guide.posterior()) == list(elbo.terms.kl_by_site) == TRUNK + head(1)
    use_head(model, 2)
    with pytest.raises(ValueError, match=r"guide must have latent site 'heads\.2\.weight' of the model"):
        TermsELBO().differentiable_loss(model, guide, x, y)


def test_a_plain_network_needs_a_draw_of_the_sites_in_use_alone():
    net, x = network(), torch.randn(5, 3)
    bnn = BayesianModule(net)
    use_head(bnn, 1)
    draw = {name: value for name, value in draws_of(bnn).items() if name in bnn.sites_in_use}
    plain = bnn.to_module(draw)
    torch.testing.assert_close(plain(x), call_with(bnn, draw, x))
    for name in head(0) + head(2):
        own, first = plain.get_parameter(name), net.get_parameter(name)
        assert torch.equal(own, first)
        assert own.data_ptr() != first.data_ptr()
    with torch.no_grad():
        plain.heads[0].weight.fill_(7.0)
    assert not torch.equal(bnn.to_module(draw).heads[0].weight, plain.heads[0].weight)
    del draw["heads.1.bias"]
    with pytest.raises(ValueError, match=r"draw must hold a value for site 'heads\.1\.bias'"):
        bnn.to_module(draw)


def test_models_without_the_head_are_refused_and_no_network_is_changed():
    with pytest.raises(ValueError, match="model must hold a MultiHead"):
        use_head(classifier(), 0)
    wide, narrow = network(), MultiHead(nn.Linear(3, 4), [nn.Linear(4, 2)])
    with pytest.raises(ValueError, match="index of one of 1 heads, got 2"):
        use_head(nn.ModuleList([wide, narrow]), 2)
    assert wide.head == 0
