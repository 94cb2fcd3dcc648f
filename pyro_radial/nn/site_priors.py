# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What a user gives as a prior, made into one distribution for each parameter."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from pyro.distributions.torch_distribution import ExpandedDistribution, TorchDistributionMixin
from torch import Tensor
from torch.distributions import Distribution

from pyro_radial.distributions.wrappers import to_like

__all__ = ["Following", "ParameterPrior", "SitePriors"]


@runtime_checkable
class ParameterPrior(Protocol):
    """A prior that makes the sample sites of a parameter itself."""

    def sample_parameter(self, name: str, parameter: Tensor) -> Tensor:
        """
        Samples one parameter, by sample statements whose names start with its name.

        The guides of this library take a site ``name`` and a site ``name + ".lam"``, and so do Pyro's with one vector
        for all sites, such as ``AutoMultivariateNormal``. Pyro's ``AutoNormal`` and ``AutoDelta`` end in an error of
        attributes; for these call it ``name + "_lam"``.

        :param str name: the name of the parameter in the network.
        :param torch.Tensor parameter: its value in the network, for shape, dtype and device.
        :returns: a value of shape ``[*draws, *parameter.shape]``.
        """
        ...


class SitePriors:
    """
    One distribution for each site, with ``event_shape`` equal to the parameter's shape and its dtype and device.

    :param prior: a distribution, a mapping from names to distributions, or a function of (name, parameter).
    :param Mapping parameters: the parameters by site name.
    :raises ValueError: for a prior that is none of these, misses a site or has a wrong shape.
    """

    def __init__(self, prior: Any, parameters: Mapping[str, Tensor]) -> None:
        if isinstance(prior, Mapping):
            _check_names(prior, parameters)
        self._build: dict[str, Callable[[], TorchDistributionMixin]] = {
            name: _builder(_prior_of(prior, name, parameter), name, parameter) for name, parameter in parameters.items()
        }

    def __getitem__(self, name: str) -> TorchDistributionMixin:
        return self._build[name]()


def _builder(prior: TorchDistributionMixin, name: str, parameter: Tensor) -> Callable[[], TorchDistributionMixin]:
    prior = to_like(prior, parameter)
    shape = prior.shape()
    if shape == torch.Size():
        prior = prior.expand(parameter.shape)
    elif shape != parameter.shape:
        raise ValueError(
            f"the prior of site {name!r} must have shape () or the parameter's {tuple(parameter.shape)}, got "
            f"{tuple(shape)} (batch_shape {tuple(prior.batch_shape)}, event_shape {tuple(prior.event_shape)})"
        )
    event: TorchDistributionMixin = prior.to_event(parameter.dim() - prior.event_dim)
    # Pyro's default expand changes the distribution it is called on, so a plate would change ours: hand out copies.
    return partial(to_like, event, parameter) if _expands_in_place(event) else partial(_same, event)


def _same(prior: TorchDistributionMixin) -> TorchDistributionMixin:
    return prior


def _expands_in_place(prior: Any) -> bool:
    if isinstance(prior, ExpandedDistribution):
        return True
    return hasattr(prior, "base_dist") and _expands_in_place(prior.base_dist)


def _prior_of(prior: Any, name: str, parameter: Tensor) -> TorchDistributionMixin:
    if isinstance(prior, Distribution | TorchDistributionMixin):
        found: Any = prior
    elif isinstance(prior, Mapping):
        found = prior[name]
    elif callable(prior):
        found = prior(name, parameter)
    else:
        raise ValueError(
            "prior must be a distribution, a mapping or function from parameter names to distributions, "
            f"or an object with sample_parameter(name, parameter), got {type(prior).__name__}"
        )
    if not isinstance(found, TorchDistributionMixin):
        raise ValueError(
            f"the prior of site {name!r} must be a pyro.distributions distribution, "
            f"got {type(found).__module__}.{type(found).__name__}"
        )
    return found


def _check_names(prior: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> None:
    missing = [name for name in parameters if name not in prior]
    if missing:
        raise ValueError(f"prior must have an entry for site {missing[0]!r}, got none for {missing}")
    unknown = [name for name in prior if name not in parameters]
    if unknown:
        raise ValueError(f"prior must have entries for the random sites {list(parameters)} alone, got {unknown}")


class Following:
    """
    A distribution that is moved once for each device and dtype it meets.

    :param TorchDistributionMixin prior: any distribution.
    """

    def __init__(self, prior: TorchDistributionMixin) -> None:
        self.prior = prior
        self._moved = prior
        self._for: tuple[torch.device, torch.dtype] | None = None

    def __call__(self, like: Tensor) -> TorchDistributionMixin:
        """The distribution on the device and in the dtype of ``like``."""
        if self._for != (like.device, like.dtype):
            self._moved = to_like(self.prior, like)
            self._for = like.device, like.dtype
        return self._moved
