# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Each layer under N draws gives what a Python loop over N plain networks gives."""

import itertools
import logging
import warnings
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import pyro
import pytest
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import nn

from pyro_radial.nn import BayesianModule, SupervisedModel, likelihoods
from pyro_radial.nn.functional_net import WITHOUT_FASTPATH
from tests.helpers.networks import Net, at, call_with, draws_of


def tied_language_model():
    """Its output layer uses the embedding's matrix."""
    layers = {"embedding": nn.Embedding(7, 4), "hidden": nn.Linear(4, 4), "output": nn.Linear(4, 7)}
    net = Net(lambda net, x: net.output(net.hidden(net.embedding(x)).tanh()), **layers)
    net.output.weight = net.embedding.weight
    return net


def unrolled(cell):
    """A recurrent cell in a Python loop."""

    def call(net, x):
        state = x.new_zeros(len(x), 3)
        for step in x.unbind(1):
            state = net.cell(step, state)
        return state

    return Net(call, cell=cell)


def last_step(rnn):
    return Net(lambda net, x: net.rnn(x)[0][:, -1], rnn=rnn)


class Scores(NamedTuple):
    mean: torch.Tensor
    label: str | None
    rest: OrderedDict


def many_outputs():
    def call(net, x):
        y = net.layer(x)
        return Scores(y, None, OrderedDict(last=[y.sum(-1), ({"exp": y.exp()}, 3)], most=y.max(-1)))

    return Net(call, layer=nn.Linear(3, 2))


def self_attention():
    """Its second output is None."""
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    return Net(lambda net, x: net.layer(x, x, x, need_weights=False), layer=layer)


def encoder():
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


IMAGE = (5, 2, 6, 6)
CASES = {
    "linear": (lambda: nn.Linear(3, 2), (5, 3)),
    "conv1d-circular": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (5, 2, 6)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()), IMAGE),
    "conv2d-groups": (lambda: nn.Conv2d(2, 4, 3, groups=2, stride=2), IMAGE),
    "embedding-padded": (lambda: nn.Embedding(7, 4, padding_idx=0), None),
    "tied": (tied_language_model, None),
    "attention": (self_attention, (5, 3, 4)),
    "transformer-layer": (encoder, (5, 3, 4)),
    "lstm": (lambda: nn.LSTM(3, 4, num_layers=2, batch_first=True), (5, 6, 3)),
    "gru": (lambda: nn.GRU(3, 4, bidirectional=True), (6, 5, 3)),
    "rnn-inside": (lambda: last_step(nn.RNN(3, 4, batch_first=True)), (5, 6, 3)),
    "gru-cell": (lambda: unrolled(nn.GRUCell(3, 3)), (5, 6, 3)),
    "batchnorm1d": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), (5, 3)),
    "batchnorm2d": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), IMAGE),
    "groupnorm": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), IMAGE),
    "instancenorm": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3)), IMAGE),
    "rmsnorm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4)), (5, 3)),
    "prelu": (lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU()), (5, 3)),
    "weight-norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), (5, 3)),
    "many-outputs": (many_outputs, (5, 3)),
}


def tensors_in(output):
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in tensors_in(item)]
    return []


def example(shape):
    return torch.randint(0, 7, (5, 3)) if shape is None else torch.randn(*shape)


def assert_draws_match_a_loop(bnn, x, lead=(4,)):
    draws = draws_of(bnn, *lead)
    together = tensors_in(call_with(bnn, draws, x))
    assert together
    for index in itertools.product(*map(range, lead)):
        alone = tensors_in(bnn.to_module(at(draws, *index))(x))
        for many, one in zip(together, alone, strict=True):
            assert many.shape == (*lead, *one.shape)
            torch.testing.assert_close(many[index], one, atol=1e-5, rtol=1e-4)


DRAWS = [
    *((name, (4,), False) for name in CASES),
    *((name, (4,), True) for name in ("linear", "transformer-layer", "attention", "tied", "groupnorm")),
    *((name, (2, 3), False) for name in ("conv2d", "tied", "lstm")),
    *((name, (), False) for name in ("linear", "tied", "lstm", "batchnorm1d", "many-outputs")),
]


@pytest.mark.filterwarnings("ignore:There is a performance drop.*_weight_norm")
@pytest.mark.parametrize(("name", "lead", "training"), DRAWS)
def test_draws_match_a_loop_over_plain_networks(name, lead, training):
    make, shape = CASES[name]
    assert_draws_match_a_loop(BayesianModule(make().train(training)), example(shape), lead)


def test_sites_without_draws_are_shared():
    bnn, x = BayesianModule(nn.Linear(3, 2)), torch.randn(5, 3)
    draws = draws_of(bnn, 4)
    draws["bias"] = draws["bias"][:1]
    output = call_with(bnn, draws, x)
    torch.testing.assert_close(output, x @ draws["weight"].mT + draws["bias"][0])


def test_a_tied_parameter_is_one_site_and_one_tensor():
    bnn = BayesianModule(tied_language_model())
    assert bnn.sites == ("embedding.weight", "hidden.weight", "hidden.bias", "output.bias")
    plain = bnn.to_module(draws_of(bnn))
    assert plain.output.weight is plain.embedding.weight


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn-inside"])
def test_recurrent_layers_run_as_a_loop_and_the_log_says_so(name, caplog):
    with caplog.at_level(logging.INFO, logger="pyro_radial"):
        bnn = BayesianModule(CASES[name][0]())
    assert bnn.batching == "loop"
    assert "one after another" in caplog.text


def test_a_network_that_vmap_refuses_falls_back_to_the_loop_and_says_so_once():
    def call(net, x):
        y = net.layer(x)
        return y if y.sum() > 0 else 2 * y

    bnn, x = BayesianModule(Net(call, layer=nn.Linear(3, 2))), torch.randn(5, 3)
    draws = draws_of(bnn, 3)
    with pytest.warns(UserWarning, match="cannot batch Net"):
        output = call_with(bnn, draws, x)
    assert bnn.batching == "loop"
    torch.testing.assert_close(output[1], bnn.to_module(at(draws, 1))(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call_with(bnn, draws, x)


def test_a_mistake_in_the_call_is_not_taken_for_a_lack_of_batching():
    bnn = BayesianModule(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="shapes"):
        call_with(bnn, draws_of(bnn, 3), torch.randn(5, 4))
    assert bnn.batching == "vmap"


@pytest.mark.parametrize("batching", ["vmap", "loop"])
def test_an_output_keeps_its_kinds_and_what_is_no_tensor(batching):
    bnn, x = BayesianModule(many_outputs()), torch.randn(5, 3)
    bnn._functional.batching = batching
    output = call_with(bnn, draws_of(bnn, 4), x)
    assert type(output) is Scores
    assert output.label is None
    assert list(output.rest) == ["last", "most"]
    assert type(output.rest["most"]) is torch.return_types.max
    torch.testing.assert_close(output.rest["most"].values, output.mean.max(-1).values)


def test_an_output_that_hides_tensors_is_refused():
    bnn = BayesianModule(Net(lambda net, x: {net.layer(x).sum()}, layer=nn.Linear(3, 2)))
    with pytest.raises(TypeError, match="several draws, got set"):
        call_with(bnn, draws_of(bnn, 3), torch.randn(5, 3))


@pytest.mark.parametrize("name", ["linear", "lstm"])
def test_dropout_differs_between_draws(name):
    body = last_step(nn.LSTM(3, 8, batch_first=True)) if name == "lstm" else nn.Linear(3, 8)
    bnn = BayesianModule(nn.Sequential(body, nn.Dropout(0.5)))
    x = torch.randn(6, 4, 3) if name == "lstm" else torch.randn(6, 3)
    same = {site: value.expand(3, *value.shape).contiguous() for site, value in draws_of(bnn).items()}
    output = call_with(bnn, same, x)
    assert not torch.equal(output[0] == 0, output[1] == 0)
    assert 0.2 < (output == 0).float().mean() < 0.8
    bnn.eval()
    output = call_with(bnn, same, x)
    torch.testing.assert_close(output[0], output[1])


class TestRunningStatistics:
    def make(self):
        return BayesianModule(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))

    def statistics(self, bnn):
        return {name: buffer.clone() for name, buffer in bnn.net.named_buffers()}

    def test_a_single_draw_updates_them_as_the_plain_network_does(self):
        bnn, x = self.make(), torch.randn(8, 3)
        draw = draws_of(bnn)
        plain = bnn.to_module(draw)
        torch.testing.assert_close(call_with(bnn, draw, x), plain(x))
        expected = dict(plain.named_buffers())
        assert self.statistics(bnn).keys() == expected.keys()
        for name, value in self.statistics(bnn).items():
            torch.testing.assert_close(value, expected[name])
        assert bnn.net.get_submodule("1").num_batches_tracked == 1

    @pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)])
    def test_several_draws_leave_them_and_warn_once(self, layer):
        bnn = BayesianModule(nn.Sequential(nn.Conv1d(3, 4, 1), layer))
        x, draws, before = torch.randn(8, 3, 5), draws_of(bnn, 3), self.statistics(bnn)
        with pytest.warns(UserWarning, match="running statistics"):
            output = call_with(bnn, draws, x)
        call_with(bnn, draws, x)
        for name, value in self.statistics(bnn).items():
            assert torch.equal(value, before[name])
        torch.testing.assert_close(output[2], bnn.to_module(at(draws, 2))(x), atol=1e-5, rtol=1e-4)
        # The single-draw call works as before.
        call_with(bnn, at(draws, 0), x)
        assert any(not torch.equal(v, before[n]) for n, v in self.statistics(bnn).items())

    def test_eval_mode_uses_them_and_leaves_them(self):
        bnn = self.make()
        bnn(torch.randn(16, 3) + 1)
        bnn.eval()
        before = self.statistics(bnn)
        assert_draws_match_a_loop(bnn, torch.randn(5, 3))
        for name, value in self.statistics(bnn).items():
            assert torch.equal(value, before[name])


@pytest.mark.parametrize("batching", ["vmap", "loop"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_a_call_writes_is_kept_for_a_single_draw_only(batching, in_place):
    def call(net, x):
        if in_place:
            net.calls += 1
        else:
            net.calls = net.calls + 1
        return net.layer(x) + net.calls

    net = Net(call, layer=nn.Linear(3, 2) if batching == "vmap" else last_step(nn.GRU(3, 2)))
    net.register_buffer("calls", torch.zeros(()))
    bnn, x = BayesianModule(net), torch.randn(5, 4, 3)
    for _ in range(2):
        bnn(x)
    draws = draws_of(bnn, 3)
    output = call_with(bnn, draws, x)
    assert bnn.net.calls == 2
    assert bnn.batching == batching
    for index in range(3):
        torch.testing.assert_close(output[index], bnn.to_module(at(draws, index))(x))


def test_the_attention_fast_path_is_off_while_any_thread_needs_it_off():
    states = [torch.backends.mha.get_fastpath_enabled()]
    first, second = WITHOUT_FASTPATH, WITHOUT_FASTPATH
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    states.append(torch.backends.mha.get_fastpath_enabled())
    second.__exit__(None, None, None)
    states.append(torch.backends.mha.get_fastpath_enabled())
    assert states == [True, False, True]


def test_a_setting_with_a_context_variable_may_be_left_by_another_thread():
    variable = ContextVar("variable", default=0)

    @contextmanager
    def changed():
        token = variable.set(1)
        yield
        variable.reset(token)  # As sdpa_kernel does from torch 2.15 on.

    together = type(WITHOUT_FASTPATH)(changed)
    together.__enter__()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(together.__exit__, None, None, None).result()
    assert variable.get() == 0


def one_number(net, x):
    """The mean of the outputs for each point."""
    output = net.net(x)
    return (output[0] if isinstance(output, tuple) else output).flatten(1).mean(1, keepdim=True)


@pytest.mark.parametrize("name", ["tied", "transformer-layer", "lstm", "batchnorm2d"])
def test_training_leaves_the_users_network_untouched(name):
    make, shape = CASES[name]
    net, x = make(), example(shape)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    next(net.children(), net).eval()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    bnn = BayesianModule(Net(one_number, net=net))
    model = SupervisedModel(bnn, likelihoods.Gaussian(num_data=20, event_dim=1))
    svi = SVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.05}), TraceMeanField_ELBO())
    for _ in range(2):
        svi.step(x, torch.zeros(5, 1))
    bnn.eval()
    assert [module.training for module in net.modules()] == modes
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in net.parameters())
