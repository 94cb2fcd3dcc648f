# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One torch optimizer does what Pyro's, one for each parameter, do."""

from functools import partial

import pyro
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import nn

from pyro_radial import CompiledSVI, TermsELBO
from pyro_radial.infer.step.optimizer import make_optimizer, stored_names
from tests.helpers.runs import data, function_problem, problem, run_on


def parameters():
    return {name: nn.Parameter(torch.tensor([1.0, -2.0])) for name in ("net$$$locs", "net$$$scales", "noise")}


def some_settings(name):
    if name == "net.scales":
        return {"lr": 0.5}
    return {"weight_decay": 0.1} if name == "noise" else {}


OPTIMIZERS = {
    "Adam": pyro.optim.Adam,
    "SGD": pyro.optim.SGD,
    "Adagrad": pyro.optim.Adagrad,
    # Makes its state at once.
    "AdagradRMSProp": pyro.optim.AdagradRMSProp,
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_those_of_an_optimizer_for_each_parameter(kind):
    """What one parameter has a setting for, another has torch's default for."""

    def settings(name):
        return {"eta": 0.5 if "scales" in name else 0.1} if kind == "AdagradRMSProp" else some_settings(name)

    optim = OPTIMIZERS[kind](settings)
    ours, theirs = parameters(), parameters()
    joint = make_optimizer(optim, ours)
    alone = [
        optim.pt_optim_constructor([parameter], **settings(name.replace("$$$", ".")))
        for name, parameter in theirs.items()
    ]
    for step in range(4):
        for one, other in zip(ours.values(), theirs.values(), strict=True):
            one.grad = torch.tensor([0.3, step - 1.0])
            other.grad = one.grad.clone()
        joint.step()
        for optimizer in alone:
            optimizer.step()
    for name, parameter in theirs.items():
        # Fused steps round elsewhere.
        torch.testing.assert_close(ours[name], parameter, rtol=1e-5, atol=1e-6)
        assert not torch.equal(parameter, parameters()[name])


def test_equal_settings_share_a_group_and_torch_s_fused_step():
    joint = make_optimizer(pyro.optim.Adam(lambda name: {"lr": 0.1 if "scales" in name else 0.2}), parameters())
    assert [(group["lr"], len(group["params"]), group["fused"]) for group in joint.param_groups] == [
        (0.2, 2, True),
        (0.1, 1, True),
    ]
    chosen = make_optimizer(pyro.optim.Adam(lambda name: {"foreach": True} if "scales" in name else {}), parameters())
    assert [bool(group["fused"]) for group in chosen.param_groups] == [False, False]


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("settings", "fused"), [({}, True), ({"fused": False}, False), ({"foreach": False}, None), ({"lr": 0.1}, True)]
)
def test_on_cuda_torch_s_fused_step_is_taken_unless_another_was_chosen(settings, fused):
    moved = {name: nn.Parameter(parameter.detach().cuda()) for name, parameter in parameters().items()}
    optimizer = make_optimizer(partial(torch.optim.Adam, **settings), moved)
    assert [group["fused"] for group in optimizer.param_groups] == [fused]


def test_settings_by_module_and_name_will_do():
    seen = []

    def settings(module, name):
        seen.append((module, name))
        return {"lr": 0.1}

    make_optimizer(pyro.optim.Adam(settings), {"net$$$locs": nn.Parameter(torch.zeros(2))})
    assert seen == [("net", "locs")]


@pytest.mark.parametrize("returned", [None, 0.1, [("lr", 0.1)]])
def test_what_is_no_dict_is_refused_by_the_parameter(returned):
    optim = pyro.optim.Adam(lambda name: returned if "scales" in name else {"lr": 0.1})
    with pytest.raises(ValueError, match=r"optim must return a dict of settings .* for 'net\$\$\$scales'"):
        make_optimizer(optim, parameters())


def test_an_unknown_setting_of_one_group_is_not_passed_over():
    with pytest.raises(TypeError, match="learning_rate"):
        make_optimizer(pyro.optim.Adam(lambda name: {"learning_rate": 0.1} if "scales" in name else {}), parameters())


@pytest.mark.parametrize("make", [problem, lambda: problem(guide=AutoNormal), function_problem])
def test_names_are_those_that_svi_sees(make):
    seen = {"ours": set(), "theirs": set()}

    def optim(who):
        def settings(name):
            seen[who].add(name)
            return {"lr": 0.1}

        return pyro.optim.SGD(settings)

    model, guide = make()
    make_optimizer(optim("ours"), run_on(model, guide, data()).parameters)
    pyro.infer.SVI(model, guide, optim("theirs"), pyro.infer.Trace_ELBO()).step(*data())
    assert seen["ours"] == seen["theirs"]
    assert any("scales" in name for name in seen["ours"])


def test_a_parameter_that_the_store_does_not_have_keeps_its_name():
    known = pyro.param("a", torch.zeros(2))
    namesake, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    named = stored_names({"guide.a": known, "guide.b_unconstrained": namesake, "model.c": other})
    assert list(named) == ["a", "guide.b", "model.c"]
    assert named["guide.b"] is namesake


def test_parameters_that_the_store_calls_alike_are_all_there():
    before = pyro.param("a", torch.zeros(2))
    pyro.get_param_store()["a"] = torch.ones(2)
    now = pyro.param("a")
    assert list(stored_names({"guide.a": before, "model.a": now})) == ["a", "model.a"]


@pytest.mark.parametrize(
    "clips", [{"clip_norm": 0.5}, {"clip_value": 0.1}, lambda module, name: {"clip_norm": len(name)}]
)
def test_gradients_are_clipped_by_parameter_as_in_svi(clips):
    ends = []
    for kind in (SVI, partial(CompiledSVI, compile=False)):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        model, guide = problem()
        svi = kind(model, guide, pyro.optim.SGD({"lr": 0.1}, clips), TermsELBO())
        for _ in range(3):
            svi.step(*data())
        ends.append(guide.state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value)


def test_what_pyro_keeps_for_each_parameter_is_refused(tmp_path):
    with pytest.raises(ValueError, match="optim must not clip each parameter by itself, got PyroOptim with clip_args"):
        make_optimizer(pyro.optim.Adam({"lr": 0.1}, {"clip_norm": 1.0}), parameters())
    saved, loaded = pyro.optim.Adam({"lr": 0.1}), pyro.optim.Adam({"lr": 0.1})
    parameter = pyro.param("a", torch.zeros(2))
    parameter.grad = torch.ones(2)
    saved([parameter.unconstrained()])
    saved.save(tmp_path / "optim")
    loaded.load(tmp_path / "optim")
    with pytest.raises(ValueError, match="optim must not have loaded a state of Pyro's optimizers"):
        make_optimizer(loaded, parameters())


@pytest.mark.parametrize("kind", ["Adam", "AdagradRMSProp"])
def test_a_parameter_that_is_made_again_replaces_the_former_one(kind):
    """As Pyro's decaying averages of baselines are made again in each step; in ``SVI`` such a one has no state."""

    def model():
        loc = pyro.param("loc", torch.zeros(3))
        with pyro.plate("rows", 3):
            pyro.sample("z", pyro.distributions.Normal(loc, 1.0), obs=torch.arange(3.0))

    values = {}
    for make in (SVI, CompiledSVI):
        pyro.clear_param_store()
        svi = make(model, lambda: None, OPTIMIZERS[kind]({}), Trace_ELBO())
        for _ in range(5):
            svi.step()
            pyro.get_param_store()["loc"] = pyro.param("loc").detach() + 0.5
            svi.step()
        values[make] = pyro.param("loc").detach().clone()
    assert torch.allclose(values[SVI], values[CompiledSVI], rtol=1e-6)
    assert [len(group["params"]) for group in svi.optimizer.param_groups] == [1]
    assert svi._stepper.optimizer.eager_reason is None
