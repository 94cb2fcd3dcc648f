# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The number of data that a loss is scaled to is the number of rows, or what was said on purpose."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch.utils.data import DataLoader, TensorDataset

from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    FitOptions,
    TermsELBO,
    diagnose,
    fit,
)
from pyro_radial.continual import train_stream
from pyro_radial.nn import likelihoods
from tests.helpers.runs import FIT, ROWS, assert_same, data, problem, trained
from tests.helpers.streams import chain, stream


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


def test_without_num_data_and_without_training_the_targets_are_all_the_data():
    model, guide = unsized()
    x, y = data()
    assert poutine.trace(model).get_trace(x, y).nodes["y"]["scale"] == 1
    elbo, sized = TermsELBO(), TermsELBO()
    torch.manual_seed(3)
    value = elbo(model, guide)(x, y)
    assert elbo.terms.num_data == ROWS
    model.likelihood.num_data = ROWS
    torch.manual_seed(3)
    assert torch.equal(sized(model, guide)(x, y), value)


def test_a_batch_larger_than_what_the_latest_training_had_is_refused_with_what_to_do():
    model, guide = unsized()
    fit(model, guide, data(12), **FIT)
    with pytest.raises(ValueError, match=r"num_data must be at least 20, .* got 12 from the latest fit; set"):
        diagnose(model, guide, data())
    model.likelihood.num_data = None
    assert diagnose(model, guide, data()).terms.num_data == ROWS


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


def test_a_stream_refuses_a_number_that_is_not_its_tasks():
    one, tasks = chain(), stream()
    one.likelihood.num_data = 7
    name, rows = tasks.names[0], len(tasks[0].train[0])
    with pytest.raises(ValueError, match=f"task '{name}': num_data .* got num_data=7 for {rows} rows"):
        train_stream(one, tasks, epochs=1, progress=False)
    with pytest.raises(ValueError, match=r"must leave out what the stream decides, got \['num_data'\]"):
        train_stream(one, tasks, epochs=1, progress=False, options=FitOptions(num_data=rows))


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
