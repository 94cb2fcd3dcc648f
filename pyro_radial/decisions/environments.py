# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Contextual bandits whose rewards are all known beforehand, so that every policy meets the same ones."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_radial._pyro.checks import non_negative_integer, positive_count, positive_float, proper_fraction

__all__ = ["ContextualBandit", "classification_bandit", "mushroom_bandit", "wheel_bandit"]


@dataclass(frozen=True, eq=False)
class ContextualBandit:
    """A sequence of contexts, and what each arm would pay in each.

    :param Tensor contexts: ``[T, D]``, floating point.
    :param Tensor rewards: ``[T, K]``, what is paid for arm k at time t if it is pulled.
    :param Tensor expected: ``[T, K]``, its expectation given the context, which regret is counted in; the rewards
        themselves by default, where they are no random numbers.
    :param str name: for progress and messages.
    :raises ValueError: naming the argument whose shape, dtype or number does not fit.

    Example::

        >>> bandit = ContextualBandit(torch.rand(100, 3), torch.rand(100, 2))
        >>> len(bandit), bandit.num_features, bandit.num_arms
        (100, 3, 2)
    """

    contexts: Tensor
    rewards: Tensor
    expected: Tensor = field(default=None)  # type: ignore[assignment]
    name: str = "bandit"

    def __post_init__(self) -> None:
        if self.expected is None:
            object.__setattr__(self, "expected", self.rewards)
        for argument in ("contexts", "rewards", "expected"):
            value: Any = getattr(self, argument)
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() != 2:
                what = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"{argument} must be a floating-point tensor of two dims, got {what}")
            if not value.numel():
                raise ValueError(f"{argument} must have rows and columns, got {list(value.shape)}")
            broken = ~value.isfinite()
            if broken.any():
                row, column = broken.nonzero()[0].tolist()
                raise ValueError(f"{argument} must be finite, got {value[row, column].item()} at [{row}, {column}]")
        if len(self.rewards) != len(self.contexts):
            raise ValueError(
                f"rewards must have a row for each of {len(self.contexts)} contexts, got {len(self.rewards)}"
            )
        if self.expected.shape != self.rewards.shape:
            raise ValueError(
                f"expected must have the shape of rewards, {list(self.rewards.shape)}, got {list(self.expected.shape)}"
            )

    def __len__(self) -> int:
        return len(self.contexts)

    @property
    def num_features(self) -> int:
        """D, the width of a context."""
        return self.contexts.shape[1]

    @property
    def num_arms(self) -> int:
        """K."""
        return self.rewards.shape[1]

    @property
    def gaps(self) -> Tensor:
        """What each arm is expected to pay less than the best one, ``[T, K]``."""
        return self.expected.amax(1, keepdim=True) - self.expected


def mushroom_bandit(
    features: Tensor, is_poisonous: Tensor, num_steps: int, *, seed: int = 0, standardize: bool = False
) -> ContextualBandit:
    """Mushrooms to eat (arm 1) or not (arm 0), drawn with replacement.

    Not to eat pays 0 and an edible one 5. A poisonous one pays 5 or -35, each with probability one half, so that it is
    expected to pay -15.

    Source: Riquelme, Tucker and Snoek (2018), "Deep Bayesian Bandits Showdown", appendix A.

    :param Tensor features: ``[N, D]``, such as those of ``load_table("mushroom")``.
    :param Tensor is_poisonous: ``[N]``, zero or one.
    :param int num_steps: how many decisions, T.
    :param int seed: of the order and of the rewards.
    :param bool standardize: as of :func:`classification_bandit`.
    :returns: the bandit.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> bandit = mushroom_bandit(torch.eye(2), torch.tensor([0, 1]), num_steps=6)
        >>> sorted(set(bandit.expected[:, 1].tolist()))
        [-15.0, 5.0]
    """
    generator = _generator("mushroom_bandit", seed)
    _check_labels("is_poisonous", is_poisonous, features, 2)
    rows = torch.randint(len(features), (positive_count("num_steps", num_steps),), generator=generator)
    harmed = torch.rand(num_steps, generator=generator) < 0.5
    poisonous = is_poisonous[rows] == 1
    paid = torch.where(poisonous & harmed, -35.0, 5.0)
    expected = torch.where(poisonous, -15.0, 5.0)
    zero = torch.zeros(num_steps)
    contexts = _standardized(features[rows]) if standardize else features[rows]
    return ContextualBandit(contexts, torch.stack([zero, paid], 1), torch.stack([zero, expected], 1), "mushroom")


def classification_bandit(
    features: Tensor,
    labels: Tensor,
    num_steps: int,
    *,
    seed: int = 0,
    standardize: bool = True,
    name: str = "classification",
) -> ContextualBandit:
    """Classes to name: the right one pays 1, the others 0; rows come in a random order, each once until all have come.

    Source: Riquelme et al. (2018), appendix A, on the statlog and adult data.

    :param Tensor features: ``[N, D]``.
    :param Tensor labels: ``[N]``, integers from 0 to K - 1.
    :param int num_steps: how many decisions, T.
    :param int seed: of the order.
    :param bool standardize: whether each feature of the T contexts gets mean zero and standard deviation one; one that
        does not vary becomes zero.
    :param str name: of the bandit.
    :returns: the bandit, with an arm for each class.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> bandit = classification_bandit(torch.eye(3), torch.tensor([0, 1, 2]), num_steps=3)
        >>> bandit.rewards.sum(1)
        tensor([1., 1., 1.])
    """
    generator = _generator("classification_bandit", seed)
    _check_labels("labels", labels, features, None)
    num_steps = positive_count("num_steps", num_steps)
    passes = -(-num_steps // len(features))
    rows = torch.cat([torch.randperm(len(features), generator=generator) for _ in range(passes)])[:num_steps]
    contexts = _standardized(features[rows]) if standardize else features[rows]
    paid = torch.nn.functional.one_hot(labels[rows].long(), int(labels.max()) + 1)
    return ContextualBandit(contexts, paid.to(features.dtype), name=name)


def wheel_bandit(
    delta: float,
    num_steps: int,
    *,
    seed: int = 0,
    others: float = 1.0,
    safe: float = 1.2,
    high: float = 50.0,
    noise: float = 0.01,
) -> ContextualBandit:
    r"""Contexts uniform on the unit disk, of which only a thin rim pays for exploring.

    Five arms pay ``others``, but for arm 0, which always pays ``safe``; and beyond the radius :math:`\delta` one arm
    of the others pays ``high``, another in each quadrant: arm 1 where both coordinates are positive, then 2 at (+, -),
    3 at (-, +) and 4 at (-, -). All have normal noise. A share :math:`1 - \delta^2` of contexts is beyond.

    Source: Riquelme et al. (2018), section 5.4 and figure 3.

    :param float delta: the radius, between zero and one.
    :param int num_steps: how many decisions, T.
    :param int seed: of the contexts and the noise.
    :param float others: what an arm is expected to pay that is neither safe nor high.
    :param float safe: more than that.
    :param float high: more than that.
    :param float noise: the standard deviation of all rewards.
    :returns: the bandit, of two features and five arms.
    :raises ValueError: naming the argument out of range.

    Example::

        >>> bandit = wheel_bandit(delta=0.5, num_steps=2000)
        >>> beyond = bandit.contexts.norm(dim=1) > 0.5
        >>> bandit.expected[beyond].amax(1).unique(), bandit.expected[~beyond].amax(1).unique()
        (tensor([50.]), tensor([1.2000]))
    """
    delta, noise = proper_fraction("wheel_bandit: delta", delta), positive_float("wheel_bandit: noise", noise)
    if not -math.inf < others < safe < high < math.inf:
        raise ValueError(f"wheel_bandit: others < safe < high must hold, got {others}, {safe} and {high}")
    generator = _generator("wheel_bandit", seed)
    num_steps = positive_count("wheel_bandit: num_steps", num_steps)
    angle = 2.0 * math.pi * torch.rand(num_steps, generator=generator, dtype=torch.double)
    radius = torch.rand(num_steps, generator=generator, dtype=torch.double).sqrt()
    contexts = radius.unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], 1)
    quadrant = 1 + 2 * (contexts[:, 0] < 0).long() + (contexts[:, 1] < 0).long()
    expected = torch.full((num_steps, 5), float(others))
    expected[:, 0] = safe
    beyond = radius > delta
    expected[beyond, quadrant[beyond]] = high
    rewards = expected + noise * torch.randn(num_steps, 5, generator=generator)
    return ContextualBandit(contexts.float(), rewards, expected, f"wheel {delta:g}")


def _generator(who: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(non_negative_integer(f"{who}: seed", seed))


def _check_labels(argument: str, labels: Tensor, features: Tensor, number: int | None) -> None:
    if labels.shape != features.shape[:1]:
        raise ValueError(
            f"{argument} must have one number for each of {len(features)} rows, got shape {list(labels.shape)}"
        )
    if labels.is_floating_point() or labels.min() < 0 or (number is not None and labels.max() >= number):
        upper = "" if number is None else f" below {number}"
        raise ValueError(f"{argument} must hold integers from 0{upper}, got {labels.dtype} from {labels.min()}")


def _standardized(features: Tensor) -> Tensor:
    spread = features.std(0, correction=0)
    return (features - features.mean(0)) / torch.where(spread > 0, spread, 1.0)
