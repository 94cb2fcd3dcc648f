# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What is asked of probabilities, labels and scores, and ties among scores."""

import torch

__all__ = ["class_probabilities", "finite_numbers", "means_of_ties"]

SUM_TOLERANCE = 1e-3


def class_probabilities(probs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities in float32 or wider and int64 labels, or a ValueError that names the argument."""
    if probs.ndim != 2 or 0 in probs.shape or not probs.is_floating_point():
        raise ValueError(f"probs must be floating-point of shape [N, K], got {probs.dtype} {list(probs.shape)}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    if labels.shape != probs.shape[:1]:
        raise ValueError(f"labels must have shape [{len(probs)}] to fit probs, got {list(labels.shape)}")
    probs = probs.to(torch.promote_types(probs.dtype, torch.float32))
    if probs.isnan().any() or (probs < 0).any():
        raise ValueError(f"probs must be non-negative, got {probs.min().item():.3g}")
    error = (probs.sum(-1) - 1).abs().max()
    if error > SUM_TOLERANCE:
        raise ValueError(f"probs must sum to one in every row, got a row that is off by {error.item():.3g}")
    if (labels < 0).any() or (labels >= probs.shape[-1]).any():
        raise ValueError(
            f"labels must be from 0 to {probs.shape[-1] - 1}, got {int(labels.min())} to {int(labels.max())}"
        )
    return probs, labels.long()


def finite_numbers(argument: str, values: torch.Tensor, number: int | None = None) -> torch.Tensor:
    """The values in float64 on the CPU, without gradients, or a ValueError that names the argument.

    Float64 holds every float16, bfloat16 and float32 exactly, so ties stay ties.

    :param str argument: the name to put in the message.
    :param values: one number for each point, ``[N]``.
    :param number: N, if it must be that of another argument.
    :raises ValueError: for another shape, no points, NaN or infinity.
    """
    wanted = "[N] with N > 0" if number is None else f"[{number}]"
    if values.ndim != 1 or len(values) == 0 or number not in (None, len(values)):
        raise ValueError(f"{argument} must have shape {wanted}, got {list(values.shape)}")
    if not values.isfinite().all():
        raise ValueError(f"{argument} must be finite, got NaN or infinity")
    return values.detach().cpu().double()


def means_of_ties(values: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The values with those of equal keys replaced by their mean, so that an order by keys does not matter.

    :param values: floating-point of shape ``[N]``.
    :param keys: shape ``[N]``.
    """
    _, group, count = keys.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(count), dtype=values.dtype, device=values.device).index_add(0, group, values)
    return (sums / count)[group]
