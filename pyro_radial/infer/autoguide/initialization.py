# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Init functions of guides: from a site to its initial value, as Pyro's own."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro.infer.autoguide.initialization import init_to_feasible, init_to_sample
from torch import nn

from pyro_radial._pyro.checks import check_function, check_shape, check_types, positive_float
from pyro_radial.distributions.constraints import is_on_sphere, is_real

__all__ = ["carries_initial_value", "init_to_fan_in", "init_to_network", "init_to_prototype"]

InitFn = Callable[..., Any]


def carries_initial_value(site: Mapping[str, Any]) -> bool:
    """Whether a site carries its initial value, as the sites of a network do."""
    return "initial_value" in site["infer"]


def init_to_prototype(site: Mapping[str, Any] | None = None) -> Any:
    """Start at zero in unconstrained space, as Pyro's ``AutoNormal`` does; start directions at a draw."""
    if site is None:
        return init_to_prototype
    return init_to_sample(site) if is_on_sphere(site["fn"].support) else init_to_feasible(site)


def init_to_fan_in(
    site: Mapping[str, Any] | None = None, gain: float = math.sqrt(2.0), fallback: InitFn = init_to_prototype
) -> Any:
    r"""Start weight tensors at draws from :math:`N(0, \mathrm{gain}^2 / \mathrm{fan\_in})`.

    The fan-in of an event of shape [out, in, ...] is the product of all sizes except the first. Use it for networks
    written by hand, where weights start at zero by default.

    :param site: a Pyro site; without one, the function is returned with its settings bound.
    :param float gain: the gain; sqrt(2) is He's, for ReLU networks.
    :param fallback: the init function of other sites: those with fewer than two event dimensions or a constrained
        support.

    Example::

        >>> import pyro, pyro.distributions as dist
        >>> from pyro_radial import AutoRadial
        >>> def model():
        ...     pyro.sample("weight", dist.Normal(0., 1.).expand([20, 30]).to_event(2))
        >>> guide = AutoRadial(model, init_loc_fn=init_to_fan_in)
        >>> guide.setup()
        >>> bool(0.2 < guide.median()["weight"].std() < 0.3)
        True
    """
    positive_float("gain", gain)
    check_function("fallback", fallback)
    if site is None:
        return functools.partial(init_to_fan_in, gain=gain, fallback=fallback)
    check_types(Mapping, site=site)
    fn = site["fn"]
    if fn.event_dim < 2 or not is_real(fn.support):
        return fallback(site)
    fan_in = fn.event_shape[1:].numel()
    return torch.randn_like(fn.sample()) * (gain / math.sqrt(fan_in))


def init_to_network(
    site: Mapping[str, Any] | None = None, net: nn.Module | None = None, fallback: InitFn = init_to_prototype
) -> Any:
    """Start each site at the network's parameter of that name.

    :param site: a Pyro site; without one, the function is returned with its settings bound.
    :param nn.Module net: a network with these parameters; by default the values that a
        :class:`~pyro_radial.nn.BayesianModule` records at its sites.
    :param fallback: the init function of other sites.

    Example::

        >>> from torch import nn
        >>> from pyro_radial import AutoRadial, BayesianModule
        >>> pretrained = nn.Linear(3, 2)
        >>> guide = AutoRadial(BayesianModule(nn.Linear(3, 2)), init_loc_fn=init_to_network(net=pretrained))
        >>> guide.setup(torch.zeros(1, 3))
        >>> torch.equal(guide.median()["weight"], pretrained.weight)
        True
    """
    check_function("fallback", fallback)
    check_types(nn.Module | None, net=net)
    if site is None:
        return functools.partial(init_to_network, net=net, fallback=fallback)
    check_types(Mapping, site=site)
    value = site["infer"].get("initial_value") if net is None else dict(net.named_parameters()).get(site["name"])
    if value is None:
        return fallback(site)
    # Inside a plate every row starts at the same weights.
    shape = site["fn"].shape()
    check_shape(f"net: the shape of site {site['name']!r}", shape, value.shape)
    return value.detach().expand(shape).clone()
