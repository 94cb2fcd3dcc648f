# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Make networks with one output, and train them with a falling rate, for experiments with priors on functions."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pyro.optim
from torch import Tensor, nn

from benchmarks.common import Pair
from pyro_radial import AutoMeanField, FitOptions, SupervisedModel, TermsELBO, fit

# Draws from a posterior, by the form of an experiment.
NUM_SAMPLES = {"default": 500, "small": 10, "paper": 500}
# The share of the steps in which the weight of the divergence rises to its own.
RAMP = 0.5
# The name of the noise in Pyro's store, with a number where the process has had others.
NOISE = re.compile(r"Gaussian(_\d+)?\.scale")
# Shares of the steps, each with what its rate is times.
FALLING = ((0.7, 1.0), (0.3, 0.1))


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
    batch_size: int,
    checkpoint: Path,
    kl_weight: float = 1.0,
    init_stddev: float = 0.01,
    rates: Sequence[tuple[float, float]] = FALLING,
    mean_only_epochs: int = 0,
    make_guide: Callable[..., Any] = AutoMeanField,
    noise_lr: float | None = None,
) -> Any:
    """A guide, mean field unless it says otherwise, with the divergence weighed up at first and a lower rate later.

    The noise of a likelihood that learns it may have a rate of its own, which does not fall.

    Epochs that train the means alone come before the steps.
    """
    guide = make_guide(model, init_stddev=init_stddev)
    steps_per_epoch = -(-len(data[0]) // batch_size)
    epochs = max(1, steps // steps_per_epoch)
    ramp = max(1, round(RAMP * epochs * steps_per_epoch))
    ends = [0, *(max(1, round(share * epochs)) for share in accumulate(share for share, _ in rates))]

    def weight_after(start: int, step: int) -> float:
        return kl_weight * min(1.0, (start + step + 1) / ramp)

    def run(epochs: int, rate: float, name: str, **more: Any) -> None:
        path = checkpoint.with_name(f"{checkpoint.name}_{name}.pt")
        own = rate if noise_lr is None else noise_lr
        adam = pyro.optim.Adam(lambda name: {"lr": own if NOISE.fullmatch(name) else rate})
        options = FitOptions(checkpoint_every=500, mean_only_epochs=epochs if name == "means" else 0)
        given = {"checkpoint": path, "progress": False, "options": options, **more}
        fit(model, guide, data, epochs=epochs, batch_size=batch_size, optim=adam, **given)

    if mean_only_epochs:
        run(mean_only_epochs, lr, "means")
    for number, ((start, end), (_, factor)) in enumerate(zip(pairwise(ends), rates, strict=True)):
        if end > start:
            run(end - start, factor * lr, str(number), loss=make_loss(partial(weight_after, start * steps_per_epoch)))
    return guide


def rounded(values: Tensor) -> list[float]:
    """Numbers for a results file."""
    return [round(value, 4) for value in values.tolist()]
