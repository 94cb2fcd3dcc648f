# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Where the auxiliary sites of a guide lead to: which of its other sites are computed from them."""

from collections.abc import Callable, Iterable
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

__all__ = ["sites_led_to"]


def sites_led_to(guide: Callable[..., Any], auxiliary: Iterable[str], args: Any, kwargs: Any) -> dict[str, set[str]]:
    """The latent sites whose values depend on an auxiliary site, directly or through others, found by a gradient.

    :param guide: a guide, which runs once.
    :param auxiliary: the names of its auxiliary sites.
    :param args: the guide's arguments.
    :param kwargs: those given by name.
    :returns: for each auxiliary site the sites that it leads to, no auxiliary ones among them.
    """
    moved = _Moved(auxiliary)
    led_to: dict[str, set[str]] = {name: set() for name in moved.names}
    with torch.enable_grad():
        with poutine.block(), moved:
            trace = poutine.trace(guide).get_trace(*args, **kwargs)
        for name, site in dict[str, Any](trace.iter_stochastic_nodes()).items():
            if name in moved.names or not moved.by or not site["value"].requires_grad:
                continue
            # The graph of one site may be a part of another's.
            gradients = torch.autograd.grad(
                site["value"].sum(), list(moved.by.values()), retain_graph=True, allow_unused=True
            )
            for source, gradient in zip(moved.by, gradients, strict=True):
                if gradient is not None:
                    led_to[source].add(name)
    return led_to


class _Moved(Messenger):
    """Moves the values of some sites by zero, in which to differentiate what is computed from them."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = frozenset(names)
        self.by: dict[str, Tensor] = {}

    def _pyro_post_sample(self, msg: Any) -> None:
        name, value = msg["name"], msg["value"]
        if name in self.names and value.is_floating_point():
            self.by[name] = torch.zeros_like(value, requires_grad=True)
            msg["value"] = value + self.by[name]
