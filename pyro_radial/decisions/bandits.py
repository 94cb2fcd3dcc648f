# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loop of a contextual bandit: a context, an arm, its reward, and a refit on a schedule."""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import check_flag, check_types, non_negative_integer, positive_count
from pyro_radial._pyro.random_numbers import seeded
from pyro_radial.decisions.policies import Policy
from pyro_radial.infer.training.checkpoint import Checkpoint
from pyro_radial.infer.training.identity import described

__all__ = ["BanditResult", "run_bandit"]

# Each decision and each refit has its own random numbers, so that a resumed run can repeat them.
DECISION, REFIT = 0, 1
CPU = torch.device("cpu")
SAVED = ("settings", "done", "arms", "rewards", "seconds")


@dataclass(frozen=True, eq=False)
class BanditResult:
    """Arms, rewards and regrets of a run.

    :param Tensor arms: arms pulled, ``[T]``.
    :param Tensor rewards: their rewards, ``[T]``.
    :param Tensor regrets: expected reward of the best arm in a context minus that of the arm pulled, float64 ``[T]``.
    :param Tensor uniform_regrets: expected regret of an arm chosen at random, float64 ``[T]``.
    :param int gradient_steps: gradient steps of all refits.
    :param float seconds: time of decisions and refits, across resumes.
    """

    arms: Tensor
    rewards: Tensor
    regrets: Tensor
    uniform_regrets: Tensor
    gradient_steps: int
    seconds: float

    @property
    def cumulative_regret(self) -> float:
        """Sum of all regrets."""
        return float(self.regrets.sum())

    def relative_regret(self, last: int | None = None) -> float:
        """Return the regret relative to choosing arms at random, which has 100.

        :param int last: number of decisions at the end to count; all by default. The last decisions measure the final
            policy without the cost of learning (Riquelme, Tucker and Snoek 2018, section 5).
        """
        last = len(self.regrets) if last is None else positive_count("last", last)
        if last > len(self.regrets):
            raise ValueError(f"last must be at most the {len(self.regrets)} decisions, got {last}")
        of_chance = float(self.uniform_regrets[-last:].sum())
        if not of_chance:
            raise ValueError(f"arms must differ in expected reward, got {last} decisions without a difference")
        return 100.0 * float(self.regrets[-last:].sum()) / of_chance


def run_bandit(
    contexts: Tensor,
    rewards: Tensor,
    policy: Policy,
    *,
    expected: Tensor | None = None,
    refit_every: int = 20,
    initial_pulls: int = 2,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> BanditResult:
    """Let a policy decide in one context after the other, showing it only the rewards of the arms that it pulls.

    First, each arm is pulled ``initial_pulls`` times in turn; then the policy chooses. It learns from all decisions so
    far after the initial pulls and after every ``refit_every`` decisions. Random numbers depend on ``seed`` alone.

    :param Tensor contexts: ``[T, D]``.
    :param Tensor rewards: reward of each arm in each context, ``[T, K]``.
    :param Policy policy: policy to run; afterwards it holds what it learned in the last refit.
    :param Tensor expected: expected rewards ``[T, K]``, from which regrets are computed; by default ``rewards``.
    :param int refit_every: decisions between refits.
    :param int initial_pulls: initial pulls of each arm.
    :param int seed: seed of all random numbers here; make the policy from a seed too.
    :param checkpoint: file to resume from. After a kill, the same call with a new policy continues from the last refit
        and ends bit for bit as an undisturbed run.
    :param bool progress: whether to show a progress bar.
    :returns: arms, rewards and regrets.
    :raises ValueError: if an argument is out of range or not finite; if the policy does not fit the contexts or chooses
        an arm that does not exist; if the checkpoint is damaged, is from another run, or is being written by another.

    Example::

        >>> class Chance(Policy):
        ...     def choose(self, context):
        ...         return int(torch.randint(self.num_arms, ()))
        >>> x = torch.randn(2000, 1)
        >>> result = run_bandit(x, torch.cat([x, -x], 1), Chance(), progress=False)
        >>> 90 < result.relative_regret() < 110
        True
    """
    expected = rewards if expected is None else expected
    _check_tensors(contexts, rewards, expected)
    check_flag("progress", progress)
    check_types(Policy, policy=policy)
    num_arms = rewards.shape[1]
    first = num_arms * non_negative_integer("initial_pulls", initial_pulls)
    if first > len(contexts):
        raise ValueError(f"initial_pulls of {num_arms} arms must be at most {len(contexts)} decisions, got {first}")
    settings = {
        "refit_every": positive_count("refit_every", refit_every),
        "initial_pulls": initial_pulls,
        "seed": non_negative_integer("seed", seed),
        "bandit": described({"contexts": contexts, "rewards": rewards, "expected": expected}),
    }
    run = _Run(contexts, rewards, policy, first, refit_every, seed)
    gaps = (expected.amax(1, keepdim=True) - expected).double()
    with nullcontext() if checkpoint is None else Checkpoint(checkpoint) as file:
        policy.begin(contexts.shape[1], num_arms)
        if file is not None:
            run.resume(file, settings)
        with tqdm(total=len(contexts), initial=run.done, desc="bandit", unit="decision", disable=not progress) as bar:
            while run.done < len(contexts):
                refitted = run.decide()
                bar.update()
                if refitted:
                    bar.set_postfix_str(f"regret {float(_pulled(gaps, run.arms)[: run.done].sum()):.6g}")
                if file is not None and (refitted or run.done == len(contexts)):
                    file.save(run.state())
    return BanditResult(
        run.arms, run.rewards, _pulled(gaps, run.arms), gaps.mean(1), policy.gradient_steps, run.seconds
    )


class _Run:
    """One run, decision by decision, with everything that its checkpoint holds."""

    def __init__(
        self, contexts: Tensor, rewards: Tensor, policy: Policy, first: int, refit_every: int, seed: int
    ) -> None:
        self.contexts, self.all_rewards, self.policy = contexts, rewards, policy
        self.first, self.refit_every, self.seed = first, refit_every, seed
        self.settings: dict[str, Any] = {}
        self.done, self.seconds = 0, 0.0
        self.arms = torch.zeros(len(contexts), dtype=torch.long)
        self.rewards = rewards.new_zeros(len(contexts))

    def decide(self) -> bool:
        """Pull one arm, and refit the policy if it is time; returns whether it was."""
        before, number, num_arms = time.monotonic(), self.done, self.all_rewards.shape[1]
        if number < self.first:
            arm = number % num_arms
        else:
            with seeded(self._seed(DECISION), CPU):
                arm = non_negative_integer("policy.choose(context)", self.policy.choose(self.contexts[number]))
        if arm >= num_arms:
            raise ValueError(f"policy must choose one of {num_arms} arms, got {arm}")
        self.arms[number], self.rewards[number] = arm, self.all_rewards[number, arm]
        self.done += 1
        due = self.done >= max(1, self.first) and (self.done - self.first) % self.refit_every == 0
        if due:
            with seeded(self._seed(REFIT), CPU):
                self.policy.refit(self.contexts[: self.done], self.arms[: self.done], self.rewards[: self.done])
        self.seconds += time.monotonic() - before
        return due

    def resume(self, file: Checkpoint, settings: dict[str, Any]) -> None:
        """Continue from a checkpoint if there is one, else write the first."""
        self.settings = {**settings, "policy": described(self.policy)}
        saved = file.load(needed=self.state())
        if saved is None:
            file.save(self.state())
            return
        file.check(saved["settings"], self.settings)
        self.policy.load_state_dict(saved["policy"])
        for name in SAVED[1:]:
            setattr(self, name, saved[name])

    def state(self) -> dict[str, Any]:
        """The content of a checkpoint."""
        return {name: getattr(self, name) for name in SAVED} | {"policy": self.policy.state_dict()}

    def _seed(self, stage: int) -> int:
        return int(np.random.SeedSequence([self.seed, self.done, stage]).generate_state(1)[0])


def _pulled(values: Tensor, arms: Tensor) -> Tensor:
    """The value ``[T]`` of the arm pulled in each context, from those of all arms ``[T, K]``."""
    return values.gather(1, arms.unsqueeze(1)).squeeze(1)


def _check_tensors(contexts: Any, rewards: Any, expected: Any) -> None:
    for name, value in (("contexts", contexts), ("rewards", rewards), ("expected", expected)):
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() != 2:
            given = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name} must be a floating-point tensor with two dims, got {given}")
        if not value.numel():
            raise ValueError(f"{name} must have rows and columns, got {list(value.shape)}")
        if not (finite := value.isfinite()).all():
            row, column = (~finite).nonzero()[0].tolist()
            raise ValueError(f"{name} must be finite, got {value[row, column].item()} at [{row}, {column}]")
    if len(rewards) != len(contexts):
        raise ValueError(f"rewards must have a row for each of {len(contexts)} contexts, got {len(rewards)}")
    if expected.shape != rewards.shape:
        raise ValueError(f"expected must have the shape of rewards, {list(rewards.shape)}, got {list(expected.shape)}")
