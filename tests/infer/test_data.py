# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Rows of data, where modules live, and the modes they are in."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.infer.data import Rows, as_inputs, check_inputs, move, num_rows, take
from pyro_radial.nn import likelihoods
from pyro_radial.nn.modules import device_of, dtype_of, evaluating
from tests.helpers.runs import Items


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


def test_the_items_of_a_dataset_may_hold_tuples_of_inputs_and_plain_numbers():
    rows = Rows(Items([((torch.zeros(2), 1.0), 0), ((torch.ones(2), 2.0), 1)]), "data")
    (left, right), y = rows.all()
    assert left.shape == (2, 2)
    assert right.tolist() == [1.0, 2.0]
    assert y.tolist() == [0, 1]


MIXED = np.array([[0.5, "red"], [1.5, "blue"]], dtype=object)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (MIXED, torch.zeros(2), r"data: x must hold numbers, got 'red' at row and column \[0, 1\], .* encode"),
        (
            {"size": torch.zeros(2), "color": MIXED[:, 1]},
            torch.zeros(2),
            r"x\['color'\] must .* 'red' at row .* \[0\],",
        ),
        (np.array([["a"], ["b"]]), torch.zeros(2), r"data: x must hold numbers, got 'a' at row and column \[0, 0\],"),
        (
            torch.zeros(2, 3),
            np.array(["no", "yes"]),
            r"data: y must hold numbers, got 'no' at row and column \[0\], .* 0, 1, ... in",
        ),
        (MIXED[:, :1], torch.zeros(2), r"data: x must .* got numbers as Python objects; convert .* astype\(float\)"),
    ],
)
def test_strings_in_a_column_are_named(x, y, words):
    with pytest.raises(ValueError, match=words):
        Rows((x, y), "data")


def test_strings_in_inputs_without_targets_are_named():
    with pytest.raises(ValueError, match=r"inputs must hold numbers, got 'red' at row and column \[0, 1\],"):
        as_inputs(MIXED, "inputs")
    assert torch.equal(as_inputs(MIXED[:, :1].astype(float), "inputs"), torch.tensor([[0.5], [1.5]]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((torch.tensor(1.0), torch.zeros(2)), "x must be a tensor of rows"),
        (((), torch.zeros(2)), "x must hold at least one tensor, got an empty tuple"),
        (((torch.zeros(2), torch.zeros(3)), torch.zeros(2)), r"tensors of one number of rows, got \[2, 3\]"),
        (Items([]), "data must have at least one row"),
    ],
)
def test_what_is_no_data_is_named(data, message):
    with pytest.raises(ValueError, match=message):
        Rows(data, "data")


@pytest.mark.parametrize("item", [torch.zeros(2), (1.0,), {"x": 1.0, "y": 2.0}])
def test_a_dataset_whose_items_are_no_pairs_is_named(item):
    with pytest.raises(ValueError, match=r"an item of the Dataset must be a pair \(x, y\)"):
        Rows(Items([item]), "data").all()


@pytest.mark.parametrize(
    ("number", "word"), [(float("inf"), "infinity"), (-float("inf"), "infinity"), (float("nan"), "NaN")]
)
@pytest.mark.parametrize("role", ["x", "y"])
def test_what_is_not_finite_is_named_with_its_row(role, number, word):
    x, y = pair()
    broken = x.clone()
    broken[3, 1] = number
    parts = (broken, y) if role == "x" else (x, broken)
    message = f"data: {role} must not hold {word}, got {word} in 1 of"
    with pytest.raises(ValueError, match=f"{message} 5 rows, first in row 3"):
        Rows(parts, "data")
    with pytest.raises(ValueError, match=f"{message} 5 rows, first in row 3"):
        Rows(((x, broken), y) if role == "x" else ({"a": x}, broken), "data")
    with pytest.raises(ValueError, match=f"{message} 2 rows, first in row 3"):
        Rows(TensorDataset(*parts), "data").take(torch.tensor([1, 3]))


def test_a_dict_of_inputs_is_taken_moved_counted_and_checked_as_one():
    x, y = pair()
    rows = Rows(({"left": x, "right": y}, y), "data")
    taken, _ = rows.take(torch.tensor([1, 2]))
    assert torch.equal(taken["left"], x[1:3])
    assert torch.equal(taken["right"], y[1:3])
    assert num_rows(taken) == 2
    assert move(taken, torch.device("cpu")).keys() == {"left", "right"}
    with pytest.raises(ValueError, match=r"data: x\['left'\] must not hold NaN, got NaN in 5 of 5 rows"):
        Rows(({"left": x * float("nan"), "right": y}, y), "data")
    with pytest.raises(ValueError, match=r"data: x must hold tensors of one number of rows, got \[4, 5\]"):
        Rows(({"left": x, "right": y[1:]}, y), "data")


@pytest.mark.parametrize("wrap", [lambda *parts: parts, TensorDataset])
def test_the_last_of_three_is_the_target(wrap):
    x, y = pair()
    (left, right), targets = Rows(wrap(x, x + 1, y), "data").all()
    assert torch.equal(left, x)
    assert torch.equal(right, x + 1)
    assert torch.equal(targets, y)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_arrays_are_tensors_of_the_networks_dtype(dtype):
    x, y = pair()
    array = x.numpy().astype("float64")
    array.flags.writeable = False
    wanted = dtype or torch.float32
    items = [(array[i], y.numpy()[i]) for i in range(5)]
    for data in ((array, y.numpy()), Items(items), DataLoader(Items(items), batch_size=2)):
        taken_x, taken_y = Rows(data, "data", dtype).all()
        assert (taken_x.dtype, taken_y.dtype) == (wanted, torch.int64)
        assert torch.equal(taken_x, x.to(wanted))
        assert torch.equal(taken_y, y)
    # A tensor is what its maker wanted.
    assert Rows((x.double(), y), "data", torch.float32).all()[0].dtype == torch.float64


def test_the_dtype_is_that_of_the_network_also_where_all_its_parameters_are_random():
    assert dtype_of(lambda: None) == torch.float32
    assert dtype_of(nn.Linear(1, 1).double()) == torch.float64
    model = SupervisedModel(BayesianModule(nn.Linear(3, 2).double()), likelihoods.Categorical())
    assert dtype_of(AutoRadial(model), model) == torch.float64


def padded(items):
    return torch.nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True), torch.tensor([y for _, y in items])


def test_a_loader_gives_its_dataset_its_collation_and_its_batch_size():
    items = [(torch.ones(length), length) for length in (1, 3, 2)]
    rows = Rows(DataLoader(Items(items), batch_size=2, shuffle=True, collate_fn=padded), "data")
    assert (len(rows), rows.batch_size) == (3, 2)
    x, y = rows.take(torch.tensor([2, 0]))
    assert x.tolist() == [[1.0, 1.0], [1.0, 0.0]]
    assert y.tolist() == [2, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": WeightedRandomSampler([1.0] * 5, 5)},
        {"sampler": RandomSampler(range(5), replacement=True)},
        {"sampler": RandomSampler(range(5), num_samples=3)},
        {"batch_sampler": [[0, 1]]},
        {"batch_size": None},
    ],
)
def test_a_loader_that_chooses_its_rows_is_refused(options):
    with pytest.raises(ValueError, match="data must be a DataLoader that passes over each row once, got one with"):
        Rows(DataLoader(TensorDataset(*pair()), **options), "data")


def test_inputs_alone_come_from_all_that_training_takes():
    x, y = pair()
    for given in (
        x,
        x.numpy().astype("float64"),
        TensorDataset(x),
        TensorDataset(x, y),
        Items(list(x)),
        DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True),
    ):
        assert torch.equal(as_inputs(given, "x"), x)
    assert [part.shape[0] for part in as_inputs(TensorDataset(x, x, y), "x")] == [5, 5]
    assert as_inputs({"a": x.numpy()}, "x")["a"].shape == (5, 3)
    with pytest.raises(ValueError, match="x must not hold infinity, got infinity in 5 of 5 rows"):
        as_inputs(TensorDataset(x + float("inf"), y), "x")


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


def test_the_device_is_that_of_the_network_before_that_of_any_buffer():
    model = SupervisedModel(BayesianModule(nn.Linear(3, 2, device="meta")), likelihoods.Categorical(num_data=5))
    model.register_buffer("elsewhere", torch.zeros(1))
    assert device_of(model) == torch.device("meta")


@pytest.mark.cuda
def test_a_network_whose_parameters_are_all_random_is_where_it_was_moved():
    model = SupervisedModel(BayesianModule(nn.Linear(3, 2)), likelihoods.Categorical(num_data=5)).cuda()
    assert device_of(AutoRadial(model), model).type == "cuda"


def test_finite_rows_may_sum_to_more_than_the_largest_number():
    largest = torch.full((3, 2), torch.finfo(torch.float32).max)
    check_inputs((torch.tensor([1, 2, 3]), largest), "x")
    largest[1, 0] = torch.inf
    with pytest.raises(ValueError, match="x must not hold infinity, got infinity in 1 of 3 rows, first in row 1"):
        check_inputs(largest, "x")
