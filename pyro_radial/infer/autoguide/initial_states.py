# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Where the parameters of a guide's sites start, and how wide each site is there."""

from collections.abc import Mapping

import torch
from pyro.nn.module import PyroParam
from torch import Tensor
from torch.distributions import Distribution

from pyro_radial.infer.autoguide.families.family import Family, Site


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
        """Return the parameters of a site at its start, which is ``value`` if no distribution was given."""
        start = self._distributions.get(site.name)
        if start is None:
            return family.initial(site, value)
        return family.initial_at(site, value, start, self._take_widths)

    def note_spread(
        self, family: Family, site: Site, value: Tensor, parameters: Mapping[str, PyroParam]
    ) -> None:
        """Note how wide a site is with the parameters that :meth:`make_parameters` returned."""
        spread = _spread_of(family, parameters)
        if spread is None:
            return
        # One number if all elements are equal, which saves a copy of all scales.
        first_element = spread.detach().flatten()[0]
        all_equal = bool((spread == first_element).all())
        self.spreads[site.name] = (first_element if all_equal else spread.detach()).clone()
        if self._take_widths and site.name in self._distributions:
            usual = _spread_of(family, family.initial(site, value))
            if usual is None or not torch.equal(spread, usual):
                self.with_given_width.add(site.name)

    def forget_distributions(self) -> None:
        """Let go of the distributions, once all sites have parameters."""
        self._distributions = {}


def _spread_of(family: Family, parameters: Mapping[str, PyroParam]) -> Tensor | None:
    """Return the width of a posterior with these initial parameters."""
    values = {name: torch.as_tensor(param.init_value) for name, param in parameters.items()}
    return family.spread(**values)
