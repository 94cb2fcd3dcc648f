# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Rates of a training: some parameters' own, what they mean for scales, and how they fall."""

import math
import re
from functools import partial

import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch.nn.functional import softplus
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau, SequentialLR, StepLR

from pyro_radial import AutoMeanField, AutoRadial
from pyro_radial.infer.training.training_run import TrainingRun
from tests.helpers.runs import (
    ROWS,
    STEPS_PER_EPOCH,
    assert_same,
    data,
    function_problem,
    killed,
    problem,
    rates,
    state_of,
    trained,
)


@pytest.fixture
def taken(monkeypatch):
    """The rates of all groups that each optimizer step is taken with."""
    seen, original = [], TrainingRun.step

    def step(self):
        seen.append([group["lr"] for group in self.trainer.optimizer.param_groups])
        original(self)

    monkeypatch.setattr(TrainingRun, "step", step)
    return seen


def scales_at(scales, others, optim=pyro.optim.Adam, **settings):
    return optim(lambda name: {"lr": scales if "scales" in name else others, **settings})


# ------------------------------------------------------------------------------------------------ by name


def test_rates_by_name_train_as_groups_of_a_torch_optimizer_do():
    def by_hand(parameters):
        assert len(parameters) == 8
        return SGD([{"params": parameters[:4], "lr": 1e-3}, {"params": parameters[4:], "lr": 2e-2}], fused=True)

    state, result = trained(*problem(), optim=by_hand)
    other, other_result = trained(*problem(), optim=scales_at(2e-2, 1e-3, pyro.optim.SGD))
    assert other_result == result
    assert_same(other, state)


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


def test_names_that_match_nothing_are_no_error():
    state, _ = trained(*problem(), optim=pyro.optim.Adam(lambda name: {"lr": 0.1 if "nowhere" in name else 1e-3}))
    assert_same(state, trained(*problem(), optim=pyro.optim.Adam({"lr": 1e-3}))[0])


def test_a_schedule_multiplies_the_rate_of_each_group(taken):
    trained(*problem(), optim=scales_at(1e-2, 3e-3), scheduler=partial(StepLR, step_size=1, gamma=0.5))
    for step, (others, scales) in enumerate(taken):
        factor = 0.5 ** (step // STEPS_PER_EPOCH)
        assert (others, scales) == pytest.approx((3e-3 * factor, 1e-2 * factor))


# ------------------------------------------------------------------------------------ what a rate of scales means


@pytest.mark.parametrize("guide", [AutoRadial, AutoMeanField, AutoNormal])
@pytest.mark.parametrize("stddev", [0.003, 0.1, 0.5])
def test_a_step_of_scales_is_one_of_their_logarithm_times_the_slope_of_softplus(guide, stddev):
    r"""With :math:`\sigma = \log(1 + e^\rho)`, :math:`d \log \sigma / d \rho = (1 - e^{-\sigma}) / \sigma`."""
    rate = 1e-3
    start = {"init_scale": stddev} if guide is AutoNormal else {"init_stddev": stddev}
    model, made = problem(guide=partial(guide, **start))
    made(*data())
    before = {name: value.detach().clone() for name, value in made.named_parameters() if "scales" in name}
    # The first step of Adam moves each element by the rate.
    trained(model, made, epochs=1, batch_size=ROWS, optim=scales_at(rate, 0.0))
    after = dict(made.named_parameters())
    assert before
    for name, rho in before.items():
        sigma, moved = softplus(rho.double()), softplus(after[name].detach().double())
        if guide is AutoRadial:
            assert sigma.mean() == pytest.approx(stddev * rho.numel() ** 0.5, rel=1e-4)
        slope = (1 - (-sigma).exp()) / sigma
        # To first order in the rate, and to rounding of rho in single precision.
        expected = (rate * slope).expand_as(moved)
        assert torch.allclose((moved / sigma).log().abs(), expected, rtol=2 * rate, atol=1e-6), name


# -------------------------------------------------------------------------------------------------- step by step


def test_a_cosine_falls_to_zero_step_by_step_in_each_group(taken):
    steps = 3 * STEPS_PER_EPOCH
    rate = {"scheduler": partial(CosineAnnealingLR, T_max=steps), "scheduler_interval": "step"}
    model, guide = problem()
    trained(model, guide, optim=scales_at(1e-2, 3e-3), **rate)
    assert len(taken) == steps
    for step, (others, scales) in enumerate(taken):
        share = 0.5 * (1 + math.cos(math.pi * step / steps))
        assert (others, scales) == pytest.approx((3e-3 * share, 1e-2 * share), rel=1e-6)


def test_a_cosine_by_its_name_counts_the_steps_of_the_run(tmp_path):
    by_hand = {"scheduler": partial(CosineAnnealingLR, T_max=3 * STEPS_PER_EPOCH), "scheduler_interval": "step"}
    expected, _ = trained(*problem(), optim=scales_at(1e-2, 3e-3), **by_hand)
    by_name = {"optim": scales_at(1e-2, 3e-3), "scheduler": "cosine"}
    assert_same(trained(*problem(), **by_name)[0], expected)
    kept = by_name | {"checkpoint": tmp_path / "run.pt"}
    trained(*problem(), **kept)
    assert_same(trained(*problem(), **kept)[0], expected)
    # Its rates are those of a run of this length.
    with pytest.raises(
        ValueError, match=f"made with scheduler.T_max={3 * STEPS_PER_EPOCH}, this run has scheduler.T_max="
    ):
        trained(*problem(), epochs=4, **kept)
    with pytest.raises(ValueError, match=r"scheduler must be a function from .*, or 'cosine', got str"):
        trained(*problem(), scheduler="linear")


def test_after_epochs_is_the_default():
    scheduler = partial(StepLR, step_size=1, gamma=0.1)
    plain, _ = trained(*problem(), scheduler=scheduler)
    assert_same(trained(*problem(), scheduler=scheduler, scheduler_interval="epoch")[0], plain)
    by_step, _ = trained(*problem(), scheduler=scheduler, scheduler_interval="step")
    assert any(not torch.equal(value, plain[name]) for name, value in by_step.items())


def test_another_interval_is_another_run(tmp_path):
    kept = {"scheduler": partial(StepLR, step_size=1), "checkpoint": tmp_path / "run.pt"}
    trained(*problem(), **kept)
    with pytest.raises(ValueError, match="made with scheduler_interval='epoch', this run has scheduler_interval='st"):
        trained(*problem(), scheduler_interval="step", **kept)


# ------------------------------------------------------------------------------------------------------- resumes

# Of several kinds: from the rate before, from the first rate, made of others, without a first rate.
SCHEDULES = {
    "none": None,
    "step": partial(StepLR, step_size=1, gamma=0.5),
    "function": partial(LambdaLR, lr_lambda=lambda epoch: 0.5**epoch),
    "cosine": partial(CosineAnnealingLR, T_max=3),
    "sequence": lambda optimizer: SequentialLR(
        optimizer, [LambdaLR(optimizer, lambda epoch: 0.5), StepLR(optimizer, 1, gamma=0.5)], milestones=[2]
    ),
    "plateau": partial(ReduceLROnPlateau, patience=0, threshold=10.0, factor=0.5),
}


# What SequentialLR of torch 2.7 says of itself.
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_other_rates_of_groups_on_resume_are_said_and_fall_as_the_old_ones_would(schedule, tmp_path, taken):
    path, scheduler = tmp_path / "run.pt", SCHEDULES[schedule]
    settings = {"checkpoint": path, "scheduler": scheduler}
    trained(*problem(), epochs=1, optim=scales_at(1e-2, 4e-3), **settings)
    undisturbed = len(taken)
    trained(*problem(), epochs=3, optim=scales_at(1e-2, 4e-3), scheduler=scheduler)
    expected = taken[2 * undisturbed :]
    del taken[:]
    message = re.escape(f"{path} was made with lr=0.004 and 0.01, this run resumes with lr=0.004 and 0.05")
    with pytest.warns(UserWarning, match=message):
        trained(*problem(), epochs=3, optim=scales_at(5e-2, 4e-3), **settings)
    assert len(taken) == len(expected) == 2 * STEPS_PER_EPOCH
    for (others, scales), (old_others, old_scales) in zip(taken, expected, strict=True):
        assert (others, scales) == pytest.approx((old_others, 5 * old_scales), rel=1e-6)


def test_the_same_rates_on_resume_are_no_warning(tmp_path, monkeypatch):
    settings = {"checkpoint": tmp_path / "run.pt", "optim": pyro.optim.Adam(rates), "checkpoint_every": 1}
    with killed(monkeypatch, "step", 6, "after"):
        trained(*problem(), **settings)
    trained(*problem(), **settings)


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        (
            pyro.optim.Adam(lambda name: {"lr": 1e-2, "weight_decay": 0.2} if "scales" in name else {}),
            r"made with optimizer groups\.1\.weight_decay=0\.1, this run has optimizer groups\.1\.weight_decay=0\.2",
        ),
        (
            pyro.optim.Adam(lambda name: {"lr": 1e-2, "weight_decay": 0.1} if "scales.0" in name else {}),
            r"made with optimizer groups\.0\.parameters='guide\.locs\.0\.weight_unconstrained, .*this run has",
        ),
        (pyro.optim.Adam({"lr": 1e-3}), r"made with optimizer groups\.0\.parameters='guide\.locs"),
    ],
    ids=["another decay", "other groups", "one group"],
)
def test_other_settings_of_a_group_on_resume_are_refused_by_name(optim, message, tmp_path):
    first = pyro.optim.Adam(lambda name: {"lr": 1e-2, "weight_decay": 0.1} if "scales" in name else {})
    trained(*problem(), epochs=1, optim=first, checkpoint=tmp_path / "run.pt")
    with pytest.raises(ValueError, match=message):
        trained(*problem(), optim=optim, checkpoint=tmp_path / "run.pt")


def test_groups_with_parameters_of_neither_module_are_told_apart_across_instances(tmp_path):
    """Names in the store count instances, so that the second problem's are others."""
    settings = {"checkpoint": tmp_path / "run.pt"}
    trained(
        *function_problem(), epochs=1, optim=pyro.optim.Adam(lambda name: {"lr": 0.1 * ("noise" in name)}), **settings
    )
    trained(*function_problem(), optim=pyro.optim.Adam(lambda name: {"lr": 0.1 * ("noise" in name)}), **settings)
    with pytest.raises(ValueError, match=r"optimizer groups\.0\.parameters="):
        trained(*function_problem(), optim=pyro.optim.Adam(lambda name: {"lr": 0.1 * ("net" in name)}), **settings)


def test_a_torch_optimizer_s_own_groups_resume_at_their_rates_too(tmp_path, taken):
    def grouped(lr):
        return lambda ps: Adam([{"params": ps[:4]}, {"params": ps[4:], "lr": lr}], lr=1e-3)

    trained(*problem(), epochs=1, optim=grouped(0.01), checkpoint=tmp_path / "run.pt")
    with pytest.warns(UserWarning, match=r"lr=0\.001 and 0\.01, this run resumes with lr=0\.001 and 0\.02"):
        trained(*problem(), epochs=2, optim=grouped(0.02), checkpoint=tmp_path / "run.pt")
    assert taken[-1] == [1e-3, 0.02]
