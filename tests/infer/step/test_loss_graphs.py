# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import random
from contextlib import nullcontext

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceMeanField_ELBO
from torch import nn

from benchmarks.guides._examples.program import Program, compared
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, PriorChain, TermsELBO
from pyro_radial.infer.step import inductor, loss_graphs
from pyro_radial.poutine import mean_only
from tests.helpers.graphs import Graphed
from tests.helpers.networks import classifier as small_classifier
from tests.helpers.networks import data
from tests.helpers.programs import PROGRAMS, classifier

X, Y = data(8)


def batch_normed():
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def captured(program, **kwargs):
    model, guide, loss, _ = program
    return Graphed(model, guide, loss, compile=False, **kwargs)


def make(loss=None, net=None, guide=AutoRadial):
    model = small_classifier(net=net)
    return Program(model, guide(model), TermsELBO() if loss is None else loss, (X, Y))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_replay_is_the_program_on_the_same_noise(name):
    pyro.set_rng_seed(0)
    program = PROGRAMS[name](4)
    loss = captured(program)
    for seed in (1, 2):
        # Recorded operations are those that ran.
        _, error, _ = compared(program, loss.graphs, seed)
        assert error <= 1e-6
    assert not loss.eager_reasons
    assert len(loss.recordings) == 1


def test_each_replay_has_noise_of_its_own():
    loss = captured(make())
    values = [float(loss((X, Y), {})[0]) for _ in range(5)]
    assert len(set(values)) == 5


def test_terms_are_those_of_the_loss():
    model, guide, elbo, _ = make()
    loss = captured(Program(model, guide, elbo, ()))
    loss((X, Y), {})
    pyro.set_rng_seed(1)
    value, _ = loss((X, Y), {})
    terms = elbo.terms
    assert elbo.step == 2
    pyro.set_rng_seed(1)
    assert torch.equal(elbo(model, guide)(X, Y).detach(), value)
    assert elbo.terms.num_data == terms.num_data == 40
    for mapping in ("nll_by_site", "kl_by_site", "entropy_by_site"):
        assert getattr(elbo.terms, mapping) == getattr(terms, mapping)
    assert torch.equal(terms.loss, value)


def test_parameters_buffers_and_priors_that_change_in_place_are_seen():
    program = PROGRAMS["PriorChain, normal"](4)
    loss = captured(program)
    loss(program.args, {})
    with torch.no_grad():
        for tensor in (*program.guide.parameters(), *program.model.chained.buffers()):
            tensor.mul_(1.1)
    _, error, _ = compared(program, loss.graphs)
    assert error <= 1e-6
    assert len(loss.recordings) == 1


def test_a_parameter_that_is_replaced_by_its_like_is_seen_without_a_new_graph(monkeypatch):
    program = make()
    loss = captured(program)
    loss((X, Y), {})
    graph = loss.recordings[0].graph
    state = {name: value + 0.1 for name, value in program.guide.state_dict().items()}
    with pyro.settings.context(module_local_params=True):
        local = make()
        loss = captured(local)
        loss((X, Y), {})
        graph = loss.recordings[0].graph
        local.guide.load_state_dict(state, assign=True)
        _, error, _ = compared(local, loss.graphs)
    assert error <= 1e-6
    assert loss.recordings[0].graph is graph


def test_a_parameter_of_another_shape_is_recorded_anew():
    def model(x):
        size = pyro.param("w", torch.ones(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(size.sum() * x, 1.0), obs=x)

    x = torch.randn(4)
    loss = Graphed(model, lambda x: None, TermsELBO(), compile=False)
    first, _ = loss((x,), {})
    pyro.clear_param_store()
    pyro.param("w", torch.ones(3))
    second, pairs = loss((x,), {})
    assert first != second
    assert pairs[0][1].shape == (3,)


def test_what_a_load_of_pyros_store_brings_is_seen(tmp_path):
    program = make()
    loss = captured(program)
    loss((X, Y), {})
    pyro.get_param_store().save(tmp_path / "store")
    before = {name: parameter.detach().clone() for name, parameter in loss.parameters.items()}
    with torch.no_grad():
        for parameter in program.guide.parameters():
            parameter.add_(1.0)
    pyro.get_param_store().load(tmp_path / "store")
    loss((X, Y), {})
    assert all(torch.equal(before[name], parameter) for name, parameter in loss.parameters.items())


def test_a_weight_of_the_kl_is_an_input_and_zero_a_graph_of_its_own():
    weights = [0.0, 0.25, 0.5, 1.0]
    program = make(TermsELBO(kl_weight=lambda step: weights[step]))
    loss = captured(program)
    for weight in weights:
        value, _ = loss((X, Y), {})
        terms = program.loss.terms
        assert terms.kl_weight == weight
        assert torch.allclose(value, terms.negative_log_likelihood + weight * terms.kl)
    assert len(loss.recordings) == 2


def test_recording_leaves_batch_norm_and_noise_as_they_were():
    model = small_classifier(net=batch_normed())
    guide = AutoRadial(model)
    guide.setup(X, Y)
    loss = Graphed(model, guide, TermsELBO(), compile=False)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert len(before) == 3
    pyro.set_rng_seed(0)
    loss((X, Y), {})
    replayed = {name: buffer.clone() for name, buffer in model.named_buffers()}
    after = torch.rand(3)
    for name, buffer in model.named_buffers():
        buffer.copy_(before[name])
    pyro.set_rng_seed(0)
    TermsELBO()(model, guide)(X, Y)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(replayed[name], buffer)
        assert not torch.equal(before[name], buffer)
    assert torch.equal(torch.rand(3), after)


NET = BayesianModule(batch_normed())


def function_of_a_network(x, y):
    logits = NET(x)
    with pyro.plate("data", 40, subsample=torch.arange(len(x))):
        pyro.sample("y", dist.Categorical(logits=logits), obs=y)


def test_the_network_of_a_model_that_is_a_function_is_found():
    guide = AutoRadial(function_of_a_network)
    # Under a handler, which wraps the function.
    loss = Graphed(pyro.poutine.scale(function_of_a_network, scale=0.5), guide, TermsELBO(), compile=False)
    guide.setup(X, Y)
    counts = [int(buffer) for name, buffer in NET.named_buffers() if name.endswith("num_batches_tracked")]
    for _ in range(3):
        loss((X, Y), {})
    now = [int(buffer) for name, buffer in NET.named_buffers() if name.endswith("num_batches_tracked")]
    assert [new - old for new, old in zip(now, counts, strict=True)] == [3]
    NET.eval()
    loss((X, Y), {})
    NET.train()
    loss((X, Y), {})
    # One for each mode.
    assert len(loss.recordings) == 2
    now[0] += 1
    assert now == [int(b) for name, b in NET.named_buffers() if name.endswith("num_batches_tracked")]


def test_a_buffer_that_a_network_assigns_is_written_into():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1
            return self.linear(x)

    program = make(net=Counting())
    loss = captured(program)
    for _ in range(3):
        loss((X, Y), {})
    assert float(dict(program.model.named_buffers())["bnn.net.calls"]) == 3.0


def test_modes_and_plain_attributes_are_part_of_the_signature():
    program = make(net=nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
    loss = captured(program)
    loss((X, Y), {})
    program.model.eval()
    compared_in_eval_mode = compared(program, loss.graphs)
    assert compared_in_eval_mode[1] <= 1e-6
    program.model.likelihood.num_data = 80
    loss((X, Y), {})
    assert program.loss.terms.num_data == 80
    assert compared(program, loss.graphs)[1] <= 1e-6


def test_like_graphs_share_compiled_code(monkeypatch):
    made = []

    def compile_graph(module, examples, options):
        made.append(module)
        return module

    monkeypatch.setattr(inductor, "compile_graph", compile_graph)
    inductor.forget()
    model = small_classifier()
    chain = PriorChain(model, form="normal")
    for task in range(3):
        guide = chain.guide(AutoRadial, init_stddev=0.1)
        loss = Graphed(chain, guide, TermsELBO())
        loss.graphs.compile_after = 3
        for _ in range(6):
            loss((X, Y), {})
        with torch.no_grad():
            for parameter in guide.parameters():
                parameter.add_(0.1)
        chain.advance(guide)
        # The model's own standard normal, then chained priors.
        assert len(made) == (1 if task == 0 else 2)
    model.likelihood.num_data = 400
    Graphed(chain, chain.guide(AutoRadial), TermsELBO())((X, Y), {})
    assert len(made) == 2


def test_odd_batches_are_not_compiled(monkeypatch):
    made = []
    monkeypatch.setattr(inductor, "compile_graph", lambda module, *_: made.append(module) or module)
    inductor.forget()
    model = small_classifier()
    loss = Graphed(model, AutoRadial(model), TermsELBO())
    loss.graphs.compile_after = 3
    for _ in range(3):
        for _ in range(5):
            loss((X, Y), {})
        loss((X[:5], Y[:5]), {})
    assert len(made) == 1
    assert len(loss.recordings) == 2


def test_compiled_gradients_are_those_of_the_program():
    program = make()
    loss = Graphed(program.model, program.guide, program.loss)
    loss.graphs.compile_after = 3
    for _ in range(5):
        loss((X, Y), {})
    (way,) = loss.graphs.replays
    assert way.code is not None
    for seed in (1, 2):
        assert compared(program, loss.graphs, seed)[1] <= 1e-5


def test_with_too_many_signatures_others_run_as_usual_after_one_warning():
    program = make()
    loss = captured(program, max_signatures=2)
    loss((X, Y), {})
    loss((X[:5], Y[:5]), {})
    with pytest.warns(UserWarning, match="of more than max_signatures = 2 kinds") as warned:
        loss((X[:4], Y[:4]), {})
    assert len(warned) == 1
    loss((X[:3], Y[:3]), {})
    pyro.set_rng_seed(0)
    value, _ = loss((X[:3], Y[:3]), {})
    assert not loss.replayed
    pyro.set_rng_seed(0)
    assert torch.equal(value, program.loss(program.model, program.guide)(X[:3], Y[:3]).detach())
    loss((X, Y), {})
    assert loss.replayed


def test_what_is_wrong_in_the_model_raises_its_own_error():
    with pytest.raises(ValueError, match="y must have shape"):
        captured(make())((X, Y[:3]), {})
    guide = AutoMeanField(small_classifier(net=nn.Linear(3, 2)))
    with pytest.raises(ValueError, match=r"guide must have latent site '0.weight'"):
        Graphed(small_classifier(net=nn.Sequential(nn.Linear(3, 2))), guide, TermsELBO())((X, Y), {})


def runs_as_it_is(loss, args, reason):
    with pytest.warns(UserWarning, match=reason) as warned:
        loss(args, {})
    assert len(warned) == 1
    with pytest.MonkeyPatch.context() as patch:
        # Said once, and not tried again.
        patch.setattr(loss_graphs, "record_program", None)
        loss(args, {})
    assert not loss.recordings
    assert len(loss.eager_reasons) == 1


def branching(x):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    if w > 0:  # The user's own line.
        w = 2 * w
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w, 1.0), obs=x)


def test_control_flow_on_a_value_is_named_with_its_line():
    line = branching.__code__.co_firstlineno + 2
    loss = Graphed(branching, AutoMeanField(branching), TermsELBO(), compile=False)
    with pytest.warns(UserWarning, match=f"reads the value of a tensor .*test_loss_graphs.py, line {line}"):
        loss((X[:, 0],), {})
    pyro.set_rng_seed(0)
    value, pairs = loss((X[:, 0],), {})
    pyro.set_rng_seed(0)
    assert torch.equal(value, TermsELBO()(branching, loss.guide)(X[:, 0]).detach())
    assert len(pairs) == 2
    assert not loss.recordings


def hidden(draw):
    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w + draw(), 1.0), obs=x)

    return model


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        np.random.random,
        lambda: torch.tensor(random.random()),
        lambda: torch.from_numpy(np.array([np.random.random()])),  # noqa: NPY002,
    ],
    ids=["Python", "NumPy", "tensor of Python's", "tensor of NumPy's"],
)
def test_random_numbers_of_python_and_numpy_are_found(draw):
    model = hidden(draw)
    loss = Graphed(model, AutoMeanField(model), TermsELBO(), compile=False)
    runs_as_it_is(loss, (X[:, 0],), "two different graphs")


def by_fork():
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return torch.randn(())


def by_handler():
    with pyro.poutine.seed(rng_seed=7):
        return torch.randn(())


@pytest.mark.parametrize("draw", [by_fork, by_handler])
def test_a_seed_that_a_model_sets_holds_in_each_step(draw):
    model = hidden(draw)
    loss = Graphed(model, AutoMeanField(model), TermsELBO(), compile=False)
    runs_as_it_is(loss, (X[:, 0],), "sets the state of torch's generator")


def test_sites_that_differ_from_run_to_run_are_named():
    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y" if random.random() < 0.5 else "z", dist.Normal(w, 1.0), obs=x)

    random.seed(0)
    loss = Graphed(model, AutoMeanField(model), TermsELBO(), compile=False)
    runs_as_it_is(loss, (X[:, 0],), "sites differ between two runs: .*'[yz]'.*'[zy]'")


def test_a_tensor_whose_value_is_read_is_compared():
    temperature = torch.tensor(2.0)

    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w / temperature.item(), 1.0), obs=x)

    program = Program(model, AutoMeanField(model), TermsELBO(), (X[:, 0],))
    loss = captured(program)
    for value in (2.0, 3.0, 2.0):
        temperature.fill_(value)
        assert compared(program, loss.graphs)[1] <= 1e-6
    temperature.fill_(torch.nan)
    for _ in range(2):
        with pyro.validation_enabled(False):
            assert torch.isnan(loss(program.args, {})[0])
    assert loss.replayed
    assert len(loss.recordings) == 3


def new_one(scale):
    return scale.new_ones(())


@pytest.mark.parametrize("make_like", [new_one, torch.ones_like])
def test_a_constant_of_the_shape_of_a_draw_may_be_read(make_like):
    def model(x):
        scale = pyro.sample("scale", dist.Gamma(2.0, 2.0))
        loc = 0.0 if make_like(scale) == 1.0 else 9.0
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(loc, scale), obs=x)

    program = Program(model, AutoMeanField(model), TermsELBO(), (X[:, 0],))
    loss = captured(program)
    assert compared(program, loss.graphs)[1] <= 1e-6
    assert len(loss.recordings) == 1


def test_a_power_of_a_draw_has_a_closed_form_in_a_graph():
    def model(x):
        scale = pyro.sample("scale", dist.InverseGamma(2.0, 2.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(0.0, scale), obs=x)

    def guide(x):
        rate = pyro.param("rate", torch.ones(()), constraint=dist.constraints.positive)
        pyro.sample("scale", dist.InverseGamma(2.0, rate))

    program = Program(model, guide, TraceMeanField_ELBO(), (X[:, 0],))
    loss = captured(program)
    assert compared(program, loss.graphs)[1] <= 1e-6
    assert len(loss.recordings) == 1


def test_shapes_that_depend_on_values_are_found():
    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        kept = x[x > 0]
        with pyro.plate("data", len(kept)):
            pyro.sample("y", dist.Normal(w, 1.0), obs=kept)

    loss = Graphed(model, AutoMeanField(model), TermsELBO(), compile=False)
    # A mask of 64 bytes at most would be a guard.
    runs_as_it_is(loss, (torch.linspace(-1.0, 1.0, 80),), "shape that depends on values")


def test_integer_indices_are_no_such_shapes():
    def model(x, rows):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(rows)):
            pyro.sample("y", dist.Normal(w, 1.0), obs=x[rows])

    loss = Graphed(model, AutoMeanField(model), TermsELBO(), compile=False)
    loss((X[:, 0], torch.tensor([0, 1])), {})
    pyro.set_rng_seed(0)
    second, _ = loss((X[:, 0], torch.tensor([5, 6])), {})
    pyro.set_rng_seed(0)
    expected = TermsELBO()(model, loss.guide)(X[:, 0], torch.tensor([5, 6]))
    torch.testing.assert_close(second, expected.detach())
    assert len(loss.recordings) == 1


def test_arguments_that_hide_tensors_run_as_they_are():
    class Batch:
        x = X[:, 0]

    def model(batch):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 8):
            pyro.sample("y", dist.Normal(w, 1.0), obs=batch.x)

    loss = Graphed(model, AutoMeanField(model), TermsELBO(), compile=False)
    runs_as_it_is(loss, (Batch(),), "arguments must be tensors, numbers.* got Batch")


def test_a_handler_around_the_call_is_at_work():
    program = make()
    loss = captured(program)
    loss((X, Y), {})
    with mean_only():
        first, second = (loss((X, Y), {})[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_machine_without_a_compiler_replays_graphs_as_recorded(monkeypatch):
    def missing(*args):
        raise inductor.CompilerMissingError("no g++")

    monkeypatch.setattr(inductor, "compile_graph", missing)
    inductor.forget()
    program = make()
    loss = Graphed(program.model, program.guide, program.loss)
    loss.graphs.compile_after = 3
    # In the second call the program itself runs.
    for _ in range(4):
        loss((X, Y), {})
    with pytest.warns(UserWarning, match=r"no compiler on this machine.*no g\+\+"):
        loss((X, Y), {})
    loss((X, Y), {})
    assert compared(program, loss.graphs)[1] <= 1e-6


@pytest.mark.parametrize("right_without_vectors", [True, False])
def test_wrong_code_is_not_used(monkeypatch, right_without_vectors):
    asked = []

    def wrong(module, examples, options):
        asked.append(options.get("cpp.simdlen"))
        if right_without_vectors and asked[-1] == 1:
            return module
        return lambda *tensors: [1.1 * t if t.is_floating_point() else t for t in module(*tensors)]

    monkeypatch.setattr(inductor, "compile_graph", wrong)
    inductor.forget()
    program = make(net=batch_normed())
    loss = Graphed(program.model, program.guide, program.loss)
    for _ in range(3):
        loss((X, Y), {})
    before = torch.get_rng_state(), [buffer.clone() for buffer in program.model.buffers()]
    with nullcontext() if right_without_vectors else pytest.warns(UserWarning, match="gives other numbers"):
        inductor.compile_once(loss.recordings[0].graph, [torch.ones(()), X, Y], {})
    assert asked == [None, 1]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(map(torch.equal, program.model.buffers(), before[1]))
    assert compared(program, loss.graphs)[1] <= 1e-6
    inductor.forget()


def test_code_that_changes_tensors_wrongly_is_not_used(monkeypatch):
    program = make(net=batch_normed())
    loss = captured(program)
    loss((X, Y), {})
    statistic = program.model.bnn.get_buffer("net.1.running_mean")
    before = statistic.clone()

    def wrong(module, examples, options):
        def code(*tensors):
            results = module(*tensors)
            statistic.add_(1.0)
            return results

        return code

    monkeypatch.setattr(inductor, "compile_graph", wrong)
    inductor.forget()
    (recording,) = loss.recordings
    with pytest.warns(UserWarning, match="gives other numbers"):
        code = inductor.compile_once(recording.graph, [torch.ones(()), X, Y], {})
    assert code is recording.graph.module
    assert torch.equal(statistic, before)
    inductor.forget()


def test_a_loss_without_gradients_takes_no_step():
    program = make()
    loss = captured(program)
    value, pairs = loss((X, Y), {}, gradients=False)
    assert not pairs
    assert program.loss.step == 0
    assert not value.requires_grad


def test_float64_stays_float64():
    pyro.set_rng_seed(0)
    program = classifier(AutoRadial, TermsELBO(), 4)
    program.model.double()
    args = (program.args[0].double(), program.args[1])
    loss = captured(program._replace(args=args))
    value, _ = loss(args, {})
    assert value.dtype == torch.float64
    assert compared(program._replace(args=args), loss.graphs)[1] <= 1e-14
