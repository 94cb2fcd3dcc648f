# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The radial guide: one radius and one direction for each latent site."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro.distributions import Distribution
from torch import Tensor

from pyro_radial._checks import positive_float
from pyro_radial.distributions.radial_normal import RadialNormal
from pyro_radial.distributions.special import MEAN_LOG_HALF_NORMAL, log_sphere_area
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.infer.autoguide.initialization import init_to_network
from pyro_radial.infer.autoguide.loc_scale import DEFAULT_INIT_STDDEV, AutoLocScale


class GuideRadialNormal(RadialNormal):
    """A radial normal that reports, exactly at its pole, the mean of its log-density instead of infinity.

    A guide's density is evaluated wherever a handler puts a site, so also at ``guide.median()``; an infinite value
    there would make a loss infinite without a word on why.
    """

    @property
    def _log_density_at_loc(self) -> float:  # type: ignore[override]
        elements = self.num_elements
        mean_log_rho = (elements - 1) * MEAN_LOG_HALF_NORMAL
        return 0.5 * math.log(2.0 / math.pi) - log_sphere_area(elements) - 0.5 - mean_log_rho


class AutoRadial(AutoLocScale):
    r"""A guide with one :class:`~pyro_radial.distributions.RadialNormal` for each latent site.

    The whole site shares one radius, so a draw's distance from the mean does not grow with the number of weights,
    as it does in mean field. Against factorized normal priors its KL is closed, and
    :class:`~pyro.infer.TraceMeanField_ELBO` uses it. A site of one element gets exactly a normal.

    Source: Farquhar, Osborne and Gal (2020), "Radial Bayesian Neural Networks", section 3.

    :param model: a Pyro model with continuous latent sites; constrained ones get the image of a radial normal.
    :param init_loc_fn: a per-site init function. The default starts at the network's own weights where the model is
        made by :class:`~pyro_radial.nn.BayesianModule`, else at a fan-in init, else at the prior's center.
    :param float init_scale: the scale every element starts at, the paper's sigma. At most one of this and
        ``init_stddev``.
    :param float init_stddev: the marginal standard deviation, sigma / sqrt(D), every element starts at. The default
        is 0.01, chosen by ``benchmarks/init_scale.py``.
    :param event_dim: narrows the radius: how many of a site's last dimensions share one, as a number for all sites
        (those with fewer dimensions keep theirs) or a mapping by site. ``event_dim=1`` is one radius for each row of
        a matrix. The default is one radius for the whole event.
    :param create_plates: an optional function of the model's arguments that returns the plates to subsample with.
    :raises ValueError: for an init that is not a positive finite number, both inits at once, an ``event_dim`` that no
        site can have or that names an unknown site, and, naming the site, for a discrete latent site.

    Example::

        >>> import pyro, torch
        >>> import pyro.distributions as dist
        >>> from pyro.infer import SVI, TraceMeanField_ELBO
        >>> def model(x, y):
        ...     w = pyro.sample("w", dist.Normal(0., 1.).expand([3]).to_event(1))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("y", dist.Normal(x @ w, 0.1), obs=y)
        >>> guide = AutoRadial(model)
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), TraceMeanField_ELBO())
        >>> x = torch.randn(50, 3)
        >>> losses = [svi.step(x, x @ torch.tensor([1., -2., 0.5])) for _ in range(200)]
        >>> losses[-1] < losses[0]
        True
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        init_loc_fn: Callable[..., Any] = init_to_network,
        init_scale: float | None = None,
        init_stddev: float | None = None,
        event_dim: int | Mapping[str, int] | None = None,
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(model, init_loc_fn=init_loc_fn, create_plates=create_plates)
        if init_scale is not None and init_stddev is not None:
            raise ValueError("AutoRadial: give init_scale or init_stddev, not both")
        self._init_scale = None if init_scale is None else positive_float("init_scale", init_scale)
        self._init_stddev = positive_float("init_stddev", DEFAULT_INIT_STDDEV if init_stddev is None else init_stddev)
        self._event_dim = event_dim if event_dim is None or isinstance(event_dim, int) else dict(event_dim)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        _check_event_dim(self._event_dim, self._event_dims)
        distributions = [self._site_posterior(name, *self._site_parameters(name)) for name in self._event_dims]
        if distributions and all(leaf(distribution).num_elements == 1 for distribution in distributions):
            warnings.warn(
                f"AutoRadial: every site ({', '.join(self._event_dims)}) has one element per event, so this is plain "
                "mean field; did the model forget .to_event(...) on its weights?",
                stacklevel=2,
            )

    def _initial_scale(self, name: str, unconstrained: Tensor, event_dim: int) -> float:
        if self._init_scale is not None:
            return self._init_scale
        return self._init_stddev * math.sqrt(self._elements_per_radius(name, unconstrained.shape))

    def _elements_per_radius(self, name: str, shape: torch.Size) -> int:
        return shape[len(shape) - self._radius_dim(name) :].numel()

    def _radius_dim(self, name: str) -> int:
        """How many of a site's event dimensions share one radius."""
        site, wanted = self._event_dims[name], self._event_dim
        if isinstance(wanted, dict):
            wanted = wanted.get(name)
        return site if wanted is None else min(wanted, site)

    def _site_posterior(self, name: str, *parameters: Tensor) -> Distribution:
        return self._make(RadialNormal, name, *parameters)

    def _guide_distribution(self, name: str, *parameters: Tensor) -> Distribution:
        return self._make(GuideRadialNormal, name, *parameters)

    def _make(self, family: type[RadialNormal], name: str, loc: Tensor, scale: Tensor) -> Distribution:
        radius_dim = self._radius_dim(name)
        # The softplus keeps scales positive, so that checking each element at every step would find nothing.
        distribution = family(loc, scale, radius_dim, validate_args=False)
        return distribution.to_event(self._event_dims[name] - radius_dim)

    def _unconstrained_quantiles(self, name: str, levels: list[float]) -> Tensor:
        return RadialNormal(*self._site_parameters(name), self._radius_dim(name)).marginal_quantiles(levels)


def _check_event_dim(event_dim: int | dict[str, int] | None, site_event_dims: dict[str, int]) -> None:
    if event_dim is None or not site_event_dims:
        return
    if isinstance(event_dim, int):
        largest = max(site_event_dims.values())
        if not 0 <= event_dim <= largest:
            raise ValueError(
                f"AutoRadial: event_dim={event_dim}, but the sites have at most {largest} event dimensions"
            )
        return
    for name, dims in event_dim.items():
        if name not in site_event_dims:
            raise ValueError(f"AutoRadial: event_dim names '{name}', but the sites are {sorted(site_event_dims)}")
        if not 0 <= dims <= site_event_dims[name]:
            raise ValueError(
                f"AutoRadial: event_dim={dims} for site '{name}', which has {site_event_dims[name]} event dimensions"
            )
