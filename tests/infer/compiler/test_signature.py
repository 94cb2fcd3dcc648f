# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Numbers that change are inputs of graphs, and small values that Python reads of arguments are guards."""

import dataclasses
import enum
import math
from typing import NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import nn

from pyro_radial import AutoMeanField, CompiledSVI, TermsELBO

X = torch.linspace(-1.0, 1.0, 30).reshape(10, 3)


def regression(x, factor=1.0, noise=1.0):
    """A linear regression whose prior or noise may change."""
    with poutine.scale(scale=factor):
        weights = pyro.sample("weights", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(x @ weights, noise), obs=x.sum(-1))


def weighted_guide(model):
    """A mean-field guide with the weight of the model."""
    base = AutoMeanField(model)
    base.setup(X)

    def guide(x, factor=1.0, **_):
        with poutine.scale(scale=factor):
            return base(x)

    return guide


def losses_of(kind, model, guide, first, calls, loss=Trace_ELBO, **options):
    """The losses of steps from one start, each on noise of its own, and what took them; ``first`` sets up the guide."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    made = guide(model)
    made(*first)
    elbo = loss(max_plate_nesting=1)
    svi = kind(model, made, pyro.optim.Adam({"lr": 0.05}), elbo, **options)
    losses = []
    for seed, (args, kwargs) in enumerate(calls):
        pyro.set_rng_seed(seed)
        losses.append(svi.step(*args, **kwargs))
    return torch.tensor(losses), svi


def check(model, calls, *, first=None, guide=AutoMeanField, loss=Trace_ELBO, num_graphs):
    """Compare compiled steps with Pyro's; ``calls`` may be a function that changes what the model reads."""
    first = calls[0][0] if first is None else first
    make_calls = calls if callable(calls) else lambda: calls
    expected, _ = losses_of(SVI, model, guide, first, make_calls(), loss)
    losses, svi = losses_of(CompiledSVI, model, guide, first, make_calls(), loss, compile=False)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0.0)
    assert svi.eager_reasons == []
    assert num_graphs is None or svi.num_graphs == num_graphs


def test_a_schedule_of_floats_has_one_graph_after_the_first_value():
    calls = [((X,), {"factor": (number + 1) / 12}) for number in range(12)]
    check(regression, calls, guide=weighted_guide, loss=TermsELBO, num_graphs=1)


def test_an_integer_that_is_no_size_is_an_input():
    check(regression, [((X, 1.0, number), {}) for number in range(1, 8)], num_graphs=1)


@pytest.mark.parametrize("read", [range, math.log, lambda number: bool(number > 3)])
def test_a_number_that_python_reads_has_a_graph_for_each_value(read):
    def model(x, number):
        read(number)
        regression(x, noise=1.0 + number)

    check(model, [((X, number % 3 + 2), {}) for number in range(6)], num_graphs=3)


def test_a_program_that_asks_for_the_type_of_a_number_is_right():
    def model(x, noise):
        regression(x, noise=noise if isinstance(noise, float) else 2.0 * noise)

    check(model, [((X, 1.0 + number % 3), {}) for number in range(6)], num_graphs=3)


def test_an_attribute_that_changes_is_an_input():
    class Model(nn.Module):
        def forward(self, x):
            regression(x, noise=self.factor)

    model = Model()

    def calls():
        for number in range(6):
            model.factor = 0.5 + number / 20
            yield (X,), {}

    model.factor = 0.5
    check(model, calls, first=(X,), num_graphs=1)


def test_a_number_of_another_type_is_another_signature_and_nan_is_as_in_pyro():
    svi = CompiledSVI(regression, AutoMeanField(regression), pyro.optim.Adam({"lr": 0.01}), Trace_ELBO(), compile=False)
    for noise in (1.0, 2.0, 1, 2.5):
        svi.step(X, 1.0, noise)
    with pytest.raises(ValueError, match="scale"):
        svi.step(X, math.nan)
    with pytest.raises(TypeError, match="str"):
        svi.step(X, "much")
    svi.step(X, 1.0, 1.5)
    assert svi.compiled


HIDDEN = {
    "torch.tensor": lambda number: torch.tensor([number, 1.0])[0],
    "torch.FloatTensor": lambda number: torch.FloatTensor([number])[0],
    "numpy": lambda number: torch.as_tensor(np.array(number)),
    "new_tensor": lambda number: X.new_tensor([number])[0],
    "text": lambda number: float(f"{number}"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_number_that_no_operation_shows_has_a_graph_for_each_value(name):
    def model(x, number):
        regression(x, noise=HIDDEN[name](number))

    check(model, [((X, 0.5 + number % 3), {}) for number in range(6)], num_graphs=3)


@pytest.mark.parametrize("name", ["torch.tensor", "text", "repr"])
def test_a_read_of_an_argument_that_no_operation_shows_is_a_guard(name):
    hidden = HIDDEN.get(name, lambda number: float(repr(number)[7:-1]))

    def model(x, numbers):
        regression(x, noise=hidden(numbers.min()))

    calls = [((X, torch.full((40,), 0.5 + number % 2)), {}) for number in range(4)]
    check(model, calls, num_graphs=2)


def test_a_number_that_is_something_else_for_a_while_is_seen():
    def model(x, noise, holder=[1.0]):  # noqa: B006
        factor = 1.0 if holder[0] is None else holder[0]
        regression(x, noise=factor * (2.0 if noise is None else noise))

    values = [1.0, 2.0, None, 3.0, 1, 2, 1.5, None, 2.5, 3, 0.5, 1]

    def calls():
        for value, other in zip(values, reversed(values), strict=True):
            model.__defaults__[0][0] = other
            yield (X, value), {}

    check(model, calls, first=(X, 1.0), num_graphs=None)


@pytest.mark.parametrize(
    ("values", "computed", "num_graphs"),
    {
        # Python's numbers are exact here; a graph for each value where a graph could not be.
        "power": ([50_000, 60_000, 200_000], lambda k: k**4 / 1e21, 2),
        "product": ([2**40, 2**41, 2**42], lambda k: k * k / 2**82, 2),
        "too large for 64 bits": ([1, 2, 3, 2**64], lambda k: (k % 7) / 7, 2),
        "too large for a float": ([1, 2, 3, 2**53 + 1], lambda k: (k - 2**53) % 5, 2),
        "date": ([738_000.1, 738_000.2, 738_000.3], lambda date: date - 738_000, 1),
        "quotient of integers": ([2**31 + 1, 2**31 + 2, 2**31 + 3], lambda k: k / 3 - 2**31 / 3, 1),
        "small difference": ([1e-9, 2e-9, 3e-9], lambda gap: ((1.0 + gap) - 1.0) * 1e9, 1),
        "seconds since 1970": ([1.7e9, 1.7e9 + 0.5, 1.7e9 + 1.0], lambda s: math.pi * (s - 1.7e9), 1),
    }.values(),
)
def test_numbers_are_as_exact_as_in_python(values, computed, num_graphs):
    def model(x, number):
        regression(x, noise=1.0 + computed(number))

    check(model, [((X, value), {}) for value in values], num_graphs=num_graphs)


@pytest.mark.parametrize(
    "number", [lambda k: k, lambda k: 0.5 * k, lambda k: k / 7, lambda k: torch.stack([X[0], X[0] * k]).sum()]
)
def test_a_number_changes_no_dtype(number):
    def model(x, k):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        location = (w * number(k)).sum() + (x.long() * number(k) * 1.0).sum() * 0.0
        assert location.dtype == torch.float32
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(location, 1.0), obs=x.sum(-1))

    check(model, [((X, 0.5 + n), {}) for n in range(4)], num_graphs=1)


class Choice(enum.Enum):
    FIRST, SECOND = 0, 1


@dataclasses.dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    rows: slice
    noise: float


class Pair(NamedTuple):
    x: torch.Tensor
    columns: range


def of_a_dataclass(batch):
    regression(batch.x[batch.rows], noise=batch.noise)


def of_a_named_tuple(pair):
    regression(pair.x[list(pair.columns)])


def of_a_slice(x, rows):
    regression(x[rows])


def of_an_enum(x, choice):
    regression(x if choice is Choice.FIRST else -x)


@pytest.mark.parametrize(
    ("model", "calls", "num_graphs"),
    [
        (of_a_slice, [(X, slice(None)), (X, slice(2, 8)), (X, slice(None))], 2),
        # Out of range, as in Pyro.
        (of_a_slice, [(X, slice(5, 500))] * 3, 1),
        (of_an_enum, [(X, Choice.FIRST), (X, Choice.SECOND)], 2),
        (of_a_named_tuple, [(Pair(X, range(4)),), (Pair(2.0 * X, range(4)),)], 1),
        (of_a_dataclass, [(Batch(X + n, slice(n), 1.0 + n),) for n in (2, 3, 2, 3)], 2),
    ],
)
def test_plain_python_objects_are_arguments(model, calls, num_graphs):
    check(model, [(args, {}) for args in calls], num_graphs=num_graphs)


@dataclasses.dataclass
class Rows:
    """A batch with an attribute of the class and one that is no field."""

    x: torch.Tensor
    factor = 1.0


def with_attribute(value, **attributes):
    vars(value).update(attributes)
    return value


class Noise(float):
    """A number that can have attributes."""


@pytest.mark.parametrize(
    ("model", "make", "num_graphs"),
    {
        "entry that is no field": (
            lambda rows: regression(rows.x, noise=rows.extra),
            lambda n: with_attribute(Rows(X), extra=1.0 + n),
            1,
        ),
        "attribute of a tensor": (
            lambda x: regression(x, noise=x.noise),
            lambda n: with_attribute(X.clone(), noise=1.0 + n % 2),
            2,
        ),
        "attribute of a number": (
            lambda noise: regression(X, noise=noise * noise.factor),
            lambda n: with_attribute(Noise(1.5), factor=1.0 + n % 2),
            2,
        ),
        "attribute of a parameter": (
            lambda x: regression(x, noise=x.noise),
            lambda n: with_attribute(nn.Parameter(X.clone(), requires_grad=False), noise=1.0 + n % 2),
            2,
        ),
    }.values(),
)
def test_attributes_of_arguments_are_seen(model, make, num_graphs):
    check(model, [((make(n),), {}) for n in range(4)], num_graphs=num_graphs)


def test_an_attribute_of_the_class_of_an_argument_is_seen():
    def calls():
        for factor in (1.0, 1.0, 2.0):
            Rows.factor = factor
            yield (Rows(X),), {}

    check(lambda rows: regression(rows.x, noise=rows.factor), calls, first=(Rows(X),), num_graphs=None)


def test_a_tensor_as_an_attribute_of_an_argument_is_refused():
    svi = CompiledSVI(regression, AutoMeanField(regression), pyro.optim.Adam({"lr": 0.01}), Trace_ELBO(), compile=False)
    with pytest.warns(UserWarning, match=r"an argument has the attribute weight, of type Tensor"):
        svi.step(with_attribute(X.clone(), weight=X))


def test_arguments_that_change_in_place_are_seen():
    def model(batch):
        regression(batch["x"][batch["rows"]], noise=batch["noise"])

    def calls():
        batch = {"x": X.clone(), "rows": [0, 1, 2, 3], "noise": 1.0}
        for number in range(12):
            batch["x"] += 0.1
            batch["noise"] += 0.25
            if number == 6:
                batch["rows"].append(4)
            yield (batch,), {}

    first = ({"x": X, "rows": [0, 1], "noise": 1.0},)
    # One for each number of rows.
    check(model, calls, first=first, num_graphs=2)


GROUP = torch.arange(10) % 3


def one_hot(group):
    return nn.functional.one_hot(group, 3).float()


def most(group):
    return torch.eye(int(group.max().item()) + 1)[group][:, :3]


def masked(group):
    return X[group > 0].sum() + one_hot(group)


def counted(group):
    return group.bincount().float()[group][:, None] + one_hot(group)


def decided(group):
    return one_hot(group) if group.sum() >= 2 else -one_hot(group)


def distinct(group):
    return group.unique().float().mean() + one_hot(group)


@pytest.mark.parametrize(
    ("function", "num_graphs"), [(one_hot, 1), (most, 1), (masked, 3), (counted, 3), (decided, 1), (distinct, 2)]
)
def test_small_values_that_python_reads_of_arguments_are_guards(function, num_graphs):
    def model(group):
        regression(function(group))

    calls = [((group,), {}) for group in (GROUP, GROUP.flip(0), 2 - GROUP, GROUP)]
    calls += [((GROUP.clamp(min=1),), {})]
    check(model, calls, num_graphs=num_graphs)
