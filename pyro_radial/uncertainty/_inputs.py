# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Checks of the arguments that metrics share."""

import torch

from pyro_radial._pyro.checks import check_types

SUM_TOLERANCE = 1e-3


def class_probabilities(
    probs: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities ``[N, K]`` in float32 or wider, and labels in int64; a ValueError if they do not fit."""
    check_types(torch.Tensor, probs=probs)
    if probs.ndim != 2 or 0 in probs.shape or not probs.is_floating_point():
        raise ValueError(
            f"probs must be floating-point of shape [N, K], got {probs.dtype} {list(probs.shape)}"
        )
    probs = probs.to(torch.promote_types(probs.dtype, torch.float32))
    if probs.isnan().any() or (probs < 0).any():
        raise ValueError(f"probs must be non-negative, got {probs.min().item():.3g}")
    error = (probs.sum(-1) - 1).abs().max()
    if error > SUM_TOLERANCE:
        raise ValueError(
            f"probs must sum to one in every row, got a row that is off by {error.item():.3g}"
        )
    return probs, class_labels("probs", labels, probs.shape)


def class_labels(argument: str, labels: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the labels as int64 after checking that there are N from 0 to K - 1, as an argument ``[N, K]`` needs."""
    check_types(torch.Tensor, labels=labels)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    if labels.shape != shape[:1]:
        raise ValueError(
            f"labels must have shape [{shape[0]}] to fit {argument}, got {list(labels.shape)}"
        )
    if (labels < 0).any() or (labels >= shape[1]).any():
        raise ValueError(
            f"labels must be from 0 to {shape[1] - 1}, got {int(labels.min())} to {int(labels.max())}"
        )
    return labels.long()


def finite_numbers(argument: str, values: torch.Tensor) -> torch.Tensor:
    """Return a vector of finite numbers in float64 on the CPU, without gradients, or raise a ValueError.

    Float64 holds every float16, bfloat16 and float32 exactly, so ties stay ties.
    """
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"{argument} must have shape [N] with N > 0, got {list(values.shape)}")
    if not values.isfinite().all():
        raise ValueError(f"{argument} must be finite, got NaN or infinity")
    return values.detach().cpu().double()


def real_targets(
    argument: str, predictions: torch.Tensor, targets: torch.Tensor, leading: int | None = None
) -> torch.Tensor:
    """Return finite targets ``[N, *target]`` for a tensor of predictions ``[*L, N, *target]``, or raise a ValueError.

    Targets ``[N]`` fit a target of one element. ``leading`` is the number of dims in L, by default all that the targets
    do not have.
    """
    if not predictions.is_floating_point():
        raise ValueError(f"{argument} must be floating-point, got {predictions.dtype}")
    shape = (
        predictions.shape[leading:]
        if leading is not None
        else predictions.shape[predictions.ndim - targets.ndim :]
    )
    if leading is None and targets.ndim == 1 and targets.shape != shape and shape == (1,):
        shape = predictions.shape[-2:]
    if targets.ndim == 1 and shape == (*targets.shape, 1):
        targets = targets.unsqueeze(-1)
    if targets.shape != shape or targets.numel() == 0 or targets.ndim == 0:
        raise ValueError(
            f"targets must have shape {list(shape)} to fit {argument}, got {list(targets.shape)}"
        )
    for name, values in ((argument, predictions), ("targets", targets)):
        if not values.isfinite().all():
            raise ValueError(f"{name} must be finite, got NaN or infinity")
    return targets.to(predictions.dtype)
