# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A training that diverges stops, and says by name what is not finite."""

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.optim import SGD

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.infer.loss.not_finite import first_not_finite
from pyro_radial.nn import likelihoods
from tests.helpers.runs import FIT, ROWS, STEPS_PER_EPOCH, assert_same, data, problem, trained


def test_the_first_tensor_that_is_not_finite_is_named():
    fine, nan, inf = torch.ones(2), torch.tensor([1.0, float("nan")]), torch.tensor(float("inf"))
    assert first_not_finite([("a", fine), ("b", inf), ("c", nan)]) == "b"
    assert first_not_finite([("a", fine), ("c", nan)]) == "c"
    assert first_not_finite([("a", fine), ("count", torch.tensor(3))]) is None


def poison(pair, name, epoch):
    def callback(record):
        if record["epoch"] == epoch:
            dict(pair[1].named_parameters())[name].data.fill_(float("nan"))

    return callback


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("name", ["locs.2.weight_unconstrained", "scales.0.bias_unconstrained"])
def test_a_parameter_that_turns_nan_stops_training_by_name_and_no_checkpoint_holds_it(validate, name, tmp_path):
    path = tmp_path / "run.pt"
    pair = problem()
    with pyro.validation_enabled(validate), pytest.raises(FloatingPointError, match=f"parameter guide.{name}"):
        trained(*pair, checkpoint=path, checkpoint_every=1, callback=poison(pair, name, epoch=1))
    saved = torch.load(path, weights_only=True)
    assert (saved["epoch"], saved["step_in_epoch"]) == (1, STEPS_PER_EPOCH)
    assert all(value.isfinite().all() for value in saved["guide"].values())
    # The last good state is one to go on from.
    assert len(trained(*problem(), checkpoint=path, checkpoint_every=1)[1].history) == 3


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("guide", [AutoRadial, AutoNormal])
def test_a_parameter_that_is_nan_from_the_start_is_named(validate, guide, tmp_path):
    model, made = problem(guide=guide)
    made(*data())
    name, parameter = next(iter(made.named_parameters()))
    parameter.data.view(-1)[0] = float("nan")
    message = f"not finite before the first step: parameter guide.{name};"
    with pyro.validation_enabled(validate), pytest.raises(FloatingPointError, match=message):
        trained(model, made, checkpoint=tmp_path / "run.pt")
    assert not list(tmp_path.iterdir())


def test_threads_that_train_at_once_leave_warnings_and_validation_as_they_were():
    before = list(warnings.filters), pyro.settings.get("validate_poutine")
    Overflowing.calls = 0
    entered = threading.Barrier(2, timeout=30)

    def train(number):
        model = SupervisedModel(BayesianModule(nn.Linear(3, 2)), likelihoods.Categorical())

        def meet(record):
            # Both are within their training, and leave it in the order in which they came.
            entered.wait()
            if record["epoch"] == 1 and number == 0:
                time.sleep(0.2)

        trained(model, AutoRadial(model), callback=meet, seed=None)
        return list(warnings.filters), pyro.settings.get("validate_poutine")

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(train, range(2))) == [before, before]
    assert (list(warnings.filters), pyro.settings.get("validate_poutine")) == before


class Overflowing(nn.Linear):
    """Overflows from its 11th call on, with every parameter finite."""

    calls = 0

    def forward(self, x):
        Overflowing.calls += 1
        return super().forward(x) * (float("inf") if Overflowing.calls > 10 else 1.0)


@pytest.mark.parametrize("validate", [True, False])
def test_a_likelihood_that_overflows_stops_training_by_the_name_of_its_site(validate, tmp_path):
    Overflowing.calls = 0
    model = SupervisedModel(BayesianModule(Overflowing(3, 2)), likelihoods.Gaussian(num_data=ROWS))
    guide = AutoRadial(model)
    y = torch.zeros(ROWS, 2)
    path = tmp_path / "run.pt"
    pyro.enable_validation(validate)
    try:
        with pytest.raises(FloatingPointError, match="log-likelihood of site 'y'"):
            trained(model, guide, data=(data()[0], y), checkpoint=path, checkpoint_every=1)
    finally:
        pyro.enable_validation(True)
    saved = torch.load(path, weights_only=True)
    assert 0 < saved["step_in_epoch"] < STEPS_PER_EPOCH
    assert_same(saved["guide"], guide.state_dict())


def test_a_draw_that_overflows_stops_training_by_the_name_of_its_site():
    model, guide = problem()

    def blow_up(record):
        for role in ("locs", "scales"):
            dict(guide.named_parameters())[f"{role}.2.weight_unconstrained"].data.fill_(3e38)

    with pytest.raises(FloatingPointError, match=r"step 4: a draw of site '2\.weight'"):
        trained(model, guide, callback=blow_up)


def test_a_far_too_large_learning_rate_stops_training(tmp_path):
    with pytest.raises(FloatingPointError, match=r"step \d"):
        trained(*problem(), optim=partial(SGD, lr=1e30))


def test_a_parameter_broken_by_the_very_last_step_is_named():
    class Breaking(SGD):
        steps = 0

        def step(self, closure=None):
            super().step(closure)
            self.steps += 1
            if self.steps == FIT["epochs"] * STEPS_PER_EPOCH:
                self.param_groups[0]["params"][0].data.fill_(float("nan"))

    with pytest.raises(FloatingPointError, match="parameter"):
        trained(*problem(), optim=partial(Breaking, lr=0.0))


def test_a_mistake_of_the_user_is_not_taken_for_a_number_that_is_not_finite():
    x, y = data()
    with pytest.raises(ValueError, match="y must hold integer labels"):
        trained(*problem(), data=(x, y.float()))
