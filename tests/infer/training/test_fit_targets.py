# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Every target is checked, in whatever batch it comes."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.infer import FitOptions, fit
from pyro_radial.infer.training.trainer import Trainer
from pyro_radial.nn import likelihoods
from tests.helpers.items import Items

ROWS = 24
WRONG = {"Bernoulli": 2.0, "Poisson": 0.5, "NegativeBinomial": 0.5, "Categorical": 7}


def model_and_data(name, wrong):
    """The wrong target is in a row that the first batch of this seed does not hold."""
    outputs = 3 if name == "Categorical" else 1
    x, y = torch.randn(ROWS, 2), torch.zeros(ROWS, dtype=torch.long)
    y = y if name == "Categorical" else y[:, None].float()
    late = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[-1]
    y[late] = wrong
    model = SupervisedModel(BayesianModule(nn.Linear(2, outputs)), getattr(likelihoods, name)())
    return model, (x, y)


def train(model, data, **options):
    settings = {"epochs": 1, "batch_size": 8, "seed": 0, "progress": False}
    return fit(model, AutoRadial(model), data, **settings, options=FitOptions(**options))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("wrap", [lambda x, y: (x, y), TensorDataset])
@pytest.mark.parametrize("name", WRONG)
def test_a_target_out_of_range_in_a_later_batch_is_named(name, wrap, compile, recorded_only):
    model, data = model_and_data(name, WRONG[name])
    with pytest.raises(ValueError, match=rf"data: y must hold .* for site 'y', got {WRONG[name]}"):
        train(model, wrap(*data), compile=compile)


def test_targets_of_the_validation_are_checked_before_the_first_step():
    model, data = model_and_data("Categorical", 0)
    _, wrong = model_and_data("Categorical", 7)
    with pytest.raises(ValueError, match="validation: y must hold labels"):
        fit(model, AutoRadial(model), data, validation=wrong, epochs=1, seed=0, progress=False)


def test_targets_in_memory_are_checked_once(monkeypatch):
    model, data = model_and_data("Categorical", 0)
    seen = []
    check = likelihoods.Categorical.check_target_values

    def counted(self, f, y):
        seen.append(len(y))
        check(self, f, y)

    monkeypatch.setattr(likelihoods.Categorical, "check_target_values", counted)
    train(model, data)
    assert seen.count(ROWS) == 1


def test_the_search_for_the_culprit_does_not_hide_the_first_error():
    model, (x, y) = model_and_data("Categorical", 7)
    trainer = Trainer(model, AutoRadial(model), (x, torch.zeros_like(y)))

    def broken(*_):
        raise ValueError("the first error")

    def search(*_, **__):
        raise RuntimeError("index 7 is out of bounds")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pyro_radial.infer.training.trainer.find_not_finite", search)
        patch.setattr("pyro_radial.infer.training.trainer.evaluate_loss", broken)
        with pytest.raises(ValueError, match="the first error"):
            trainer.step((x, y))


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_one_hot_labels_are_named_with_what_to_do(dtype):
    model, (x, y) = model_and_data("Categorical", 0)
    with pytest.raises(ValueError, match=r"data: y must .* if the labels are one-hot, pass y.argmax\(-1\)") as caught:
        train(model, (x, nn.functional.one_hot(y, 3).to(dtype)))
    assert "(2," not in str(caught.value)


def test_a_ragged_dataset_is_named():
    model, _ = model_and_data("Categorical", 0)
    with pytest.raises(ValueError, match=r"data: the items of the Dataset must have one shape .*collate_fn"):
        train(model, Items([(torch.zeros(2), 0), (torch.zeros(3), 0)]))
