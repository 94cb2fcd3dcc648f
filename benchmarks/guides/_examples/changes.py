# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What programs read besides their arguments, and how it changes between two steps."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule
from torch import Tensor

from benchmarks.guides._examples.program import Program


class Change(NamedTuple):
    """A program, what changes before each further step, and the program of these steps."""

    program: Program
    change: Callable[[], Any]
    after: Program


Y = torch.tensor([0.5, -1.0, 2.0, 0.3, 0.1, -0.2, 0.9, 1.5])
FACTOR = 1.0


def with_factor(read: Callable[[], Any]) -> Callable[[Tensor], None]:
    """A model whose likelihood is scaled by what it reads."""

    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with poutine.scale(scale=read()), pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    return model


def nothing() -> None:
    """Change nothing."""


def changing(model: Callable[..., Any], change: Callable[[], Any], before: Any = (Y,), after: Any = None) -> Change:
    """A model under a guide of normal sites, and its arguments."""
    program = Program(model, AutoNormal(model), Trace_ELBO(), before)
    return Change(program, change, program._replace(args=before if after is None else after))


def closure() -> Change:
    """A Python number in a closure."""
    factor = 1.0

    def change() -> None:
        nonlocal factor
        factor = 3.0

    return changing(with_factor(lambda: factor), change)


def global_variable() -> Change:
    """A Python number in a global variable."""
    global FACTOR
    FACTOR = 1.0

    def change() -> None:
        global FACTOR
        FACTOR = 3.0

    return changing(with_factor(lambda: FACTOR), change)


def closed_dict() -> Change:
    """An item of a dict in a closure."""
    state = {"annealing": 0.1}
    return changing(with_factor(lambda: state["annealing"]), lambda: state.update(annealing=0.7))


def closed_object() -> Change:
    """An attribute of a plain object in a closure."""
    state = SimpleNamespace(annealing=0.1)
    return changing(with_factor(lambda: state.annealing), lambda: setattr(state, "annealing", 0.7))


def closed_tensor() -> Change:
    """A tensor in a closure that is replaced."""
    state = {"annealing": torch.tensor(0.1)}
    return changing(with_factor(lambda: state["annealing"]), lambda: state.update(annealing=torch.tensor(0.7)))


def filled_tensor() -> Change:
    """A tensor in a closure that is written to."""
    factor = torch.tensor(0.1)
    return changing(with_factor(lambda: factor), lambda: factor.fill_(0.7))


def method() -> Change:
    """An attribute of the object whose method is the model."""

    class Holder:
        factor = 1.0

        def model(self, y: Tensor) -> None:
            with_factor(lambda: self.factor)(y)

    holder = Holder()
    return changing(holder.model, lambda: setattr(holder, "factor", 3.0))


def module_attribute() -> Change:
    """An attribute of a module."""

    class Holder(PyroModule):
        factor = 1.0

        def forward(self, y: Tensor) -> None:
            with_factor(lambda: self.factor)(y)

    holder = Holder()
    return changing(holder, lambda: setattr(holder, "factor", 3.0))


def counting_module() -> Change:
    """A module that counts its calls and anneals by the count."""

    class Counter(PyroModule):
        calls = 0

        def forward(self, y: Tensor) -> None:
            self.calls += 1
            with_factor(lambda: 0.1 * self.calls)(y)

    counter = Counter()
    return changing(counter, lambda: setattr(counter, "calls", 50))


def argument(first: Any, second: Any) -> Change:
    """The scale as an argument."""

    def model(y: Tensor, factor: Any) -> None:
        with_factor(lambda: factor)(y)

    return changing(model, nothing, (Y, first), (Y, second))


def batch_size() -> Change:
    """A smaller mini-batch."""

    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 100, subsample=torch.arange(len(y))):
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    return changing(model, nothing, after=(Y[:3],))


def data_size() -> Change:
    """The number of rows of the whole data, in a closure."""
    size = {"rows": 100}

    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", size["rows"], subsample=torch.arange(len(y))):
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    return changing(model, lambda: size.update(rows=1_000))


def added_site() -> Change:
    """A list in a closure that grows, and with it the model's sites."""
    names = ["a"]

    def model(y: Tensor) -> None:
        total = sum(pyro.sample(name, dist.Normal(0.0, 1.0)) for name in names)
        pyro.sample("y", dist.Normal(total, 1.0).expand(y.shape).to_event(1), obs=y)

    def guide(y: Tensor) -> None:
        for name in names:
            pyro.sample(name, dist.Normal(pyro.param(f"loc_{name}", torch.tensor(0.3)), 0.5))

    program = Program(model, guide, Trace_ELBO(), (Y,))
    return Change(program, lambda: names.__setitem__(slice(1, None), ["b"]), program)


def control_flow() -> Change:
    """A branch on the value of a draw."""

    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        scale = 1.0 if z > 0 else 3.0
        pyro.sample("y", dist.Normal(z, scale).expand(y.shape).to_event(1), obs=y)

    return changing(model, nothing)


def branch_on_data() -> Change:
    """A branch on the mean of the data."""

    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        scale = 1.0 if y.mean() > 0 else 3.0
        pyro.sample("y", dist.Normal(z, scale).expand(y.shape).to_event(1), obs=y)

    return changing(model, nothing, after=(-Y,))


def length_of_chain() -> Change:
    """The length of a ``pyro.markov`` loop, read from an argument."""

    def model(y: Tensor, length: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        for t in pyro.markov(range(int(length))):
            pyro.sample(f"y_{t}", dist.Normal(z, 1.0), obs=y[t])

    return changing(model, nothing, (Y, torch.tensor(3)), (Y, torch.tensor(5)))


def sequential_plate() -> Change:
    """A loop over a plate that subsamples."""

    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        for i in pyro.plate("rows", len(y), subsample_size=3):
            pyro.sample(f"y_{i}", dist.Normal(z, 1.0), obs=y[i])

    return changing(model, nothing)


def observed_sites() -> Change:
    """Which sites ``poutine.condition`` fixes, by a dict that is changed."""
    data = {"b": torch.tensor(0.5)}

    def model() -> None:
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("b", dist.Normal(a, 1.0))

    program = Program(poutine.condition(model, data), AutoNormal(poutine.block(model, hide=["b"])), Trace_ELBO())
    return Change(program, lambda: data.update(b=torch.tensor(5.0)), program)


def particles() -> Change:
    """The number of particles of the loss."""
    model = with_factor(lambda: 1.0)
    loss = Trace_ELBO(num_particles=1)
    program = Program(model, AutoNormal(model), loss, (Y,))
    return Change(program, lambda: setattr(loss, "num_particles", 3), program)


def replaced_parameter() -> Change:
    """A parameter of Pyro's store that is set to a new value."""

    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(pyro.param("mean", torch.tensor(0.0)), 1.0))
        pyro.sample("y", dist.Normal(z, 1.0).expand(y.shape).to_event(1), obs=y)

    def change() -> None:
        if pyro.param("mean") != 2.0:
            pyro.get_param_store()["mean"] = torch.tensor(2.0)

    return changing(model, change)


def mask() -> Change:
    """A Python mask in a closure."""
    state = {"seen": True}

    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with poutine.mask(mask=state["seen"]):
            pyro.sample("y", dist.Normal(z, 1.0).expand(y.shape).to_event(1), obs=y)

    return changing(model, lambda: state.update(seen=False))


CHANGES: dict[str, Callable[[], Change]] = {
    "closure": closure,
    "global": global_variable,
    "dict in a closure": closed_dict,
    "object in a closure": closed_object,
    "tensor in a closure, replaced": closed_tensor,
    "tensor in a closure, filled": filled_tensor,
    "object of the method": method,
    "module's attribute": module_attribute,
    "module that counts": counting_module,
    "number as argument": lambda: argument(0.1, 0.7),
    "tensor as argument": lambda: argument(torch.tensor(0.1), torch.tensor(0.7)),
    "mini-batch": batch_size,
    "size of the data": data_size,
    "added site": added_site,
    "branch on a draw": control_flow,
    "branch on data": branch_on_data,
    "length of pyro.markov": length_of_chain,
    "sequential plate": sequential_plate,
    "poutine.condition": observed_sites,
    "particles": particles,
    "parameter set again": replaced_parameter,
    "poutine.mask": mask,
}
