# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Init functions of guides: from a site to its initial value, as Pyro's own."""

import functools
from collections.abc import Callable
from typing import Any

from pyro.infer.autoguide.initialization import init_to_feasible, init_to_sample
from torch import Tensor, nn

from pyro_radial._pyro.checks import check_shape
from pyro_radial._pyro.types import Node
from pyro_radial.distributions.constraints import is_on_sphere

InitFn = Callable[..., object]


def init_to_prototype(site: Node) -> Tensor:
    """Start at zero in unconstrained space, as Pyro's ``AutoNormal`` does; start directions at a draw."""
    return init_to_sample(site) if is_on_sphere(site["fn"].support) else init_to_feasible(site)


def init_by(init_fn: InitFn, site: Node) -> Any:
    """Return the initial value of a site, or raise a ``ValueError`` if a user gave one of some rows of a plate alone.

    A guide repeats the values of a mini-batch over all rows. That suits draws, and not values that belong to rows.
    """
    value = init_fn(site)
    given_values = getattr(init_fn, "keywords", {}).get("values") or {}
    for frame in site["cond_indep_stack"] if site["name"] in given_values else ():
        rows = value.shape[frame.dim - site["fn"].event_dim] if isinstance(value, Tensor) else 0
        if frame.full_size is not None and rows == frame.size < frame.full_size:
            raise ValueError(
                f"init_loc_fn: the value of site {site['name']!r} must be of all {frame.full_size} rows of plate "
                f"{frame.name!r}, got {rows} rows"
            )
    return value


def init_to_network(
    site: Node | None = None,
    net: nn.Module | None = None,
    fallback: InitFn = init_to_prototype,
) -> Any:
    """Start each site at the network's parameter of that name.

    :param site: a Pyro site; without one, the function is returned with its settings bound.
    :param nn.Module net: a network with these parameters; by default the values that a
        :class:`~pyro_radial.nn.BayesianModule` records at its sites.
    :param fallback: the init function of other sites.

    Example::

        >>> import torch
        >>> from torch import nn
        >>> from pyro_radial import AutoRadial, BayesianModule
        >>> pretrained = nn.Linear(3, 2)
        >>> guide = AutoRadial(BayesianModule(nn.Linear(3, 2)), init_loc_fn=init_to_network(net=pretrained))
        >>> guide.setup(torch.zeros(1, 3))
        >>> torch.equal(guide.median()["weight"], pretrained.weight)
        True
    """
    if site is None:
        return functools.partial(init_to_network, net=net, fallback=fallback)
    if net is None:
        value = site["infer"].get("initial_value")
    else:
        value = dict(net.named_parameters()).get(site["name"])
    if value is None:
        return fallback(site)
    # Inside a plate every row starts at the same weights.
    shape = site["fn"].shape()
    check_shape(f"net: the shape of site {site['name']!r}", shape, value.shape)
    return value.detach().expand(shape).clone()
