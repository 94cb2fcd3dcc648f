# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A network under a functional prior, compared with the exact posterior of that prior."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_radial.functional.priors import FunctionPrior, GaussianProcess
from pyro_radial.infer.prediction.predict import predict

__all__ = ["PlaceComparison", "ProcessComparison", "compare_with_process"]

#: The most training rows, and the points of one covariance.
MOST_ROWS = 10_000
CHUNK = 1_000
#: A ratio of standard deviations further from one is a finding, and a mean that is further off, in standard deviations
#: of the process.
RATIO = 1.25
DISTANCE = 0.5


@dataclass(frozen=True)
class PlaceComparison:
    """Means and standard deviations ``[N, O]`` of the network's function and of the exact posterior at some points.

    Both are without observation noise. ``measured`` says whether the loss compares functions at these points too.
    """

    place: str
    mean: Tensor
    stddev: Tensor
    process_mean: Tensor
    process_stddev: Tensor
    measured: bool

    @property
    def distance(self) -> float:
        """The root mean square distance of the means, in standard deviations of the process."""
        return float(((self.mean - self.process_mean) / self.process_stddev).square().mean().sqrt())

    @property
    def width(self) -> float:
        """The network's standard deviation divided by the process's, as a geometric mean over points."""
        return float((self.stddev / self.process_stddev).log().mean().exp())

    def __str__(self) -> str:
        return (
            f"at {len(self.mean)} {self.place}: the means are {self.distance:.2f} standard deviations apart, the "
            f"standard deviation of the function is {self.width:.2f} times the exact one"
        )


@dataclass(frozen=True)
class ProcessComparison:
    """A network compared with the exact posterior of its functional prior.

    :param places: a comparison for each set of points, training inputs first.
    :param float noise: the root mean square of the network's noise standard deviation.
    :param float process_noise: the noise of observations of the process.
    """

    places: tuple[PlaceComparison, ...]
    noise: float
    process_noise: float

    def __str__(self) -> str:
        noise = f"noise {self.noise:.3g}, {self.noise / self.process_noise:.2f} times that of the process"
        return "\n".join(["compared with the exact posterior: " + noise, *map(str, self.places)])

    @property
    def findings(self) -> list[str]:
        """What is wrong with the noise, the width and the mean, and what to try."""
        found = []
        ratio = self.noise / self.process_noise
        if not 1 / RATIO < ratio < RATIO:
            found.append(
                f"The noise is {ratio:.2f} times that of the exact posterior. Train longer, or start closer to it: the "
                "noise is learned last."
            )
        far = [place for place in self.places if place.distance > DISTANCE]
        if far:
            worst = max(far, key=lambda place: place.distance)
            found.append(
                f"The mean is off by {worst.distance:.2f} standard deviations of the exact posterior at the "
                f"{worst.place}. Train longer, use larger batches, or a network that can be as rough as the prior."
            )
        narrow, wide = (choose(self.places, key=lambda place: place.width) for choose in (min, max))
        # Points elsewhere help only if the width is right at the points that the loss has.
        trained = all(place.width >= 1 / RATIO for place in self.places if place.measured)
        points = "Put measurement points where predictions are made."
        for worst, word, advice in (
            (narrow, "narrow", points if trained else "Train longer, or take function_space_laplace for the widths."),
            (wide, "wide", "Train longer, or use larger batches."),
        ):
            if worst.width < 1 / RATIO if word == "narrow" else worst.width > RATIO:
                found.append(
                    f"The posterior is too {word}: the standard deviation of its functions is {worst.width:.2f} times "
                    f"the exact one at the {worst.place}. {advice}"
                )
        return found


def compare_with_process(
    model: Callable[..., Any],
    guide: Any,
    prior: FunctionPrior,
    data: tuple[Tensor, Tensor],
    places: dict[str, Tensor],
    *,
    measured: Collection[str],
    num_samples: int,
    function_site: str,
) -> ProcessComparison:
    """Compare the network with the exact posterior at the training inputs and at further places, by name.

    Those of ``measured`` are the ones where the loss compares functions.

    The relative error of a width is 1 / sqrt(2 S) at each point, with S samples.
    """
    x, y = data
    process = _exact(prior, len(x))
    found, noises = [], []
    method: Any = "linearized" if getattr(guide, "linear_only", False) else "draws"
    for place, points in {"training inputs": x, **places}.items():
        prediction = predict(
            model, guide, points, num_samples, method=method, function_site=function_site, progress=False
        )
        values = prediction.samples.double()
        values = values.reshape(*values.shape[:2], -1)
        noises.append(_noise_variance(prediction))
        moments = [process.posterior(x, y, part) for part in points.split(CHUNK)]
        mean = torch.cat([part for part, _ in moments])
        variance = torch.cat([covariance.diagonal(dim1=-2, dim2=-1).mT for _, covariance in moments])
        found.append(PlaceComparison(place, values.mean(0), values.std(0), mean, variance.sqrt(), place in measured))
    return ProcessComparison(tuple(found), float(noises[0].mean().sqrt()), float(process.observation_noise))


def _exact(prior: FunctionPrior, num_rows: int) -> GaussianProcess:
    """The prior, if it has an exact posterior that fits into memory."""
    if not isinstance(prior, GaussianProcess):
        raise ValueError(
            "loss must have a prior with an exact posterior, a GaussianProcess, got "
            f"{type(prior).__name__}; omit loss, or compare with a GaussianProcess with similar functions"
        )
    if not prior.observation_noise > 0:
        raise ValueError(
            "loss must have a prior that knows the noise of observations, got observation_noise = 0; call "
            "prior.fit(x, y), or prior.observation_noise.fill_(...)"
        )
    if num_rows > MOST_ROWS:
        raise ValueError(
            f"data must have at most {MOST_ROWS:,} rows, because the exact posterior needs their covariance, got "
            f"{num_rows:,}; train and compare on fewer rows"
        )
    return prior


def _noise_variance(prediction: Any) -> Tensor:
    try:
        return prediction.aleatoric_variance
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"model must have a normal likelihood to be compared with a Gaussian process: {error}"
        ) from error
