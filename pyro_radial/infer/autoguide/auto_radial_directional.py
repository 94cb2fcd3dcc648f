# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The radial and directional guide: von Mises-Fisher directions, log-normal radii, and normals or radials elsewhere."""

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Literal

import torch
from pyro.distributions import Distribution, constraints
from pyro.nn.module import PyroParam
from torch import Tensor
from torch.distributions import Transform
from torch.nn.functional import normalize

from pyro_radial._compat import deep_setattr
from pyro_radial.distributions.constraints import is_on_sphere
from pyro_radial.distributions.radial_normal import RadialNormal
from pyro_radial.distributions.von_mises_fisher import VonMisesFisherStable
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.infer.autoguide.auto_mean_field import AutoMeanField
from pyro_radial.infer.autoguide.auto_radial import GuideRadialNormal
from pyro_radial.infer.autoguide.initialization import init_to_network
from pyro_radial.infer.autoguide.loc_scale import DEFAULT_INIT_STDDEV


class AutoRadialDirectional(AutoMeanField):
    r"""A guide with a von Mises-Fisher distribution on each direction, a log-normal on each positive site, normals
    elsewhere.

    Made for models with the prior :class:`~pyro_radial.nn.priors.RadialDirectionalPrior`, where every KL is then
    closed; it takes any model with continuous latent sites.

    A direction's mean is a free vector, normalized; its concentration :math:`\kappa` is one number for the whole site,
    so for a layer, or with ``shared_concentration=False`` one for each group. Under a uniform prior a group costs
    :math:`\kappa A(\kappa) + \log C(\kappa) + S` nats, with the ratio A of Bessel functions and the log-area S of
    the sphere: a shared concentration makes every group pay for the sharpest; concentrations of their own let a group
    that is not needed become uniform, at no cost.

    Source: Oh, Adamczewski and Park (2019), "Radial and Directional Posteriors for Bayesian Neural Networks", eq. 10.

    :param model: a Pyro model with continuous latent sites.
    :param init_loc_fn: a per-site init function; the default is that of :class:`~pyro_radial.AutoRadial`.
    :param float init_scale: the standard deviation every element of the other sites starts at, in unconstrained space.
    :param float init_mean_cosine: E[mu . x] of every direction at the start, between 0 and 1; 0.9 is the paper's. It
        sets :math:`\kappa` to :math:`A (n - A^2) / (1 - A^2)` in n dimensions (Banerjee et al. 2005, eq. 4.4).
    :param bool shared_concentration: one concentration for a site, or one for each of its groups.
    :param str rest: "normal" or "radial", the distribution of sites on the whole line.
    :param create_plates: an optional function of the model's arguments that returns the plates to subsample with.
    :raises ValueError: for an argument out of range and, naming the site, for a discrete latent site.

    Example::

        >>> import torch
        >>> from torch import nn
        >>> from pyro_radial import BayesianModule
        >>> from pyro_radial.nn.priors import RadialDirectionalPrior
        >>> bnn = BayesianModule(nn.Linear(3, 2), RadialDirectionalPrior("row"))
        >>> guide = AutoRadialDirectional(bnn)
        >>> guide.setup(torch.zeros(1, 3))
        >>> guide.posterior()["weight.direction"].base_dist
        VonMisesFisherStable(loc: torch.Size([2, 3]), concentration: torch.Size([2]))
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        init_loc_fn: Callable[..., Any] = init_to_network,
        init_scale: float = DEFAULT_INIT_STDDEV,
        init_mean_cosine: float = 0.9,
        shared_concentration: bool = True,
        rest: Literal["normal", "radial"] = "normal",
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(model, init_loc_fn=init_loc_fn, init_scale=init_scale, create_plates=create_plates)
        if not 0.0 < init_mean_cosine < 1.0:
            raise ValueError(f"init_mean_cosine must lie between zero and one, got {init_mean_cosine!r}")
        if rest not in ("normal", "radial"):
            raise ValueError(f'rest must be "normal" or "radial", got {rest!r}')
        self._init_mean_cosine = float(init_mean_cosine)
        self._shared_concentration = shared_concentration
        self._rest = rest
        self._directions: set[str] = set()

    def _transform_of(self, site: Mapping[str, Any]) -> Transform | None:
        if is_on_sphere(site["fn"].support):
            self._directions.add(site["name"])
            return None
        return super()._transform_of(site)

    def _init_site(self, name: str, unconstrained: Tensor, event_dim: int) -> None:
        if name not in self._directions:
            return super()._init_site(name, unconstrained, event_dim)
        self._event_dims[name] = event_dim
        distribution = leaf(self._start.get(name))
        concentration = self._first_concentration(unconstrained, event_dim)
        if isinstance(distribution, VonMisesFisherStable):
            unconstrained = distribution.loc.expand_as(unconstrained).to(unconstrained).clone()
            if self._start_scales:
                given = distribution.concentration.to(concentration).expand(unconstrained.shape[:-1])
                concentration = self._per_concentration(given, event_dim)
        self._initial_scales[name] = concentration
        deep_setattr(self.locs, name, PyroParam(unconstrained, constraints.real, event_dim))
        # Its logarithm is what is trained: useful concentrations span orders of magnitude.
        deep_setattr(self.scales, name, PyroParam(concentration.clone(), constraints.positive, event_dim - 1))

    def _first_concentration(self, direction: Tensor, event_dim: int) -> Tensor:
        size, cosine = direction.shape[-1], self._init_mean_cosine
        concentration = cosine * (size - cosine**2) / (1.0 - cosine**2)
        return self._per_concentration(torch.full_like(direction[..., 0], concentration), event_dim)

    def _per_concentration(self, concentrations: Tensor, event_dim: int) -> Tensor:
        """One for each group, or their geometric mean for the whole event."""
        if not self._shared_concentration or event_dim == 1:
            return concentrations.clone()
        groups = tuple(range(1 - event_dim, 0))
        return concentrations.log().mean(groups, keepdim=True).exp()

    def _site_posterior(self, name: str, *parameters: Tensor) -> Distribution:
        loc, scale = parameters
        event_dim = self._event_dims[name]
        if name in self._directions:
            distribution = VonMisesFisherStable(normalize(loc, dim=-1), scale, validate_args=False)
            return distribution.to_event(event_dim - 1)
        if self._is_radial(name):
            return RadialNormal(loc, scale, event_dim, validate_args=False)
        return super()._site_posterior(name, *parameters)

    def _guide_distribution(self, name: str, *parameters: Tensor) -> Distribution:
        if self._is_radial(name):
            loc, scale = parameters
            return GuideRadialNormal(loc, scale, self._event_dims[name], validate_args=False)
        return super()._guide_distribution(name, *parameters)

    def _is_radial(self, name: str) -> bool:
        return self._rest == "radial" and self._transforms[name] is None and name not in self._directions

    def _elements_per_radius(self, name: str, shape: torch.Size) -> int:
        return shape[len(shape) - self._event_dims[name] :].numel() if self._is_radial(name) else 1

    def _initial_scale(self, name: str, unconstrained: Tensor, event_dim: int) -> float:
        return self._init_scale * math.sqrt(self._elements_per_radius(name, unconstrained.shape))

    def _site_center(self, name: str) -> Tensor:
        loc = attrgetter(name)(self.locs)
        return normalize(loc, dim=-1) if name in self._directions else loc

    def _unconstrained_quantiles(self, name: str, levels: list[float]) -> Tensor:
        if name in self._directions:
            raise ValueError(f"site '{name}' is a direction, whose elements have no closed-form quantiles")
        if self._is_radial(name):
            return RadialNormal(*self._site_parameters(name), self._event_dims[name]).marginal_quantiles(levels)
        return super()._unconstrained_quantiles(name, levels)
