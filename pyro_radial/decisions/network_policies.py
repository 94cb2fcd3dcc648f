# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Policies that choose by a network of all arms' rewards, under any posterior."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyro_radial._pyro.checks import positive_count, positive_float, proper_fraction
from pyro_radial.decisions.history import History
from pyro_radial.decisions.linear_model import LinearModel
from pyro_radial.decisions.policies import Policy
from pyro_radial.decisions.refits import Refits
from pyro_radial.infer.posthoc.last_layer import LastLayer, find_last_layer
from pyro_radial.infer.posthoc.trained_network import TrainedNetwork, trained_values
from pyro_radial.infer.prediction.predict import predict
from pyro_radial.infer.training.data import device_of, dtype_of

__all__ = ["EnsembleSampling", "EpsilonGreedy", "NetworkPolicy", "NeuralLinear", "ThompsonSampling"]


class NetworkPolicy(Policy):
    """Base class of policies with one model of all arms, which is trained on at each refit.

    :param nn.Module model: ``model(x, y)`` with the K arms' values at the site "f", ``[N, K]``, of rewards ``[N, K]``
        that are NaN where the arm was not pulled: a :class:`~pyro_radial.SupervisedModel` of a network with K outputs
        and :class:`~pyro_radial.decisions.PulledArm`.
    :param nn.Module guide: its guide.
    :param float reward_scale: what rewards are divided by in training, so that they are of the order of one.
    :param refit_options: of :class:`~pyro_radial.decisions.Refits`: ``loss``, ``optim``, ``steps``, ``batch_size`` and
        ``compile``.
    :raises ValueError: naming the argument that does not fit.
    """

    def __init__(self, model: nn.Module, guide: nn.Module, *, reward_scale: float = 1.0, **refit_options: Any) -> None:
        self.reward_scale = positive_float(f"{type(self).__name__}: reward_scale", reward_scale)
        self.refits = Refits(model, guide, **refit_options, who=type(self).__name__)

    @property
    def gradient_steps(self) -> int:  # type: ignore[override]
        """Gradient steps taken in all."""
        return self.refits.steps_done

    def begin(self, num_features: int, num_arms: int) -> None:
        """Make the parameters; the model must take such contexts and have a value for each arm.

        :raises ValueError: naming what does not fit.
        """
        super().begin(num_features, num_arms)
        self.refits.begin(torch.zeros(2, num_features), torch.zeros(2, num_arms))

    def refit(self, history: History) -> None:
        """Train on, from where the last refit ended."""
        self._checked(history.contexts[0])
        self.refits.refit(history.contexts, history.targets(self.num_arms) / self.reward_scale)

    def state_dict(self) -> dict[str, Any]:
        """That of the training."""
        return {"refits": self.refits.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put it back."""
        self.refits.load_state_dict(state["refits"])

    def _expected(self, context: Tensor, num_samples: int) -> Tensor:
        """What each arm is expected to pay under draws of the posterior, ``[S, K]``."""
        model, guide = self.refits.model, self.refits.guide
        x = self._checked(context).unsqueeze(0)
        f = predict(model, guide, x, num_samples=num_samples).samples.squeeze(1)
        likelihood: Any = getattr(model, "likelihood", None)
        return f if likelihood is None else likelihood.inverse_link(f)


class ThompsonSampling(NetworkPolicy):
    """One draw of the network for each decision, and the arm that pays most in it.

    With the guide and the loss it is Thompson sampling under any posterior: ``AutoRadial``, ``AutoMeanField``,
    ``AutoRadialDirectional``, or one of functions, ``loss=FunctionalELBO(...)``.

    Source: Thompson (1933), "On the likelihood that one unknown probability exceeds another in view of the evidence of
    two samples"; with functional posteriors Sun et al. (2019), "Functional variational Bayesian neural networks",
    section 5.3.

    :param model: as of :class:`NetworkPolicy`.
    :param guide: as there.
    :param reward_scale: as there.
    :param refit_options: as there.

    Example::

        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
        >>> from pyro_radial.decisions import ContextualBandit, PulledArm, run_bandit
        >>> x = torch.randn(60, 2)
        >>> bandit = ContextualBandit(x, torch.cat([x, -x], 1))
        >>> net = nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 4))
        >>> model = SupervisedModel(BayesianModule(net), PulledArm(scale=0.3))
        >>> policy = ThompsonSampling(model, AutoRadial(model), steps=20, compile=False)
        >>> result = run_bandit(bandit, policy, refit_every=20, progress=False)
        >>> result.arms.shape, policy.gradient_steps
        (torch.Size([60]), 60)
    """

    def choose(self, context: Tensor) -> int:
        """The arm to pull."""
        return int(self._expected(context, 1)[0].argmax())


class EpsilonGreedy(NetworkPolicy):
    """The arm with the largest mean over draws, but with a small probability any.

    :param model: as of :class:`NetworkPolicy`.
    :param guide: as there, also a point estimate, such as ``AutoRadial(model, families={".": Delta()})``.
    :param float epsilon: that probability, between zero and one.
    :param int num_samples: draws in the mean; one is enough for a point estimate.
    :param options: as of :class:`NetworkPolicy`.
    """

    def __init__(
        self, model: nn.Module, guide: nn.Module, *, epsilon: float = 0.05, num_samples: int = 1, **options: Any
    ) -> None:
        super().__init__(model, guide, **options)
        self.epsilon = proper_fraction("EpsilonGreedy: epsilon", epsilon)
        self.num_samples = positive_count("EpsilonGreedy: num_samples", num_samples)

    def choose(self, context: Tensor) -> int:
        """The arm to pull."""
        best = int(self._expected(context, self.num_samples).mean(0).argmax())
        return int(torch.randint(self.num_arms, ())) if float(torch.rand(())) < self.epsilon else best


class NeuralLinear(NetworkPolicy):
    """Thompson sampling with the full posterior of a linear model of each arm, on what the last layer is given.

    The network is trained as it is; at each refit its last hidden layer gives the features of all decisions.

    Source: Riquelme, Tucker and Snoek (2018), "Deep Bayesian Bandits Showdown", section 4.2.

    :param model: as of :class:`NetworkPolicy`, whose network ends with a linear layer.
    :param guide: as there, as a rule a point estimate; of others the medians are used.
    :param float prior_precision: as of :class:`~pyro_radial.decisions.LinearThompson`.
    :param float shape: as there.
    :param float rate: as there.
    :param options: as of :class:`NetworkPolicy`.
    :raises ValueError: when begun, for a network that does not end so.
    """

    def __init__(
        self,
        model: nn.Module,
        guide: nn.Module,
        *,
        prior_precision: float = 0.25,
        shape: float = 6.0,
        rate: float = 6.0,
        **options: Any,
    ) -> None:
        super().__init__(model, guide, **options)
        self.prior_precision = positive_float("NeuralLinear: prior_precision", prior_precision)
        self.shape, self.rate = positive_float("NeuralLinear: shape", shape), positive_float("NeuralLinear: rate", rate)
        self._arms: list[LinearModel] = []

    def begin(self, num_features: int, num_arms: int) -> None:
        """Make the parameters and the prior of each arm."""
        super().begin(num_features, num_arms)
        if not self._arms:
            self._read()
            size = self._features(torch.zeros(2, num_features)).shape[1]
            self._arms = [self._prior(size) for _ in range(num_arms)]

    def choose(self, context: Tensor) -> int:
        """The arm to pull."""
        x = self._features(self._checked(context).unsqueeze(0))[0]
        return int(torch.stack([arm.draw() @ x for arm in self._arms]).argmax())

    def refit(self, history: History) -> None:
        """Train on, and take the posterior of each arm on the new features."""
        super().refit(history)
        self._read()
        features = self._features(history.contexts)
        for number in range(self.num_arms):
            pulled = history.arms == number
            rewards = history.rewards[pulled].double() / self.reward_scale
            self._arms[number] = self._prior(features.shape[1]).updated(features[pulled], rewards)

    def state_dict(self) -> dict[str, Any]:
        """That of the training and the posterior of each arm."""
        return {**super().state_dict(), "arms": [arm._asdict() for arm in self._arms]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put it back."""
        super().load_state_dict(state)
        self._arms = [LinearModel(**arm) for arm in state["arms"]]
        self._read()

    def _read(self) -> None:
        """Take the network as it is now trained."""
        model, guide = self.refits.model, self.refits.guide
        self._network = TrainedNetwork(model, trained_values(guide, "NeuralLinear"), "NeuralLinear")
        example = torch.zeros(2, self._begun[0]).to(device_of(model), dtype_of(model))
        with torch.no_grad():
            self._layer: LastLayer = find_last_layer(self._network, example, "NeuralLinear")

    @torch.no_grad()
    def _features(self, x: Tensor) -> Tensor:
        """What the last layer is given, in float64 where linear models are."""
        model = self.refits.model
        features, _ = self._layer.features(self._network, x.to(device_of(model), dtype_of(model)))
        return features.cpu().double()

    def _prior(self, size: int) -> LinearModel:
        return LinearModel.prior(size, self.prior_precision, self.shape, self.rate)


class EnsembleSampling(Policy):
    """One of several policies, any with the same probability, chooses; all are trained on at each refit.

    Of networks that differ by their start, and are trained as point estimates, it is Thompson sampling with a deep
    ensemble in the place of a posterior.

    Source: Lu and Van Roy (2017), "Ensemble sampling"; without their perturbed rewards.

    :param members: policies, of which none is another.
    :raises ValueError: for no members, or one that is there twice.
    """

    def __init__(self, members: Sequence[NetworkPolicy]) -> None:
        self.members = tuple(members)
        if not self.members or len({id(member) for member in self.members}) < len(self.members):
            raise ValueError(
                f"EnsembleSampling: members must be policies, one at least and each once, got {len(self.members)}"
            )

    @property
    def gradient_steps(self) -> int:  # type: ignore[override]
        """Gradient steps taken by all members."""
        return sum(member.gradient_steps for member in self.members)

    def begin(self, num_features: int, num_arms: int) -> None:
        """Begin all members."""
        super().begin(num_features, num_arms)
        for member in self.members:
            member.begin(num_features, num_arms)

    def choose(self, context: Tensor) -> int:
        """The arm to pull."""
        return self.members[int(torch.randint(len(self.members), ()))].choose(context)

    def refit(self, history: History) -> None:
        """Train all members on."""
        for member in self.members:
            member.refit(history)

    def state_dict(self) -> dict[str, Any]:
        """Those of the members."""
        return {"members": [member.state_dict() for member in self.members]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put them back."""
        for member, own in zip(self.members, state["members"], strict=True):
            member.load_state_dict(own)
