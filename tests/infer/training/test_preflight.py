# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Every target fits the model, and the loss is scaled to the number of rows, or to what was said on purpose."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, FitOptions, SupervisedModel, diagnose, fit, predict
from pyro_radial.nn import likelihoods
from tests.helpers.runs import FIT, ROWS, assert_same, data, problem, run_on, trained


def unsized():
    return problem(likelihood=likelihoods.Categorical())


def test_a_likelihood_without_num_data_trains_as_one_with_the_rows():
    state, result = trained(*problem())
    model, guide = unsized()
    other, other_result = trained(model, guide)
    assert_same(other, state)
    assert other_result == result
    assert model.likelihood.num_data == ROWS


def test_num_data_that_is_not_the_rows_is_refused_with_both_numbers():
    model, guide = problem(likelihood=likelihoods.Categorical(num_data=1000))
    with pytest.raises(ValueError, match=r"num_data .* got num_data=1000 for 20 rows; .*FitOptions\(num_data=1000"):
        trained(model, guide)
    assert guide.prototype_trace is None
    with pytest.raises(ValueError, match="got num_data=1000 for 20 rows"):
        trained(model, guide, data=DataLoader(TensorDataset(*data()), batch_size=5))


@pytest.mark.parametrize("given", [None, 50])
def test_rows_that_are_a_part_of_the_data_are_declared(given):
    model, guide = problem(likelihood=likelihoods.Categorical(num_data=given))
    _, result = trained(model, guide, num_data=50)
    assert model.likelihood.num_data == 50
    # In nats per datum, of 50: the KL of the last loss is what the guide's own distributions say.
    _, whole = trained(*problem())
    assert result.history[0]["kl"] == pytest.approx(whole.history[0]["kl"] * ROWS / 50, rel=0.02)


def test_each_training_takes_its_own_rows():
    model, guide = unsized()
    for rows in (ROWS, 12):
        fit(model, guide, data(rows), **FIT)
        assert model.likelihood.num_data == rows
    assert copy.deepcopy(model).likelihood.num_data == 12
    model.likelihood.num_data = 30
    with pytest.raises(ValueError, match="got num_data=30 for 12 rows"):
        fit(model, guide, data(12), **FIT)


def test_a_batch_larger_than_what_the_latest_training_had_is_refused_with_what_to_do():
    model, guide = unsized()
    fit(model, guide, data(12), **FIT)
    with pytest.raises(ValueError, match=r"num_data must be at least 20, .* got 12 from the latest fit; set"):
        diagnose(model, guide, data())
    model.likelihood.num_data = None
    assert diagnose(model, guide, data()).terms.num_data == ROWS


@pytest.mark.parametrize(
    ("rows", "outputs", "message"),
    [
        (lambda x, y: (x, y.float()), 2, r"pass y\.long\(\)"),
        (lambda x, y: (x, y), 1, r"likelihoods\.Bernoulli"),
        (lambda x, y: (x[0], y[0]), 2, "a tensor without dims"),
    ],
)
def test_a_beginners_rows_are_refused_with_what_to_pass(rows, outputs, message):
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    model = SupervisedModel(BayesianModule(nn.Linear(3, outputs)), likelihoods.Categorical())
    with pytest.raises(ValueError, match=message):
        fit(model, AutoRadial(model), rows(x, y), **FIT)


def test_a_prediction_of_one_row_without_its_dim_is_refused_with_what_to_pass():
    model, guide = unsized()
    fit(model, guide, data(), **FIT)
    with pytest.raises(ValueError, match=r"pass a single row as x\[None\]"):
        predict(model, guide, data()[0][0])


def plated(size):
    def model(x, y=None):
        weight = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", size or len(x), subsample=torch.arange(len(x))):
            f = pyro.deterministic("f", x @ weight)
            pyro.sample("targets", dist.Normal(f, 1.0), obs=y)

    return model, AutoRadial(model)


@pytest.mark.parametrize(("size", "found"), [(None, 6), (1000, 1000)])
def test_a_plate_that_has_not_the_size_of_the_data_is_named(size, found):
    x, y = data()[0], torch.zeros(ROWS)
    message = rf"model must observe 'targets' in a plate of the size of the data, 20, got one of size {found}"
    with pytest.raises(ValueError, match=message):
        fit(*plated(size), (x, y), **FIT)
    fit(*plated(ROWS), (x, y), **FIT)
    fit(*plated(1000), (x, y), options=FitOptions(num_data=1000), **FIT)


def test_a_table_of_counts_under_two_plates_is_told_the_product_of_both():
    rows, genes = 8, 3

    def model(row, counts):
        with pyro.plate("genes", genes, dim=-1):
            rate = pyro.sample("rate", dist.LogNormal(0.0, 1.0))
            with pyro.plate("samples", rows, subsample=row, dim=-2):
                pyro.sample("counts", dist.Poisson(rate), obs=counts)

    data = torch.arange(rows), torch.full((rows, genes), 3.0)
    words = (
        r"model must observe 'counts' in a plate of the size of the data, 8, got one of size 24: .* if that size is "
        r"the product of several plates, as for a table of counts, .* options=FitOptions\(num_data=24\)"
    )
    with pytest.raises(ValueError, match=words):
        fit(model, AutoMeanField(model), data, **FIT)
    result = fit(model, AutoMeanField(model), data, options=FitOptions(num_data=rows * genes), **FIT)
    assert result.history


# ------------------------------------------------------------------------------------------------------ targets

ALL_ROWS = 24
WRONG = {"Bernoulli": 2.0, "Poisson": 0.5, "NegativeBinomial": 0.5, "ZeroInflated": 0.5, "Categorical": 7}


def model_and_data(name, wrong):
    """The wrong target is in a row that the first batch of this seed does not hold."""
    outputs = 3 if name == "Categorical" else 1
    x, y = torch.randn(ALL_ROWS, 2), torch.zeros(ALL_ROWS, dtype=torch.long)
    y = y if name == "Categorical" else y[:, None].float()
    late = torch.randperm(ALL_ROWS, generator=torch.Generator().manual_seed(0))[-1]
    y[late] = wrong
    arguments = [likelihoods.Poisson()] if name == "ZeroInflated" else []
    model = SupervisedModel(BayesianModule(nn.Linear(2, outputs)), getattr(likelihoods, name)(*arguments))
    return model, (x, y)


def train_on(model, rows):
    return fit(model, AutoRadial(model), rows, epochs=1, batch_size=8, seed=0, progress=False)


@pytest.mark.parametrize("wrap", [lambda x, y: (x, y), TensorDataset])
@pytest.mark.parametrize("name", WRONG)
def test_a_target_out_of_range_in_a_later_batch_is_named(name, wrap):
    model, rows = model_and_data(name, WRONG[name])
    with pytest.raises(ValueError, match=rf"data: y must hold .* for site 'y', got {WRONG[name]}"):
        train_on(model, wrap(*rows))


def test_targets_of_the_validation_are_checked_before_the_first_step():
    model, rows = model_and_data("Categorical", 0)
    _, wrong = model_and_data("Categorical", 7)
    with pytest.raises(ValueError, match="validation: y must hold labels"):
        fit(model, AutoRadial(model), rows, validation=wrong, epochs=1, seed=0, progress=False)


def test_targets_in_memory_are_checked_once(monkeypatch):
    model, rows = model_and_data("Categorical", 0)
    seen = []
    check = likelihoods.Categorical.check_target_values

    def counted(self, f, y):
        seen.append(len(y))
        check(self, f, y)

    monkeypatch.setattr(likelihoods.Categorical, "check_target_values", counted)
    train_on(model, rows)
    assert seen.count(ALL_ROWS) == 1


def test_the_search_for_the_culprit_does_not_hide_the_first_error():
    model, (x, y) = model_and_data("Categorical", 7)
    run = run_on(model, AutoRadial(model), (x, torch.zeros_like(y)))

    def broken(*_):
        raise ValueError("the first error")

    def search(*_, **__):
        raise RuntimeError("index 7 is out of bounds")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pyro_radial.infer.step.stepper.find_not_finite", search)
        patch.setattr("pyro_radial.infer.training.training_run.evaluate_loss", broken)
        with pytest.raises(ValueError, match="the first error"):
            run.step()


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_one_hot_labels_are_named_with_what_to_do(dtype):
    model, (x, y) = model_and_data("Categorical", 0)
    with pytest.raises(ValueError, match=r"data: y must .* if the labels are one-hot, pass y.argmax\(-1\)") as caught:
        train_on(model, (x, nn.functional.one_hot(y, 3).to(dtype)))
    assert "(2," not in str(caught.value)
