# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Guides whose sites have a loc and a scale for every element: the radial family and mean field."""

import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from pyro.distributions import constraints
from pyro.nn.module import PyroModule, PyroParam
from torch import Tensor

from pyro_radial._compat import deep_setattr
from pyro_radial.infer.autoguide.base import AutoPerSite

# From benchmarks/init_scale.py: with 0.003 the best in the mean, and ahead of it on two of its three data sets.
DEFAULT_INIT_STDDEV = 0.01


class MissingMeans(NamedTuple):
    """What :meth:`AutoLocScale.load_means` did not find."""

    missing_sites: list[str]


class AutoLocScale(AutoPerSite):
    """Base of guides with parameters ``locs.<site>`` (real) and ``scales.<site>`` (positive, by a softplus)."""

    scale_constraint = constraints.softplus_positive

    def __init__(self, model: Any, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        self._event_dims: dict[str, int] = {}
        self._initial_scales: dict[str, float] = {}
        self.locs = PyroModule()
        self.scales = PyroModule()

    def _initial_scale(self, name: str, unconstrained: Tensor, event_dim: int) -> float:
        """The scale that every element of a site starts at."""
        raise NotImplementedError

    def _init_site(self, name: str, unconstrained: Tensor, event_dim: int) -> None:
        self._event_dims[name] = event_dim
        initial = self._initial_scale(name, unconstrained, event_dim)
        self._initial_scales[name] = initial
        scale = torch.full_like(unconstrained, initial)
        # The event_dim of a parameter is what lets a plate select the rows of a mini-batch.
        deep_setattr(self.locs, name, PyroParam(unconstrained, constraints.real, event_dim))
        deep_setattr(self.scales, name, PyroParam(scale, self.scale_constraint, event_dim))

    def _site_parameters(self, name: str) -> tuple[Tensor, Tensor]:
        return attrgetter(name)(self.locs), attrgetter(name)(self.scales)

    def _site_center(self, name: str) -> Tensor:
        return attrgetter(name)(self.locs)

    @torch.no_grad()
    def load_means(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> MissingMeans:
        """Start the means at the values of a trained network; the scales stay.

        :param state_dict: values by site name, such as ``net.state_dict()``; names that are no site are passed over.
        :param bool strict: whether a site without a value is an error.
        :returns: the sites without a value.
        :raises ValueError: naming the site, for a missing value (if strict) or a wrong shape.
        """
        self._require_setup("load_means")
        missing = [name for name in self._transforms if name not in state_dict]
        if strict and missing:
            raise ValueError(f"load_means: no value for the sites {missing}; strict=False leaves these as they are")
        for name, transform in self._transforms.items():
            if name not in missing:
                value = state_dict[name]
                target = attrgetter(f"{name}_unconstrained")(self.locs)
                value = value if transform is None else transform.inv(value)
                if value.shape != target.shape:
                    raise ValueError(
                        f"load_means: site '{name}' has shape {tuple(target.shape)}, "
                        f"its value in state_dict {tuple(value.shape)}"
                    )
                target.copy_(value)
        return MissingMeans(missing)

    @torch.no_grad()
    def scale_change(self) -> dict[str, float]:
        """How far each site's scales have moved: the root mean square of log(scale / initial scale)."""
        self._require_setup("scale_change")
        return {
            name: float((self._site_parameters(name)[1] / initial).log().square().mean().sqrt())
            for name, initial in self._initial_scales.items()
        }


def check_init_scale(argument: str, value: float) -> float:
    """A positive finite number, or an error that names the argument."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < math.inf:
        raise ValueError(f"{argument} must be a positive finite number, got {value!r}")
    return float(value)
