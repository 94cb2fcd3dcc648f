# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The units of a network: which are kept, and how much each matters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Cut", "Scores"]


@dataclass(frozen=True, eq=False)
class Cut:
    """Which units of a network are kept.

    A unit is an output of a linear layer or an output channel of a convolution. The inputs of a layer are the units
    of the layer before, or the network's own; the inputs after an :class:`~torch.nn.Flatten` are the positions of the
    channels before it, and may be cut one by one.

    :param outputs: boolean masks over the outputs of layers, shape ``[num_outputs]``, by the name of the layer as in
        ``net.named_modules()``; True is kept. A layer without a mask keeps all.
    :param inputs: the same over the inputs of layers, shape ``[num_inputs]``.
    :raises ValueError: if a mask is not a boolean vector; the message names it.

    Example::

        >>> import torch
        >>> Cut(outputs={"0": torch.tensor([True, False, True])})
        Cut(outputs={'0': 2 of 3}, inputs={})
    """

    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for side, masks in (("outputs", self.outputs), ("inputs", self.inputs)):
            for layer, mask in masks.items():
                if mask.dtype != torch.bool or mask.ndim != 1:
                    raise ValueError(f"{side}[{layer!r}] must be a boolean vector, got {mask.dtype}, {[*mask.shape]}")

    def __repr__(self) -> str:
        outputs, inputs = (
            "{" + ", ".join(f"{name!r}: {int(mask.sum())} of {len(mask)}" for name, mask in masks.items()) + "}"
            for masks in (self.outputs, self.inputs)
        )
        return f"Cut(outputs={outputs}, inputs={inputs})"


@dataclass(frozen=True, eq=False)
class Scores:
    """How much each unit matters, on a logarithmic scale; the higher, the rather it is kept.

    :param outputs: scores of the outputs of layers, shape ``[num_outputs]``, by the name of the layer. Leave out the
        last layer: the network's outputs are never cut.
    :param inputs: scores of the inputs of layers, shape ``[num_inputs]``.
    :raises ValueError: if there are no scores, or some are not a vector of numbers; the message names them. Minus
        infinity is a score, the log of zero.

    Example::

        >>> import torch
        >>> Scores(outputs={"0": torch.tensor([0.0, -9.0, -1.0])}).at_least(-2)
        Cut(outputs={'0': 2 of 3}, inputs={})
    """

    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for side, scores in self.sides():
            for layer, values in scores.items():
                if not values.is_floating_point() or values.ndim != 1 or values.numel() == 0:
                    raise ValueError(
                        f"{side}[{layer!r}] must be a vector of one floating point number per unit, "
                        f"got {values.dtype}, {[*values.shape]}"
                    )
                if not (values < torch.inf).all():
                    raise ValueError(
                        f"{side}[{layer!r}] must be less than infinity, and not NaN, got {float(values.max())}"
                    )
        if not (self.outputs or self.inputs):
            raise ValueError("outputs or inputs must hold scores, got none")

    def sides(self) -> tuple[tuple[str, Mapping[str, Tensor]], tuple[str, Mapping[str, Tensor]]]:
        """``("outputs", scores of outputs)`` and ``("inputs", scores of inputs)``."""
        return ("outputs", self.outputs), ("inputs", self.inputs)

    def at_least(self, threshold: float) -> Cut:
        """The cut that keeps the units whose score reaches the threshold."""
        outputs, inputs = (
            {layer: values >= threshold for layer, values in scores.items()} for _, scores in self.sides()
        )
        return Cut(outputs, inputs)
