# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Objects of one class must not share parameters through Pyro's store, and copies must train alone."""

import copy
import io

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroModule, PyroParam
from torch import nn

from pyro_radial._compat import deep_setattr
from pyro_radial._naming import UniquelyNamed, rename_tree, unique_name


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


def test_both_parameters_of_one_instance_are_trained():
    model = Located(0.0)
    train(model, 50.0)
    assert min(values(model)) > 0.1


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


def test_a_deepcopy_trains_alone():
    model = Located(1.0)
    train(model, 50.0)
    before, twin = values(model), copy.deepcopy(model)
    train(twin, -50.0)
    assert values(model) == before
    assert twin.loc.item() < before[0]
    assert twin.below.shift.item() < before[1]


def test_an_unpickled_copy_trains_alone():
    model = Located(1.0)
    train(model, 50.0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    before, twin = values(model), torch.load(file, weights_only=False)
    assert values(twin) == before
    train(twin, -50.0)
    assert values(model) == before
    assert twin.loc.item() < before[0]


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


def test_deep_setattr_makes_modules_on_the_way():
    root = PyroModule("root")
    deep_setattr(root, "a.b.x", nn.Parameter(torch.ones(())))
    assert isinstance(root.a.b, PyroModule)
    assert root.a.b.x == 1.0
