# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The radial guide: one radius and one direction for each latent site."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from pyro_radial.infer.autoguide.base import AutoPerSite
from pyro_radial.infer.autoguide.families import Families, Family, Radial
from pyro_radial.infer.autoguide.initialization import init_to_network

__all__ = ["AutoRadial"]


class AutoRadial(AutoPerSite):
    r"""A guide with one :class:`~pyro_radial.distributions.RadialNormal` for each latent site.

    The whole site shares one radius, so a draw's distance from the mean does not grow with the number of weights,
    as it does in mean field. Against factorized normal priors its KL is closed, and
    :class:`~pyro.infer.TraceMeanField_ELBO` uses it. A site of one element gets exactly a normal.

    One radius is made for weights that act together. It is a poor choice for a large site of local variables, such as
    the topics of every document: they then all move in and out at once, and the built-in gap of the family's KL, about
    0.635 nats an element, is paid for each. Give such a site ``families={"local": families.Normal()}``, or a radius
    for each row with ``event_dim={"local": 1}``. With normals the guide ends where Pyro's ``AutoNormal`` does; with
    radii a hidden Markov model ends at 2,105 nats against 2,015, and a sparse gamma DEF at 14,601 against 13,589
    (``benchmarks/guides/pyro_models.py``).

    Source: Farquhar, Osborne and Gal (2020), "Radial Bayesian Neural Networks", section 3.

    :param model: a Pyro model with continuous latent sites; constrained ones get the pushforward of a radial normal.
    :param init_loc_fn: a per-site init function. The default starts at the network's own weights where the model is
        made by :class:`~pyro_radial.nn.BayesianModule`, and elsewhere as Pyro's ``AutoNormal`` does.
    :param float init_scale: the scale every element starts at, the paper's sigma. At most one of this and
        ``init_stddev``.
    :param float init_stddev: the marginal standard deviation, sigma / sqrt(D), of every element at the start, in
        unconstrained space; by default 0.01 at sites of a network, which carry their initial value (chosen by
        ``benchmarks/guides/init_scale.py``), and 0.1 at others, as ``AutoNormal`` has it.
    :param event_dim: narrows the radius: how many of a site's last dimensions share one, as a number for all sites
        (those with fewer dimensions keep theirs) or a mapping by site. ``event_dim=1`` is one radius for each row of
        a matrix. The default is one radius for the whole event.
    :param families: other families for some sites: a mapping from names of sites, or regular expressions searched in
        their names, to a :class:`~pyro_radial.infer.autoguide.families.Family`; or a function of the name and the site
        that returns one, or None for a radial posterior.
    :param create_plates: an optional function of the model's arguments that returns the plates to subsample with.
    :raises ValueError: for an init that is not a positive finite number, both inits at once, an ``event_dim`` that no
        site can have or that names an unknown site, and, naming the site, for a discrete latent site, a family that
        cannot serve its site, a key of ``families`` that names no site, or two patterns for one.

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
        families: Families | None = None,
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        if init_scale is not None and init_stddev is not None:
            raise ValueError("AutoRadial: give init_scale or init_stddev, not both")
        super().__init__(
            model, init_loc_fn=init_loc_fn, init_stddev=init_stddev, families=families, create_plates=create_plates
        )
        self._event_dim = event_dim if event_dim is None or isinstance(event_dim, int) else dict(event_dim)
        self._radial = Radial(init_scale=init_scale)

    def default_family(self, name: str, site: Any) -> Family:
        """A radial normal, with as wide a radius as ``event_dim`` says."""
        wanted = self._event_dim.get(name) if isinstance(self._event_dim, dict) else self._event_dim
        return self._radial if wanted is None else Radial(init_scale=self._radial.init_scale, event_dim=wanted)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        _check_event_dim(self._event_dim, {name: site.event_dim for name, site in self._site.items()})
        radial = {name: family for name, family in self._families.items() if isinstance(family, Radial)}
        if radial and all(family.elements_per_radius(self._site[name]) == 1 for name, family in radial.items()):
            warnings.warn(
                f"AutoRadial: every site ({', '.join(radial)}) has one element per event, so this is plain "
                "mean field; did the model forget .to_event(...) on its weights?",
                stacklevel=2,
            )


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
