# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Return losses as Python numbers, as ``SVI`` does, without a wait for the device."""

import operator
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

OPERATIONS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
    *("lt", "le", "eq", "ne", "ge", "gt", "neg", "pos", "abs"),
)
REFLECTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")


def _on_floats(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that converts losses among its operands to floats, and calls a function on them."""

    def method(*operands: Any) -> Any:
        return function(*(float(x) if isinstance(x, DeviceLoss) else x for x in operands))

    return method


class DeviceLoss:
    """A loss on a device that behaves as a float. Its value is read from the device, which waits, when it is used."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __float__(self) -> float:
        return float(self.tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(float(self), name)

    def __reduce__(self) -> Any:
        return float, (float(self),)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(float(self), dtype=dtype)

    __int__ = _on_floats(int)
    __bool__ = _on_floats(bool)
    __hash__ = _on_floats(hash)
    __repr__ = _on_floats(repr)
    __format__ = _on_floats(format)
    __round__ = _on_floats(round)


def _reflect(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reflected method, such as ``__radd__``, in which the loss is the second operand of a function."""
    return lambda loss, number: function(number, float(loss))


for _name in OPERATIONS:
    setattr(DeviceLoss, f"__{_name}__", _on_floats(getattr(operator, _name)))
for _name in REFLECTED:
    setattr(DeviceLoss, f"__r{_name}__", _reflect(getattr(operator, _name)))
Real.register(DeviceLoss)

Loss = float | DeviceLoss | tuple[float | DeviceLoss, ...]


def as_number(loss: Tensor) -> Loss:
    """Return a loss as ``SVI`` does: a float, or a :class:`DeviceLoss` on other devices, or a tuple of these."""
    if loss.ndim:
        numbers = (as_number(number) for number in loss.unbind())
        return tuple(number for number in numbers if not isinstance(number, tuple))
    return float(loss) if loss.device.type == "cpu" else DeviceLoss(loss)
