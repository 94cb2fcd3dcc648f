# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What a linear layer or a convolution gives with noise in the place of drawn parameters."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyro_radial.nn.local.unit_noise import UnitNoise

__all__ = ["LAYERS", "Parameter", "noisy_output"]

#: Layers whose parameters enter linearly, and that take each row of a batch for itself. Subclasses may do otherwise.
LAYERS = {nn.Linear: 1, nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5}

# What a variance of zero counts as.
TINY = torch.finfo(torch.float32).tiny

# A parameter of a layer: a value, or where it is not drawn its noise.
Parameter = Tensor | UnitNoise | None


def noisy_output(layer: nn.Module, x: Tensor, weight: Parameter, bias: Parameter) -> Tensor:
    """The output of a layer, with noise drawn for each row of a batch.

    :param nn.Module layer: of a type of ``LAYERS``.
    :param Tensor x: its input, whose first dimension are the rows.
    :param weight: its weight, or the noise of it.
    :param bias: the same of its bias, or None.
    :returns: what the layer returns, in distribution as with drawn parameters for each row.
    """
    mean = _apply(layer, x, _mean(weight), _mean(bias))
    noise: Tensor | None = None
    if isinstance(weight, UnitNoise):
        if x.dim() != 2 or not weight.has_outputs:
            noise = _flipped_output(layer, x, weight)
        elif isinstance(bias, UnitNoise) and weight.radius is None and bias.radius is None:
            # The sum of two normals is one.
            return mean + weight.of_outputs(_stddev(x, weight.scale, bias.scale)).to(mean.dtype)
        else:
            noise = weight.of_outputs(_stddev(x, weight.scale))
    if isinstance(bias, UnitNoise):
        of_bias = _at_channels(layer, bias.scale * bias.unit((len(x), *bias.scale.shape)), mean.dim())
        noise = of_bias if noise is None else noise + of_bias
    return mean if noise is None else mean + noise.to(mean.dtype)


def _mean(parameter: Parameter) -> Tensor | None:
    return parameter.loc if isinstance(parameter, UnitNoise) else parameter


def _stddev(x: Tensor, scale: Tensor, bias_scale: Tensor | None = None) -> Tensor:
    """The standard deviation of each output for unit normal noise; where all inputs are zero, as good as zero."""
    # In full precision: the squares of small scales underflow in a short dtype.
    wide = torch.promote_types(scale.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        squares = None if bias_scale is None else bias_scale.to(wide).square()
        variance = F.linear(x.to(wide).square(), scale.to(wide).square(), squares)
    # The root has no derivative at zero; below the bound its gradient is zero.
    return variance.clamp_min(TINY).sqrt()


def _flipped_output(layer: nn.Module, x: Tensor, weight: UnitNoise) -> Tensor:
    """The output for noise that rows share but for signs of their inputs and outputs, and for their radii."""
    shape = weight.loc.shape
    rows, outputs, radii = len(x), shape[0], None
    if weight.radius is None or weight.radius_dim < len(shape) - 1:
        # Radii within an output cannot be taken out of its sum.
        noise = weight.unit(shape)
    else:
        noise = weight.directions(shape)
        radii = weight.radius(x.new_empty(rows, 1 if weight.radius_dim == len(shape) else outputs, dtype=noise.dtype))
    flips = _signs(rows, outputs, noise)
    if radii is not None:
        flips = flips * radii
    inputs = x.shape[_channel_dim(layer, x.dim())]
    flipped = x * _at_channels(layer, _signs(rows, inputs, x), x.dim())
    output = _apply(layer, flipped, weight.scale * noise, None)
    return output * _at_channels(layer, flips, output.dim()).to(output.dtype)


def _signs(rows: int, size: int, like: Tensor) -> Tensor:
    return torch.where(torch.rand((rows, size), device=like.device) < 0.5, -1.0, 1.0).to(like.dtype)


def _channel_dim(layer: nn.Module, dims: int) -> int:
    return dims - 1 if isinstance(layer, nn.Linear) else 1


def _at_channels(layer: nn.Module, values: Tensor, dims: int) -> Tensor:
    """Values ``[rows, channels]``, the same at all positions of an output or input of so many dimensions."""
    ones = (1,) * (dims - 2)
    rows, channels = values.shape
    return values.reshape((rows, *ones, channels) if isinstance(layer, nn.Linear) else (rows, channels, *ones))


def _apply(layer: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The layer's own computation with these parameters, without hooks."""
    if isinstance(layer, nn.Linear):
        assert weight is not None
        return F.linear(x, weight, bias)
    bare = copy.copy(layer)
    bare._parameters = {"weight": weight, "bias": bias}
    output: Tensor = type(layer).forward(bare, x)
    return output
