# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Bayesian optimization with BoTorch: the loop, and what proposes the points; needs the extra ``bo``."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

try:
    from botorch.acquisition import PosteriorMean
    from botorch.optim import optimize_acqf
    from botorch.optim.optimize_mixed import optimize_acqf_mixed_alternating
except ImportError as error:
    raise ImportError("Bayesian optimization needs BoTorch: pip install 'pyro-radial[bo]'") from error

from pyro_radial._pyro.checks import non_negative_integer, positive_count
from pyro_radial._pyro.random_state import seeded, seeded_elsewhere
from pyro_radial.decisions.acquisitions import (
    Acquisition,
    gibbon,
    log_expected_improvement,
    max_value_entropy,
    thompson,
    upper_confidence_bound,
)
from pyro_radial.decisions.botorch_models import FunctionDraws, ProcessModel
from pyro_radial.decisions.space import Space
from pyro_radial.decisions.surrogates import GaussianProcessSurrogate, NetworkSurrogate, RandomFeatures, Surrogate
from pyro_radial.infer.training.checkpoint import check_settings, load_checkpoint, save_checkpoint
from pyro_radial.infer.training.fingerprint import described
from pyro_radial.infer.training.sole_writer import sole_writer

__all__ = [
    "Acquisition",
    "AcquisitionSearch",
    "FunctionDraws",
    "GaussianProcessSurrogate",
    "NetworkSurrogate",
    "OptimizationResult",
    "ProcessModel",
    "Proposer",
    "RandomFeatures",
    "RandomSearch",
    "Space",
    "Surrogate",
    "gibbon",
    "log_expected_improvement",
    "max_value_entropy",
    "run_optimization",
    "thompson",
    "thompson_candidates",
    "upper_confidence_bound",
]

SAVED = ("settings", "x", "y", "seconds", "proposer")

CPU = torch.device("cpu")


class Proposer:
    """Base class: says where to evaluate next, in the unit cube."""

    #: Gradient steps taken in all.
    gradient_steps: int = 0

    def begin(self, space: Space) -> None:
        """Make what depends on the inputs."""

    def propose(self, x: Tensor, y: Tensor, space: Space) -> Tensor:
        """A point ``[D]`` in the unit cube.

        :param Tensor x: the points so far ``[N, D]``, in the unit cube and in float64.
        :param Tensor y: their values ``[N, 1]``.
        :param Space space: the inputs.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """All that later proposals depend on besides the evaluations."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned, after :meth:`begin`."""


class RandomSearch(Proposer):
    """Any point with the same probability."""

    def propose(self, x: Tensor, y: Tensor, space: Space) -> Tensor:
        """A point ``[D]`` in the unit cube."""
        return space.random(1)[0]


class AcquisitionSearch(Proposer):
    """Where an acquisition function of a surrogate, trained on all evaluations, is largest.

    :param Surrogate surrogate: what is trained.
    :param acquisition: one of :mod:`pyro_radial.decisions.acquisitions`, or another such function.
    :param int num_restarts: of BoTorch's ``optimize_acqf``, or of ``optimize_acqf_mixed_alternating`` where some inputs
        are discrete.
    :param int raw_samples: of the same.
    :raises ValueError: naming the argument that does not fit.
    """

    def __init__(
        self,
        surrogate: Surrogate,
        acquisition: Acquisition = thompson,
        *,
        num_restarts: int = 4,
        raw_samples: int = 64,
    ) -> None:
        if not isinstance(surrogate, Surrogate):
            raise ValueError(f"AcquisitionSearch: surrogate must be a Surrogate, got {type(surrogate).__name__}")
        if not callable(acquisition):
            raise ValueError(
                f"AcquisitionSearch: acquisition must be a function of a surrogate, got {type(acquisition).__name__}"
            )
        self.surrogate, self.acquisition = surrogate, acquisition
        self.num_restarts = positive_count("AcquisitionSearch: num_restarts", num_restarts)
        self.raw_samples = positive_count("AcquisitionSearch: raw_samples", raw_samples)

    @property
    def gradient_steps(self) -> int:  # type: ignore[override]
        """Those of the surrogate."""
        return self.surrogate.gradient_steps

    def begin(self, space: Space) -> None:
        """Begin the surrogate."""
        self.surrogate.begin(space.num_inputs)

    def propose(self, x: Tensor, y: Tensor, space: Space) -> Tensor:
        """A point ``[D]`` in the unit cube."""
        self.surrogate.refit(x, y)
        acquisition = self.acquisition(self.surrogate, x, y)
        return _maximizer(acquisition, space, space.unit_bounds, self.num_restarts, self.raw_samples)

    def state_dict(self) -> dict[str, Any]:
        """That of the surrogate."""
        return {"surrogate": self.surrogate.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put it back."""
        self.surrogate.load_state_dict(state["surrogate"])


def thompson_candidates(
    draws: FunctionDraws, bounds: Any, num_candidates: int, *, num_restarts: int = 4, raw_samples: int = 64
) -> Tensor:
    """The maximizers of so many draws, one of each: candidates to evaluate at once.

    :param FunctionDraws draws: of one output.
    :param bounds: the least and largest value of each input, ``[2, D]``.
    :param int num_candidates: q, at most the number of draws.
    :param int num_restarts: of BoTorch's ``optimize_acqf``.
    :param int raw_samples: of the same.
    :returns: points ``[q, D]``.
    :raises ValueError: naming the argument: for more candidates than draws, and bounds the wrong way round.
    """
    if positive_count("thompson_candidates: num_candidates", num_candidates) > draws.num_draws:
        raise ValueError(
            f"thompson_candidates: num_candidates must be at most the {draws.num_draws} draws, got {num_candidates}"
        )
    space = Space(bounds)
    found = []
    for index in range(num_candidates):
        acquisition = PosteriorMean(draws.one(index))
        found.append(_maximizer(acquisition, space, space.bounds, num_restarts, raw_samples))
    return torch.stack(found)


@dataclass(frozen=True, eq=False)
class OptimizationResult:
    """What was evaluated.

    :param Tensor x: points ``[T, D]``, in the units of the bounds, in float64.
    :param Tensor y: values ``[T]``, in float64.
    :param int gradient_steps: of all refits.
    :param float seconds: that refits and proposals took, across resumes, without the evaluations.
    """

    x: Tensor
    y: Tensor
    gradient_steps: int = 0
    seconds: float = 0.0

    @property
    def best(self) -> tuple[Tensor, float]:
        """The best point ``[D]`` and its value."""
        index = int(self.y.argmax())
        return self.x[index], float(self.y[index])

    def simple_regret(self, maximum: float) -> Tensor:
        """How far the best value so far is from the maximum, after each evaluation, ``[T]``.

        :param float maximum: of the function.
        """
        return maximum - self.y.cummax(0).values


def run_optimization(
    objective: Callable[[Tensor], Any],
    bounds: Any,
    proposer: Proposer,
    *,
    num_evaluations: int = 30,
    num_initial: int = 5,
    discrete: Mapping[int, Sequence[float]] | None = None,
    categorical: Mapping[int, Sequence[float]] | None = None,
    standardize: bool = True,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> OptimizationResult:
    """Maximize a function that is expensive to evaluate.

    The first points are random; then the proposer is told all that is known, with inputs in the unit cube, before each
    evaluation. Each proposal has random numbers of its own, from the seed alone.

    :param objective: a function of a point ``[D]``, in float64 and in the units of the bounds, that returns a number.
    :param bounds: the least and the largest value of each input, ``[2, D]``.
    :param Proposer proposer: an :class:`AcquisitionSearch` or :class:`RandomSearch`.
    :param int num_evaluations: T, those of the first points included.
    :param int num_initial: random points first.
    :param discrete: for each input that is no continuous one the values that it may have, such as ``{2: range(1, 9)}``;
        searched as by BoTorch's ``optimize_acqf_mixed_alternating``.
    :param categorical: the same for codes of categories, which have no order.
    :param bool standardize: whether the proposer gets values with mean zero and standard deviation one. Without it they
        are as they are, as for a prior whose scale is known.
    :param int seed: of everything random here; proposers are the caller's, so make them from a seed too.
    :param checkpoint: a file. A run that is killed at any moment goes on after the last evaluation when it is called
        again with the same settings and a proposer made anew, and ends bit for bit as if undisturbed.
    :param bool progress: whether to show progress, with the best value so far.
    :returns: the points and their values.
    :raises ValueError: naming the argument: bounds the wrong way round, a value that is NaN or infinite with its point,
        numbers out of range, or a checkpoint that is damaged, of another run, or being written by another.

    Example::

        >>> proposer = AcquisitionSearch(GaussianProcessSurrogate(), log_expected_improvement)
        >>> result = run_optimization(lambda x: -(x - 0.3).square().sum(), [[-1.0], [1.0]], proposer,
        ...                           num_evaluations=10, progress=False)
        >>> point, value = result.best
        >>> bool((point - 0.3).abs() < 0.05)
        True
    """
    space = Space(bounds, discrete, categorical)
    num_evaluations = positive_count("run_optimization: num_evaluations", num_evaluations)
    if positive_count("run_optimization: num_initial", num_initial) > num_evaluations:
        raise ValueError(
            f"run_optimization: num_initial must be at most the {num_evaluations} evaluations, got {num_initial}"
        )
    seed = non_negative_integer("run_optimization: seed", seed)
    if not isinstance(proposer, Proposer):
        raise ValueError(f"run_optimization: proposer must be a Proposer, got {type(proposer).__name__}")
    path = None if checkpoint is None else Path(checkpoint)
    settings: dict[str, Any] = {"num_initial": num_initial, "standardize": standardize, "seed": seed}
    x, y, seconds = space.bounds.new_zeros(0, space.num_inputs), space.bounds.new_zeros(0), 0.0
    with sole_writer(path):
        proposer.begin(space)
        if path is not None:
            settings |= {"space": space.described(), "proposer": described(proposer)}
            if path.exists():
                state = load_checkpoint(path, CPU, needed=SAVED)
                check_settings(path, state["settings"], settings)
                x, y, seconds = state["x"], state["y"], state["seconds"]
                proposer.load_state_dict(state["proposer"])
        bar = tqdm(total=num_evaluations, initial=len(y), desc="optimization", disable=not progress)
        with bar:
            while len(y) < num_evaluations:
                before = time.monotonic()
                own = int(np.random.SeedSequence([seed, len(y)]).generate_state(1)[0])
                with seeded(own, CPU), seeded_elsewhere(own):
                    if len(y) < num_initial:
                        unit = space.random(1)[0]
                    else:
                        unit = proposer.propose(space.to_unit(x), _values(y, standardize), space)
                seconds += time.monotonic() - before
                point = space.from_unit(unit)
                y = torch.cat([y, y.new_tensor([_evaluated(objective, point)])])
                x = torch.cat([x, point.unsqueeze(0)])
                bar.update()
                bar.set_postfix_str(f"best {float(y.max()):.6g}")
                if path is not None:
                    state = {"x": x, "y": y, "seconds": seconds, "proposer": proposer.state_dict()}
                    save_checkpoint(path, {"settings": settings, **state})
    return OptimizationResult(x, y, proposer.gradient_steps, seconds)


def _values(y: Tensor, standardize: bool) -> Tensor:
    """What the proposer is told, ``[N, 1]``."""
    if standardize:
        spread = y.std(correction=0)
        y = (y - y.mean()) / torch.where(spread > 0, spread, 1.0)
    return y.unsqueeze(1)


def _evaluated(objective: Callable[[Tensor], Any], point: Tensor) -> float:
    value = float(objective(point.clone()))
    if not math.isfinite(value):
        raise ValueError(f"run_optimization: objective must be finite, got {value} at {point.tolist()}")
    return value


def _maximizer(acquisition: Any, space: Space, bounds: Tensor, num_restarts: int, raw_samples: int) -> Tensor:
    """The point ``[D]`` within bounds where an acquisition function is largest."""
    options: dict[str, Any] = {"q": 1, "num_restarts": num_restarts, "raw_samples": raw_samples}
    with warnings.catch_warnings():
        # Of line searches that end early, after which it takes the best point found, or starts again by itself.
        warnings.simplefilter("ignore")
        if space.is_continuous:
            found, _ = optimize_acqf(acquisition, bounds, **options)
        else:
            discrete, categorical = space.unit_values(space.discrete), space.unit_values(space.categorical)
            found, _ = optimize_acqf_mixed_alternating(acquisition, bounds, discrete, categorical, **options)
    return found[0].detach()
