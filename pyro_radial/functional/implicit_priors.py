# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Priors on functions that are known by their draws: random pieces, networks, and what other priors make together."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide, AutoGuideList
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_radial._checks import positive_float
from pyro_radial._naming import rename_tree, unique_name
from pyro_radial.functional.gaussian import gaussian_log_prob, gaussian_score
from pyro_radial.functional.priors import FunctionPrior, check_values
from pyro_radial.nn.bayesian_module import BayesianModule

__all__ = ["BNNPrior", "ImplicitProcess", "Mixture", "PiecewiseConstant", "PiecewiseLinear", "Sum"]


class ImplicitProcess(FunctionPrior):
    """A prior that is a function to draw with.

    Example::

        >>> def random_line(x, num_samples):
        ...     return torch.randn(num_samples, 1) + torch.randn(num_samples, 1) * x[:, 0]
        >>> ImplicitProcess(random_line).sample(torch.rand(7, 1), num_samples=5).shape
        torch.Size([5, 7, 1])

    :param sampler: a function of points ``[N, D]`` and a number S that returns the values there of S independent
        functions, ``[S, N, O]``, or ``[S, N]`` for a single output. A module is registered here, and not copied.
    :raises ValueError: naming ``sampler`` if it is no function.
    """

    def __init__(self, sampler: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        if not callable(sampler):
            raise ValueError(f"sampler must be a function of points and a number of draws, but is {sampler!r}")
        self.sampler = sampler

    def _sample(self, x: Tensor, num_samples: int, num_outputs: int) -> Tensor:
        values = self.sampler(x, num_samples)
        if not isinstance(values, Tensor):
            raise ValueError(f"sampler must return a tensor, but it returned {type(values).__name__}")
        return values.unsqueeze(-1) if values.dim() == 2 else values


class _Pieces(FunctionPrior):
    """Functions of one input with a Poisson number of change points, uniform on an interval."""

    def __init__(self, low: float = 0.0, high: float = 1.0, rate: float = 3.0) -> None:
        super().__init__()
        if not -torch.inf < low < high < torch.inf:
            raise ValueError(f"low must be below high, both finite, but low is {low!r} and high is {high!r}")
        self.low, self.high = float(low), float(high)
        self.rate = positive_float("rate", rate)

    def extra_repr(self) -> str:
        """The settings of the process."""
        return f"low={self.low}, high={self.high}, rate={self.rate}"

    def _sample(self, x: Tensor, num_samples: int, num_outputs: int) -> Tensor:
        if x.dim() != 2 or x.shape[1] != 1:
            raise ValueError(f"x must have shape [N, 1] for {type(self).__name__}, but its shape is {list(x.shape)}")
        points = x.double().squeeze(1)
        functions = num_samples * num_outputs
        # Counts are drawn on the host, so that their maximum, a shape, waits for no device.
        counts = torch.poisson(torch.full((functions, 1), self.rate))
        width = int(counts.max())
        knots = self.low + (self.high - self.low) * torch.rand(functions, width, dtype=points.dtype, device=x.device)
        unused = (torch.arange(width) >= counts).to(x.device)
        knots = knots.masked_fill(unused, torch.inf).sort(-1).values
        values = torch.rand(functions, width + 2, dtype=points.dtype, device=x.device)
        # The piece that a point is on is the number of change points up to it; those not in use are beyond all.
        piece = torch.searchsorted(knots, points.expand(functions, -1).contiguous(), right=True)
        f = self._on_pieces(points, piece, knots, values)
        return f.reshape(num_samples, num_outputs, len(x)).mT

    def _on_pieces(self, points: Tensor, piece: Tensor, knots: Tensor, values: Tensor) -> Tensor:
        """Values ``[F, N]`` of F functions, from ``[N]``, ``[F, N]``, ``[F, K]`` and uniform draws ``[F, K + 2]``."""
        raise NotImplementedError


class PiecewiseConstant(_Pieces):
    r"""Step functions on an interval: Poisson many change points, and on each piece a value from U[0, 1].

    Change points are uniform on ``[low, high]``, so two points d apart have the same value with probability at least
    :math:`e^{-\mathrm{rate}\, d / (\mathrm{high} - \mathrm{low})}`. The outermost pieces go on beyond the interval.
    Outputs are independent.

    Source: Sun et al. (2019), section 5.1 and figure 3, with rate 3 on [0, 1].

    Example::

        >>> x = torch.linspace(0, 1, 50).unsqueeze(-1)
        >>> PiecewiseConstant().sample(x, num_samples=4).shape
        torch.Size([4, 50, 1])

    :param float low: where the interval begins.
    :param float high: where it ends.
    :param float rate: the expected number of change points in it.
    :raises ValueError: naming the argument that does not fit.
    """

    def _on_pieces(self, points: Tensor, piece: Tensor, knots: Tensor, values: Tensor) -> Tensor:
        return values.gather(-1, piece)


class PiecewiseLinear(_Pieces):
    r"""Continuous functions of straight pieces on an interval: Poisson many kinks, and at each a value from U[0, 1].

    With k kinks, uniform on ``[low, high]``, there are k + 2 knots, the ends among them, and as many values; between
    two knots the function is linear. (The published code draws k + 1 values and reads past them.) The outermost
    pieces go on beyond the interval. Outputs are independent.

    Source: Sun et al. (2019), section 5.1 and figure 3, with rate 3 on [0, 1].

    Example::

        >>> x = torch.linspace(0, 1, 50).unsqueeze(-1)
        >>> PiecewiseLinear().sample(x, num_samples=4, num_outputs=2).shape
        torch.Size([4, 50, 2])

    :param float low: where the interval begins.
    :param float high: where it ends.
    :param float rate: the expected number of kinks in it.
    :raises ValueError: naming the argument that does not fit.
    """

    def _on_pieces(self, points: Tensor, piece: Tensor, knots: Tensor, values: Tensor) -> Tensor:
        # The first change point not in use becomes the end of the interval; a piece never starts there.
        ends = knots.new_full((len(knots), 1), torch.inf)
        right = torch.cat([knots, ends], -1).clamp_max(self.high)
        left = torch.cat([knots.new_full((len(knots), 1), self.low), right[:, :-1]], -1)
        start, stop = left.gather(-1, piece), right.gather(-1, piece)
        from_value, to_value = values.gather(-1, piece), values.gather(-1, piece + 1)
        return from_value + (to_value - from_value) * (points - start) / (stop - start)


class Mixture(FunctionPrior):
    r"""One of several priors at random: each draw is a function of one member, all its outputs included.

    Where all members have a density, so has the mixture, :math:`p(f) = \sum_k w_k p_k(f)`, and its score is exact:
    the mean of the members' scores under the probabilities of having drawn f. All members carry the same noise, which
    functions that are compared with the mixture then carry too.

    Example::

        >>> prior = Mixture([PiecewiseConstant(), PiecewiseLinear()], weights=[1.0, 3.0])
        >>> prior.sample(torch.rand(7, 1), num_samples=5).shape
        torch.Size([5, 7, 1])

    :param priors: the members.
    :param weights: a positive number for each, in any units; all alike by default.
    :raises ValueError: naming the argument that does not fit.
    """

    def __init__(self, priors: Sequence[FunctionPrior], weights: Sequence[float] | None = None) -> None:
        super().__init__()
        self.priors: Any = _members(priors)
        weights = [1.0] * len(self.priors) if weights is None else [positive_float("weights", w) for w in weights]
        if len(weights) != len(self.priors):
            raise ValueError(f"weights must be {len(self.priors)} numbers, one for each prior, but are {len(weights)}")
        self.weights = tuple(weight / sum(weights) for weight in weights)
        noises = {float(prior.noise) for prior in list[Any](self.priors)}
        if len(noises) > 1:
            raise ValueError(f"priors of a mixture must carry the same noise, but theirs are {sorted(noises)}")
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
        # They lie sorted by member; each goes to a place that drew it.
        return torch.cat(drawn)[member.argsort().argsort().to(x.device)]


class Sum(FunctionPrior):
    """The sum of independent functions, one of each prior.

    Of Gaussian processes it is one, with the sums of their means and covariances; then its density and score are exact.

    Example::

        >>> from pyro_radial.functional import GaussianProcess
        >>> from pyro.contrib.gp.kernels import RBF
        >>> steps_on_a_trend = Sum([GaussianProcess(RBF(input_dim=1)), PiecewiseConstant()])
        >>> steps_on_a_trend.sample(torch.rand(7, 1), num_samples=5).shape
        torch.Size([5, 7, 1])

    :param priors: the summands.
    :raises ValueError: naming ``priors`` if there are none, or one is no prior.
    """

    def __init__(self, priors: Sequence[FunctionPrior]) -> None:
        super().__init__()
        self.priors: Any = _members(priors)
        self.noise = math.hypot(*(float(prior.noise) for prior in list[Any](self.priors)))

    def moments(self, x: Tensor, num_outputs: int = 1) -> tuple[Tensor, Tensor]:
        """Mean ``[N, O]`` and covariances ``[O, N, N]``, in float64.

        :raises NotImplementedError: naming the class of a summand that is not Gaussian.
        """
        means, covariances = zip(*(prior.moments(x, num_outputs) for prior in self.priors), strict=True)
        return torch.stack(means).sum(0), torch.stack(covariances).sum(0)

    def score(self, f: Tensor, x: Tensor) -> Tensor:
        """The exact gradient of ``log p(f)`` in the function values ``[S, N, O]``, in their dtype.

        :raises NotImplementedError: naming the class of a summand that is not Gaussian.
        """
        check_values(f, x)
        return gaussian_score(f, *self.moments(x, f.shape[-1]))

    def log_prob(self, f: Tensor, x: Tensor) -> Tensor:
        """The log-density of function values ``[S, N, O]``, ``[S]``, in their dtype.

        :raises NotImplementedError: naming the class of a summand that is not Gaussian.
        """
        check_values(f, x)
        return gaussian_log_prob(f, *self.moments(x, f.shape[-1]))

    def _sample(self, x: Tensor, num_samples: int, num_outputs: int) -> Tensor:
        return torch.stack([prior.sample(x, num_samples, num_outputs) for prior in self.priors]).sum(0)


class BNNPrior(FunctionPrior):
    """The functions of a Bayesian network: under its own prior on weights, or under a trained guide.

    Any :class:`~pyro_radial.nn.BayesianModule` and any guide for it, radial or not. The network, and a guide that is a
    :class:`~pyro.nn.PyroModule` as all autoguides are, are copied as they are now, so the prior stays where it is when
    they train on. A guide that is a plain function reads the parameter store at every draw. The copies stay in
    evaluation mode. All draws are one pass under a plate.

    Example::

        >>> from pyro_radial import AutoRadial, BayesianModule
        >>> bnn = BayesianModule(nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)))
        >>> guide = AutoRadial(bnn)
        >>> guide.setup(torch.zeros(2, 1))
        >>> before_data, after_data = BNNPrior(bnn), BNNPrior(bnn, guide)
        >>> after_data.sample(torch.rand(7, 1), num_samples=5).shape
        torch.Size([5, 7, 1])

    :param BayesianModule bnn: the network; of a :class:`~pyro_radial.SupervisedModel` it is ``model.bnn``.
    :param guide: a guide with sites of ``bnn``, called on points alone, with parameters already. Weights that it
        leaves out, or all without one, are drawn from the network's prior.
    :raises ValueError: naming the argument that does not fit.
    """

    def __init__(self, bnn: BayesianModule, guide: Callable[..., Any] | None = None) -> None:
        super().__init__()
        if not isinstance(bnn, BayesianModule):
            raise ValueError(f"bnn must be a BayesianModule, but is {type(bnn).__name__}")
        _check_guide(guide)
        self.bnn = copy.deepcopy(bnn)
        self.guide: Any = guide
        if isinstance(guide, PyroModule):
            self.guide = copy.deepcopy(guide)
            # By its old name it would read the original's parameters from the store; the guide's class, which may be
            # Pyro's, is that name.
            rename_tree(self.guide, unique_name(type(self)))
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "BNNPrior":
        """Leaves the copies in evaluation mode: a prior drops no units, and keeps running statistics as they are."""
        return super().train(False)

    def _sample(self, x: Tensor, num_samples: int, num_outputs: int) -> Tensor:
        with poutine.block(), pyro.plate("functions", num_samples):
            drawn = None if self.guide is None else poutine.trace(self.guide).get_trace(x)
            values = self.bnn(x) if drawn is None else poutine.replay(self.bnn, trace=drawn)(x)
        if not isinstance(values, Tensor):
            raise ValueError(f"the network of bnn must return one tensor, but it returned {type(values).__name__}")
        # A single draw leaves no dim behind.
        return values.unsqueeze(0) if num_samples == 1 else values


def _check_guide(guide: Any) -> None:
    """None or a guide that can run on points alone, or a ValueError that names it."""
    if guide is not None and not callable(guide):
        raise ValueError(f"guide must be a function of points, but is {guide!r}")
    if isinstance(guide, nn.Module) and not isinstance(guide, PyroModule):
        raise ValueError(
            f"guide must be a PyroModule or a function such as guide.forward, but is {type(guide).__name__}"
        )
    if isinstance(guide, AutoGuide) and not isinstance(guide, AutoGuideList) and guide.prototype_trace is None:
        raise ValueError("guide has no parameters yet: train it, or run it once on inputs and targets")


def _members(priors: Sequence[FunctionPrior]) -> nn.ModuleList:
    members = list(priors)
    if not members or not all(isinstance(prior, FunctionPrior) for prior in members):
        raise ValueError(f"priors must be priors on functions, at least one, but are {members!r}")
    return nn.ModuleList(members)
