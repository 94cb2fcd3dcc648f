# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Which parameters of a network are random, and the prior of each: what the arguments of BayesianModule say."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_radial.distributions.wrappers import to_like
from pyro_radial.nn.functional_net import STATISTICS_LAYERS

NORM_LAYERS = (*STATISTICS_LAYERS, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)

#: The most names of parameters in an error.
SHOWN = 10

Select = Callable[[str, nn.Parameter], bool] | str | None


@runtime_checkable
class ParameterPrior(Protocol):
    """A prior that makes the sample sites of a parameter itself."""

    def sample_parameter(self, name: str, parameter: Tensor) -> Tensor:
        """Sample a parameter, ``[*draws, *parameter.shape]``, by sample statements whose names start with its name.

        With Pyro's ``AutoNormal`` and ``AutoDelta`` a site ``name`` cannot go with a site ``name + ".lam"``; use
        ``name + "_lam"`` for these. ``parameter`` is the value in the network, for shape, dtype and device.
        """


def site_priors(prior: Any, parameters: Mapping[str, Tensor]) -> dict[str, TorchDistributionMixin]:
    """Return a distribution for each site, in the parameter's dtype, on its device, with its shape as event shape."""
    if isinstance(prior, Mapping):
        if missing := [name for name in parameters if name not in prior]:
            raise ValueError(
                f"prior must have an entry for site {missing[0]!r}, got none for {missing}"
            )
        if unknown := [name for name in prior if name not in parameters]:
            raise ValueError(
                f"prior must have entries for the random sites {list(parameters)} only, got {unknown}"
            )
    return {name: _expand_to(_prior_of(prior, name, p), name, p) for name, p in parameters.items()}


def _expand_to(
    prior: TorchDistributionMixin, name: str, parameter: Tensor
) -> TorchDistributionMixin:
    prior = to_like(prior, parameter)
    shape = prior.shape()
    if shape == torch.Size():
        prior = prior.expand(parameter.shape)
    elif shape != parameter.shape:
        raise ValueError(
            f"the prior of site {name!r} must have shape () or the parameter's {tuple(parameter.shape)}, got "
            f"{tuple(shape)} (batch_shape {tuple(prior.batch_shape)}, event_shape {tuple(prior.event_shape)})"
        )
    return prior.to_event(parameter.dim() - prior.event_dim)


def _prior_of(prior: object, name: str, parameter: Tensor) -> TorchDistributionMixin:
    if isinstance(prior, Distribution | TorchDistributionMixin):
        distribution: Any = prior
    elif isinstance(prior, Mapping):
        distribution = prior[name]
    elif callable(prior) and not isinstance(prior, type):
        distribution = prior(name, parameter)
    else:
        raise ValueError(
            "prior must be a distribution, a mapping or function from parameter names to distributions, "
            f"or an object with sample_parameter(name, parameter), got {type(prior).__name__}"
        )
    if not isinstance(distribution, TorchDistributionMixin):
        raise ValueError(
            f"the prior of site {name!r} must be a pyro.distributions distribution, "
            f"got {type(distribution).__module__}.{type(distribution).__name__}"
        )
    return distribution


class Following:
    """A distribution that follows the device and dtype of a tensor, and is moved only when these change."""

    def __init__(self, prior: TorchDistributionMixin) -> None:
        self.prior = prior
        self._converted = prior
        self._for: tuple[torch.device, torch.dtype] | None = None

    def __call__(self, like: Tensor) -> TorchDistributionMixin:
        """Return the distribution on the device and in the dtype of ``like``."""
        if self._for != (like.device, like.dtype):
            self._converted = to_like(self.prior, like)
            self._for = like.device, like.dtype
        return self._converted


def check_net(net: nn.Module) -> None:
    """Raise a ValueError naming ``net`` unless it is a plain network without uninitialized parameters."""
    if any(isinstance(module, PyroModule) for module in net.modules()):
        raise ValueError(
            "net must be a plain network, got one with a PyroModule, which is already a Pyro model"
        )
    for name, parameter in net.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"net must have run once on data, got the lazy parameter {name!r}")
    for prefix, module in net.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                raise ValueError(
                    f"net must not hold a tensor computed from its parameters, got {attribute!r} of module {prefix!r} "
                    f"({type(module).__name__}); compute it in forward, and use torch.nn.utils.parametrizations "
                    "instead of torch.nn.utils.weight_norm or spectral_norm"
                )


def select_parameters(net: nn.Module, select: Select) -> dict[str, nn.Parameter]:
    """Return the parameters that ``select`` chooses, by name and in the network's order; tied ones occur once.

    :raises ValueError: naming ``select``, if it cannot choose, or chooses nothing or a parameter of integers.
    """
    try:
        is_selected = _matcher(net, select)
    except re.error as error:
        raise ValueError(
            f"select must be a valid regular expression, got {select!r} ({error})"
        ) from error
    parameters = dict(net.named_parameters())
    selected = {name: p for name, p in parameters.items() if is_selected(name, p)}
    if not selected:
        names = list(parameters)
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        frozen = "; all are frozen or belong to normalization layers" if select is None else ""
        raise ValueError(
            f"select must choose at least one parameter of the network, got none of {names[:SHOWN]}{more}{frozen}"
        )
    for name, parameter in selected.items():
        if not parameter.is_floating_point():
            raise ValueError(
                f"select must choose floating point parameters, got {name!r} of {parameter.dtype}; leave it out with "
                "select, or keep it as a real parameter and call torch.view_as_complex on it in forward"
            )
    return selected


def _matcher(net: nn.Module, select: Select) -> Callable[[str, nn.Parameter], bool]:
    """Return a function of a parameter's name and the parameter: whether ``select`` makes it random.

    :raises re.error: for an invalid regular expression.
    """
    if isinstance(select, str):
        pattern = re.compile(select)
        return lambda name, parameter: pattern.search(name) is not None
    if select is not None:
        return select
    left_out: set[int] = set()
    for module in net.modules():
        if isinstance(module, NORM_LAYERS):
            left_out.update(map(id, module.parameters(recurse=False)))
    return lambda name, parameter: parameter.requires_grad and id(parameter) not in left_out
