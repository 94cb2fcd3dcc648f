# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Objects of one class must not share parameters through Pyro's store, and copies must train alone."""

import copy
import gc
import weakref

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroParam
from torch import nn

from pyro_radial import AutoRadial, PriorChain
from pyro_radial._pyro import naming
from pyro_radial._pyro.compat import deep_setattr
from pyro_radial._pyro.naming import UniquelyNamed, rename_tree, unique_name


class Located(UniquelyNamed):
    """A model with a parameter at the root and one below."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.loc = PyroParam(torch.tensor(start))
        self.below = PyroModule()
        self.below.shift = nn.Parameter(torch.tensor(start))

    def forward(self, y: torch.Tensor) -> None:
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(self.loc + self.below.shift, 1.0), obs=y)


def no_latents(y: torch.Tensor) -> None:
    """The guide of a model without latent sites: SVI maximizes the likelihood."""


def train(model: Located, target: float, steps: int = 3) -> None:
    svi = SVI(model, no_latents, pyro.optim.SGD({"lr": 0.01}), Trace_ELBO())
    for _ in range(steps):
        svi.step(torch.full((4,), target))


def values(model: Located) -> tuple[float, float]:
    return model.loc.item(), model.below.shift.item()


def test_names_count_up_per_class():
    class Counted:
        pass

    assert [unique_name(Counted) for _ in range(3)] == ["Counted", "Counted_2", "Counted_3"]


def test_two_instances_do_not_share_parameters():
    first, second = Located(1.0), Located(-1.0)
    train(first, 50.0)
    before = values(first)
    assert before != (1.0, 1.0)
    train(second, -50.0)
    assert values(first) == before
    assert values(second)[0] < -1.0


def test_a_deepcopy_edited_does_not_jump_back():
    model = Located(1.0)
    train(model, 50.0)
    twin = copy.deepcopy(model)
    assert values(twin) == values(model)
    with torch.no_grad():
        twin.loc_unconstrained.fill_(7.0)
        twin.below.shift.fill_(8.0)
    twin(torch.zeros(4))
    assert values(twin) == (7.0, 8.0)
    assert 7.0 not in values(model)


def test_a_copy_of_a_part_stays_with_the_copy_of_the_whole():
    whole = PyroModule("whole")
    whole.part = Located(0.0)
    assert whole.part._pyro_name == "whole.part"
    twin = copy.deepcopy(whole)
    assert twin.part._pyro_name == "whole.part"
    assert twin.part._pyro_context is twin._pyro_context


def test_clearing_the_store_keeps_the_values():
    model = Located(1.0)
    train(model, 50.0)
    before = values(model)
    pyro.clear_param_store()
    model(torch.zeros(4))
    assert values(model) == before


def test_rename_tree_renames_what_is_below_and_shares_one_context():
    root = PyroModule("old")
    deep_setattr(root, "a.b.weight", nn.Parameter(torch.zeros(())))
    context = root._pyro_context
    rename_tree(root, "new")
    assert (root._pyro_name, root.a._pyro_name, root.a.b._pyro_name) == ("new", "new.a", "new.a.b")
    assert root._pyro_context is root.a._pyro_context is root.a.b._pyro_context
    assert root._pyro_context is not context


def regression(x: torch.Tensor, y: torch.Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


X, Y = torch.randn(5, 3), torch.zeros(5)


def trained(guide, model=regression):
    svi = SVI(model, guide, pyro.optim.SGD({"lr": 0.01}), Trace_ELBO())
    svi.step(X, Y)
    return guide


def located(start: float) -> Located:
    model = Located(start)
    train(model, 2.0)
    return model


def stored() -> list[str]:
    return sorted(pyro.get_param_store().keys())


@pytest.fixture
def only_new_garbage():
    """What is there already is not looked through by each collection, which takes a second late in the suite."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(
    "make",
    [
        lambda: trained(AutoRadial(regression)),
        lambda: trained(copy.deepcopy(trained(AutoRadial(regression)))),
        lambda: located(1.0),
        lambda: trained(PriorChain(regression).guide(AutoNormal)),
    ],
    ids=["guide", "copy", "model", "chain"],
)
def test_what_the_store_holds_of_a_module_goes_with_it(make, only_new_garbage):
    parameters = []
    for _ in range(5):
        module = make()
        parameters += [weakref.ref(p) for p in pyro.get_param_store()._params.values()]
        del module
        # What refers to itself is gone when the garbage is collected.
        gc.collect()
        assert stored() == []
    assert len(parameters) >= 5
    assert [p for p in parameters if p() is not None] == []
    assert pyro.get_param_store()._param_to_name == {}


def saved_elsewhere(guide, counter: int) -> None:
    """The store as another process left it, in which the guide of that number was trained."""
    state = pyro.get_param_store().get_state()
    pyro.clear_param_store()
    own, other = f"{guide._pyro_name}.", f"{type(guide).__name__}_{counter}."
    pyro.get_param_store().set_state(
        {part: {name.replace(own, other): value for name, value in held.items()} for part, held in state.items()}
    )


@pytest.mark.parametrize("loaded", ["before the guide", "after the guide", "after its parameters"])
def test_a_store_of_another_process_with_other_counts_is_warned_of(loaded):
    first = trained(AutoRadial(regression))
    if loaded == "before the guide":
        saved_elsewhere(first, 12345)
    guide = AutoRadial(regression)
    if loaded == "after its parameters":
        guide.setup(X, Y)
    if loaded != "before the guide":
        saved_elsewhere(first, 12345)
    with pytest.warns(UserWarning, match=f"holds parameters of AutoRadial_12345, which {guide._pyro_name} does not"):
        guide(X, Y)
    guide(X, Y)


def test_a_module_made_meanwhile_by_another_thread_does_no_harm(monkeypatch):
    root, kept = naming._root, []

    def root_while_others_work(stored):
        kept.append(Located())
        pyro.param(f"meanwhile_{len(kept)}", torch.zeros(()))
        return root(stored)

    pyro.param("there_before", torch.zeros(()))
    monkeypatch.setattr(naming, "_root", root_while_others_work)
    Located().check_store()
    assert kept
