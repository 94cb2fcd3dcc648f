# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Every row is seen once in an epoch, and parts of a batch make up the whole."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, diagnose, fit, predict
from pyro_radial.infer.data import Batches, Rows, split_batch
from pyro_radial.nn import likelihoods
from tests.helpers.runs import FIT, ROWS, Items, data, problem, trained


def test_each_epoch_sees_every_row_once_in_an_order_of_its_own():
    seen = []

    class Watched(TensorDataset):
        def __getitem__(self, i):
            seen.append(i)
            return super().__getitem__(i)

    trained(*problem(), data=Watched(*data()), epochs=3)
    # The first two rows are also looked at once, to make the parameters.
    epochs = [seen[2 + k * ROWS : 2 + (k + 1) * ROWS] for k in range(3)]
    assert len(seen) == 2 + 3 * ROWS
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("number", [2, 3, 7])
def test_parts_of_a_batch_equal_the_whole_in_gradients_and_terms(number):
    """Batches of 20 in parts of 10 and 10; 7, 7 and 6; 3 six times and 2."""

    def gradients(accumulate):
        model, guide = problem(guide=partial(AutoRadial, init_stddev=0.3))
        # Leaves the parameters where they are, with the gradients in place.
        optim = partial(SGD, lr=0.0)
        _, result = trained(model, guide, accumulate=accumulate, optim=optim, batch_size=20, epochs=1)
        return {name: p.grad for name, p in guide.named_parameters()}, result.history[0]

    whole, whole_record = gradients(1)
    split, split_record = gradients(number)
    for name, value in whole.items():
        # Single precision: 20 terms summed in another order, of the size of the largest gradient of the site.
        assert torch.allclose(split[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max())), name
        assert float(value.abs().max()) > 0
    # The KL sees no data, so each part has the same one, and their weighted sum is that one again.
    assert split_record == pytest.approx(whole_record, rel=1e-5)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, left, right):
        return self.linear(left * right)


def forms(x, other, y):
    """The same rows in all forms that a user may have them in, with names or without."""
    items = [((x[i], other[i]), y[i]) for i in range(len(x))]
    named = [({"right": other[i], "left": x[i]}, y[i]) for i in range(len(x))]
    arrays = x.numpy().astype("float64"), other.numpy().astype("float64"), y.numpy()
    return {
        "three tensors": (x, other, y),
        "arrays": arrays,
        "arrays by name": ({"left": arrays[0], "right": arrays[1]}, arrays[2]),
        "dict": ({"left": x, "right": other}, y),
        "items of three": TensorDataset(x, other, y),
        "loader": DataLoader(TensorDataset(x, other, y), batch_size=FIT["batch_size"], shuffle=True),
        "loader of pairs": DataLoader(Items(items), batch_size=FIT["batch_size"]),
        "loader of dicts": DataLoader(Items(named), batch_size=FIT["batch_size"]),
    }


@pytest.mark.parametrize("form", forms(*[torch.zeros(1)] * 3))
def test_data_in_every_form_are_trained_on_predicted_and_diagnosed_alike(form):
    x, y = data()

    def run(given, inputs, **batch_size):
        torch.manual_seed(1)
        model = SupervisedModel(BayesianModule(TwoInputs()), likelihoods.Categorical())
        guide = AutoRadial(model)
        settings = {**{name: value for name, value in FIT.items() if name != "batch_size"}, **batch_size}
        result = fit(model, guide, given, validation=given, **settings)
        torch.manual_seed(2)
        draws = predict(model, guide, inputs, num_samples=3, chunk_size=7)
        log_prob = draws.log_prob(y.numpy() if "arrays" in form else y)
        return result, draws.samples, log_prob, str(diagnose(model, guide, given, num_particles=2))

    expected = run(((x, x.flip(0)), y), (x, x.flip(0)), batch_size=FIT["batch_size"])
    given = forms(x, x.flip(0), y)[form]
    inputs = given[0] if isinstance(given, tuple) and len(given) == 2 else given
    if isinstance(given, tuple) and len(given) == 3:
        inputs = given[:2]
    batch_size = {} if "loader" in form else {"batch_size": FIT["batch_size"]}
    result, samples, log_prob, diagnosis = run(given, inputs, **batch_size)
    assert result == expected[0]
    assert torch.equal(samples, expected[1])
    assert torch.equal(log_prob, expected[2])
    assert diagnosis == expected[3]


@pytest.mark.parametrize(("rows", "size", "per_epoch"), [(7, 3, 3), (6, 3, 2), (2, 5, 1), (1, 1, 1)])
def test_a_batch_does_not_depend_on_those_before_it(rows, size, per_epoch):
    def batches():
        return Batches(Rows(data(rows), "data"), size, seed=3, device=torch.device("cpu"))

    whole = batches()
    assert whole.per_epoch == per_epoch
    for epoch in (0, 1):
        for number in range(per_epoch):
            x, y = whole.get(epoch, number)
            fresh_x, fresh_y = batches().get(epoch, number)
            assert torch.equal(x, fresh_x)
            assert torch.equal(y, fresh_y)
    assert torch.equal(batches().first_rows()[0], data(rows)[0][:2])


@pytest.mark.parametrize(("rows", "number"), [(6, 1), (6, 4), (3, 5)])
def test_the_parts_of_a_batch_are_its_rows_in_order_and_their_shares_make_one(rows, number):
    x, y = data(rows)
    pieces = list(split_batch((x, y), number))
    assert torch.equal(torch.cat([part[0] for part, _ in pieces]), x)
    assert torch.equal(torch.cat([part[1] for part, _ in pieces]), y)
    assert [share for _, share in pieces] == [len(part[1]) / rows for part, _ in pieces]
    assert len(pieces) <= number


@pytest.mark.parametrize(("rows", "per_epoch"), [(9, 2), (8, 2), (3, 1)])
def test_a_loader_that_drops_the_last_batch_has_whole_batches_alone(rows, per_epoch):
    x = torch.arange(float(rows))[:, None]
    loader = DataLoader(TensorDataset(x, x), batch_size=4, drop_last=True)
    batches = Batches(Rows(loader, "data"), 4, 0, torch.device("cpu"))
    assert batches.per_epoch == per_epoch
    assert {len(batches.get(0, number)[0]) for number in range(per_epoch)} == {min(rows, 4)}


def test_workers_of_a_loader_are_refused():
    x = torch.zeros(4, 1)
    with pytest.raises(ValueError, match=r"^data must be a DataLoader without workers, got num_workers=1"):
        Rows(DataLoader(TensorDataset(x, x), num_workers=1), "data")


def test_features_with_a_graph_are_detached_with_a_warning():
    x = nn.Linear(2, 2)(torch.ones(4, 2))
    with pytest.warns(UserWarning, match="^data requires gradients"):
        rows = Rows((x, x.detach()), "data")
    assert not rows.take(torch.arange(2))[0].requires_grad
