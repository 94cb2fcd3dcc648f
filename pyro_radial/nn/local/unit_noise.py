# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The noise of a tensor of weights, and the noise it adds to the outputs of a layer, without drawing the weights."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from pyro_radial._pyro.compat import standard_gamma
from pyro_radial.distributions.numerics import append_dims, event_norm
from pyro_radial.distributions.radial_normal import RadialNormal
from pyro_radial.distributions.wrappers import leaf

# Entries of a site's ``infer`` dict. In the model: that the site's value is a parameter of a network, used for nothing
# else, and a function from the arguments of a call to whether it asks for local reparameterization.
PARAMETER = "network_parameter"
ASKS = "asks_for_local_reparameterization"
# In the guide: a function from the site's name and distribution to its noise, and the noise of a site left undrawn.
OFFER = "local_reparameterization"
NOISE = "undrawn_noise"

# Smaller squared norms and variances are rounding errors, and their roots have no useful derivative.
LEAST_SQUARE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class UnitNoise:
    r"""The noise of a site whose value is ``loc + scale * noise``, with noise that has no preferred direction.

    Without a radius the noise is standard normal. With one it is :math:`r\, u`, with a uniform direction u in the D
    elements of the last ``radius_dim`` dims and an independent radius r.

    :param Tensor loc: the mean, ``[*draws, *shape]``.
    :param Tensor scale: the scales, of the same shape.
    :param int radius_dim: the number of last dims that share one radius, at least 1 if there are radii.
    :param radius: a function that draws radii in a tensor's shape, dtype and device, or None for a standard normal.

    Example::

        >>> noise = UnitNoise(torch.zeros(2, 3), torch.ones(2, 3), 2, half_normal)
        >>> noise.draw((5, 2, 3)).shape, noise.draw_for_outputs(torch.ones(5, 2)).shape
        (torch.Size([5, 2, 3]), torch.Size([5, 2]))
    """

    loc: Tensor
    scale: Tensor
    radius_dim: int = 0
    radius: Callable[[Tensor], Tensor] | None = None

    def draw(self, shape: Sequence[int]) -> Tensor:
        """Draw values of the site, ``[*draws, *shape]``."""
        return self.loc + self.scale * self.unit(shape)

    def unit(self, shape: Sequence[int]) -> Tensor:
        """Draw the noise, ``[*draws, *shape]``."""
        directions = self.directions(shape)
        if self.radius is None:
            return directions
        first_elements = directions.flatten(-self.radius_dim)[..., 0]
        return directions * self.radius(append_dims(first_elements, self.radius_dim))

    def directions(self, shape: Sequence[int]) -> Tensor:
        """Draw the noise without its radii."""
        noise = torch.randn(tuple(shape), dtype=self.loc.dtype, device=self.loc.device)
        if self.radius is None:
            return noise
        norm = append_dims(event_norm(noise, self.radius_dim), self.radius_dim)
        return noise / norm.clamp_min(LEAST_SQUARE).to(noise.dtype)

    def draw_for_outputs(self, stddev: Tensor) -> Tensor:
        r"""Draw what the noise of a matrix ``[out, in]`` adds to the outputs of a linear layer.

        With :math:`v_j^2 = \sum_i \mathrm{scale}_{ji}^2 a_i^2`, the noise of output j is :math:`v_j` times one
        coordinate of the matrix noise, along :math:`\mathrm{scale}_j a / v_j`; these directions are orthogonal. The
        coordinates of standard normal noise are standard normals z. Those of a direction in D dimensions are, jointly,

        .. math:: z_j \Big/ \sqrt{\textstyle\sum_k z_k^2 + s}, \qquad s \sim \chi^2(D - \mathrm{out}).

        With a radius for each row, each output has its own direction in D = in dimensions.

        :param Tensor stddev: v, ``[..., out]``.
        :returns: the noise, of the same shape.
        """
        if self.radius is None:
            return stddev * torch.randn_like(stddev)
        outputs, inputs = self.loc.shape[-2:]
        # Norms of many elements and gamma draws need at least float32.
        like = stddev.detach().float() if stddev.element_size() < 4 else stddev.detach()
        if self.radius_dim == 1:
            noise = _coordinate(like, inputs) * self.radius(like)
        else:
            noise = _coordinates(like, outputs * inputs) * self.radius(like[..., :1])
        return stddev * noise.to(stddev.dtype)


def _coordinates(like: Tensor, dimensions: int) -> Tensor:
    """Draw a uniform direction in ``dimensions`` dimensions for each row of ``like``; return its first coordinates."""
    z = torch.randn_like(like)
    squared_norm = z.square().sum(-1, keepdim=True)
    if dimensions > z.shape[-1]:
        shape = torch.full_like(squared_norm, 0.5 * (dimensions - z.shape[-1]))
        squared_norm = squared_norm + 2.0 * standard_gamma(shape)
    return z * squared_norm.clamp_min(LEAST_SQUARE).rsqrt()


def _coordinate(like: Tensor, dimensions: int) -> Tensor:
    """Draw one coordinate of a uniform direction in ``dimensions`` dimensions for each element of ``like``.

    The squares of two coordinates sum to 1 - U ** (2 / (dimensions - 2)) with a uniform U, and their angle is uniform:
    exact, and much cheaper than a gamma draw.
    """
    a, b = torch.randn((2, *like.shape), dtype=like.dtype, device=like.device).unbind()
    if dimensions == 1:
        return torch.where(a < 0, -1.0, 1.0).to(a.dtype)
    squared = (a.square() + b.square()).clamp_min(LEAST_SQUARE)
    if dimensions == 2:
        return a * squared.rsqrt()
    return a * (-torch.expm1(squared / (2 - dimensions)) / squared).sqrt()


def half_normal(like: Tensor) -> Tensor:
    """Draw radii of a :class:`~pyro_radial.distributions.RadialNormal`."""
    return torch.randn_like(like).abs()


def unit_noise(name: str, distribution: Any) -> UnitNoise:
    """Return the noise of a site's distribution, or raise a ValueError if it is neither normal nor radial."""
    inner = leaf(distribution)
    if not isinstance(inner, Normal | RadialNormal):
        raise ValueError(
            f"local_reparameterization: site '{name}' must have a normal or a radial posterior, got "
            f"{type(inner).__name__}; take another one, or train with drawn weights"
        )
    shape = distribution.shape()
    loc = _once(inner.loc.expand(shape), distribution.event_dim)
    scale = _once(inner.scale.expand(shape), distribution.event_dim)
    if isinstance(inner, Normal) or inner.num_elements == 1:
        return UnitNoise(loc, scale)
    return UnitNoise(loc, scale, inner.event_dim, half_normal)


def _once(tensor: Tensor, event_dim: int) -> Tensor:
    """Drop leading dims in which the tensor is only repeated, as in a plate of particles."""
    lead = tensor.dim() - event_dim
    dims = zip(tensor.shape[:lead], tensor.stride()[:lead], strict=True)
    return tensor[(0,) * lead] if all(size == 1 or stride == 0 for size, stride in dims) else tensor


#: Layers that are linear in their parameters and compute each row of a batch by itself, and the dims of a batch.
LAYERS = {nn.Linear: 1, nn.Conv1d: 3, nn.Conv2d: 4, nn.Conv3d: 5}

# A parameter of a layer: its value, or its noise if it is not drawn.
Parameter = Tensor | UnitNoise | None


def noisy_output(layer: nn.Module, x: Tensor, weight: Parameter, bias: Parameter) -> Tensor:
    """Compute a layer of a type in ``LAYERS`` with noise for each row of a batch, instead of drawn parameters."""
    mean = _apply(layer, x, _mean(weight), _mean(bias))
    noise: Tensor | None = None
    if isinstance(weight, UnitNoise):
        if x.dim() != 2:
            noise = _flipped_output(layer, x, weight)
        elif isinstance(bias, UnitNoise) and weight.radius is None and bias.radius is None:
            # The sum of two normals is normal.
            return mean + weight.draw_for_outputs(_stddev(x, weight.scale, bias.scale)).to(
                mean.dtype
            )
        else:
            noise = weight.draw_for_outputs(_stddev(x, weight.scale))
    if isinstance(bias, UnitNoise):
        of_bias = _at_channels(
            layer, bias.scale * bias.unit((len(x), *bias.scale.shape)), mean.dim()
        )
        noise = of_bias if noise is None else noise + of_bias
    return mean if noise is None else mean + noise.to(mean.dtype)


def _mean(parameter: Parameter) -> Tensor | None:
    return parameter.loc if isinstance(parameter, UnitNoise) else parameter


def _stddev(x: Tensor, scale: Tensor, bias_scale: Tensor | None = None) -> Tensor:
    """Return the standard deviation of each output for standard normal noise, at least the root of LEAST_SQUARE."""
    # In float32 at least: the squares of small scales underflow in short dtypes.
    wide = torch.promote_types(scale.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        squares = None if bias_scale is None else bias_scale.to(wide).square()
        variance = nn.functional.linear(x.to(wide).square(), scale.to(wide).square(), squares)
    # The root has no derivative at zero; clamped values have a gradient of zero.
    return variance.clamp_min(LEAST_SQUARE).sqrt()


def _flipped_output(layer: nn.Module, x: Tensor, weight: UnitNoise) -> Tensor:
    """Return the output for noise that all rows share; each row has its own radius and random signs (Flipout)."""
    shape = weight.loc.shape
    rows = len(x)
    outputs = shape[0]
    radii: Tensor | float = 1.0
    if weight.radius is None or weight.radius_dim < len(shape) - 1:
        # Radii within an output cannot be taken out of its sum.
        noise = weight.unit(shape)
    else:
        noise = weight.directions(shape)
        number = 1 if weight.radius_dim == len(shape) else outputs
        radii = weight.radius(x.new_empty(rows, number, dtype=noise.dtype))
    flips = _signs(rows, outputs, noise) * radii
    inputs = x.shape[-1 if isinstance(layer, nn.Linear) else 1]
    flipped = x * _at_channels(layer, _signs(rows, inputs, x), x.dim())
    output = _apply(layer, flipped, weight.scale * noise, None)
    return output * _at_channels(layer, flips, output.dim()).to(output.dtype)


def _signs(rows: int, size: int, like: Tensor) -> Tensor:
    return torch.where(torch.rand((rows, size), device=like.device) < 0.5, -1.0, 1.0).to(like.dtype)


def _at_channels(layer: nn.Module, values: Tensor, dims: int) -> Tensor:
    """Return values ``[rows, channels]``, broadcast over all positions of an input or output."""
    position_dims = (1,) * (dims - 2)
    rows, channels = values.shape
    return values.reshape(
        (rows, *position_dims, channels)
        if isinstance(layer, nn.Linear)
        else (rows, channels, *position_dims)
    )


def _apply(layer: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute the layer with these parameters, without hooks."""
    if isinstance(layer, nn.Linear):
        return nn.functional.linear(x, weight, bias)  # type: ignore[arg-type]
    bare = copy.copy(layer)
    bare._parameters = {"weight": weight, "bias": bias}
    return type(layer).forward(bare, x)
