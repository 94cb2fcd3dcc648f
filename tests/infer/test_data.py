# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Rows of data, where modules live, and the modes they are in."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.infer.data import Rows, check_inputs, device_of, evaluating, move, num_rows, take
from pyro_radial.nn import likelihoods


def pair(rows=5):
    return torch.arange(3.0 * rows).reshape(rows, 3), torch.arange(rows)


@pytest.mark.parametrize("wrap", [lambda x, y: (x, y), lambda x, y: [x, y], TensorDataset])
def test_rows_are_taken_in_the_order_asked_for(wrap):
    x, y = pair()
    rows = Rows(wrap(x, y), "data")
    index = torch.tensor([3, 0, 3])
    taken_x, taken_y = rows.take(index)
    assert torch.equal(taken_x, x[index])
    assert torch.equal(taken_y, y[index])
    assert len(rows) == 5
    assert torch.equal(rows.all()[0], x)


def test_a_tuple_of_inputs_is_taken_moved_and_counted_as_one():
    x, y = pair()
    taken_x, _ = Rows(((x, y), y), "data").take(torch.tensor([1, 2]))
    assert torch.equal(taken_x[0], x[1:3])
    assert torch.equal(taken_x[1], y[1:3])
    assert num_rows((x, y)) == 5
    assert torch.equal(take((x, y), slice(1, 2))[1], y[1:2])
    assert [t.device.type for t in move((x, y), torch.device("cpu"))] == ["cpu", "cpu"]


class Items(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def test_the_items_of_a_dataset_may_hold_tuples_of_inputs_and_plain_numbers():
    rows = Rows(Items([((torch.zeros(2), 1.0), 0), ((torch.ones(2), 2.0), 1)]), "data")
    (left, right), y = rows.all()
    assert left.shape == (2, 2)
    assert right.tolist() == [1.0, 2.0]
    assert y.tolist() == [0, 1]


def test_nan_in_a_dataset_is_named_by_its_row_there():
    x, y = pair()
    x[3, 1] = float("nan")
    rows = Rows(TensorDataset(x, y), "data")
    with pytest.raises(ValueError, match="data: x holds NaN in 1 of 2 rows, first in row 3"):
        rows.take(torch.tensor([1, 3]))


def test_nan_in_targets_is_named():
    x, _ = pair()
    with pytest.raises(ValueError, match="data: y holds NaN in 5 of 5 rows, first in row 0"):
        Rows((x, torch.full((5,), float("nan"))), "data")


def test_nan_in_a_tuple_of_inputs_is_named():
    x, y = pair()
    with pytest.raises(ValueError, match="data: x holds NaN in 1 of 5 rows, first in row 2"):
        Rows(((y, x.index_fill(0, torch.tensor(2), float("nan"))), y), "data")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(2, 3), "must be a pair"),
        ((torch.zeros(2),), "must be a pair"),
        (None, "must be a pair"),
        (([1, 2], torch.zeros(2)), "x must be a tensor of rows or a tuple of such, got list"),
        ((torch.tensor(1.0), torch.zeros(2)), "x must be a tensor of rows"),
        (((), torch.zeros(2)), "x is an empty tuple"),
        (((torch.zeros(2), torch.zeros(3)), torch.zeros(2)), "different numbers of rows"),
        ((torch.zeros(2, 1), torch.zeros(3)), "x has 2 rows and y has 3"),
        ((torch.zeros(0, 1), torch.zeros(0)), "data has no rows"),
        (Items([]), "data has no rows"),
    ],
)
def test_what_is_no_data_is_named(data, message):
    with pytest.raises(ValueError, match=message):
        Rows(data, "data")


@pytest.mark.parametrize("item", [torch.zeros(2), (1.0, 2.0, 3.0), {"x": 1.0, "y": 2.0}])
def test_a_dataset_whose_items_are_no_pairs_is_named(item):
    with pytest.raises(ValueError, match=r"an item of the Dataset must be a pair \(x, y\)"):
        Rows(Items([item]), "data").all()


def test_integers_and_infinities_are_inputs():
    check_inputs((torch.tensor([1, 2]), torch.tensor([float("inf"), 0.0])), "x")


def frozen_norm_model():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    net[1].eval()
    return SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=5))


def computing_modes(model):
    """The modes that the network really computes in."""
    return [module.training for module in model.bnn.to_module(model.bnn.sample_parameters()).modules()]


@pytest.mark.parametrize("fail", [False, True])
def test_every_submodule_gets_its_own_mode_back_also_after_an_error(fail):
    model = frozen_norm_model()
    guide = AutoRadial(model)
    model.likelihood.eval()
    modes = [module.training for module in model.modules()]
    computing = computing_modes(model)
    assert not all(computing)
    assert any(computing)

    def use():
        with evaluating(model, guide, lambda: None):
            assert not any(module.training for module in [*model.modules(), *guide.modules()])
            assert not any(computing_modes(model))
            if fail:
                raise KeyError

    if fail:
        with pytest.raises(KeyError):
            use()
    else:
        use()
    assert [module.training for module in model.modules()] == modes
    assert computing_modes(model) == computing
    assert guide.training


def test_the_device_is_that_of_the_first_module_that_holds_a_tensor():
    assert device_of(lambda: None, nn.Tanh()) == torch.device("cpu")
    assert device_of(nn.Tanh(), nn.Linear(1, 1, device="meta")) == torch.device("meta")
    assert device_of(nn.BatchNorm1d(2, affine=False, device="meta"), nn.Linear(1, 1)) == torch.device("meta")


@pytest.mark.cuda
def test_a_network_whose_parameters_are_all_random_is_where_it_was_moved():
    model = SupervisedModel(BayesianModule(nn.Linear(3, 2)), likelihoods.Categorical(num_data=5)).cuda()
    assert device_of(AutoRadial(model), model).type == "cuda"
