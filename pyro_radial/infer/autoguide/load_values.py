# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Check the values that a user loads into a guide, such as those of a network, and convert them to its parameters."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor
from torch.distributions import transform_to

from pyro_radial.infer.autoguide.families.family import LocScale, Site
from pyro_radial.nn.bayesian_module import BayesianModule, check_fixed, modules_of


def find_missing(
    model: object | None, sites: Collection[str], state_dict: Mapping[str, Tensor], strict: bool
) -> list[str]:
    """Return the sites without a value in a trained network's state dict.

    :param model: the guide's model, or None for a guide that was loaded from a file.
    :raises ValueError: as :meth:`AutoPerSite.load_means` says.
    """
    missing = [name for name in sites if name not in state_dict]
    if strict and missing:
        raise ValueError(f"load_means: no value for the sites {missing}; strict=False skips them")
    networks = modules_of(BayesianModule, model)
    for network in networks:
        check_fixed(network, "state_dict", state_dict, sites)
    unknown = sorted(state_dict.keys() - set(sites))
    if strict and unknown and model is not None and not networks:
        raise ValueError(
            f"state_dict must have values of the sites {list(sites)} only, got {unknown}; strict=False "
            "leaves them out"
        )
    return missing


def unconstrain_mean(site: Site, shape: torch.Size, value: Tensor) -> Tensor:
    """Return a value on a site's support in unconstrained space, where it must have the given shape.

    :raises ValueError: naming the site, for another shape or a value outside the interior of the support.
    """
    if site.transform is not None:
        value = site.transform.inv(value)
    if value.shape != shape:
        raise ValueError(
            f"load_means: site '{site.name}' has shape {tuple(shape)}, its value in state_dict {tuple(value.shape)}"
        )
    num_invalid = int((~value.isfinite()).sum())
    if num_invalid:
        raise ValueError(
            f"state_dict must have finite values inside the support of site '{site.name}', got {num_invalid} of "
            f"{value.numel()} elements that are not"
        )
    return value


def unconstrain_stddev(family: LocScale, site: Site, like: Tensor, stddev: Tensor) -> Tensor:
    """Return the scale with this marginal standard deviation, as it is trained: unconstrained and of ``like``'s shape.

    :raises ValueError: naming the site, for a number that is not positive and finite, or for another shape.
    """
    if not bool(((stddev > 0) & stddev.isfinite()).all()):
        raise ValueError(
            f"stddevs and scales must be positive and finite, got others at site '{site.name}'"
        )
    try:
        scale = family.scale_of(site, stddev).to(like).expand(like.shape)
    except RuntimeError as error:
        raise ValueError(
            f"stddevs and scales must broadcast to site '{site.name}' of shape {tuple(like.shape)}, got shape "
            f"{tuple(stddev.shape)}"
        ) from error
    return transform_to(family.scale_constraint).inv(scale)
