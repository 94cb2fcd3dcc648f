# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Policies choose the arms of a bandit and learn from the rewards: Thompson sampling, and what it is compared with."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.decisions._refits import Refits
from pyro_radial import predict
from pyro_radial.infer.posthoc.laplace import LastLayer, TrainedNetwork, find_last_layer


class Policy:
    """Base class of policies. Random numbers come from torch; the loop seeds it before each decision and refit."""

    #: Gradient steps taken so far.
    gradient_steps: int = 0
    #: Width D of a context, after :meth:`begin`.
    num_features: int = 0
    #: Number K of arms, after :meth:`begin`.
    num_arms: int = 0

    def begin(self, num_features: int, num_arms: int) -> None:
        """Create what depends on the width D of a context and the number K of arms."""
        self.num_features = num_features
        self.num_arms = num_arms

    def choose(self, context: Tensor) -> int:
        """Choose the arm to pull in a context ``[D]``, an integer from 0 to K - 1."""
        raise NotImplementedError

    def refit(self, contexts: Tensor, arms: Tensor, rewards: Tensor) -> None:
        """Learn from all decisions so far, at least one: contexts ``[N, D]``, arms pulled ``[N]``, rewards ``[N]``."""


class ThompsonSampling(Policy):
    """Draw a network from the posterior for each decision, and pull the arm with the largest reward in that draw.

    Source: Thompson (1933), "On the likelihood that one unknown probability exceeds another in view of the evidence of
    two samples"; with functional posteriors Sun et al. (2019), "Functional variational Bayesian neural networks",
    section 5.3.

    :param nn.Module model: a :class:`~pyro_radial.SupervisedModel` of a network with one output per arm and
        :class:`~pyro_radial.nn.likelihoods.MaskedGaussian`, without ``num_data``.
    :param nn.Module guide: its guide.
    :param float reward_scale: typical size of a reward; rewards are divided by it for training.
    :param refit_options: options of :class:`~benchmarks.decisions._refits.Refits`.
    """

    def __init__(self, model: nn.Module, guide: nn.Module, *, reward_scale: float = 1.0, **refit_options: Any) -> None:
        self.model = model
        self.guide = guide
        self.reward_scale = reward_scale
        self.refits = Refits(model, guide, **refit_options)

    @property
    def gradient_steps(self) -> int:  # type: ignore[override]
        """Gradient steps taken so far."""
        return self.refits.steps_done

    def begin(self, num_features: int, num_arms: int) -> None:
        """Create all parameters."""
        super().begin(num_features, num_arms)
        self.refits.begin(torch.zeros(2, num_features), torch.zeros(2, num_arms))

    def choose(self, context: Tensor) -> int:
        """Choose the arm with the largest function value under a draw of the posterior."""
        return int(predict(self.model, self.guide, context.unsqueeze(0), num_samples=1).samples.argmax())

    def refit(self, contexts: Tensor, arms: Tensor, rewards: Tensor) -> None:
        """Train the guide further, from where the last refit ended."""
        targets = rewards.new_full((len(arms), self.num_arms), math.nan)
        targets.scatter_(1, arms.unsqueeze(1), rewards.unsqueeze(1))
        self.refits.refit(contexts, targets / self.reward_scale)


class UniformPolicy(Policy):
    """Choose each arm with the same probability."""

    def choose(self, context: Tensor) -> int:
        """The arm to pull."""
        return int(torch.randint(self.num_arms, ()))


class LinearModel(NamedTuple):
    r"""The normal-inverse-gamma distribution of the weights of a linear model and its noise.

    .. math:: \sigma^2 \sim \mathrm{IG}(a, b), \qquad w \mid \sigma^2 \sim N(\mu, \sigma^2 \Lambda^{-1}),
        \qquad y \mid x, w, \sigma^2 \sim N(w^T x, \sigma^2).

    Rows X with rewards y update it to

    .. math:: \Lambda' = \Lambda + X^T X, \quad \Lambda' \mu' = \Lambda \mu + X^T y, \quad a' = a + \tfrac n2, \quad
        b' = b + \tfrac12 (y^T y + \mu^T \Lambda \mu - \mu'^T \Lambda' \mu').

    Source: Riquelme, Tucker and Snoek (2018), "Deep Bayesian Bandits Showdown", eq. 1 and 2.

    :param Tensor mean: :math:`\mu`, ``[E]``, in float64.
    :param Tensor precision: :math:`\Lambda`, ``[E, E]``.
    :param Tensor shape: :math:`a`.
    :param Tensor rate: :math:`b`.
    """

    mean: Tensor
    precision: Tensor
    shape: Tensor
    rate: Tensor

    @classmethod
    def prior(cls, size: int, prior_precision: float, shape: float, rate: float) -> "LinearModel":
        r"""A prior with mean zero and :math:`\Lambda = \lambda I`."""
        eye = torch.eye(size, dtype=torch.double)
        return cls(
            torch.zeros(size, dtype=torch.double),
            prior_precision * eye,
            torch.tensor(shape, dtype=torch.double),
            torch.tensor(rate, dtype=torch.double),
        )

    def updated(self, x: Tensor, y: Tensor) -> "LinearModel":
        """The posterior given rows ``[n, E]`` and rewards ``[n]``, both in float64."""
        precision = self.precision + x.mT @ x
        weighted = self.precision @ self.mean
        mean = torch.cholesky_solve((weighted + x.mT @ y).unsqueeze(1), torch.linalg.cholesky(precision)).squeeze(1)
        change = y @ y + self.mean @ weighted - mean @ precision @ mean
        return LinearModel(mean, precision, self.shape + 0.5 * len(y), self.rate + 0.5 * change.clamp_min(0.0))

    def draw(self) -> Tensor:
        """Draw weights ``[E]``, with a noise level drawn first."""
        variance = self.rate / torch._standard_gamma(self.shape)
        factor = torch.linalg.cholesky(self.precision)
        noise = torch.randn_like(self.mean).unsqueeze(1)
        return self.mean + variance.sqrt() * torch.linalg.solve_triangular(factor.mT, noise, upper=True).squeeze(1)


class LinearThompson(Policy):
    r"""Thompson sampling with the exact posterior of a linear model for each arm.

    Source: Riquelme, Tucker and Snoek (2018), "Deep Bayesian Bandits Showdown", section 4.1.
    """

    def __init__(self) -> None:
        self._arms: list[LinearModel] = []

    def begin(self, num_features: int, num_arms: int) -> None:
        """Create the prior of each arm."""
        super().begin(num_features, num_arms)
        self._arms = [_prior(num_features + 1) for _ in range(num_arms)]

    def choose(self, context: Tensor) -> int:
        """The arm with the largest reward in a draw of all arms."""
        x = with_one(context)
        return int(torch.stack([arm.draw() @ x for arm in self._arms]).argmax())

    def refit(self, contexts: Tensor, arms: Tensor, rewards: Tensor) -> None:
        """Compute the posterior of each arm from the prior and all its rewards."""
        for number in range(self.num_arms):
            x, y = contexts[arms == number], rewards[arms == number]
            self._arms[number] = _prior(x.shape[1] + 1).updated(with_one(x), y.double())


def with_one(x: Tensor) -> Tensor:
    """Rows with a one at the end, for the bias, in float64."""
    x = x.double()
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)


class EpsilonGreedy(ThompsonSampling):
    """Choose the arm with the largest mean reward, and sometimes any arm.

    :param model: model, as for :class:`ThompsonSampling`.
    :param guide: its guide; for a point estimate one draw is the mean.
    :param options: options of :class:`ThompsonSampling`.
    """

    #: The probability of a random arm.
    epsilon = 0.05

    def choose(self, context: Tensor) -> int:
        """The arm to pull."""
        best = super().choose(context)
        return int(torch.randint(self.num_arms, ())) if float(torch.rand(())) < self.epsilon else best


class NeuralLinear(ThompsonSampling):
    """Thompson sampling with the exact posterior of a linear model for each arm, on the features of the last layer.

    Each refit trains the network, and then takes the input of its last linear layer as the features of all decisions.

    Source: Riquelme, Tucker and Snoek (2018), "Deep Bayesian Bandits Showdown", section 4.2.

    :param model: model of a network that ends with a linear layer.
    :param guide: its guide, usually a point estimate.
    :param options: options of :class:`ThompsonSampling`.
    """

    def __init__(self, model: nn.Module, guide: nn.Module, **options: Any) -> None:
        super().__init__(model, guide, **options)
        self._arms: list[LinearModel] = []

    def begin(self, num_features: int, num_arms: int) -> None:
        """Create the parameters and the prior of each arm."""
        super().begin(num_features, num_arms)
        self._find_last_layer()
        size = self._features(torch.zeros(2, num_features)).shape[1]
        self._arms = [_prior(size) for _ in range(num_arms)]

    def choose(self, context: Tensor) -> int:
        """The arm to pull."""
        x = self._features(context.unsqueeze(0))[0]
        return int(torch.stack([arm.draw() @ x for arm in self._arms]).argmax())

    def refit(self, contexts: Tensor, arms: Tensor, rewards: Tensor) -> None:
        """Train the network further, and compute the posterior of each arm on the new features."""
        super().refit(contexts, arms, rewards)
        self._find_last_layer()
        features = self._features(contexts)
        for number in range(self.num_arms):
            own = rewards[arms == number].double() / self.reward_scale
            self._arms[number] = _prior(features.shape[1]).updated(features[arms == number], own)

    def _find_last_layer(self) -> None:
        self._network = TrainedNetwork(self.model, self.guide)
        with torch.no_grad():
            self._layer: LastLayer = find_last_layer(self._network, torch.zeros(2, self.num_features))

    @torch.no_grad()
    def _features(self, x: Tensor) -> Tensor:
        """The input of the last layer, in float64 as linear models need it."""
        features, _ = self._layer.features(self._network, x)
        return features.double()


def _prior(size: int) -> LinearModel:
    """The prior of Riquelme, Tucker and Snoek (2018)."""
    return LinearModel.prior(size, 0.25, 6.0, 6.0)


class EnsembleSampling(Policy):
    """Choose with a random member of an ensemble, and train all members at each refit.

    With point estimates of networks that start differently, this is Thompson sampling with a deep ensemble.

    Source: Lu and Van Roy (2017), "Ensemble sampling"; without their perturbed rewards.

    :param members: separate policies.
    """

    def __init__(self, members: Sequence[ThompsonSampling]) -> None:
        self.members = tuple(members)

    @property
    def gradient_steps(self) -> int:  # type: ignore[override]
        """Gradient steps of all members."""
        return sum(member.gradient_steps for member in self.members)

    def begin(self, num_features: int, num_arms: int) -> None:
        """Begin all members."""
        super().begin(num_features, num_arms)
        for member in self.members:
            member.begin(num_features, num_arms)

    def choose(self, context: Tensor) -> int:
        """The arm to pull."""
        return self.members[int(torch.randint(len(self.members), ()))].choose(context)

    def refit(self, contexts: Tensor, arms: Tensor, rewards: Tensor) -> None:
        """Train all members further."""
        for member in self.members:
            member.refit(contexts, arms, rewards)
