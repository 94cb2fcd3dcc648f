# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws as leading dims: taken off the parameters, and put back on the outputs."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_radial._pyro.compat import tree_map_only
from pyro_radial.nn.local.unit_noise import UnitNoise

__all__ = ["NOISE_PARTS", "split_draws", "split_noise", "unflatten"]

#: The tensors of a noise, which follow the name of its site.
NOISE_PARTS = ("loc", "scale")


def split_draws(
    values: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
) -> tuple[tuple[int, ...], dict[str, Tensor], dict[str, Tensor]]:
    """
    Sorts the values of sites into those that all draws share and those with one slice per draw.

    Leading dims of size one are dropped, site by site, since a plate leaves them where it does not reach.

    :param Mapping values: ``[*draws, *shape]`` by site.
    :param Mapping shapes: the shape of each parameter.
    :returns: the draws' shape; the values without draws; and the others, of shape ``[N, *shape]`` with the N draws
        flattened.
    :raises ValueError: naming the site whose shape does not fit.
    """
    draws: tuple[int, ...] = ()
    first = ""
    shared: dict[str, Tensor] = {}
    drawn: dict[str, Tensor] = {}
    for name, value in values.items():
        shape = shapes[name]
        cut = value.dim() - len(shape)
        if cut < 0 or value.shape[cut:] != shape:
            raise ValueError(
                f"site {name!r} must have a value whose shape ends in the parameter's {tuple(shape)}, "
                f"got {tuple(value.shape)}"
            )
        lead = tuple(size for size in value.shape[:cut] if size != 1)
        if not lead:
            shared[name] = value.reshape(shape)
            continue
        if draws and lead != draws:
            raise ValueError(f"site {name!r} must have draws of shape {draws}, as site {first!r} has, got {lead}")
        draws, first = lead, first or name
        drawn[name] = value.reshape(math.prod(lead), *shape)
    return draws, shared, drawn


def split_noise(
    values: Mapping[str, Tensor],
    noises: Mapping[str, UnitNoise],
    site_shapes: Mapping[str, torch.Size],
    shapes: Mapping[str, torch.Size],
) -> tuple[tuple[int, ...], dict[str, Tensor], dict[str, Tensor]]:
    """
    The same where some sites have noise in the place of values.

    :param Mapping values: of the other sites.
    :param Mapping noises: by site.
    :param Mapping site_shapes: the shapes ``[*draws, *shape]`` that the values would have.
    :param Mapping shapes: the shape of each parameter.
    :returns: as :func:`split_draws`, with ``site.loc`` and ``site.scale`` among the tensors. Draws that share both are
        counted by a tensor of N elements under the empty name, so that there is always one with draws.
    """
    tensors, tensor_shapes = dict(values), {name: shapes[name] for name in values}
    lead: tuple[int, ...] = ()
    for name, noise in noises.items():
        shape = shapes[name]
        sizes = site_shapes[name][: len(site_shapes[name]) - len(shape)]
        lead = tuple(size for size in sizes if size != 1) or lead
        for part in NOISE_PARTS:
            tensor = getattr(noise, part)
            tensors[f"{name}.{part}"] = tensor if tensor.shape == shape else tensor.expand(site_shapes[name])
            tensor_shapes[f"{name}.{part}"] = shape
    if lead:
        tensors[""], tensor_shapes[""] = next(iter(noises.values())).loc.new_zeros(lead), torch.Size()
    return split_draws(tensors, tensor_shapes)


def unflatten(outputs: Any, draws: tuple[int, ...]) -> Any:
    """
    The outputs with the draws as leading dims.

    :param outputs: tensors of shape ``[N, ...]``, nested in any way.
    :param tuple draws: the draws' shape, of N elements.
    :returns: the same with tensors of shape ``[*draws, ...]``.
    """
    return tree_map_only(Tensor, lambda tensor: tensor.reshape(*draws, *tensor.shape[1:]), outputs)
