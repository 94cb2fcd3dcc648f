# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The function of a model, as a function of the values of its sites and of inputs."""

from collections.abc import Mapping
from typing import Any

import pyro
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_radial._pyro.compat import is_subsample
from pyro_radial._pyro.types import Message, Model
from pyro_radial.distributions.moments import center
from pyro_radial.nn.likelihoods import FUNCTION_SITE
from pyro_radial.nn.supervised import find_network


class SiteFunction:
    """The function that a model records, at given values of its sites. No target is drawn.

    If the model's network is known, it alone runs; any other model runs whole, without validation of its arguments.

    :param model: a Pyro model ``model(x)``, or a :class:`~pyro_radial.nn.BayesianModule`; its function is its output.
    :param str function_site: the deterministic site where the model records the function's values.
    """

    def __init__(self, model: Model, function_site: str = FUNCTION_SITE) -> None:
        self.model = model
        self.function_site = function_site
        network = find_network(model)
        is_recorded = network is None or network.likelihood is not None
        self._network = None if is_recorded and function_site != FUNCTION_SITE else network

    def __call__(self, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the function's values ``[N, O]`` at given values of sites; all other sites are at their centers."""
        return self.values(values, x).reshape(len(x), -1)

    def values(self, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the function's values in the shape that the model records, ``[N, *outputs]``."""
        return self._run(_GivenValues(values, self.function_site), x)

    def dependence(
        self, values: Mapping[str, Tensor], x: Tensor
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Find by a gradient the sites that the function depends on at these inputs.

        :returns: the sites that are among ``values``, and the others.
        """
        leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
        handler = _GivenValues(leaves, self.function_site, leaf=True)
        with torch.enable_grad():
            output = self._run(handler, x)
        leaves = {**leaves, **handler.centered_leaves}
        site_gradients = gradients(output, list(leaves.values()))
        used_sites = [
            name
            for name, gradient in zip(leaves, site_gradients, strict=True)
            if gradient is not None
        ]
        if not used_sites:
            raise ValueError(
                f"model must have a function that can be differentiated in its weights, got values at site "
                f"'{self.function_site}' without a gradient in any of {sorted(leaves)}"
            )
        given_sites = tuple(name for name in used_sites if name in values)
        return given_sites, tuple(name for name in used_sites if name not in values)

    def _run(self, handler: "_GivenValues", x: Tensor) -> Tensor:
        if self._network is not None:
            with handler:
                parameters = self._network.sample_parameters()
            output = self._network(x, parameters)
        else:
            # Where a row is mapped over, values cannot be looked at.
            with pyro.validation_enabled(False), handler:
                self.model(x)
            output = handler.output
        if (
            not isinstance(output, Tensor)
            or not output.is_floating_point()
            or output.shape[:1] != (len(x),)
        ):
            got = f"{output.dtype} {list(output.shape)}" if isinstance(output, Tensor) else "none"
            raise ValueError(
                f"model must record real values for each of {len(x)} inputs at a site '{self.function_site}', got "
                f'{got}; record the function\'s values with pyro.deterministic("{self.function_site}", values)'
            )
        return output


def gradients(output: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    """Return the gradient of the output's sum in each leaf; None for a leaf that the output does not depend on."""
    if not output.requires_grad:
        return [None] * len(leaves)
    return list(torch.autograd.grad(output, leaves, torch.ones_like(output), allow_unused=True))


class _GivenValues(Messenger):
    """Gives sites their values, and keeps those of the function; no handler further out sees these sites."""

    def __init__(
        self, values: Mapping[str, Tensor], function_site: str, leaf: bool = False
    ) -> None:
        super().__init__()
        self.values = values
        self.function_site = function_site
        self.leaf = leaf
        self.centered_leaves: dict[str, Tensor] = {}
        self.output: Any = None

    def _pyro_sample(self, msg: Message) -> None:
        if is_subsample(msg):
            return
        name = msg["name"]
        msg["stop"] = True
        if name == self.function_site:
            self.output = msg["value"]
        elif not msg["is_observed"]:
            msg["value"] = self._value(name, msg["fn"])
            msg["done"] = True

    def _value(self, name: str, distribution: Any) -> Tensor:
        if name in self.values:
            return self.values[name]
        if self.output is not None:
            # The function does not depend on what comes after it.
            return torch.zeros(distribution.shape(), device=self.output.device)
        try:
            value = center(distribution).detach()
        except ValueError as error:
            raise ValueError(
                f"posterior must have site '{name}' of the model, whose prior has no center: {error}"
            ) from None
        if self.leaf:
            value = self.centered_leaves[name] = value.requires_grad_()
        return value
