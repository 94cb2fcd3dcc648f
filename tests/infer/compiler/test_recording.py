# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What cannot be recorded runs as it is, with a reason; what a recording checks, warns of and leaves alone."""

import cProfile
import gc
import math
import operator
import random
import sys
import warnings
from functools import partial
from queue import SimpleQueue
from types import CodeType

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, JitTraceMeanField_ELBO, Trace_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pyro_radial import AutoMeanField, CompiledSVI, TermsELBO
from pyro_radial.infer.compiler import cache
from tests.helpers.networks import classifier, data
from tests.helpers.programs import (
    Graphed,
    Program,
    StoredParameter,
    X,
    Y,
    assert_same_steps,
    eager_svi,
    line,
    nothing,
    of_model,
    prepared,
    recorded_svi,
    take_steps,
)


class WithPenalty(Trace_ELBO):
    def loss_and_grads(self, model, guide, *args, **kwargs):
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        loss = loss + 100.0 * sum(p.square().sum() for p in guide.parameters())
        loss.backward()
        return loss.item()


class Encoded(nn.Module):
    """A model with a network that no param statement names."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)

    def forward(self, x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(self.net(x[:, None])[:, 0] + w, 0.5), obs=y)


class Checkpointed(PyroModule):
    def __init__(self, reentrant):
        super().__init__()
        self.a, self.b = PyroModule[nn.Linear](1, 8), PyroModule[nn.Linear](8, 1)
        self.dropout, self.reentrant = nn.Dropout(0.5), reentrant

    def hidden(self, x):
        return torch.tanh(self.dropout(self.a(x)))

    def forward(self, x, y):
        x = x[:, None].clone().requires_grad_(self.reentrant)
        hidden = checkpoint(self.hidden, x, use_reentrant=self.reentrant)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(self.b(hidden)[:, 0], 1.0), obs=y)


class Recurrent(PyroModule):
    def __init__(self):
        super().__init__()
        self.net = PyroModule[nn.LSTM](1, 2, batch_first=True)

    def forward(self, x, y):
        # The graph draws this, and then fails.
        x = x + torch.rand_like(x)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(self.net(x[:, None, None])[0][:, -1, 0], 1.0), obs=y)


def noisy(draw):
    """A line whose locations have other noise too."""

    def model(x, y):
        line(x, y + draw())

    return of_model(model)


def by_fork():
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return torch.randn(())


#: Counts the runs of a program. The content of queues is not seen.
RUNS = SimpleQueue()


def number_of_run():
    RUNS.put(None)
    return RUNS.qsize()


def with_changing_sites(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("yz"[number_of_run() % 2], dist.Normal(w, 1.0), obs=y)


def branching(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    if w > 0:  # The user's own line.
        w = 2 * w
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)


def on_positive_rows(x, y):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    positive = x[x > 0]
    with pyro.plate("data", len(positive)):
        pyro.sample("y", dist.Normal(w, 1.0), obs=positive)


def differentiating_its_argument(x, y):
    line(x.detach().requires_grad_(), y)
    x.requires_grad_()


class Batch:
    def __init__(self):
        self.x = X


def of_a_batch(batch):
    line(batch.x, Y)


def sparse(layout, *, as_argument):
    table = getattr(torch.eye(20)[:, :3], layout)()

    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 1), 1.0).to_event(2))
        with pyro.plate("rows", 20):
            pyro.sample("y", dist.Normal(((x if as_argument else table) @ w)[:, 0], 1.0), obs=y)

    return of_model(model, AutoMeanField, table if as_argument else X, Y)


def reading_what_it_stored():
    stored = StoredParameter()

    def model(x):
        # A number of the step before.
        if "theta" in vars(stored):
            x = x + float(vars(stored)["theta"].detach())
        stored(x)

    return of_model(model, AutoMeanField, X)


def of_loss(loss):
    guide = AutoMeanField(line)
    guide.setup(X, Y)
    return Program(line, guide, loss, (X, Y))


FILE_AND_LINE = rf"\(test_recording.py, line {branching.__code__.co_firstlineno + 2}\)"
#: Programs that are no graphs, and the reason.
REFUSED = {
    "branch on a draw": (partial(of_model, branching), f"reads the value of a tensor .* {FILE_AND_LINE}"),
    "Python's noise": (partial(noisy, random.random), "random numbers from Python or NumPy"),
    "tensor of NumPy's noise": (
        partial(noisy, lambda: torch.from_numpy(np.array([np.random.random()]))),  # noqa: NPY002
        "random numbers from Python or NumPy",
    ),
    "an unseen change": (partial(noisy, lambda: 1e-9 * number_of_run()), "two different graphs"),
    "a rare layer": (partial(noisy, lambda: 5.0 * (random.random() < 1e-9)), "random numbers from Python or NumPy"),
    "seed by a fork": (partial(noisy, by_fork), "sets the state of torch's generator"),
    # A mask of 64 bytes at most would be a guard.
    "shape by values": (
        lambda: of_model(on_positive_rows, AutoMeanField, torch.linspace(-1.0, 1.0, 80), Y),
        "shape that depends on values",
    ),
    "network without a param statement": (lambda: of_model(Encoded()), "no param statement names it"),
    "argument with a gradient": (
        lambda: of_model(line, AutoMeanField, X.clone().requires_grad_(), Y),
        "requires a gradient",
    ),
    "argument that gets a gradient": (
        lambda: of_model(differentiating_its_argument, AutoMeanField, X.clone(), Y),
        "requires a gradient",
    ),
    "checkpoint": (lambda: of_model(Checkpointed(False), nothing), "checkpointing with dropout"),
    "reentrant checkpoint": (lambda: of_model(Checkpointed(True), nothing), ""),
    "LSTM": (lambda: of_model(Recurrent(), nothing), "can record it, but not replay it"),
    "sparse argument": (lambda: sparse("to_sparse_coo", as_argument=True), "is sparse"),
    "sparse tensor": (lambda: sparse("to_sparse_csr", as_argument=False), "[Ss]parse"),
    "attribute read before it is set": (reading_what_it_stored, "reads the value of a tensor"),
    "object as an argument": (
        lambda: of_model(of_a_batch, AutoMeanField, Batch()),
        "arguments must be tensors, numbers.* got Batch",
    ),
    "gradients of a subclass": (lambda: of_loss(WithPenalty()), "WithPenalty computes its gradients"),
    "JitTraceMeanField_ELBO": (
        lambda: of_loss(JitTraceMeanField_ELBO(ignore_jit_warnings=True)),
        "more slowly; use TraceMeanField_ELBO",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_program_that_is_no_graph_runs_as_it_is_with_a_reason(name, monkeypatch):
    make, reason = REFUSED[name]
    program = prepared(make)
    expected = take_steps(eager_svi(program), program, 3)
    program = prepared(make)
    svi = recorded_svi(program)
    with pytest.warns(UserWarning, match=f"the program runs uncompiled: .*{reason}") as caught:
        found = take_steps(svi, program, 2)
    # Said once, and not tried again.
    assert sum("uncompiled" in str(warning.message) for warning in caught) == 1
    monkeypatch.setattr(cache, "record_program", None)
    found += take_steps(svi, program, 1)
    assert_same_steps(found, expected)
    assert len(svi.eager_reasons) == 1
    assert not svi.compiled
    assert not svi.num_graphs


def test_sites_that_differ_between_two_runs_are_named():
    program = of_model(with_changing_sites)._replace(loss=TermsELBO())
    with pytest.warns(UserWarning, match=r"sites differ between two runs: .*'[yz]'.*'[zy]'"):
        take_steps(recorded_svi(program), program, 1)


def test_a_refusal_is_remembered_for_all_values_and_shapes():
    runs = []

    def model(x, factor):
        runs.append(None)
        branching(factor * x, x)

    guide = AutoMeanField(model)
    guide.setup(X, 0.5)
    svi = recorded_svi(Program(model, guide, Trace_ELBO()))
    with pytest.warns(UserWarning, match="reads the value"):
        svi.step(X, 0.5)
    runs.clear()
    for number in range(8):
        svi.step(X[: 5 + number % 4], number / 10)
    assert len(runs) == 8


def test_a_first_run_that_does_more_than_later_ones_is_recorded():
    from sklearn.cluster import KMeans

    centers = {}

    def model(x):
        if not centers:
            start = KMeans(2, n_init=1, random_state=0).fit(x.numpy()).cluster_centers_
            centers["start"] = torch.tensor(start)
        weights = pyro.sample("weights", dist.Normal(centers["start"], 1.0).to_event(2))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(x @ weights.mean(0), 1.0), obs=x.sum(-1))

    svi = recorded_svi(Program(model, AutoMeanField(model), Trace_ELBO()))
    for _ in range(3):
        svi.step(torch.randn(10, 3))
    assert svi.compiled
    assert svi.eager_reasons == []


def test_a_guide_that_is_collected_meanwhile_is_not_missed():
    inputs, targets = data(8)
    model = classifier()
    guide, forgotten = AutoMeanField(model), AutoMeanField(model)
    guide.setup(inputs, targets)
    SVI(model, forgotten, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO()).step(inputs, targets)
    # Pyro's store has its parameters until it is collected, which a cycle leaves to the collector.
    forgotten.itself = [forgotten]
    # A program that changes what can be compared is not recorded, but the content of queues is not seen.
    guides, runs = SimpleQueue(), SimpleQueue()
    guides.put(forgotten)

    def watched(x, y=None):
        runs.put(None)
        if runs.qsize() > 2 and not guides.empty():
            guides.get()
        return model(x, y)

    del forgotten
    threshold = gc.get_threshold()
    try:
        gc.set_threshold(1, 1, 1)
        # A step that cannot be recorded warns.
        recorded_svi(Program(watched, guide, TermsELBO())).step(inputs, targets)
    finally:
        gc.set_threshold(*threshold)
    assert guides.empty()


def test_a_program_is_recorded_under_profilers():
    """One written in C, as for ``python -m cProfile``, one written in Python, and a trace function."""
    inputs, targets = data(8)
    expected = _losses_of_steps(inputs, targets)
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        losses = _losses_of_steps(inputs, targets)
    finally:
        profiler.disable()
    assert losses == expected
    names = {
        code.co_name for code in map(operator.attrgetter("code"), profiler.getstats()) if isinstance(code, CodeType)
    }
    assert "_losses_of_steps" in names

    def note(frame, event, argument):
        seen.add(event)

    for get_hook, set_hook in ((sys.getprofile, sys.setprofile), (sys.gettrace, sys.settrace)):
        previous, seen = get_hook(), set()
        set_hook(note)
        try:
            losses = _losses_of_steps(inputs, targets)
            assert get_hook() is note
        finally:
            set_hook(previous)
        assert losses == expected
        assert "call" in seen


def test_a_program_is_recorded_while_its_operations_are_counted():
    """Torch's counter hooks the gradients of several parameters at once."""
    inputs, targets = data(8)
    expected = _losses_of_steps(inputs, targets)
    with FlopCounterMode(display=False) as counter:
        assert _losses_of_steps(inputs, targets) == expected
    assert counter.get_total_flops() > 0


def test_a_search_for_nan_runs_the_program_itself():
    inputs, targets = data(8)
    model = classifier()
    svi = recorded_svi(Program(model, AutoMeanField(model), TermsELBO()))
    svi.step(inputs, targets)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
        with (
            torch.autograd.detect_anomaly(),
            pytest.warns(UserWarning, match=r"runs uncompiled: torch\.autograd\.detect_anomaly"),
        ):
            svi.step(inputs, targets)
    assert not svi.compiled
    svi.step(inputs, targets)
    assert svi.compiled


def _losses_of_steps(inputs, targets):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model = classifier()
    svi = recorded_svi(Program(model, AutoMeanField(model), TermsELBO()))
    losses = [svi.step(inputs, targets) for _ in range(3)]
    assert svi.compiled
    return losses


EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools(effects, signature=""):
    """Eight schools, not centered."""
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
    pyro.deterministic("log_tau", tau.log())
    pyro.factor("nothing", 0.0 * tau)
    with pyro.plate("schools", len(effects)):
        effect = pyro.sample("standardized", dist.Normal(0.0, 1.0))
        pyro.sample("effect", dist.Normal(mu + tau * effect, ERRORS), obs=effects)


@pytest.mark.parametrize(
    ("guide", "loss", "is_wrong"),
    [
        (AutoNormal, TraceMeanField_ELBO, True),
        (AutoMeanField, TraceMeanField_ELBO, False),
        (AutoNormal, Trace_ELBO, False),
        (AutoNormal, TermsELBO, False),
    ],
)
def test_a_log_jacobian_that_pyros_loss_leaves_out_is_named_once(guide, loss, is_wrong):
    svi = recorded_svi(Program(schools, guide(schools), loss()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("default", "TraceMeanField_ELBO leaves out")
        for signature in ("a", "a", "b") if is_wrong else ("a",):
            svi.step(EFFECTS, signature)
    named = [str(warning.message).partition("; ")[0] for warning in caught]
    assert named == ["TraceMeanField_ELBO leaves out the log-Jacobian of ['tau']"] * is_wrong
    assert {warning.filename for warning in caught} <= {take_steps.__code__.co_filename, __file__}


@pytest.mark.filterwarnings("ignore:TraceMeanField_ELBO leaves out")
def test_without_the_log_jacobian_a_scale_falls_to_zero():
    """Wrong in SVI too; the numbers in docs/compiled.md."""
    medians = []
    for make in (SVI, partial(CompiledSVI, compile=False)):
        for loss in (TraceMeanField_ELBO(), TermsELBO()):
            pyro.clear_param_store()
            pyro.set_rng_seed(0)
            guide = AutoNormal(schools)
            # Pyro's own step for the wrong loss, and ours for the right one.
            if (make is SVI) != isinstance(loss, TermsELBO):
                svi = make(schools, guide, pyro.optim.Adam({"lr": 0.1}), loss)
                for _ in range(200):
                    svi.step(EFFECTS)
                medians.append(float(guide.median()["tau"]))
    assert medians[0] < 0.05
    assert 1.2 < medians[1] < 4.0


def labelled(distribution):
    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", distribution(x[:, :1] * w), obs=y)

    return model


#: A distribution, a value out of its range, and whether Pyro has a finite density there without validation.
OUT_OF_RANGE = {
    "a negative class": (lambda f: dist.Categorical(logits=f), -1.0, False),
    "half a count": (lambda f: dist.Poisson(f[:, 0].exp()), 0.5, True),
    "half a count of an event": (lambda f: dist.Poisson(f.exp()).to_event(1), 0.5, False),
    "a negative time": (lambda f: dist.Exponential(f[:, 0].exp()), -1.0, False),
    "a masked count": (lambda f: dist.Poisson(f[:, 0].exp()).mask(torch.ones(8, dtype=torch.bool)), -2.0, False),
}


@pytest.mark.parametrize(
    ("name", "validate"),
    [*((name, True) for name in OUT_OF_RANGE), *((name, False) for name, row in OUT_OF_RANGE.items() if row[2])],
)
def test_an_observation_out_of_range_is_an_error_as_in_svi(name, validate):
    make, wrong, _ = OUT_OF_RANGE[name]
    model = labelled(make)
    guide = AutoNormal(model)
    x, targets = torch.randn(8, 3), torch.ones(8, 3) if "event" in name else torch.ones(8)
    with pyro.validation_enabled(validate):
        svi = recorded_svi(Program(model, guide, Trace_ELBO()))
        svi.step(x, targets)
        expected = {name: value.detach().clone() for name, value in guide.named_parameters()}
        targets[0] = wrong
        if not validate:
            # As Pyro does without validation.
            assert math.isfinite(svi.step(x, targets))
            return
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"site 'y' must have observations within the support .*, got -?[0-9.]*$"
            ):
                svi.step(x, targets)
        assert all(torch.equal(expected[name], value) for name, value in guide.named_parameters())
        assert svi.num_graphs == 1
        assert "remainder" not in svi.graphs.programs[0].graph.module.code
        svi.step(x, torch.ones_like(targets))


def test_recording_leaves_noise_and_buffers_as_they_were():
    """Two evaluations of a graph, the first of which records it, are two runs of the program."""
    model = classifier(net=nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)))
    loss = Graphed(model, AutoMeanField(model), TermsELBO(), compile=False)
    x, y = data(8)
    loss.guide.setup(x, y)
    initial = {name: buffer.clone() for name, buffer in model.named_buffers()}
    ends = []
    for evaluate in (lambda: loss((x, y), gradients=False)[0], lambda: TermsELBO()(model, loss.guide)(x, y)):
        model.load_state_dict(initial, strict=False)
        pyro.set_rng_seed(0)
        values = {str(step): evaluate().detach() for step in range(2)}
        ends.append({**values, "noise": torch.rand(3), **{n: b.clone() for n, b in model.named_buffers()}})
    torch.testing.assert_close(ends[0], ends[1])


def coins(x):
    heads = pyro.sample("heads", dist.Bernoulli(0.5))
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    pyro.sample("x", dist.Normal(level + heads, 1.0).expand(x.shape).to_event(1), obs=x)


def guide_of_coins(x):
    pyro.sample("heads", dist.Bernoulli(logits=pyro.param("logit", lambda: torch.zeros(()))))
    pyro.sample("level", dist.Normal(pyro.param("level_loc", lambda: torch.zeros(())), 0.5))


@pytest.mark.filterwarnings("ignore:the program runs uncompiled")
def test_a_loss_that_scores_draws_runs_as_it_is_and_names_them():
    outcomes = []
    for take in (eager_svi, recorded_svi):
        program = prepared(lambda: Program(coins, guide_of_coins, TraceGraph_ELBO(), (X,)))
        outcomes.append(take_steps(svi := take(program), program))
    assert_same_steps(*outcomes)
    assert svi.num_graphs == 0
    (reason,) = svi.eager_reasons
    assert reason.endswith("by scores of ['heads'], which have no rsample")


def rows_in_a_plate(rows, y, size=None):
    with pyro.plate("rows", 8, subsample=rows, subsample_size=size):
        local = pyro.sample("local", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(local, 0.3), obs=y)


def same_plate(rows, y, size=None):
    return pyro.plate("rows", 8, subsample=rows, subsample_size=size)


@pytest.mark.parametrize(
    ("create_plates", "args", "is_named"),
    [
        (None, (torch.tensor([6, 1, 2]), X[:3]), True),
        (same_plate, (torch.tensor([6, 1, 2]), X[:3]), False),
        # Each draws its rows, and the model gets those of the guide.
        (None, (None, X[:3], 3), False),
        (None, (torch.arange(8), torch.ones(8)), False),
    ],
)
def test_a_plate_whose_rows_the_guide_draws_in_place_of_given_ones_is_named_once(create_plates, args, is_named):
    guide = AutoNormal(rows_in_a_plate, create_plates=create_plates)
    svi = CompiledSVI(rows_in_a_plate, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO(), compile=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            svi.step(*args)
    assert [str(warning.message)[:46] for warning in caught] == [
        "the guide draws the rows of the plate 'rows' b"
    ] * is_named
