# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Learning rates by the names of parameters, and how they fall."""

import math
from functools import partial

import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from pyro_radial.infer.training.training_run import TrainingRun
from tests.helpers.runs import STEPS_PER_EPOCH, assert_same, data, function_problem, problem, state_of, trained


@pytest.fixture
def taken(monkeypatch):
    """The rates of all groups that each optimizer step is taken with."""
    seen, original = [], TrainingRun.step

    def step(self):
        seen.append([group["lr"] for group in self.optimizer.param_groups])
        original(self)

    monkeypatch.setattr(TrainingRun, "step", step)
    return seen


def scales_at(scales, others, optim=pyro.optim.Adam, **settings):
    return optim(lambda name: {"lr": scales if "scales" in name else others, **settings})


# ------------------------------------------------------------------------------------------------ by name


@pytest.mark.parametrize("make", [problem, partial(problem, guide=AutoNormal), function_problem])
def test_a_rate_of_zero_holds_what_it_is_the_rate_of(make):
    model, guide = make()
    guide(*data()) if isinstance(guide, AutoNormal) else guide.setup(*data())
    if make is function_problem:
        model(*data())
    before = state_of(model, guide)
    still = ("scales", "noise")
    optim = pyro.optim.Adam(lambda name: {"lr": 0.0 if any(part in name for part in still) else 1e-2})
    state, _ = trained(model, guide, optim=optim)
    for name, value in before.items():
        assert torch.equal(state[name], value) == any(part in name for part in still), name


COSINE = {"scheduler": partial(CosineAnnealingLR, T_max=3 * STEPS_PER_EPOCH), "scheduler_interval": "step"}


@pytest.mark.parametrize(
    ("schedule", "factor"),
    [
        ({"scheduler": partial(StepLR, step_size=1, gamma=0.5)}, lambda step: 0.5 ** (step // STEPS_PER_EPOCH)),
        (COSINE, lambda step: 0.5 * (1 + math.cos(math.pi * step / (3 * STEPS_PER_EPOCH)))),
    ],
    ids=["after epochs", "after steps, to zero"],
)
def test_a_schedule_multiplies_the_rate_of_each_group(schedule, factor, taken):
    trained(*problem(), optim=scales_at(1e-2, 3e-3), **schedule)
    assert len(taken) == 3 * STEPS_PER_EPOCH
    for step, (others, scales) in enumerate(taken):
        assert (others, scales) == pytest.approx((3e-3 * factor(step), 1e-2 * factor(step)), rel=1e-6)


# -------------------------------------------------------------------------------------------------- step by step


def test_a_cosine_by_its_name_counts_the_steps_of_the_run():
    expected, _ = trained(*problem(), optim=scales_at(1e-2, 3e-3), **COSINE)
    assert_same(trained(*problem(), optim=scales_at(1e-2, 3e-3), scheduler="cosine")[0], expected)
    with pytest.raises(ValueError, match=r"scheduler must be a function from .*, or 'cosine', got str"):
        trained(*problem(), scheduler="linear")
