# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Mixtures and sums of priors on functions."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyro_radial._pyro.checks import check_types, positive_float
from pyro_radial.functional.priors.function_prior import FunctionPrior, check_values

__all__ = ["Mixture", "Sum"]


class Mixture(FunctionPrior):
    r"""A mixture of priors: each draw is a function of one member, with all its outputs.

    If all members have a density, the mixture has :math:`p(f) = \sum_k w_k p_k(f)`, and its score is the mean of the
    members' scores under the probabilities of having drawn f. All members must have the same noise.

    :param priors: the members.
    :param weights: a positive number for each member, in any units; equal by default.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> from pyro_radial.functional import PiecewiseConstant, PiecewiseLinear
        >>> prior = Mixture([PiecewiseConstant(), PiecewiseLinear()], weights=[1.0, 3.0])
        >>> prior.sample(torch.rand(7, 1), num_samples=5).shape
        torch.Size([5, 7, 1])
    """

    def __init__(self, priors: Sequence[FunctionPrior], weights: Sequence[float] | None = None) -> None:
        super().__init__()
        members = _members(priors)
        self.priors: Any = nn.ModuleList(members)
        check_types(Iterable | None, weights=weights)
        weights = [1.0] * len(members) if weights is None else [positive_float("weights", w) for w in weights]
        if len(weights) != len(members):
            raise ValueError(f"weights must be {len(members)} numbers, one for each prior, got {len(weights)}")
        self.weights = tuple(weight / sum(weights) for weight in weights)
        noises = {float(prior.noise) for prior in members}
        if len(noises) > 1:
            raise ValueError(f"priors of a mixture must carry the same noise, got {sorted(noises)}")
        self.noise = noises.pop()

    def score(self, f: Tensor, x: Tensor) -> Tensor:
        """The exact gradient of ``log p(f)`` in the function values ``[S, N, O]``, in their dtype.

        :raises NotImplementedError: naming the class of a member without a known density.
        """
        posterior = self._joint(f, x).softmax(0)[..., None, None]
        scores = torch.stack([prior.score(f.double(), x) for prior in self.priors])
        return (posterior * scores).sum(0).to(f.dtype)

    def log_prob(self, f: Tensor, x: Tensor) -> Tensor:
        """The log-density of function values ``[S, N, O]``, ``[S]``, in their dtype.

        :raises NotImplementedError: naming the class of a member without a known density.
        """
        return self._joint(f, x).logsumexp(0).to(f.dtype)

    def extra_repr(self) -> str:
        """The normalized weights."""
        return f"weights={self.weights}"

    def _joint(self, f: Tensor, x: Tensor) -> Tensor:
        """The log-densities of a member and its values, ``[K, S]``, in float64."""
        check_values(f, x)
        conditional = torch.stack([prior.log_prob(f.double(), x) for prior in self.priors])
        return conditional + torch.tensor(self.weights, dtype=torch.double).log().to(conditional).unsqueeze(-1)

    def _sample(self, x: Tensor, num_samples: int, num_outputs: int) -> Tensor:
        member = torch.multinomial(torch.tensor(self.weights), num_samples, replacement=True)
        counts = member.bincount(minlength=len(self.weights)).tolist()
        drawn = [p.sample(x, n, num_outputs) for p, n in zip(self.priors, counts, strict=True) if n]
        # The draws are sorted by member; each goes to a place that drew its member.
        return torch.cat(drawn)[member.argsort().argsort().to(x.device)]


class Sum(FunctionPrior):
    """The sum of independent functions, one of each prior.

    The sum of Gaussian processes is one, with the sums of their means and covariances.

    :param priors: the summands.
    :raises ValueError: naming ``priors``, for an empty list or an element that is not a prior.

    Example::

        >>> from pyro_radial.functional import GaussianProcess, PiecewiseConstant
        >>> from pyro.contrib.gp.kernels import RBF
        >>> steps_on_a_trend = Sum([GaussianProcess(RBF(input_dim=1)), PiecewiseConstant()])
        >>> steps_on_a_trend.sample(torch.rand(7, 1), num_samples=5).shape
        torch.Size([5, 7, 1])
    """

    def __init__(self, priors: Sequence[FunctionPrior]) -> None:
        super().__init__()
        members = _members(priors)
        self.priors: Any = nn.ModuleList(members)
        self.noise = math.hypot(*(float(prior.noise) for prior in members))

    def moments(self, x: Tensor, num_outputs: int = 1) -> tuple[Tensor, Tensor]:
        """Mean ``[N, O]`` and covariances ``[O, N, N]``, in float64.

        :raises NotImplementedError: naming the class of a summand that is not Gaussian.
        """
        means, covariances = zip(*(prior.moments(x, num_outputs) for prior in self.priors), strict=True)
        return torch.stack(means).sum(0), torch.stack(covariances).sum(0)

    def _sample(self, x: Tensor, num_samples: int, num_outputs: int) -> Tensor:
        return torch.stack([prior.sample(x, num_samples, num_outputs) for prior in self.priors]).sum(0)


def _members(priors: Sequence[FunctionPrior]) -> list[FunctionPrior]:
    """Return a list of at least one prior, or raise a ValueError."""
    members = list(priors) if isinstance(priors, Iterable) else []
    if not members or not all(isinstance(prior, FunctionPrior) for prior in members):
        raise ValueError(f"priors must be priors on functions, at least one, got {priors!r}")
    return members
