# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A network with another output: the gradient of one of its outputs with respect to its input."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyro_radial._pyro.checks import check_number, check_types

__all__ = ["InputGradient"]


class InputGradient(nn.Module):
    r"""Add the gradient of an output with respect to the input, such as forces from energies.

    .. math:: g_b = c\, \frac{\partial}{\partial x_b} \sum_{b'} E_{b'}

    This is the gradient of row b alone if rows do not mix. Several inputs may be passed in order; the gradient is that
    with respect to the first. It runs under :func:`torch.func.vmap` and can be trained. Local reparameterization gives
    gradients another distribution, so weights below this module are drawn as a whole.

    :param nn.Module net: a network that returns a number for each row, ``[B]`` or ``[B, 1]``, or a dict with such.
    :param str of: the name of that output.
    :param str name: the name of its gradient, of the shape of the input.
    :param float factor: c, for example -1 for a force.
    :raises ValueError: naming the argument; in a call, for an output of another shape or a name that is taken.

    Example::

        >>> from pyro_radial import BayesianModule, SupervisedModel
        >>> from pyro_radial.nn.likelihoods import Gaussian
        >>> net = InputGradient(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), "energy", "force", -1.0)
        >>> {name: tuple(value.shape) for name, value in net(torch.zeros(5, 2)).items()}
        {'energy': (5, 1), 'force': (5, 2)}
        >>> model = SupervisedModel(BayesianModule(net), {"energy": Gaussian(scale=0.1), "force": Gaussian(scale=0.5)})
    """

    def __init__(self, net: nn.Module, of: str, name: str, factor: float = 1.0) -> None:
        super().__init__()
        check_types(nn.Module, net=net)
        check_types(str, of=of, name=name)
        if name == of:
            raise ValueError(f"name must differ from the output's name, of={of!r}, got {name!r}")
        self.net, self.of, self.name = net, of, name
        self.factor = check_number("factor", factor, lambda number: abs(number) < float("inf"), "a finite number")

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Call the network, and differentiate by its first input ``[B, ...]``; returns all outputs by name."""

        def total(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            outputs = self.net(x, *args, **kwargs)
            named = dict(outputs) if isinstance(outputs, Mapping) else {self.of: outputs}
            if self.of not in named or self.name in named:
                raise ValueError(
                    f"net must have an output {self.of!r} and none {self.name!r}, got outputs {sorted(named)}"
                )
            value = named[self.of]
            if value.shape not in ((len(x),), (len(x), 1)):
                raise ValueError(
                    f"net must return one number for each of {len(x)} rows as {self.of!r}, got {tuple(value.shape)}"
                )
            return value.sum(), named

        gradient, named = torch.func.grad(total, has_aux=True)(x)
        return {**named, self.name: self.factor * gradient}
