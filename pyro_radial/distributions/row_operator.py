# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A formula of rows and its gradient as one operator: one node of a graph, computed for a few rows at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_radial.distributions.numerics import accumulation_dtype

# From ratios and shifts, [*batch, D], and noise, [*batch, directions, D], to a value for each row, [*batch], and, if
# wanted, its derivatives in ratios and shifts.
Formula = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, ...]]
Operator = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]

_OPERATORS: dict[str, Operator] = {}
_ONCE = (
    "the KL to a radial distribution can be differentiated once, in reverse or in forward mode; second derivatives "
    "such as those of torch.func.hessian are not implemented"
)
# Numbers of the noise at a time, so that each step of the formula stays in the processor's cache.
_NUMBERS_AT_ONCE = 2**19


def row_operator(name: str, formula: Formula) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a formula as a differentiable function of ratios and shifts.

    The gradient is computed along with the value, if anything needs it. Second derivatives raise a RuntimeError. The
    operator has this name below ``pyro_radial::``.
    """
    _OPERATORS[name] = _register(name, formula)

    def value_of(ratio: Tensor, shift: Tensor, noise: Tensor) -> Tensor:
        needs_gradient = torch.is_grad_enabled() and (ratio.requires_grad or shift.requires_grad)
        results = _OPERATORS[name](ratio.detach(), shift.detach(), noise, needs_gradient)
        attached = _Attached if torch.compiler.is_compiling() else _AttachedBothWays
        return attached.apply(*results, ratio, shift, noise, name, needs_gradient)

    return value_of


def _register(name: str, formula: Formula) -> Operator:
    @torch.library.custom_op(f"pyro_radial::{name}", mutates_args=())
    def operator(
        ratio: Tensor, shift: Tensor, noise: Tensor, with_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        chunks = [formula(*rows, with_gradient) for rows in _split_rows(ratio, shift, noise)]
        results = chunks[0]
        if len(chunks) > 1:
            results = tuple(map(torch.cat, zip(*chunks, strict=True)))
        value = results[0].reshape(ratio.shape[:-1]).contiguous()
        if not with_gradient:
            # An operator always has the same number of results.
            return value, ratio.new_empty(0), ratio.new_empty(0)
        by_ratio = results[1].reshape(ratio.shape).contiguous()
        by_shift = results[2].reshape(ratio.shape).contiguous()
        return value, by_ratio, by_shift

    @operator.register_fake
    def _(
        ratio: Tensor, shift: Tensor, noise: Tensor, with_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        value = ratio.new_empty(ratio.shape[:-1], dtype=accumulation_dtype(ratio))
        shape = ratio.shape if with_gradient else (0,)
        return value, ratio.new_empty(shape), ratio.new_empty(shape)

    @operator.register_vmap
    def _(
        info: Any, in_dims: Any, ratio: Tensor, shift: Tensor, noise: Tensor, with_gradient: bool
    ) -> Any:
        rows = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((ratio, shift), in_dims, strict=False)
        ]
        # Unbatched noise is shared by all examples.
        noise = noise.unsqueeze(0) if in_dims[2] is None else noise.movedim(in_dims[2], 0)
        derivatives = 0 if with_gradient else None
        return operator(*rows, noise, with_gradient), (0, derivatives, derivatives)

    return operator


def _split_rows(
    ratio: Tensor, shift: Tensor, noise: Tensor
) -> Sequence[tuple[Tensor, Tensor, Tensor]]:
    """Return the rows in groups; in one group if several rows share their noise."""
    if ratio.device.type != "cpu" or noise.shape[:-2] != ratio.shape[:-1]:
        return [(ratio, shift, noise)]
    count, dim = noise.shape[-2:]
    size = max(1, _NUMBERS_AT_ONCE // (count * dim))
    flat = ratio.reshape(-1, dim), shift.reshape(-1, dim), noise.reshape(-1, count, dim)
    return list(zip(*(tensor.split(size) for tensor in flat), strict=True))


class _Attached(torch.autograd.Function):
    """Attach a value that was computed outside of the graph, by the derivatives that came with it."""

    generate_vmap_rule = True

    # Torch's compiler counts the parameters to tell whether the first is a context, so all are named.
    @staticmethod
    def forward(
        value: Tensor,
        by_ratio: Tensor,
        by_shift: Tensor,
        ratio: Tensor,
        shift: Tensor,
        noise: Tensor,
        name: str,
        has_gradient: bool,
    ) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
        ctx.name, ctx.has_gradient = inputs[6:]
        ctx.save_for_backward(*inputs[1:6])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_scale_derivatives(grad, ctx), None, None, None


class _AttachedBothWays(_Attached):
    """Attach a value, with a forward mode too; Torch's compiler does not support that."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
        _Attached.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[1:6])

    @staticmethod
    def jvp(
        ctx: Any,
        value: object,
        by_ratio: object,
        by_shift: object,
        ratio: Tensor,
        shift: Tensor,
        *_: object,
    ) -> Tensor:
        derivative = ctx.saved_tensors[0]
        unit_gradient = torch.ones((), dtype=derivative.dtype, device=derivative.device).expand(
            ratio.shape[:-1]
        )
        along_ratio, along_shift = _scale_derivatives(unit_gradient, ctx)
        sums = accumulation_dtype(derivative)
        return (along_ratio * ratio + along_shift * shift).sum(-1, dtype=sums)


def _scale_derivatives(grad: Tensor, ctx: Any) -> tuple[Tensor, ...]:
    by_ratio, by_shift, ratio, shift, noise = ctx.saved_tensors
    if not ctx.has_gradient:
        _, by_ratio, by_shift = _OPERATORS[ctx.name](ratio.detach(), shift.detach(), noise, True)
    # A compiled graph cannot be differentiated twice, and Torch's compiler takes no function with a forward mode.
    find = _ScaledOnce.forward if torch.compiler.is_compiling() else _ScaledOnce.apply
    return find(grad, by_ratio, by_shift, ratio, shift)


class _ScaledOnce(torch.autograd.Function):
    """The derivatives of a value times its gradient, with an error for second derivatives.

    The derivatives carry no graph, so without this class second derivatives would silently be zero. The error is not
    NotImplementedError: losses take that as a missing KL and sample it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: Tensor, by_ratio: Tensor, by_shift: Tensor, ratio: Tensor, shift: Tensor
    ) -> tuple[Tensor, ...]:
        factor = grad.unsqueeze(-1).to(by_ratio.dtype)
        return factor * by_ratio, factor * by_shift

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Any, ...]:
        raise RuntimeError(_ONCE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError(_ONCE)
