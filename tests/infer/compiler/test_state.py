# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""State that a program reads: it changes between two steps, or the program itself changes it."""

import os
import random
import re
import warnings
import weakref
from array import array
from collections import ChainMap, deque, namedtuple
from functools import partial
from itertools import count
from types import MethodType, ModuleType, SimpleNamespace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from torch import nn

from benchmarks.guides._examples.changes import CHANGES
from benchmarks.guides.pyro_examples import TARGET, changed
from pyro_radial import AutoMeanField
from pyro_radial.infer.compiler.state import IdentityMap
from tests.helpers.programs import Graphed, assert_same_steps, eager_svi, recorded_svi, take_steps

X = torch.linspace(-1.0, 2.0, 6)
SCALE = 1.5
CONFIG = ModuleType("config")


def regression(x, scale, prior=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0) if prior is None else prior)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w * scale, 1.0), obs=x)


def guide(x):
    pyro.sample("w", dist.Normal(pyro.param("loc", lambda: torch.zeros(())), 1.0))


def reading(holder, read, change=lambda holder: None):
    """A model that reads its scale from an object, and a change of the object."""
    return lambda x: regression(x, read(holder)), lambda program: change(holder)


class Net(nn.Module):
    """A layer whose output is scaled by what a function reads from the module."""

    def __init__(self, read, trained=False, **attributes):
        super().__init__()
        # A graph is recorded only of a program whose parameters are in param statements, or are frozen.
        self.layer = nn.Linear(1, 1).requires_grad_(trained)
        self.read, self.trained = read, trained
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        if self.trained:
            pyro.module("net", self)
        regression(x, self.layer(x[:, None])[:, 0] * self.read(self))


def of_module(read, change=lambda net: None, buffer=None, **attributes):
    torch.manual_seed(0)
    net = Net(read, **attributes)
    if buffer is not None:
        net.register_buffer("total", buffer)
    return net, lambda program: change(net)


def one(net):
    return 1.0


def number_in_a_closure():
    scale = 1.5

    def model(x):
        regression(x, scale)

    def change(program):
        nonlocal scale
        scale = 2.5

    return model, change


def global_number():
    def change(program):
        globals()["SCALE"] = 2.5

    globals()["SCALE"] = 1.5
    return lambda x: regression(x, SCALE), change


def default_of_an_argument():
    def model(x, scale=1.5):
        regression(x, scale)

    return model, lambda program: setattr(model, "__defaults__", (2.5,))


def attribute_of_a_function():
    def model(x):
        regression(x, model.scale)

    model.scale = 1.5
    return model, lambda program: setattr(model, "scale", 2.5)


def keyword_of_a_partial_function():
    model = partial(regression, scale=1.5)
    return model, lambda program: model.keywords.update(scale=2.5)


class Trainer:
    """A plain object with a model as a method."""

    shared = 1.5

    def __init__(self):
        self._hidden = 1.5
        self.nets = {"first": nn.Linear(1, 1).requires_grad_(False)}

    def model(self, x):
        regression(x, self.shared * self.hidden * self.factor())

    def of_nets(self, x):
        regression(x, self.nets["first"](x[:, None])[:, 0])

    @property
    def hidden(self):
        return self._hidden

    def factor(self):
        return 1.0


def of_trainer(change, method="model"):
    torch.manual_seed(0)
    # A new class, which can be changed.
    trainer = type("Trainer", (Trainer,), {"factor": lambda self: 1.0})()
    return getattr(trainer, method), lambda program: change(trainer)


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.5


class Factor(float):
    """A number with an attribute."""

    power = 1.0


def objects_in(container):
    """An object with the scale, in a container without keys."""
    term = Factor(1.5)
    term.power = 1.0
    return reading(
        (container([term]), term),
        lambda h: sum(each**each.power for each in h[0]),
        lambda h: setattr(h[1], "power", 2.0),
    )


Pair = namedtuple("Pair", "scale shift")


def replaced_total(net):
    net.total = net.total + 1.0
    return net.total


def prior_of_a_pyro_module():
    class Model(PyroModule):
        def forward(self, x):
            regression(x, self.scale, self.w)

    model = Model()
    model.w = PyroSample(dist.Normal(0.0, 1.0))
    model.forward = MethodType(lambda self, x: regression(x, self.scale), model)
    model.scale = 1.5
    return model, lambda program: setattr(model, "scale", 2.5)


def another_guide():
    def narrow(x):
        pyro.sample("w", dist.Normal(pyro.param("loc"), 0.5))

    return lambda x: regression(x, 1.5), lambda program: setattr(program, "guide", narrow)


def dtype_of_autocast():
    def model(x):
        regression(x, (x[:, None] @ torch.full((1, 1), 1.3))[:, 0].float())

    def change(program):
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)

    return model, change


def mask_from_numbers():
    size = {"rows": 2}
    return lambda x: regression(x[torch.arange(len(x)) < size["rows"]], 1.5), lambda program: size.update(rows=4)


def mask_in_a_closure():
    mask = torch.tensor([True, True, False, False, True, False])
    return lambda x: regression(x[mask], 1.5), lambda program: mask.fill_(True)


def tensor_of_a_distribution():
    prior = dist.Normal(0.0, 1.0)
    return lambda x: regression(x, 1.5, prior), lambda program: setattr(prior, "loc", TORCH(1.0))


TORCH = torch.tensor
#: A function that makes a model, and a function of the program that changes what the model reads.
RECORDED = {
    "number in a closure": number_in_a_closure,
    "dict in a closure": lambda: reading(
        {"model": {"scale": 1.5}}, lambda h: h["model"]["scale"], lambda h: h["model"].update(scale=2.5)
    ),
    "deque": lambda: reading(deque([1.5]), lambda h: h[-1], lambda h: h.append(2.5)),
    "set": lambda: reading(set(), lambda h: 2.5 if "large" in h else 1.5, lambda h: h.add("large")),
    **{
        f"object in a {name}": partial(objects_in, container)
        for name, container in {
            "set": set,
            "frozenset": frozenset,
            "dict's key": dict.fromkeys,
            "NumPy array": partial(np.array, dtype=object),
            "set of weak references": weakref.WeakSet,
            "chain of maps": lambda objects: ChainMap({}, dict.fromkeys(objects)),
        }.items()
    },
    "memory view": lambda: reading(memoryview(bytearray(b"12")), lambda h: float(h[0]), lambda h: h.__setitem__(0, 60)),
    "array": lambda: reading(array("d", [1.5]), lambda h: h[0], lambda h: h.__setitem__(0, 2.5)),
    "NumPy array": lambda: reading(np.array([1.5, 2.0]), lambda h: float(h[0]), lambda h: h.__setitem__(0, 2.5)),
    "global number": global_number,
    "attribute of a Python module": lambda: reading(
        CONFIG, lambda h: CONFIG.scale, lambda h: setattr(CONFIG, "scale", 2.5)
    ),
    "environment variable": lambda: reading(
        os.environ, lambda h: float(os.environ["TEST_SCALE"]), lambda h: os.environ.update(TEST_SCALE="2.5")
    ),
    "default of an argument": default_of_an_argument,
    "attribute of a function": attribute_of_a_function,
    "keyword of a partial function": keyword_of_a_partial_function,
    "attribute behind a property": lambda: of_trainer(lambda t: setattr(t, "_hidden", 2.5)),
    "attribute of a class": lambda: of_trainer(lambda t: setattr(type(t), "shared", 2.5)),
    "method of a class": lambda: of_trainer(lambda t: setattr(type(t), "factor", lambda self: 2.5)),
    "method of one object": lambda: of_trainer(lambda t: setattr(t, "factor", lambda: 2.5)),
    "module in a dict": lambda: of_trainer(
        lambda t: t.nets.update(first=nn.Linear(1, 1, bias=False).requires_grad_(False)), "of_nets"
    ),
    "object with slots": lambda: reading(Slotted(), lambda h: h.scale, lambda h: setattr(h, "scale", 2.5)),
    "number of a module": lambda: of_module(lambda n: n.scale, lambda n: setattr(n, "scale", 2.5), scale=1.5),
    "list of a module": lambda: of_module(lambda n: sum(n.scales), lambda n: n.scales.append(2.5), scales=[1.5]),
    "named tuple": lambda: of_module(
        lambda n: n.pair.scale, lambda n: setattr(n, "pair", Pair(2.5, 0.0)), pair=Pair(1.5, 0.0)
    ),
    "new attribute": lambda: of_module(
        lambda n: 2.5 if hasattr(n, "extra") else 1.5, lambda n: setattr(n, "extra", True)
    ),
    "layer": lambda: of_module(
        one, lambda n: setattr(n, "layer", nn.Sequential(nn.Linear(1, 1), nn.Tanh()).requires_grad_(False))
    ),
    "mode": lambda: of_module(lambda n: 1.5 if n.training else 2.5, lambda n: n.eval()),
    "forward hook": lambda: of_module(one, lambda n: n.layer.register_forward_hook(lambda m, args, out: 2 * out)),
    "frozen parameter": lambda: of_module(one, lambda n: n.eval().layer.weight.requires_grad_(False), trained=True),
    "hook on a gradient": lambda: of_module(
        one, lambda n: n.layer.weight.register_hook(lambda gradient: 2 * gradient), trained=True
    ),
    "replaced tensor": lambda: of_module(lambda n: n.t, lambda n: setattr(n, "t", TORCH(2.5)), t=TORCH(1.5)),
    "tensor of another shape": lambda: of_module(
        lambda n: n.t.sum(), lambda n: setattr(n, "t", torch.ones(3)), t=torch.ones(2)
    ),
    "buffer that the program replaces": lambda: of_module(
        replaced_total, lambda n: n.total.fill_(5.0), buffer=torch.zeros(())
    ),
    "tensor of a distribution": tensor_of_a_distribution,
    "PyroModule": prior_of_a_pyro_module,
    "number of particles": lambda: (lambda x: regression(x, 1.5), lambda p: setattr(p.loss, "num_particles", 3)),
    "guide": another_guide,
    "default dtype": lambda: (
        lambda x: regression(x, torch.ones(6) / 3),
        lambda p: torch.set_default_dtype(torch.float64),
    ),
    "dtype of autocast": dtype_of_autocast,
    "argument as a list": lambda: (lambda x: regression(x, sum(x.tolist())), lambda p: p.args[0].add_(1.0)),
    "argument changed unseen": lambda: (lambda x: regression(x, sum(x.tolist())), lambda p: p.args[0].data.add_(1.0)),
    "argument changed by NumPy": lambda: (
        lambda x: regression(x, x[x > 0.5].sum()),
        lambda p: np.negative(p.args[0].numpy(), out=p.args[0].numpy()),
    ),
    "buffer as an array": lambda: of_module(lambda n: float(n.t.numpy()), lambda n: n.t.fill_(2.5), t=TORCH(1.5)),
    "comparison of tensors": lambda: reading(
        (torch.ones(2), torch.ones(2)), lambda h: 1.5 if torch.equal(*h) else 2.5, lambda h: h[0].fill_(2.0)
    ),
    "item of a tensor changed unseen": lambda: reading(
        TORCH([1.5, 1.0]), lambda h: (2.0 * h)[0].item(), lambda h: h.data.fill_(2.5)
    ),
    "item of a replaced tensor": lambda: of_module(
        lambda n: float(n.t), lambda n: setattr(n, "t", TORCH(2.5)), t=TORCH(1.5)
    ),
    "number in a tensor": lambda: reading(
        {"scale": 1.5}, lambda h: float(torch.tensor([h["scale"], 0.0]).sum()), lambda h: h.update(scale=2.5)
    ),
    "mask from numbers": mask_from_numbers,
    "mask in a closure": mask_in_a_closure,
    "item of an argument and a global": lambda: (
        lambda x: regression(x, X.sum().item() + x.sum().item()),
        lambda p: setattr(p, "args", (-X,)),
    ),
}


def list_that_grows():
    lengths = []

    def model(x):
        lengths.append(len(x))
        regression(x, float(len(lengths)))

    return model, lambda program: None


def counter_in_a_closure():
    calls = 0

    def model(x):
        nonlocal calls
        calls += 1
        regression(x, float(calls))

    return model, lambda program: None


def counted_calls(net):
    net.calls += 1
    return net.calls


def output_that_is_stored(net):
    net.last_output = net.layer.weight * 2.0
    return 1.5


def changed_buffer(net):
    net.total += 1
    return float(net.total)


def written_where_the_host_reads(net):
    table = torch.zeros(2)
    # An operation without a result.
    torch._foreach_add_([table], [net.layer.weight.detach().reshape(1).expand(2)])
    return table.sum().item()


def fill_weight(net):
    net.layer.weight.data.fill_(2.5)


#: Programs that run as they are, because they change their state, or because it cannot be compared.
EAGER = {
    "large NumPy array": lambda: reading(
        np.full(10_000, 1.5), lambda h: torch.as_tensor(h.mean()), lambda h: h.fill(2.5)
    ),
    "counter of a module": lambda: of_module(counted_calls, calls=0),
    "list that grows": list_that_grows,
    "counter in a closure": counter_in_a_closure,
    "output that is stored": lambda: of_module(output_that_is_stored, last_output=None),
    "iterator": lambda: reading(count(1), lambda h: float(next(h))),
    "generator of random numbers": lambda: reading(random.Random(0), lambda h: h.random()),
    "parameter as an array": lambda: of_module(
        lambda n: float(np.asarray(n.layer.bias.detach())[0]), lambda n: n.layer.bias.data.fill_(2.5), trained=True
    ),
    "item of a changed buffer": lambda: of_module(changed_buffer, buffer=torch.zeros(())),
    "item of a replaced buffer": lambda: of_module(lambda n: replaced_total(n).item(), buffer=torch.zeros(())),
    "written where the host reads": lambda: of_module(written_where_the_host_reads, fill_weight, trained=True),
}


@pytest.fixture(autouse=True)
def settings_restored():
    yield
    restore_settings()


def restore_settings():
    torch.set_default_dtype(torch.float32)
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_dtype("cpu", torch.bfloat16)


def steps_with_a_change(name, make_svi):
    """The outcomes of five steps, with a change before the fourth."""
    restore_settings()
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    CONFIG.scale, os.environ["TEST_SCALE"] = 1.5, "1.5"
    model, change = (RECORDED | EAGER)[name]()
    args = (X if name == "item of an argument and a global" else X.clone(),)
    program = SimpleNamespace(model=model, guide=guide, loss=Trace_ELBO(), args=args)
    svi = make_svi(program)
    # Loading a library takes random numbers of Python's in a first recording.
    pyro.set_rng_seed(1)
    outcomes = take_steps(svi, program, 3)
    change(program)
    svi.guide = program.guide
    return outcomes + take_steps(svi, program, 2), svi


@pytest.mark.parametrize("name", RECORDED | EAGER)
def test_steps_after_a_change_are_those_of_the_program(name):
    expected, _ = steps_with_a_change(name, eager_svi)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, svi = steps_with_a_change(name, recorded_svi)
    assert_same_steps(found, expected)
    assert svi.compiled == (name in RECORDED)
    assert len(caught) == len(svi.eager_reasons) == (name in EAGER)
    assert all("the program runs uncompiled: " in str(warning.message) for warning in caught)


# Changes that only programs of several sites, plates or handlers know; ``make soak`` runs all.
QUICK_CHANGES = {
    "mini-batch",
    "size of the data",
    "added site",
    "poutine.condition",
    "parameter set again",
    "length of pyro.markov",
    "sequential plate",
}
WHY_EAGER = {
    "module that counts": "it changes .*calls while it runs",
    "branch on a draw": "reads the value of a tensor",
    "branch on data": "reads the value of a tensor",
    "sequential plate": "reads the value of a tensor",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK_CHANGES else pytest.mark.slow) for name in CHANGES]
)
def test_a_changed_program_after_pyros_examples_gets_the_gradients_of_the_change(name):
    row = changed(name)
    assert float(row["error"]) <= TARGET
    assert bool(row["eagerly"]) == (name in WHY_EAGER)
    if name in WHY_EAGER:
        assert re.search(WHY_EAGER[name] + r".* \(changes.py, line \d+\)", row["eagerly"])


def plates(x):
    return pyro.plate("data", 12, subsample=x.long())


@pytest.mark.parametrize(
    ("scope", "make_guide"), [("global", AutoNormal), ("closure", AutoMeanField), ("name of a plate", AutoMeanField)]
)
def test_a_users_name_may_be_that_of_the_plates_of_a_guide(scope, make_guide):
    my_plates = plates

    def in_closure(plates):
        def model(x):
            with plates(x):
                pyro.sample("y", dist.Normal(pyro.sample("local", dist.Normal(0.0, 1.0)), 1.0), obs=x)

        return model

    def by_global(x):
        with plates(x):
            pyro.sample("y", dist.Normal(pyro.sample("local", dist.Normal(0.0, 1.0)), 1.0), obs=x)

    def by_string(x):
        with my_plates(x), pyro.plate("plates", 1, dim=-2):
            pyro.sample("y", dist.Normal(pyro.sample("local", dist.Normal(0.0, 1.0)), 1.0), obs=x)

    model = {"global": by_global, "closure": in_closure(plates), "name of a plate": by_string}[scope]
    loss = Graphed(model, make_guide(model, create_plates=plates), Trace_ELBO(), compile=False)
    for start in (0, 4):
        x = torch.arange(start, start + 4.0)
        pyro.set_rng_seed(0)
        replayed, _ = loss((x,))
    assert loss.replayed
    assert not loss.eager_reasons
    pyro.set_rng_seed(0)
    torch.testing.assert_close(replayed, torch.tensor(Trace_ELBO().loss(model, loss.guide, x)))


class Unhashable:
    """A model that compares equal to all others of its class, as an object of a dataclass does."""

    __hash__ = None

    def __init__(self, scale):
        self.scale = scale

    def __eq__(self, other):
        return isinstance(other, Unhashable)

    def __call__(self, x):
        regression(x, self.scale)


def test_an_identity_map_tells_equal_objects_apart_and_needs_no_hash():
    numbers = IdentityMap([(a := Unhashable(1.0), 1)])
    b = Unhashable(1.0)
    assert numbers.setdefault(a, 2) == 1
    assert numbers.setdefault(b, 2) == 2


def test_an_identity_map_keeps_its_keys_alive():
    class Key:
        pass

    numbers = IdentityMap()
    numbers.setdefault(key := Key(), 1)
    reference = weakref.ref(key)
    del key
    assert reference() is not None


def test_each_of_several_equal_models_has_a_graph():
    models = Unhashable(0.5), Unhashable(3.0)
    loss = Graphed(None, guide, Trace_ELBO(), compile=False)
    for loss.model in (*models, *models):
        pyro.set_rng_seed(0)
        replayed, _ = loss((X,))
        pyro.set_rng_seed(0)
        torch.testing.assert_close(replayed, torch.tensor(Trace_ELBO().loss(loss.model, guide, X)))
    assert len(loss.programs) == 2
    assert loss.replayed
