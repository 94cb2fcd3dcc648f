# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Make networks with one output, and train them with a falling rate, for experiments with priors on functions."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import pyro.optim
from torch import Tensor, nn

from benchmarks.common import Pair
from pyro_radial import AutoMeanField, FitOptions, SupervisedModel, TermsELBO, fit

# Draws from a posterior, by the form of an experiment.
NUM_SAMPLES = {"default": 500, "small": 10}
# The share of the steps in which the weight of the divergence rises to its own.
RAMP = 0.5
# The name of the noise in Pyro's store, with a number where the process has had others.
NOISE = re.compile(r"Gaussian(_\d+)?\.scale")


def network(inputs: int, hidden: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """A plain network with one output."""
    sizes = [inputs, *hidden]
    layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), activation())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 1))


def weight_space(kl_weight: Callable[[int], float]) -> TermsELBO:
    """The loss of a network with a prior on its weights."""
    return TermsELBO(10, vectorize_particles=True, strict_kl=True, kl_weight=kl_weight)


def train(
    model: SupervisedModel,
    data: Pair,
    make_loss: Callable[[Callable[[int], float]], TermsELBO],
    *,
    steps: int,
    lr: float,
    rates: Sequence[tuple[float, float]],
    batch_size: int,
    checkpoint: Path,
    kl_weight: float,
    init_stddev: float,
    noise_lr: float,
) -> AutoMeanField:
    """A mean-field guide, with the divergence weighed up at first and a lower rate later.

    The noise of a likelihood that learns it has a rate of its own, which does not fall.

    :param rates: shares of the steps, each with what its rate is times.
    """
    guide = AutoMeanField(model, init_stddev=init_stddev)
    steps_per_epoch = -(-len(data[0]) // batch_size)
    epochs = max(1, steps // steps_per_epoch)
    ramp = max(1, round(RAMP * epochs * steps_per_epoch))
    ends = [0, *(max(1, round(share * epochs)) for share in accumulate(share for share, _ in rates))]

    def weight_after(start: int, step: int) -> float:
        return kl_weight * min(1.0, (start + step + 1) / ramp)

    def rate_of(rate: float, name: str) -> dict[str, float]:
        return {"lr": noise_lr if NOISE.fullmatch(name) else rate}

    for number, ((start, end), (_, factor)) in enumerate(zip(pairwise(ends), rates, strict=True)):
        if end > start:
            fit(
                model,
                guide,
                data,
                epochs=end - start,
                batch_size=batch_size,
                optim=pyro.optim.Adam(partial(rate_of, factor * lr)),
                loss=make_loss(partial(weight_after, start * steps_per_epoch)),
                checkpoint=checkpoint.with_name(f"{checkpoint.name}_{number}.pt"),
                progress=False,
                options=FitOptions(checkpoint_every=500),
            )
    return guide


def rounded(values: Tensor) -> list[float]:
    """Numbers for a results file."""
    return [round(value, 4) for value in values.tolist()]
