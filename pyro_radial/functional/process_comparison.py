# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A network under a functional prior beside the exact posterior of that prior."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_radial.functional.priors import FunctionPrior, GaussianProcess
from pyro_radial.infer.prediction.predict import predict

__all__ = ["PlaceComparison", "ProcessComparison", "compare_with_process"]

#: Rows and points whose covariance is held at once, and how many points a covariance takes.
MOST_ROWS = 10_000
CHUNK = 1_000
#: Further from one than this, a ratio of standard deviations is a finding; further than this, in standard deviations
#: of the process, a mean is.
RATIO = 1.25
DISTANCE = 0.5


@dataclass(frozen=True)
class PlaceComparison:
    """Network and exact posterior at the points of one place.

    :param str place: what the points are.
    :param Tensor mean: the network's mean function, ``[N, O]``; likewise ``stddev``, the standard deviation of the
        function, without noise.
    :param Tensor process_mean: those of the exact posterior.
    """

    place: str
    mean: Tensor
    stddev: Tensor
    process_mean: Tensor
    process_stddev: Tensor

    @property
    def distance(self) -> float:
        """Root mean square of the distance of the means, each in the process's standard deviations there."""
        return float(((self.mean - self.process_mean) / self.process_stddev).square().mean().sqrt())

    @property
    def width(self) -> float:
        """The network's standard deviation over the process's, the geometric mean over points."""
        return float((self.stddev / self.process_stddev).log().mean().exp())

    def __str__(self) -> str:
        return (
            f"at {len(self.mean)} {self.place}: means {self.distance:.2f} standard deviations of the process apart, "
            f"function standard deviation {self.width:.2f} of it"
        )


@dataclass(frozen=True)
class ProcessComparison:
    """A network beside the exact posterior of its functional prior.

    :param places: the places of points, training inputs first.
    :param float noise: the root mean square of the network's noise standard deviation.
    :param float process_noise: the noise of observations of the process.
    """

    places: tuple[PlaceComparison, ...]
    noise: float
    process_noise: float

    def __str__(self) -> str:
        noise = f"noise {self.noise:.3g}, {self.noise / self.process_noise:.2f} of the process's"
        return "\n".join(["beside the exact posterior: " + noise, *map(str, self.places)])

    @property
    def findings(self) -> list[str]:
        """Which of noise, width and mean is off, and what to try."""
        found = []
        ratio = self.noise / self.process_noise
        if not 1 / RATIO < ratio < RATIO:
            found.append(
                f"The noise is {ratio:.2f} times the exact posterior's process has. Train longer, or start it nearer: "
                "the noise is what is learned last."
            )
        far = [place for place in self.places if place.distance > DISTANCE]
        if far:
            worst = max(far, key=lambda place: place.distance)
            found.append(
                f"The mean is off, by {worst.distance:.2f} standard deviations of the exact posterior at the "
                f"{worst.place}. Train longer, take larger batches, or a network that can be as rough as the prior."
            )
        narrow = [place for place in self.places if place.width < 1 / RATIO]
        if narrow:
            worst = min(narrow, key=lambda place: place.width)
            found.append(
                f"The posterior is too narrow: its function's standard deviation is {worst.width:.2f} of the exact "
                f"one's at the {worst.place}. Put measurement points where predictions are made."
            )
        wide = [place for place in self.places if place.width > RATIO]
        if wide:
            worst = max(wide, key=lambda place: place.width)
            found.append(
                f"The posterior is too wide: its function's standard deviation is {worst.width:.2f} times the exact "
                f"one's at the {worst.place}. Train longer, or take larger batches."
            )
        return found


def compare_with_process(
    model: Callable[..., Any],
    guide: Any,
    prior: FunctionPrior,
    data: tuple[Tensor, Tensor],
    places: dict[str, Tensor],
    *,
    num_samples: int,
    function_site: str,
) -> ProcessComparison:
    """The comparison at the training inputs and at further places.

    :param model: a Pyro model ``model(x, y)`` with a normal likelihood; guide: its guide, trained.
    :param prior: a Gaussian process that knows the noise of observations.
    :param data: all rows that the guide was trained on.
    :param places: further points ``[M, ...]``, by what they are.
    :param int num_samples: draws of the function; a width from S draws has a relative error of 1 / sqrt(2 S) a point.
    :raises ValueError: for a prior without an exact posterior, for more rows than its covariance can hold, and for a
        likelihood that is not of numbers.
    """
    x, y = data
    process = _exact(prior, len(x))
    training = "training inputs"
    found, noise = [], x.new_zeros(0)
    for place, points in {training: x, **places}.items():
        prediction = predict(model, guide, points, num_samples=num_samples, function_site=function_site, progress=False)
        values = prediction.samples.double()
        values = values.reshape(*values.shape[:2], -1)
        if place == training:
            noise = _noise_variance(prediction)
        moments = list(_process_moments(process, x, y, points))
        mean, variance = (torch.cat(part) for part in zip(*moments, strict=True))
        found.append(PlaceComparison(place, values.mean(0), values.std(0), mean, variance.sqrt()))
    return ProcessComparison(tuple(found), float(noise.mean().sqrt()), float(process.observation_noise))


def _exact(prior: FunctionPrior, num_rows: int) -> GaussianProcess:
    """The prior, if its exact posterior is known and can be had."""
    if not isinstance(prior, GaussianProcess):
        raise ValueError(
            "diagnose: loss must have a prior with an exact posterior, a GaussianProcess, got "
            f"{type(prior).__name__}; leave loss out, or compare with a GaussianProcess of like functions"
        )
    if not prior.observation_noise > 0:
        raise ValueError(
            "diagnose: loss must have a prior that knows the noise of observations, got observation_noise = 0; call "
            "prior.fit(x, y), or prior.observation_noise.fill_(...)"
        )
    if num_rows > MOST_ROWS:
        raise ValueError(
            f"diagnose: data must have at most {MOST_ROWS:,} rows, whose covariance the exact posterior holds, got "
            f"{num_rows:,}; train on fewer rows, or compare on a part that a network was trained on alone"
        )
    return prior


def _process_moments(prior: GaussianProcess, x: Tensor, y: Tensor, points: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for part in points.split(CHUNK):
        mean, covariance = prior.posterior(x, y, part)
        yield mean, covariance.diagonal(dim1=-2, dim2=-1).mT.expand_as(mean)


def _noise_variance(prediction: Any) -> Tensor:
    try:
        return prediction.aleatoric_variance
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"diagnose: model must have a normal likelihood to be compared with a Gaussian process: {error}"
        ) from error
