# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loop of a contextual bandit: a context, an arm, its reward, and a refit on a schedule."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import non_negative_integer, positive_count
from pyro_radial._pyro.random_state import seeded
from pyro_radial.decisions.environments import ContextualBandit
from pyro_radial.decisions.history import History
from pyro_radial.decisions.policies import Policy
from pyro_radial.infer.training.checkpoint import check_settings, load_checkpoint, save_checkpoint
from pyro_radial.infer.training.fingerprint import described
from pyro_radial.infer.training.sole_writer import sole_writer

__all__ = ["BanditResult", "run_bandit"]

# Of what is random at a time, so that each has its own numbers and can be done again alone.
DECISION, REFIT = 0, 1

SAVED = ("settings", "done", "arms", "rewards", "seconds", "policy")

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class BanditResult:
    """What a policy did, and what it lost by it.

    Regrets are of expectations: what the best arm was expected to pay in a context less what the arm that was pulled
    was.

    :param Tensor arms: those pulled, ``[T]``.
    :param Tensor rewards: what they paid, ``[T]``.
    :param Tensor regrets: the regret of each decision, ``[T]``, in float64.
    :param Tensor uniform_regrets: what that of an arm chosen at random would have been, on average over the arms,
        ``[T]``.
    :param int gradient_steps: of all refits.
    :param float seconds: that decisions and refits took, across resumes.
    """

    arms: Tensor
    rewards: Tensor
    regrets: Tensor
    uniform_regrets: Tensor
    gradient_steps: int = 0
    seconds: float = field(default=0.0, compare=False)

    @property
    def cumulative_regret(self) -> float:
        """The sum of all regrets."""
        return float(self.regrets.sum())

    @property
    def relative_regret(self) -> float:
        """The same relative to that of choosing uniformly, which is 100."""
        return self._relative(len(self.regrets))

    def simple_regret(self, last: int = 500) -> float:
        """The mean regret of the last decisions: about that of the policy with all it has learned.

        Source: Riquelme, Tucker and Snoek (2018), "Deep Bayesian Bandits Showdown", section 5.

        :param int last: how many, at most T.
        :raises ValueError: naming it if it is out of range.
        """
        return float(self.regrets[-self._last(last) :].mean())

    def relative_simple_regret(self, last: int = 500) -> float:
        """The same relative to that of choosing uniformly in these contexts, which is 100."""
        return self._relative(self._last(last))

    def _relative(self, last: int) -> float:
        of_chance = float(self.uniform_regrets[-last:].sum())
        if not of_chance:
            raise ValueError(f"bandit must have arms that pay differently, got {last} decisions of equal ones")
        return 100.0 * float(self.regrets[-last:].sum()) / of_chance

    def _last(self, last: int) -> int:
        if positive_count("last", last) > len(self.regrets):
            raise ValueError(f"last must be at most the {len(self.regrets)} decisions, got {last}")
        return last


def run_bandit(
    bandit: ContextualBandit,
    policy: Policy,
    *,
    refit_every: int = 20,
    initial_pulls: int = 2,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> BanditResult:
    """Let a policy decide in all contexts of a bandit, one after the other.

    Arms are first pulled in turn, whatever the policy, and then as the policy chooses. Once all are pulled, and then
    every ``refit_every`` decisions, whatever the policy, it learns from everything it has seen. Each decision and each
    refit has random numbers of its own, from the seed alone; the generators are afterwards as they were.

    :param ContextualBandit bandit: contexts and rewards.
    :param Policy policy: how to decide; at the end it has learned what the last refit told it.
    :param int refit_every: decisions from refit to refit.
    :param int initial_pulls: how often each arm is pulled first; none with 0, and then the first decisions are those of
        an untrained policy.
    :param int seed: of everything random here; policies are the caller's, so make them from a seed too.
    :param checkpoint: a file. A run that is killed at any moment goes on from the last refit when it is called again
        with the same bandit, policy (made anew) and settings, and ends bit for bit as if undisturbed.
    :param bool progress: whether to show progress, with the regret so far.
    :returns: the arms, rewards and regrets.
    :raises ValueError: naming the argument out of range, a context of another width than the policy takes, an arm that
        there is not, a bandit with fewer contexts than first pulls, or a checkpoint that is damaged, of another run,
        or being written by another.

    Example::

        >>> from pyro_radial.decisions import UniformPolicy, wheel_bandit
        >>> result = run_bandit(wheel_bandit(delta=0.9, num_steps=2000), UniformPolicy(), progress=False)
        >>> 90 < result.relative_regret < 110
        True
    """
    refit_every = positive_count("run_bandit: refit_every", refit_every)
    initial_pulls = non_negative_integer("run_bandit: initial_pulls", initial_pulls)
    seed = non_negative_integer("run_bandit: seed", seed)
    if not isinstance(bandit, ContextualBandit):
        raise ValueError(f"run_bandit: bandit must be a ContextualBandit, got {type(bandit).__name__}")
    if not isinstance(policy, Policy):
        raise ValueError(f"run_bandit: policy must be a Policy, got {type(policy).__name__}")
    first = initial_pulls * bandit.num_arms
    if first > len(bandit):
        raise ValueError(
            f"run_bandit: initial_pulls of {bandit.num_arms} arms must be at most the {len(bandit)} decisions in all, "
            f"got {first}"
        )
    path = None if checkpoint is None else Path(checkpoint)
    run = _Run(bandit, policy, refit_every, initial_pulls, seed)
    with sole_writer(path):
        policy.begin(bandit.num_features, bandit.num_arms)
        if path is not None:
            settings = run.settings()
            if path.exists():
                run.load(path, settings)
            else:
                run.save(path, settings)
        bar = tqdm(total=len(bandit), initial=run.done, desc=bandit.name, unit="decision", disable=not progress)
        with bar:
            while run.done < len(bandit):
                before = time.monotonic()
                run.decide()
                refitted = run.refit_if_due()
                run.seconds += time.monotonic() - before
                bar.update()
                if refitted:
                    bar.set_postfix_str(f"regret {run.regret:.6g}")
                if path is not None and (refitted or run.done == len(bandit)):
                    run.save(path, settings)
    return run.result()


class _Run:
    """One run, decision by decision, with everything that a checkpoint of it must hold."""

    def __init__(
        self, bandit: ContextualBandit, policy: Policy, refit_every: int, initial_pulls: int, seed: int
    ) -> None:
        self.bandit, self.policy, self.refit_every, self.seed = bandit, policy, refit_every, seed
        self.initial_pulls = initial_pulls
        self.first = initial_pulls * bandit.num_arms
        self.done, self.seconds = 0, 0.0
        self.arms = torch.zeros(len(bandit), dtype=torch.long)
        self.rewards = torch.zeros(len(bandit), dtype=bandit.rewards.dtype)
        self._gaps = bandit.gaps.double()

    def decide(self) -> None:
        """Pull one arm."""
        number = self.done
        if number < self.first:
            arm = number % self.bandit.num_arms
        else:
            with seeded(self._seed(DECISION), CPU):
                arm = int(self.policy.choose(self.bandit.contexts[number]))
        if not 0 <= arm < self.bandit.num_arms:
            raise ValueError(f"run_bandit: policy must choose one of {self.bandit.num_arms} arms, got {arm}")
        self.arms[number], self.rewards[number] = arm, self.bandit.rewards[number, arm]
        self.done += 1

    def refit_if_due(self) -> bool:
        """Tell the policy what it has seen, if it is time; whether it was."""
        if self.done < max(1, self.first) or (self.done - self.first) % self.refit_every:
            return False
        with seeded(self._seed(REFIT), CPU):
            seen = slice(0, self.done)
            self.policy.refit(History(self.bandit.contexts[seen], self.arms[seen], self.rewards[seen]))
        return True

    @property
    def regret(self) -> float:
        """That of all decisions so far."""
        return float(self._regrets[: self.done].sum())

    @property
    def _regrets(self) -> Tensor:
        return self._gaps.gather(1, self.arms.unsqueeze(1)).squeeze(1)

    def result(self) -> BanditResult:
        """Once all is done."""
        steps = self.policy.gradient_steps
        return BanditResult(self.arms, self.rewards, self._regrets, self._gaps.mean(1), steps, self.seconds)

    def _seed(self, stage: int) -> int:
        return int(np.random.SeedSequence([self.seed, self.done, stage]).generate_state(1)[0])

    def settings(self) -> dict[str, Any]:
        """What a checkpoint must have been made with."""
        given = {"refit_every": self.refit_every, "initial_pulls": self.initial_pulls, "seed": self.seed}
        tensors = {name: getattr(self.bandit, name) for name in ("contexts", "rewards", "expected")}
        return {**given, "bandit": described(tensors), "policy": described(self.policy)}

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        """Write what the rest of the run depends on."""
        state = {name: getattr(self, name) for name in ("done", "arms", "rewards", "seconds")}
        save_checkpoint(path, {"settings": settings, **state, "policy": self.policy.state_dict()})

    def load(self, path: Path, settings: dict[str, Any]) -> None:
        """Go on from there."""
        state = load_checkpoint(path, CPU, needed=SAVED)
        check_settings(path, state["settings"], settings)
        self.policy.load_state_dict(state["policy"])
        for name in ("done", "arms", "rewards", "seconds"):
            setattr(self, name, state[name])
