# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Where the parameters of a guide's sites start, how wide each site is there, and values that they are loaded from."""

from collections.abc import Collection, Mapping

import torch
from pyro.nn.module import PyroParam
from torch import Tensor
from torch.distributions import Distribution, transform_to

from pyro_radial.infer.autoguide.families.family import Family, LocScale, Site
from pyro_radial.nn.bayesian_module import BayesianModule, check_fixed, modules_of


class InitialStates:
    """The distributions that a guide's sites start at, and the widths that sites had when they started.

    A guide keeps one of these beside its parameters, because a start is given before the parameters exist and the
    widths are compared with later ones.
    """

    def __init__(self) -> None:
        self._distributions: dict[str, Distribution] = {}
        self._take_widths = False
        #: The scales or concentrations of each site at its start; one number if all elements are equal.
        self.spreads: dict[str, Tensor] = {}
        #: The sites that took over the width of a distribution.
        self.with_given_width: set[str] = set()

    def give(self, distributions: Mapping[str, Distribution], *, take_widths: bool) -> None:
        """Let sites start at distributions, by name, and at the widths of these too if ``take_widths``."""
        self._distributions = dict(distributions)
        self._take_widths = take_widths

    def make_parameters(self, family: Family, site: Site, value: Tensor) -> dict[str, PyroParam]:
        """Return the parameters of a site at its start, and note how wide it is there.

        :param Tensor value: the start if no distribution was given.
        """
        start = self._distributions.get(site.name)
        if start is None:
            parameters = family.initial(site, value)
        else:
            parameters = family.initial_at(site, value, start, self._take_widths)
        spread = _spread_of(family, parameters)
        if spread is None:
            return parameters
        # One number if all elements are equal, which saves a copy of all scales.
        first_element = spread.detach().flatten()[0]
        all_equal = bool((spread == first_element).all())
        self.spreads[site.name] = (first_element if all_equal else spread.detach()).clone()
        if self._take_widths and start is not None:
            usual = _spread_of(family, family.initial(site, value))
            if usual is None or not torch.equal(spread, usual):
                self.with_given_width.add(site.name)
        return parameters


def _spread_of(family: Family, parameters: Mapping[str, PyroParam]) -> Tensor | None:
    """Return the width of a posterior with these initial parameters."""
    values = {name: torch.as_tensor(param.init_value) for name, param in parameters.items()}
    return family.spread(**values)


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
    """Return the scale with this marginal standard deviation, as it is trained: unconstrained, and like ``like``.

    :raises ValueError: naming the site, for a number that is not positive and finite, or for another shape.
    """
    if not bool(((stddev > 0) & stddev.isfinite()).all()):
        raise ValueError(
            f"stddevs and scales must be positive and finite, got others at site '{site.name}'"
        )
    try:
        scale = family.scale_at(site, stddev.to(like).expand(site.shape))
    except RuntimeError as error:
        raise ValueError(
            f"stddevs and scales must broadcast to site '{site.name}' of shape {tuple(site.shape)}, got shape "
            f"{tuple(stddev.shape)}"
        ) from error
    return transform_to(family.scale_constraint).inv(scale)
