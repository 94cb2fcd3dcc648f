# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Whether data have about the size that priors on weights and the noise start with; training and diagnosis ask it."""

from typing import Any

import torch
from torch import Tensor

from pyro_radial.infer.training.data import Inputs, num_rows
from pyro_radial.nn.bayesian_module import BayesianModule, submodules
from pyro_radial.nn.likelihoods import Gaussian, HeteroscedasticGaussian

__all__ = ["not_standardized"]

# Measured root mean squares. In regression, inputs of 30 are predicted no better than by the mean, and a mean target of
# 10 is missed by several standard deviations. Classes are still learned from pixels up to 255, but not well from 4000.
MOST_OF_INPUT, MOST_OF_INPUT_FOR_CLASSES, MOST_OF_TARGET = 30.0, 300.0, 10.0
# In units of the first noise, but at most of one: below it the noise stays at 16 times the error.
LEAST_SPREAD = 0.1


@torch.no_grad()
def not_standardized(model: Any, x: Inputs, y: Inputs) -> str | None:
    """Say which inputs or real targets have another size, with the numbers; None if all fit or nothing is known."""
    likelihood = getattr(model, "likelihood", None)
    if likelihood is None or num_rows(x) < 2:
        return None
    is_real, found = isinstance(likelihood, Gaussian | HeteroscedasticGaussian), []
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, tuple) else (x,)
    size = max((_largest(part) for part in parts if part.is_floating_point()), default=0.0)
    if size > (MOST_OF_INPUT if is_real else MOST_OF_INPUT_FOR_CLASSES) and not _scales_inputs(model):
        found.append(f"inputs with a root mean square of up to {size:.3g}")
    if is_real and isinstance(y, Tensor) and y.is_floating_point():
        mean, spread, noise = float(y.mean()), float(y.std(0, correction=0).max()), getattr(likelihood, "scale", 1.0)
        if _largest(y) > MOST_OF_TARGET or 0.0 < spread < LEAST_SPREAD * min(1.0, float(noise)):
            found.append(f"targets with mean {mean:.3g} and standard deviation {spread:.3g}")
    if not found:
        return None
    advice = "Standardize inputs and real targets by the training rows, and convert predictions back."
    return f"The data have {' and '.join(found)}, but the priors and the noise expect about unit size. {advice}"


def _largest(values: Tensor) -> float:
    """The root mean square over rows of the largest element of a row."""
    return float(torch.linalg.vector_norm(values, dim=0).max()) / len(values) ** 0.5


def _scales_inputs(model: Any) -> bool:
    """Whether the first layer with parameters of a Bayesian network normalizes its inputs."""
    networks = (part.skeleton for part in submodules(model) if isinstance(part, BayesianModule))
    layers = (layer for network in networks for layer in network.modules() if [*layer.parameters(recurse=False)])
    return "Norm" in type(next(layers, None)).__name__
