# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Each layer under N draws gives what a Python loop over N plain networks gives."""

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
from tests.helpers.networks import at, call_with, draws_of


class TiedLanguageModel(nn.Module):
    """The output layer uses the embedding's matrix."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.output = nn.Linear(4, 7)
        self.output.weight = self.embedding.weight

    def forward(self, x):
        return self.output(self.hidden(self.embedding(x)).tanh())


class Unrolled(nn.Module):
    """A recurrent cell in a Python loop."""

    def __init__(self, cell, size=3):
        super().__init__()
        self.cell = cell
        self.size = size

    def forward(self, x):
        state = x.new_zeros(x.shape[0], self.size)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state


class ManyOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, shift=0.0):
        y = self.layer(x) + shift
        return {"y": y, "rest": [y.sum(-1), (None, 3, y.exp())]}


class Scores(NamedTuple):
    mean: torch.Tensor
    label: str | None
    rest: OrderedDict


class NamedOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        y = self.layer(x)
        return Scores(y, None, OrderedDict(last=y.exp(), most=y.max(-1)))


class SelfAttention(nn.Module):
    """Attention whose second output is None."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)


class ValueDependent(nn.Module):
    """vmap cannot batch a branch on a tensor's value."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        y = self.layer(x)
        return y if y.sum() > 0 else 2 * y


def encoder():
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


IMAGE = (5, 2, 6, 6)
CASES = {
    "linear": (lambda: nn.Linear(3, 2), (5, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, padding=1), (5, 2, 6)),
    "conv1d-circular": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (5, 2, 6)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()), IMAGE),
    "conv2d-groups": (lambda: nn.Conv2d(2, 4, 3, groups=2, stride=2), IMAGE),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (3, 2, 4, 4, 4)),
    "conv-transposed": (lambda: nn.ConvTranspose2d(2, 3, 2), IMAGE),
    "embedding": (lambda: nn.Embedding(7, 4), None),
    "embedding-padded": (lambda: nn.Embedding(7, 4, padding_idx=0), None),
    "tied": (TiedLanguageModel, None),
    "attention": (SelfAttention, (5, 3, 4)),
    "transformer-layer": (encoder, (5, 3, 4)),
    "transformer": (lambda: nn.TransformerEncoder(encoder(), 2), (5, 3, 4)),
    "lstm": (lambda: nn.LSTM(3, 4, num_layers=2, batch_first=True), (5, 6, 3)),
    "gru": (lambda: nn.GRU(3, 4, bidirectional=True), (6, 5, 3)),
    "rnn-inside": (lambda: Wrapped(nn.RNN(3, 4, batch_first=True)), (5, 6, 3)),
    "gru-cell": (lambda: Unrolled(nn.GRUCell(3, 3)), (5, 6, 3)),
    "rnn-cell": (lambda: Unrolled(nn.RNNCell(3, 3)), (5, 6, 3)),
    "batchnorm1d": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), (5, 3)),
    "batchnorm2d": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), IMAGE),
    "groupnorm": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), IMAGE),
    "instancenorm": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3)), IMAGE),
    "rmsnorm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4)), (5, 3)),
    "prelu": (lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU()), (5, 3)),
    "weight-norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), (5, 3)),
    "many-outputs": (ManyOutputs, (5, 3)),
    "named-outputs": (NamedOutputs, (5, 3)),
}


class Wrapped(nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0][:, -1]


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
    for index in torch.cartesian_prod(*(torch.arange(size) for size in lead)).reshape(-1, len(lead)).tolist():
        plain = bnn.to_module(at(draws, *index))
        alone = tensors_in(plain(x))
        assert len(alone) == len(together)
        for many, one in zip(together, alone, strict=True):
            assert many.shape == (*lead, *one.shape)
            torch.testing.assert_close(many[tuple(index)], one, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop.*_weight_norm")
@pytest.mark.parametrize("name", CASES)
def test_draws_match_a_loop_in_eval_mode(name):
    make, shape = CASES[name]
    bnn = BayesianModule(make().eval())
    assert_draws_match_a_loop(bnn, example(shape))


@pytest.mark.parametrize("name", ["linear", "transformer-layer", "attention", "tied", "groupnorm"])
def test_draws_match_a_loop_in_train_mode(name):
    make, shape = CASES[name]
    assert_draws_match_a_loop(BayesianModule(make().train()), example(shape))


@pytest.mark.parametrize("name", ["conv2d", "tied", "lstm"])
def test_several_dims_of_draws_come_back_as_several_dims(name):
    make, shape = CASES[name]
    assert_draws_match_a_loop(BayesianModule(make().eval()), example(shape), lead=(2, 3))


@pytest.mark.parametrize("name", ["linear", "tied", "lstm", "batchnorm1d", "named-outputs"])
def test_one_draw_equals_the_plain_network(name):
    make, shape = CASES[name]
    bnn, x = BayesianModule(make().eval()), example(shape)
    draw = draws_of(bnn)
    expected = tensors_in(bnn.to_module(draw)(x))
    for ours, theirs in zip(tensors_in(call_with(bnn, draw, x)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_sites_without_draws_are_shared():
    bnn, x = BayesianModule(nn.Linear(3, 2)), torch.randn(5, 3)
    draws = draws_of(bnn, 4)
    draws["bias"] = draws["bias"][:1]
    output = call_with(bnn, draws, x)
    torch.testing.assert_close(output, x @ draws["weight"].mT + draws["bias"][0])


def test_a_tied_parameter_is_one_site_and_one_tensor():
    bnn = BayesianModule(TiedLanguageModel())
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
    bnn, x = BayesianModule(ValueDependent()), torch.randn(5, 3)
    draws = draws_of(bnn, 3)
    with pytest.warns(UserWarning, match="cannot batch ValueDependent"):
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
    bnn, x = BayesianModule(NamedOutputs()), torch.randn(5, 3)
    bnn._functional.batching = batching
    output = call_with(bnn, draws_of(bnn, 4), x)
    assert type(output) is Scores
    assert output.label is None
    assert list(output.rest) == ["last", "most"]
    assert type(output.rest["most"]) is torch.return_types.max
    torch.testing.assert_close(output.rest["most"].values, output.mean.max(-1).values)


def test_an_output_that_hides_tensors_is_refused():
    class Odd(nn.Linear):
        def forward(self, x):
            return {super().forward(x).sum()}

    bnn = BayesianModule(Odd(3, 2))
    with pytest.raises(TypeError, match="several draws, got set"):
        call_with(bnn, draws_of(bnn, 3), torch.randn(5, 3))


@pytest.mark.parametrize("name", ["linear", "lstm"])
def test_dropout_differs_between_draws(name):
    rnn = nn.LSTM(3, 8, batch_first=True)
    body = Wrapped(rnn) if name == "lstm" else nn.Linear(3, 8)
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

    def test_a_buffer_that_is_assigned_anew_is_kept(self):
        class Counter(nn.Linear):
            def __init__(self):
                super().__init__(3, 2)
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x):
                self.calls = self.calls + 1
                return super().forward(x)

        bnn = BayesianModule(Counter())
        for _ in range(3):
            bnn(torch.randn(5, 3))
        assert bnn.net.calls == 3
        call_with(bnn, draws_of(bnn, 2), torch.randn(5, 3))
        assert bnn.net.calls == 3


@pytest.mark.parametrize("batching", ["vmap", "loop"])
def test_a_buffer_written_in_place_is_kept_for_a_single_draw_only(batching):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2) if batching == "vmap" else Wrapped(nn.GRU(3, 2))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.layer(x) + self.calls

    bnn, x = BayesianModule(Counter()), torch.randn(5, 4, 3)
    assert bnn.batching == batching
    bnn(x)
    draws = draws_of(bnn, 3)
    output = call_with(bnn, draws, x)
    assert bnn.net.calls == 1
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


@pytest.mark.parametrize("name", ["tied", "transformer-layer", "lstm", "batchnorm2d"])
def test_training_leaves_the_users_network_untouched(name):
    make, shape = CASES[name]
    net, x = make(), example(shape)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    next(net.children(), net).eval()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    bnn = BayesianModule(nn.Sequential(net, First()))
    model = SupervisedModel(bnn, likelihoods.Gaussian(num_data=20, event_dim=1))
    svi = SVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.05}), TraceMeanField_ELBO())
    y = torch.zeros(5, 1)
    x = x if name != "batchnorm2d" else x[:5]
    for _ in range(2):
        svi.step(x, y)
    bnn.eval()
    assert [module.training for module in net.modules()] == modes
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in net.parameters())


class First(nn.Module):
    """One number for each point."""

    def forward(self, output):
        output = output[0] if isinstance(output, tuple) else output
        return output.flatten(1).mean(1, keepdim=True)
