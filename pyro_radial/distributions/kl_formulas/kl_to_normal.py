# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The KL to a factorized normal distribution; it keeps only its arguments for the gradient."""

import inspect
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pyro_radial.distributions.numerics import append_dims, event_sum


def kl_to_normal(
    loc: Tensor,
    scale: Tensor,
    center: Tensor,
    unit: Tensor,
    event_dims: int,
    radius: int | None = None,
) -> Tensor:
    r"""Return the KL from independent normal elements, or (up to a constant) from radial ones, summed over the event.

    With :math:`s = \sigma / t` and :math:`d = (\mu - m) / t` it is the sum of
    :math:`\tfrac12 (s_i^2 - 1 + d_i^2) - \log s_i`; for radial elements, of
    :math:`\tfrac12 (s_i^2 / D + d_i^2) - \log s_i`. Here ``center`` is m and ``unit`` is t, and D, the ``radius``, is
    the number of elements that share one radius; None for independent normal elements. The means ``loc`` have the full
    shape, and the others broadcast.
    """
    # A compiler finds the gradient itself, and takes no function with a forward mode.
    find: Callable[..., Tensor] = (
        _KLToNormal.forward if torch.compiler.is_compiling() else _KLToNormal.apply
    )
    return find(*_in_one_dtype(loc, scale, center, unit), event_dims, radius)


def standardize(loc: Tensor, scale: Tensor, center: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and mean in units of the other side's, in a dtype that holds their squares."""
    return _standardize(*_in_one_dtype(loc, scale, center, unit))


def _in_one_dtype(*tensors: Tensor) -> list[Tensor]:
    dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.float32)
    return [tensor if tensor.dtype == dtype else tensor.to(dtype) for tensor in tensors]


def _standardize(loc: Tensor, scale: Tensor, center: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    return scale / unit, (loc - center) / unit


class _KLToNormal(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        loc: Tensor,
        scale: Tensor,
        center: Tensor,
        unit: Tensor,
        event_dims: int,
        radius: int | None,
    ) -> Tensor:
        ratio, shift = _standardize(loc, scale, center, unit)
        if radius is None:
            # The square of a ratio near one loses its digits unless one is subtracted at once.
            twice = torch.addcmul(
                torch.addcmul(ratio.new_full((), -1.0), ratio, ratio), shift, shift
            )
        else:
            twice = torch.addcmul(shift * shift, ratio, ratio, value=1.0 / radius)
        return -event_sum(torch.sub(ratio.log(), twice, alpha=0.5), event_dims)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
        ctx.event_dims, ctx.radius = inputs[4:]
        ctx.save_for_backward(*inputs[:4])
        ctx.save_for_forward(*inputs[:4])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        loc, scale, center, unit = ctx.saved_tensors
        ratio, shift = _standardize(loc, scale, center, unit)
        grad = append_dims(grad, ctx.event_dims).to(ratio.dtype)
        factor = grad / unit
        by_loc = shift * factor
        by_scale = torch.addcdiv(ratio * (factor / (ctx.radius or 1)), -grad, scale)
        by_center = (-by_loc).sum_to_size(center.shape) if ctx.needs_input_grad[2] else None
        by_unit = (
            (-torch.addcmul(by_loc * shift, by_scale, ratio)).sum_to_size(unit.shape)
            if ctx.needs_input_grad[3]
            else None
        )
        return (
            by_loc.sum_to_size(loc.shape),
            by_scale.expand_as(by_loc).sum_to_size(scale.shape),
            by_center,
            by_unit,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, loc: Tensor, scale: Tensor, center: Tensor, unit: Tensor, *_: None) -> Tensor:
        ratio, shift = _standardize(*ctx.saved_tensors)
        by_ratio = ratio / (ctx.radius or 1) - ratio.reciprocal()
        change = (
            shift * (loc - center - shift * unit) + by_ratio * (scale - ratio * unit)
        ) / ctx.saved_tensors[3]
        return event_sum(change, ctx.event_dims)


# Torch asks for the signature in each call; for few elements finding it takes longer than the formula.
_KLToNormal.forward.__signature__ = inspect.signature(_KLToNormal.forward)  # type: ignore[attr-defined]
