# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How an arm is chosen: what all policies share, chance, and a linear model of each arm."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_radial._pyro.checks import positive_count, positive_float
from pyro_radial.decisions.history import History
from pyro_radial.decisions.linear_model import LinearModel

__all__ = ["LinearThompson", "Policy", "UniformPolicy", "with_one"]


class Policy:
    """Base class: chooses arms, and learns from what they paid when it is told to.

    A subclass defines :meth:`choose` and, where it learns, :meth:`refit` and its state; where it makes something that
    depends on the bandit's size, :meth:`begin`, which it calls here too. Its random numbers are torch's, which
    :func:`~pyro_radial.decisions.run_bandit` seeds for each decision and each refit. Public attributes are its
    settings: a checkpoint of a run with others is refused.
    """

    #: Gradient steps taken in all.
    gradient_steps: int = 0
    #: The width of a context and the number of arms, once :meth:`begin` has said so.
    sizes: tuple[int, int] | None = None

    def begin(self, num_features: int, num_arms: int) -> None:
        """Make what depends on the sizes of a bandit.

        :param int num_features: how many features, D.
        :param int num_arms: how many arms, K.
        :raises ValueError: for sizes other than those that it was begun with.
        """
        sizes = (positive_count("num_features", num_features), positive_count("num_arms", num_arms))
        if self.sizes not in (None, sizes):
            raise ValueError(
                f"{type(self).__name__}: contexts and arms must be those of the bandit that it was begun with, "
                f"{self.sizes[0]} features and {self.sizes[1]} arms, got {num_features} and {num_arms}"
            )
        self.sizes = sizes

    def choose(self, context: Tensor) -> int:
        """The arm to pull.

        :param Tensor context: ``[D]``.
        :returns: an integer from 0 to K - 1.
        """
        raise NotImplementedError

    def refit(self, history: History) -> None:
        """Learn from everything seen so far.

        :param History history: at least one decision.
        """

    def state_dict(self) -> dict[str, Any]:
        """All that later choices depend on, in tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned, after :meth:`begin`."""

    @property
    def num_arms(self) -> int:
        """K."""
        return self._begun[1]

    @property
    def _begun(self) -> tuple[int, int]:
        if self.sizes is None:
            raise ValueError(f"{type(self).__name__}: begin must come before decisions, got none begun")
        return self.sizes

    def _checked(self, context: Tensor) -> Tensor:
        """The context, if it has the width that the policy was begun with."""
        if context.shape != self._begun[:1]:
            raise ValueError(
                f"{type(self).__name__}: context must have shape [{self._begun[0]}], got {list(context.shape)}"
            )
        return context


class UniformPolicy(Policy):
    """Any arm with the same probability: what regrets are relative to."""

    def choose(self, context: Tensor) -> int:
        """The arm to pull."""
        self._checked(context)
        return int(torch.randint(self.num_arms, ()))


class LinearThompson(Policy):
    r"""Thompson sampling with the full posterior of a linear model of each arm.

    A draw of each arm's weights and noise from the conjugate posterior of :class:`LinearModel`, and the arm whose draw
    pays most. An arm never pulled is drawn from the prior.

    Source: Riquelme, Tucker and Snoek (2018), "Deep Bayesian Bandits Showdown", section 4.1, whose prior is the
    default.

    :param float prior_precision: :math:`\lambda`, of the weights, in units of one over the noise's variance.
    :param float shape: :math:`a_0`, of the inverse-gamma prior of that variance.
    :param float rate: :math:`b_0`, of the same.
    :raises ValueError: naming the argument out of range.

    Example::

        >>> from pyro_radial.decisions import run_bandit, ContextualBandit
        >>> x = torch.randn(300, 2)
        >>> bandit = ContextualBandit(x, torch.cat([x, -x], 1))
        >>> result = run_bandit(bandit, LinearThompson(), progress=False)
        >>> bool(result.relative_regret < 25)
        True
    """

    def __init__(self, prior_precision: float = 0.25, shape: float = 6.0, rate: float = 6.0) -> None:
        self.prior_precision = positive_float("LinearThompson: prior_precision", prior_precision)
        self.shape = positive_float("LinearThompson: shape", shape)
        self.rate = positive_float("LinearThompson: rate", rate)
        self._arms: list[LinearModel] = []

    def begin(self, num_features: int, num_arms: int) -> None:
        """Make the prior of each arm."""
        super().begin(num_features, num_arms)
        if not self._arms:
            self._arms = [self._prior(num_features) for _ in range(num_arms)]

    def choose(self, context: Tensor) -> int:
        """The arm to pull."""
        x = with_one(self._checked(context))
        return int(torch.stack([arm.draw() @ x for arm in self._arms]).argmax())

    def refit(self, history: History) -> None:
        """The posterior of each arm, from the prior and all its rewards."""
        self._checked(history.contexts[0])
        for number in range(self.num_arms):
            x, y = history.of_arm(number)
            self._arms[number] = self._prior(x.shape[1]).updated(with_one(x), y.double())

    def state_dict(self) -> dict[str, Any]:
        """The posterior of each arm."""
        return {"arms": [arm._asdict() for arm in self._arms]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put it back."""
        self._arms = [LinearModel(**arm) for arm in state["arms"]]

    def _prior(self, num_features: int) -> LinearModel:
        return LinearModel.prior(num_features + 1, self.prior_precision, self.shape, self.rate)


def with_one(x: Tensor) -> Tensor:
    """Rows with a one at the end, for the bias, in float64."""
    x = x.double()
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)
