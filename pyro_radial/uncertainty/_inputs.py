# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What is asked of probabilities, labels and scores, and ties among scores."""

import torch

__all__ = ["class_labels", "class_probabilities", "finite_numbers", "means_of_ties", "real_targets"]

SUM_TOLERANCE = 1e-3


def class_probabilities(probs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities in float32 or wider and int64 labels, or a ValueError that names the argument."""
    if probs.ndim != 2 or 0 in probs.shape or not probs.is_floating_point():
        raise ValueError(f"probs must be floating-point of shape [N, K], got {probs.dtype} {list(probs.shape)}")
    labels = class_labels("probs", labels, probs.shape)
    probs = probs.to(torch.promote_types(probs.dtype, torch.float32))
    if probs.isnan().any() or (probs < 0).any():
        raise ValueError(f"probs must be non-negative, got {probs.min().item():.3g}")
    error = (probs.sum(-1) - 1).abs().max()
    if error > SUM_TOLERANCE:
        raise ValueError(f"probs must sum to one in every row, got a row that is off by {error.item():.3g}")
    return probs, labels


def class_labels(argument: str, labels: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The labels in int64, or a ValueError that names them.

    :param argument: what they must fit.
    :param labels: integers of shape ``[N]``.
    :param shape: of that argument, ``[N, K]``.
    :raises ValueError: for another shape or type, or a label that is no class.
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    if labels.shape != shape[:1]:
        raise ValueError(f"labels must have shape [{shape[0]}] to fit {argument}, got {list(labels.shape)}")
    if (labels < 0).any() or (labels >= shape[1]).any():
        raise ValueError(f"labels must be from 0 to {shape[1] - 1}, got {int(labels.min())} to {int(labels.max())}")
    return labels.long()


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


def real_targets(
    who: str, argument: str, predictions: torch.Tensor, targets: torch.Tensor, leading: int | None = None
) -> torch.Tensor:
    """The targets in the shape that predictions have after some leading dims, or a ValueError that names the argument.

    :param who: the function, for the message.
    :param argument: the name of the predictions, for the message.
    :param predictions: floating-point, ``[*L, N, *target]``.
    :param targets: ``[N, *target]``, or ``[N]`` where the target has one element.
    :param leading: the number of dims in L; by default what the targets leave.
    :raises ValueError: if shapes or types do not fit, there are no targets, or a value is not finite.
    """
    if not predictions.is_floating_point():
        raise ValueError(f"{who}: {argument} must be floating-point, got {predictions.dtype}")
    shape = predictions.shape[leading:] if leading is not None else predictions.shape[predictions.ndim - targets.ndim :]
    if leading is None and targets.ndim == 1 and targets.shape != shape and shape == (1,):
        shape = predictions.shape[-2:]
    if targets.ndim == 1 and shape == (*targets.shape, 1):
        targets = targets.unsqueeze(-1)
    if targets.shape != shape or targets.numel() == 0 or targets.ndim == 0:
        raise ValueError(f"{who}: targets must have shape {list(shape)} to fit {argument}, got {list(targets.shape)}")
    for name, values in ((argument, predictions), ("targets", targets)):
        if not values.isfinite().all():
            raise ValueError(f"{who}: {name} must be finite, got NaN or infinity")
    return targets.to(predictions.dtype)
