# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Policies choose the arms of a contextual bandit and learn from the rewards."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyro_radial._pyro.checks import check_types, positive_count, positive_float
from pyro_radial.decisions.refits import Refits
from pyro_radial.infer.prediction.predict import predict

__all__ = ["Policy", "ThompsonSampling"]


class Policy:
    """Base class of policies for :func:`~pyro_radial.decisions.run_bandit`.

    A subclass defines :meth:`choose` and, if it learns, :meth:`refit`, :meth:`state_dict` and :meth:`load_state_dict`.
    Random numbers come from torch, which ``run_bandit`` seeds before each decision and each refit. Public attributes
    are settings: a run resumes only with the same ones. Begin the names of learned attributes with an underscore.

    Example::

        >>> class BestMean(Policy):
        ...     _best = 0
        ...     def choose(self, context):
        ...         return self._best
        ...     def refit(self, contexts, arms, rewards):
        ...         means = [rewards[arms == arm].mean() for arm in range(self.num_arms)]
        ...         self._best = int(torch.stack(means).argmax())
        >>> policy = BestMean()
        >>> policy.begin(num_features=1, num_arms=2)
        >>> policy.refit(torch.zeros(3, 1), torch.tensor([0, 1, 1]), torch.tensor([2.0, 1.0, 4.0]))
        >>> policy.choose(torch.zeros(1))
        1
    """

    #: Gradient steps taken so far.
    gradient_steps: int = 0
    #: Width D of a context, after :meth:`begin`.
    num_features: int = 0
    #: Number K of arms, after :meth:`begin`.
    num_arms: int = 0

    def begin(self, num_features: int, num_arms: int) -> None:
        """Create what depends on the width D of a context and the number K of arms; a second call does nothing.

        :raises ValueError: if the policy has begun with other sizes.
        """
        positive_count("num_features", num_features)
        positive_count("num_arms", num_arms)
        if self.num_arms and (num_features, num_arms) != (self.num_features, self.num_arms):
            raise ValueError(
                f"policy has begun with {self.num_features} features and {self.num_arms} arms, got {num_features} "
                f"features and {num_arms} arms; make a new policy for another bandit"
            )
        self.num_features, self.num_arms = num_features, num_arms

    def choose(self, context: Tensor) -> int:
        """Choose the arm to pull in a context ``[D]``, an integer from 0 to K - 1."""
        raise NotImplementedError

    def refit(self, contexts: Tensor, arms: Tensor, rewards: Tensor) -> None:
        """Learn from all decisions so far, at least one: contexts ``[N, D]``, arms pulled ``[N]``, rewards ``[N]``."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later choices depend on, as tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, after :meth:`begin`."""

    def check_context(self, context: Tensor) -> None:
        """Raise a ``ValueError`` if the policy has not begun or if the context has another width."""
        if not self.num_arms:
            raise ValueError("policy must begin before it decides; call begin(num_features, num_arms)")
        check_types(Tensor, context=context)
        if context.shape != (self.num_features,) or not context.is_floating_point() or not context.isfinite().all():
            raise ValueError(f"context must be {self.num_features} finite numbers, got {context}")


class ThompsonSampling(Policy):
    """Draw a network from the posterior for each decision, and pull the arm with the largest reward in that draw.

    This is Thompson sampling under any posterior: choose it with the guide (``AutoRadial``, ``AutoMeanField``,
    ``AutoRadialDirectional``) and the loss, such as ``FunctionalELBO`` for a prior on functions.

    Source: Thompson (1933), "On the likelihood that one unknown probability exceeds another in view of the evidence of
    two samples"; with functional posteriors Sun et al. (2019), "Functional variational Bayesian neural networks",
    section 5.3.

    :param nn.Module model: a :class:`~pyro_radial.SupervisedModel` of a network with one output per arm and
        :class:`~pyro_radial.nn.likelihoods.MaskedGaussian`, without ``num_data``.
    :param nn.Module guide: its guide.
    :param float reward_scale: typical size of a reward; rewards are divided by it for training.
    :param refit_options: ``loss`` and ``optim`` as for :func:`~pyro_radial.fit` (Adam at 3e-3 by default), gradient
        ``steps`` (200) of one refit, ``batch_size`` (64), and whether to ``compile`` (True) the step.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
        >>> from pyro_radial.decisions import run_bandit
        >>> from pyro_radial.nn.likelihoods import MaskedGaussian
        >>> x = torch.randn(60, 2)
        >>> net = nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 4))
        >>> model = SupervisedModel(BayesianModule(net), MaskedGaussian(scale=0.3))
        >>> policy = ThompsonSampling(model, AutoRadial(model), steps=20, compile=False)
        >>> result = run_bandit(x, torch.cat([x, -x], 1), policy, progress=False)
        >>> result.arms.shape, policy.gradient_steps
        (torch.Size([60]), 60)
    """

    def __init__(self, model: nn.Module, guide: nn.Module, *, reward_scale: float = 1.0, **refit_options: Any) -> None:
        self.reward_scale = positive_float("reward_scale", reward_scale)
        self.refits = Refits(model, guide, **refit_options)

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.refits.model

    @property
    def guide(self) -> nn.Module:
        """The guide."""
        return self.refits.guide

    @property
    def gradient_steps(self) -> int:  # type: ignore[override]
        """Gradient steps taken so far."""
        return self.refits.steps_done

    def begin(self, num_features: int, num_arms: int) -> None:
        """Create all parameters; a ValueError if the model does not take contexts, or lacks an output for each arm."""
        super().begin(num_features, num_arms)
        self.refits.begin(torch.zeros(2, num_features), torch.zeros(2, num_arms))

    def choose(self, context: Tensor) -> int:
        """Choose the arm with the largest function value under a draw of the posterior."""
        self.check_context(context)
        return int(predict(self.model, self.guide, context.unsqueeze(0), num_samples=1).samples.argmax())

    def refit(self, contexts: Tensor, arms: Tensor, rewards: Tensor) -> None:
        """Train the guide further, from where the last refit ended."""
        check_types(Tensor, contexts=contexts, arms=arms, rewards=rewards)
        if contexts.shape[1:] != (self.num_features,) or not len(contexts) or not contexts.isfinite().all():
            raise ValueError(f"contexts must be rows of {self.num_features} finite numbers, got {contexts}")
        known = {*range(self.num_arms)}
        if arms.shape != contexts.shape[:1] or arms.dtype != torch.long or not known >= {*arms.tolist()}:
            raise ValueError(f"arms must be an integer from 0 to {self.num_arms - 1} for each context, got {arms}")
        if rewards.shape != arms.shape or not rewards.is_floating_point() or not rewards.isfinite().all():
            raise ValueError(f"rewards must be a finite number for each context, got {rewards}")
        targets = rewards.new_full((len(arms), self.num_arms), math.nan)
        targets.scatter_(1, arms.unsqueeze(1), rewards.unsqueeze(1))
        self.refits.refit(contexts, targets / self.reward_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the training."""
        return {"refits": self.refits.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        if not isinstance(state, Mapping) or "refits" not in state:
            raise ValueError(f"state must be what state_dict() returned, got {state!r}")
        self.refits.load_state_dict(state["refits"])
