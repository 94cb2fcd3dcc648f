# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The function of a model, as a function of the values of its sites and of inputs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_radial.distributions.moments import center
from pyro_radial.nn.likelihood import FUNCTION_SITE

__all__ = ["Dependence", "SiteFunction"]


class Dependence(NamedTuple):
    """Which sites a function depends on."""

    #: Of those whose values are given.
    given: tuple[str, ...]
    #: Of the model's others.
    others: tuple[str, ...]


class SiteFunction:
    """The function that a model records, without what the model does after it: no target is sampled.

    :param model: a Pyro model whose first argument are the inputs, and which needs no other up to its function; or a
        :class:`~pyro_radial.nn.BayesianModule`, whose function is what it returns.
    :param str function_site: the deterministic site where the model records the function's values.
    """

    def __init__(self, model: Callable[..., Any], function_site: str = FUNCTION_SITE) -> None:
        self.model, self.function_site = model, function_site

    def __call__(self, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The function's values ``[N, O]`` where the sites have these values, and all others are at their centers.

        :raises ValueError: for a model that records no such values.
        """
        return self._run(_GivenValues(values, self.function_site), x)

    def dependence(self, values: Mapping[str, Tensor], x: Tensor) -> Dependence:
        """The sites that the function depends on at these inputs, found by a gradient.

        :raises ValueError: for a function without a gradient in any site.
        """
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        handler = _GivenValues(leaves, self.function_site, leaf=True)
        with torch.enable_grad():
            output = self._run(handler, x)
        leaves = {**leaves, **handler.others}
        found = gradients(output, list(leaves.values()))
        used = [name for name, gradient in zip(leaves, found, strict=True) if gradient is not None]
        if not used:
            raise ValueError(
                f"model must have a function that can be differentiated in its weights, got values at site "
                f"'{self.function_site}' without a gradient in any of {sorted(leaves)}"
            )
        return Dependence(
            tuple(name for name in used if name in values), tuple(name for name in used if name not in values)
        )

    def _run(self, handler: "_GivenValues", x: Tensor) -> Tensor:
        try:
            with handler:
                output = self.model(x)
        except _ReachedError:
            output = handler.output
        else:
            # A network by itself records nothing.
            output = output if hasattr(self.model, "skeleton") else None
        if not isinstance(output, Tensor) or not output.is_floating_point() or output.shape[:1] != (len(x),):
            raise ValueError(
                f"model must record real values for each of {len(x)} inputs at a site '{self.function_site}', got "
                f"{_described(output)}; record the function's values with "
                f'pyro.deterministic("{self.function_site}", values)'
            )
        return output.reshape(len(x), -1)


def gradients(output: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    """The gradient of a sum in each of some tensors, None where there is none."""
    if not output.requires_grad:
        return [None] * len(leaves)
    return list(torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True))


class _GivenValues(Messenger):
    """Gives sites their values, and stops the model at its function; no handler further out sees these sites."""

    def __init__(self, values: Mapping[str, Tensor], function_site: str, leaf: bool = False) -> None:
        super().__init__()
        self.values, self.function_site, self.leaf = values, function_site, leaf
        self.others: dict[str, Tensor] = {}
        self.output: Any = None

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if name == self.function_site:
            self.output = msg["value"]
            raise _ReachedError
        if msg["is_observed"] or site_is_subsample(msg):
            return
        value = self.values.get(name)
        if value is None:
            value = _center(name, msg["fn"])
            if self.leaf:
                value = self.others[name] = value.requires_grad_()
        msg["value"], msg["done"], msg["stop"] = value, True, True


class _ReachedError(Exception):
    """The model is at its function, and need not go on."""


def _center(name: str, distribution: Any) -> Tensor:
    try:
        value = center(distribution)
    except ValueError as error:
        raise ValueError(
            f"posterior must have site '{name}' of the model, whose prior has no center: {error}"
        ) from None
    return value.detach()


def _described(output: Any) -> str:
    return f"{output.dtype} {list(output.shape)}" if isinstance(output, Tensor) else "none"
