# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Kinds of state that a program reads: each changes between two steps, or is changed by the program."""

import dataclasses
import os
import random
import warnings
from array import array
from collections import deque, namedtuple
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

from pyro_radial import AutoMeanField, TermsELBO
from pyro_radial.infer.step.loss_evaluation import Call, evaluate_loss
from tests.helpers.graphs import Graphed

X = torch.linspace(-1.0, 2.0, 6)
SCALE = 1.5
COUNTED = 0
CONFIG = ModuleType("config")
KINDS, EAGER = {}, set()


def kind(make):
    """A function that makes a model, and a function that changes what it reads (in place, in a program's parts)."""
    KINDS[make.__name__] = make
    return make


def runs_eagerly(make):
    EAGER.add(make.__name__)
    return kind(make)


def regression(x, scale, prior=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0) if prior is None else prior)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w * scale, 1.0), obs=x)


def guide(x):
    pyro.sample("w", dist.Normal(pyro.param("loc", lambda: torch.zeros(())), 1.0))


class Net(nn.Module):
    """A layer whose output is scaled by what a function reads from the module."""

    def __init__(self, read=lambda self: 1.0, layer=None, trained=False, **attributes):
        super().__init__()
        # A graph is recorded only of a program whose parameters are in param statements, or are frozen.
        self.layer = (nn.Linear(1, 1) if layer is None else layer).requires_grad_(trained)
        self.read, self.trained = read, trained
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        if self.trained:
            pyro.module("net", self)
        regression(x, self.layer(x[:, None])[:, 0] * self.read(self))


def of_module(read, change, **attributes):
    torch.manual_seed(0)
    net = Net(read, **attributes)
    return net, lambda p: change(net)


@kind
def number_in_a_closure():
    scale = 1.5

    def model(x):
        regression(x, scale)

    def change(p):
        nonlocal scale
        scale = 2.5

    return model, change


@kind
def nested_dict_in_a_closure():
    config = {"model": {"scale": 1.5}}
    return lambda x: regression(x, config["model"]["scale"]), lambda p: config["model"].update(scale=2.5)


@kind
def deque_in_a_closure():
    scales = deque([1.5])
    return lambda x: regression(x, scales[-1]), lambda p: scales.append(2.5)


@kind
def set_in_a_closure():
    flags = set()
    return lambda x: regression(x, 2.5 if "large" in flags else 1.5), lambda p: flags.add("large")


@kind
def array_in_a_closure():
    values = array("d", [1.5])
    return lambda x: regression(x, values[0]), lambda p: values.__setitem__(0, 2.5)


@kind
def numpy_array_changed_in_place():
    values = np.array([1.5, 2.0])
    return lambda x: regression(x, float(values[0])), lambda p: values.__setitem__(0, 2.5)


@runs_eagerly
def large_numpy_array():
    values = np.full(10_000, 1.5)
    return lambda x: regression(x, torch.as_tensor(values.mean())), lambda p: values.fill(2.5)


@kind
def global_number():
    def change(p):
        globals()["SCALE"] = 2.5

    globals()["SCALE"] = 1.5
    return lambda x: regression(x, SCALE), change


@kind
def attribute_of_a_python_module():
    CONFIG.scale = 1.5
    return lambda x: regression(x, CONFIG.scale), lambda p: setattr(CONFIG, "scale", 2.5)


@kind
def environment_variable():
    os.environ["TEST_SCALE"] = "1.5"
    return lambda x: regression(x, float(os.environ["TEST_SCALE"])), lambda p: os.environ.update(TEST_SCALE="2.5")


@kind
def function_called_by_the_model():
    parts = SimpleNamespace(scale=lambda: 1.5)
    return lambda x: regression(x, parts.scale()), lambda p: setattr(parts, "scale", lambda: 2.5)


@kind
def closure_of_a_function_called_by_the_model():
    config = {"scale": 1.5}

    def scale():
        return config["scale"]

    return lambda x: regression(x, scale()), lambda p: config.update(scale=2.5)


@kind
def default_of_an_argument():
    def model(x, scale=1.5):
        regression(x, scale)

    return model, lambda p: setattr(model, "__defaults__", (2.5,))


@kind
def attribute_of_a_function():
    def model(x):
        regression(x, model.scale)

    model.scale = 1.5
    return model, lambda p: setattr(model, "scale", 2.5)


@kind
def keyword_of_a_partial_function():
    model = partial(regression, scale=1.5)
    return model, lambda p: model.keywords.update(scale=2.5)


class Trainer:
    """A plain object with a model as a method."""

    shared = 1.5

    def __init__(self):
        self.scale, self._own = 1.5, 1.5
        self.nets = {
            "first": nn.Linear(1, 1).requires_grad_(False),
            "others": [nn.BatchNorm1d(1, affine=False), nn.Dropout(0.0)],
        }

    def model(self, x):
        regression(x, self.scale * self.shared * self.own * self.factor())

    def of_nets(self, x):
        hidden = self.nets["first"](x[:, None])
        for net in self.nets["others"]:
            hidden = net(hidden)
        regression(x, hidden[:, 0])

    @property
    def own(self):
        return self._own

    def factor(self):
        return 1.0


def of_trainer(change, method="model"):
    torch.manual_seed(0)
    # A class of its own, which can be changed.
    trainer = type("Trainer", (Trainer,), {"factor": lambda self: 1.0})()
    return getattr(trainer, method), lambda p: change(trainer)


@kind
def attribute_of_a_plain_object():
    return of_trainer(lambda t: setattr(t, "scale", 2.5))


@kind
def attribute_behind_a_property():
    return of_trainer(lambda t: setattr(t, "_own", 2.5))


@kind
def attribute_of_a_class():
    return of_trainer(lambda t: setattr(type(t), "shared", 2.5))


@kind
def method_of_a_class():
    return of_trainer(lambda t: setattr(type(t), "factor", lambda self: 2.5))


@kind
def method_of_one_object():
    return of_trainer(lambda t: setattr(t, "factor", lambda: 2.5))


@kind
def mode_of_a_module_in_a_list_of_an_object():
    return of_trainer(lambda t: t.nets["others"][0].eval(), "of_nets")


@kind
def another_module_in_a_dict_of_an_object():
    def change(trainer):
        trainer.nets["first"] = nn.Linear(1, 1, bias=False).requires_grad_(False)

    return of_trainer(change, "of_nets")


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.5


@kind
def object_with_slots():
    slotted = Slotted()
    return lambda x: regression(x, slotted.scale), lambda p: setattr(slotted, "scale", 2.5)


@dataclasses.dataclass
class Config:
    scale: float = 1.5


Pair = namedtuple("Pair", "scale shift")


@kind
def number_of_a_module():
    return of_module(lambda net: net.scale, lambda net: setattr(net, "scale", 2.5), scale=1.5)


@kind
def numpy_number_of_a_module():
    return of_module(
        lambda net: float(net.scale), lambda net: setattr(net, "scale", np.float64(2.5)), scale=np.float64(1)
    )


@kind
def list_of_a_module():
    return of_module(lambda net: sum(net.scales), lambda net: net.scales.append(2.5), scales=[1.5])


@kind
def dataclass_of_a_module():
    return of_module(lambda net: net.config.scale, lambda net: setattr(net.config, "scale", 2.5), config=Config())


@kind
def named_tuple_of_a_module():
    return of_module(lambda net: net.pair.scale, lambda net: setattr(net, "pair", Pair(2.5, 0.0)), pair=Pair(1.5, 0.0))


@kind
def attribute_added_later():
    return of_module(lambda net: 2.5 if hasattr(net, "extra") else 1.5, lambda net: setattr(net, "extra", True))


@kind
def forward_replaced():
    def forward(self, x):
        regression(x, 2.5)

    return of_module(lambda net: 1.5, lambda net: setattr(net, "forward", MethodType(forward, net)))


@kind
def layer_replaced():
    return of_module(
        lambda net: 1.5,
        lambda net: setattr(net, "layer", nn.Sequential(nn.Linear(1, 1), nn.Tanh()).requires_grad_(False)),
    )


@kind
def mode():
    return of_module(lambda net: 1.5 if net.training else 2.5, lambda net: net.eval())


@kind
def forward_hook():
    return of_module(lambda net: 1.5, lambda net: net.layer.register_forward_hook(lambda m, args, out: 2 * out))


@kind
def forward_pre_hook():
    return of_module(lambda net: 1.5, lambda net: net.layer.register_forward_pre_hook(lambda m, args: (args[0] + 1.0,)))


@kind
def frozen_parameter():
    return of_module(lambda net: 1.5, lambda net: net.eval().layer.weight.requires_grad_(False), trained=True)


@kind
def hook_on_a_gradient():
    return of_module(lambda net: 1.5, lambda net: net.layer.weight.register_hook(lambda grad: 2 * grad), trained=True)


@kind
def parameter_replaced():
    return of_module(
        lambda net: 1.5, lambda net: setattr(net.layer, "weight", nn.Parameter(torch.ones(1, 1), requires_grad=False))
    )


@kind
def tensor_replaced():
    return of_module(lambda net: net.t, lambda net: setattr(net, "t", torch.tensor(2.5)), t=torch.tensor(1.5))


@kind
def tensor_of_another_shape():
    return of_module(lambda net: net.t.sum(), lambda net: setattr(net, "t", torch.ones(3)), t=torch.ones(2))


@kind
def tensor_changed_in_place():
    return of_module(lambda net: net.t, lambda net: net.t.fill_(2.5), t=torch.tensor(1.5))


@kind
def buffer_that_the_program_replaces():
    def read(net):
        net.total = net.total + 1.0
        return net.total

    net, _ = of_module(read, None)
    net.register_buffer("total", torch.zeros(()))
    return net, lambda p: net.total.fill_(5.0)


@kind
def statistics_of_batch_norm():
    torch.manual_seed(0)
    net = Net(layer=nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    return net, lambda p: net.layer[1].reset_running_stats()


def with_prior(net, x):
    regression(x, 1.5, net.prior)


@kind
def distribution_replaced():
    parts = SimpleNamespace(prior=dist.Normal(0.0, 1.0))
    return partial(with_prior, parts), lambda p: setattr(parts, "prior", dist.Normal(1.0, 2.0))


@kind
def tensor_of_a_distribution():
    parts = SimpleNamespace(prior=dist.Normal(0.0, 1.0))
    return partial(with_prior, parts), lambda p: setattr(parts.prior, "loc", torch.tensor(1.0))


@kind
def prior_of_a_pyro_module():
    class Model(PyroModule):
        def forward(self, x):
            regression(x, self.w)

    model = PyroModule[Net]()
    model = Model()
    model.w = PyroSample(dist.Normal(0.0, 1.0))
    model.forward = MethodType(lambda self, x: regression(x, self.scale), model)
    model.scale = 1.5
    return model, lambda p: setattr(model, "scale", 2.5)


@kind
def scale_of_a_handler():
    config = {"scale": 0.5}

    def model(x):
        with pyro.poutine.scale(scale=config["scale"]):
            regression(x, 1.5)

    return model, lambda p: config.update(scale=0.25)


@kind
def number_of_particles():
    def change(p):
        p.loss.num_particles = 3

    return lambda x: regression(x, 1.5), change


class Tempered(Trace_ELBO):
    """A loss with an object of its own."""

    config = SimpleNamespace(weight=1.0)

    def differentiable_loss(self, *args, **kwargs):
        return self.config.weight * super().differentiable_loss(*args, **kwargs)


@kind
def object_of_the_loss():
    Tempered.config.weight = 1.0

    def change(p):
        p.loss.config.weight = 0.5

    return lambda x: regression(x, 1.5), change


@kind
def another_guide():
    def other(x):
        pyro.sample("w", dist.Normal(pyro.param("loc"), 0.5))

    return lambda x: regression(x, 1.5), lambda p: setattr(p, "guide", other)


@kind
def default_dtype():
    return lambda x: regression(x, torch.ones(6) / 3), lambda p: torch.set_default_dtype(torch.float64)


@kind
def dtype_of_autocast():
    def model(x):
        regression(x, (x[:, None] @ torch.full((1, 1), 1.3))[:, 0].float())

    def change(p):
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)

    return model, change


@runs_eagerly
def counter_of_a_module():
    def read(net):
        net.calls += 1
        return net.calls

    return of_module(read, lambda net: None, calls=0)


@runs_eagerly
def list_that_grows():
    kept = []

    def model(x):
        kept.append(len(x))
        regression(x, float(len(kept)))

    return model, lambda p: None


@runs_eagerly
def counter_among_the_globals():
    globals()["COUNTED"] = 0

    def model(x):
        global COUNTED
        COUNTED += 1
        regression(x, float(COUNTED))

    return model, lambda p: None


@runs_eagerly
def counter_in_a_closure():
    calls = 0

    def model(x):
        nonlocal calls
        calls += 1
        regression(x, float(calls))

    return model, lambda p: None


@runs_eagerly
def output_that_is_kept():
    def read(net):
        net.last = net.layer.weight * 2.0
        return 1.5

    return of_module(read, lambda net: None, last=None)


@runs_eagerly
def iterator():
    numbers = count(1)
    return lambda x: regression(x, float(next(numbers))), lambda p: None


@runs_eagerly
def generator_of_random_numbers():
    generator = random.Random(0)
    return lambda x: regression(x, generator.random()), lambda p: None


@runs_eagerly
def random_numbers_of_python():
    return lambda x: regression(x, random.random()), lambda p: None


@kind
def argument_as_a_list():
    return lambda x: regression(x, sum(x.tolist())), lambda p: p.x.add_(1.0)


@kind
def buffer_as_an_array():
    return of_module(lambda net: float(net.t.numpy()), lambda net: net.t.fill_(2.5), t=torch.tensor(1.5))


@runs_eagerly
def parameter_as_an_array():
    return of_module(
        lambda net: float(np.asarray(net.layer.bias.detach())[0]),
        lambda net: net.layer.bias.data.fill_(2.5),
        trained=True,
    )


@kind
def comparison_of_tensors():
    one, other = torch.ones(2), torch.ones(2)
    return lambda x: regression(x, 1.5 if torch.equal(one, other) else 2.5), lambda p: one.fill_(2.0)


@kind
def item_of_a_tensor_that_is_changed_unseen():
    scale = torch.tensor([1.5, 1.0])
    return lambda x: regression(x, (2.0 * scale)[0].item()), lambda p: scale.data.fill_(2.5)


@kind
def item_of_a_tensor_that_is_replaced():
    return of_module(lambda net: float(net.t), lambda net: setattr(net, "t", torch.tensor(2.5)), t=torch.tensor(1.5))


@kind
def numbers_from_python():
    config = {"scale": 1.5}
    return lambda x: regression(x, float(torch.tensor([config["scale"], 0.0]).sum())), lambda p: config.update(
        scale=2.5
    )


@kind
def loop_over_a_plate():
    config = {"scale": 1.5}

    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        for row in pyro.plate("rows", len(x)):
            pyro.sample(f"y_{row}", dist.Normal(w * row * config["scale"], 1.0), obs=x[row])

    return model, lambda p: config.update(scale=2.5)


@kind
def mask_from_numbers():
    size = {"rows": 2}
    return lambda x: regression(x[torch.arange(len(x)) < size["rows"]], 1.5), lambda p: size.update(rows=4)


@kind
def mask_in_a_closure():
    mask = torch.tensor([True, True, False, False, True, False])
    return lambda x: regression(x[mask], 1.5), lambda p: mask.fill_(True)


@runs_eagerly
def item_of_a_buffer_that_the_program_changes():
    def read(net):
        net.calls += 1
        return float(net.calls)

    net, change = of_module(read, lambda net: None)
    net.register_buffer("calls", torch.zeros(()))
    return net, change


@runs_eagerly
def item_of_a_buffer_that_the_program_replaces():
    def read(net):
        net.calls = net.calls + 1
        return net.calls.item()

    net, change = of_module(read, lambda net: None)
    net.register_buffer("calls", torch.zeros(()))
    return net, change


@kind
def item_of_an_argument_that_is_a_global_too():
    def change(p):
        p.x = -p.x

    return lambda x: regression(x, X.sum().item() + x.sum().item()), change


@runs_eagerly
def written_where_the_host_reads():
    def read(net):
        table = torch.zeros(2)
        # An operation without a result.
        torch._foreach_add_([table], [net.layer.weight.detach().reshape(1).expand(2)])
        return table.sum().item()

    return of_module(read, lambda net: net.layer.weight.data.fill_(2.5), trained=True)


def restore_settings():
    torch.set_default_dtype(torch.float32)
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_dtype("cpu", torch.bfloat16)


@pytest.fixture(autouse=True)
def settings_restored():
    yield
    restore_settings()


def steps(name, captured):
    """The losses and gradients of five steps, with a change before the fourth, and how they ran."""
    pyro.clear_param_store()
    model, change = KINDS[name]()
    program = SimpleNamespace(
        model=model, guide=guide, loss=Tempered() if name == "object_of_the_loss" else Trace_ELBO()
    )
    if captured:
        program = Graphed(program.model, program.guide, program.loss, compile=False)
    program.x = X if name == "item_of_an_argument_that_is_a_global_too" else X.clone()
    outcomes, replayed = [], []
    for step in range(5):
        if step == 3:
            change(program)
        pyro.set_rng_seed(step)
        if captured:
            loss, pairs = program((program.x,), {})
            replayed.append(program.replayed)
        else:
            weight = program.loss.weight_at(step) if isinstance(program.loss, TermsELBO) else 1.0
            call = Call(program.loss, program.model, program.guide, (program.x,), {}, weight=weight)
            evaluation = evaluate_loss(call)
            loss, pairs = evaluation.loss, evaluation.parameters_with_gradients()
        outcomes.append([loss, *(gradient for _, gradient in pairs)])
        with torch.no_grad():
            for parameter, gradient in pairs:
                parameter -= 0.01 * gradient
    return outcomes, replayed, program


@pytest.mark.parametrize("name", KINDS)
def test_steps_after_a_change_are_those_of_the_program(name):
    theirs, _, _ = steps(name, False)
    restore_settings()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ours, replayed, loss = steps(name, True)
    for own, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, their, rtol=1e-5, atol=1e-6)
    assert replayed == [name not in EAGER] * 5
    assert len(warned) == len(loss.eager_reasons) == (name in EAGER)
    assert all("the program runs uncompiled: " in str(warning.message) for warning in warned)


def plates(x):
    return pyro.plate("data", 12, subsample=x.long())


@pytest.mark.parametrize("where", ["global", "closure", "name of a plate"])
@pytest.mark.parametrize("guide", [AutoNormal, AutoMeanField])
def test_a_users_name_may_be_that_of_the_plates_of_a_guide(where, guide):
    mine = plates

    def made(plates):
        def model(x):
            with plates(x):
                pyro.sample("y", dist.Normal(pyro.sample("local", dist.Normal(0.0, 1.0)), 1.0), obs=x)

        return model

    def by_global(x):
        with plates(x):
            pyro.sample("y", dist.Normal(pyro.sample("local", dist.Normal(0.0, 1.0)), 1.0), obs=x)

    def by_string(x):
        with mine(x), pyro.plate("plates", 1, dim=-2):
            pyro.sample("y", dist.Normal(pyro.sample("local", dist.Normal(0.0, 1.0)), 1.0), obs=x)

    model = {"global": by_global, "closure": made(plates), "name of a plate": by_string}[where]
    loss = Graphed(model, guide(model, create_plates=plates), Trace_ELBO(), compile=False)
    for first in (0, 4):
        x = torch.arange(first, first + 4.0)
        pyro.set_rng_seed(0)
        replayed, _ = loss((x,), {})
    assert loss.replayed
    assert not loss.eager_reasons
    pyro.set_rng_seed(0)
    torch.testing.assert_close(replayed, torch.tensor(Trace_ELBO().loss(model, loss.guide, x)))


def test_enough_kinds_stay_on_graphs():
    assert len(KINDS) >= 40
    assert len(KINDS) - len(EAGER) >= 25
