# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What all guides of the library are: one posterior per latent site, each of a family, on the site's own support."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.nn import PyroModule
from torch import Tensor
from torch.distributions import Distribution, transform_to

from pyro_radial._pyro.checks import positive_float
from pyro_radial._pyro.compat import deep_setattr, prototype_hide_fn
from pyro_radial._pyro.naming import UniquelyNamed
from pyro_radial._pyro.one_at_a_time import one_at_a_time
from pyro_radial.infer.autoguide.families import Families, Family, LocScale, Site, choose_families
from pyro_radial.infer.autoguide.families.setup import as_one_number, as_site, initial_values
from pyro_radial.infer.autoguide.initialization import carries_initial_value, init_to_network
from pyro_radial.nn.bayesian_module import keeping_buffers
from pyro_radial.nn.likelihood import is_target
from pyro_radial.poutine.local_reparameterization import noise_asked_for, noise_offered

__all__ = ["AutoPerSite", "MissingMeans"]

# From benchmarks/guides/init_scale.py: with 0.003 the best in the mean, and ahead of it on two of its three data sets.
NETWORK_INIT_STDDEV = 0.01
# As Pyro's AutoNormal.
INIT_STDDEV = 0.1


class MissingMeans(NamedTuple):
    """What :meth:`AutoPerSite.load_means` did not find."""

    missing_sites: list[str]


class AutoPerSite(UniquelyNamed, AutoGuide):
    """Base of the guides: an independent posterior for each latent site, of the family chosen for it.

    Each site is sampled *directly* from a distribution on its support. An auxiliary normal plus a ``Delta``, as in
    Pyro's ``AutoNormal``, loses every analytic KL, and on constrained sites makes
    :class:`~pyro.infer.TraceMeanField_ELBO` wrong by the log-Jacobian.

    A subclass is a signature and :meth:`default_family`. Parameters are ``<plural>.<site>``: ``locs.w``, ``scales.w``;
    with another site ``w.lam``, those of ``w`` are ``locs.w.own``, ``scales.w.own``.

    :param model: a Pyro model.
    :param init_loc_fn: a per-site init function, as in :mod:`pyro.infer.autoguide.initialization`.
    :param float init_stddev: the marginal standard deviation of every element at the start, in unconstrained space; by
        default 0.01 at sites of a network, which carry their initial value, and 0.1 at others.
    :param families: what is wanted in the place of the default families: a mapping from names of sites, or regular
        expressions searched in them, to a :class:`~pyro_radial.infer.autoguide.families.Family`, or a function of the
        name and the site that returns one or None.
    :param create_plates: an optional function of the model's arguments that returns the plates to subsample with.
    :raises ValueError: for an ``init_stddev`` that is not a positive finite number; once the model has run, for one
        without latent sites, and naming the site, for a discrete latent site, a family that cannot serve its site, a
        key of ``families`` that names no site, or two patterns for one.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        init_loc_fn: Callable[..., Any] = init_to_network,
        init_stddev: float | None = None,
        families: Families | None = None,
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        self.init_loc_fn = init_loc_fn
        super().__init__(InitMessenger(partial(_init_latent, init_loc_fn))(model), create_plates=create_plates)
        self._init_stddev = None if init_stddev is None else positive_float("init_stddev", init_stddev)
        self._wanted_families = families
        self._families: dict[str, Family] = {}
        self._site: dict[str, Site] = {}
        self._places: dict[str, str] = {}
        self._parameter_names: dict[str, tuple[str, ...]] = {}
        self._initial_spreads: dict[str, Tensor] = {}
        self._start: dict[str, Distribution] = {}
        self._start_spread = False
        self._spread_started: set[str] = set()

    def default_family(self, name: str, site: Any) -> Family:
        """The family of a site for which the user wants none in particular.

        :param str name: of the site.
        :param site: the site in Pyro's trace of the model.
        """
        raise NotImplementedError(f"{type(self).__name__} must define default_family(name, site)")

    @staticmethod
    def _prototype_hide_fn(msg: Any) -> bool:
        # Without targets the model samples them, to predict; they are no latent site even then.
        return prototype_hide_fn(msg) or is_target(msg)

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """Make the parameters now, by running the model once on these arguments; nothing where they exist.

        Buffers of the model, such as the running statistics of batch norm, stay as they are.

        After this an optimizer, ``load_state_dict`` and ``DistributedDataParallel`` can take the guide.
        """
        if self.prototype_trace is not None:
            return
        try:
            with one_at_a_time():
                self._setup_prototype(*args, **kwargs)
        except Exception:
            # A guide that failed half-way must not pass for one that has its parameters.
            self.prototype_trace = None
            raise

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        # A network in train mode, trained before, keeps the statistics that it has.
        with keeping_buffers(poutine.unwrap(self.model)):
            super()._setup_prototype(*args, **kwargs)
        sites = dict(self._latent_sites())
        if not sites:
            raise ValueError(
                f"{type(self).__name__}: model must have at least one latent site, got none; a model whose parameters "
                "are all pyro.param needs a guide without sites, such as lambda *args: None"
            )
        self._places = places(sites)
        chosen = choose_families(self._wanted_families, sites)
        for name, site in sites.items():
            self._make_parameters(name, site, chosen.get(name) or self.default_family(name, site))
            # Only the shape is of use from here on, and a copy of a network's weights is worth saving.
            site["value"] = site["value"].detach().to("meta")
        # Not before all sites are made: a setup that failed is repeated from the same start.
        self._start = {}

    def _make_parameters(self, name: str, prior_site: Any, family: Family) -> None:
        default = NETWORK_INIT_STDDEV if carries_initial_value(prior_site) else INIT_STDDEV
        try:
            site, value = as_site(name, prior_site, family.transform(prior_site), self._init_stddev or default)
        except FloatingPointError as error:
            raise ValueError(f"{type(self).__name__}: {error}") from None
        start = self._start.get(name)
        if start is None:
            parameters = family.initial(site, value)
        else:
            parameters = family.initial_at(site, value, start, self._start_spread)
        for parameter, initial in parameters.items():
            deep_setattr(self._container(parameter, name), self._places[name], initial)
        self._families[name], self._site[name] = family, site
        self._parameter_names[name] = tuple(parameters)
        spread = family.spread(**initial_values(parameters))
        if spread is None:
            return
        self._initial_spreads[name] = as_one_number(spread.detach())
        if start is not None and self._start_spread:
            usual = family.spread(**initial_values(family.initial(site, value)))
            if usual is None or not torch.equal(spread, usual):
                self._spread_started.add(name)

    def _container(self, parameter: str, site: str) -> PyroModule:
        """Where the parameters of this name of all sites are."""
        plural = f"{parameter}s"
        if hasattr(type(self), plural):
            raise ValueError(f"site '{site}': a family's parameter must not be called {parameter!r}, got one that is")
        if plural not in self._modules:
            setattr(self, plural, PyroModule())
        container = getattr(self, plural)
        assert isinstance(container, PyroModule)
        return container

    @property
    def latent_sites(self) -> tuple[str, ...]:
        """The names of the sites that it samples; none before it has its parameters."""
        return tuple(self._families)

    def _latent_sites(self) -> Iterator[tuple[str, Any]]:
        assert self.prototype_trace is not None
        return self.prototype_trace.iter_stochastic_nodes()

    def _parameters_of(self, name: str) -> dict[str, Tensor]:
        """The parameters of one site, those of the rows of a mini-batch within its plate."""
        place = attrgetter(self._places[name])
        return {p: place(getattr(self, f"{p}s")) for p in self._parameter_names[name]}

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every latent site; the same arguments as the model."""
        self.setup(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        result = {}
        for name, prior_site in self._latent_sites():
            with ExitStack() as stack:
                for frame in prior_site["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                stack.enter_context(noise_asked_for(prior_site, args, kwargs))
                family, site = self._families[name], self._site[name]
                distribution = family.guide_distribution(site, **self._parameters_of(name))
                infer: Any = noise_offered(prior_site, family.local_noise)
                result[name] = pyro.sample(name, family.on_support(site, distribution), infer=infer)
        return result

    @torch.no_grad()
    def posterior(self) -> dict[str, dist.Distribution]:
        """``{site: distribution}`` on each site's support, at full plate size, detached from training."""
        self._require_setup("posterior")
        result = {}
        for name, family in self._families.items():
            parameters = {p: value.detach().clone() for p, value in self._parameters_of(name).items()}
            result[name] = family.on_support(self._site[name], family.distribution(self._site[name], **parameters))
        return result

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The posterior median of every site, elementwise; arguments are needed only before the first run."""
        self._require_setup("median", *args, **kwargs)
        return {
            name: self._constrain(name, family.center(self._site[name], **self._parameters_of(name)).detach().clone())
            for name, family in self._families.items()
        }

    @torch.no_grad()
    def quantiles(self, quantiles: Sequence[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Quantiles of each element's marginal, ``{site: [len(quantiles), *shape]}``.

        :param quantiles: numbers strictly between 0 and 1.
        :raises ValueError: for a site whose transform mixes elements (a simplex, a covariance), since the
            marginals of its elements are then not pushforwards of the marginals in unconstrained space.
        """
        self._require_setup("quantiles", *args, **kwargs)
        levels = [float(q) for q in quantiles]
        if not all(0.0 < q < 1.0 for q in levels):
            raise ValueError(f"quantiles must lie strictly between 0 and 1, got {levels}")
        return {name: self._site_quantiles(name, levels) for name in self._families}

    def _site_quantiles(self, name: str, levels: list[float]) -> Tensor:
        site = self._site[name]
        levels = [1.0 - q for q in levels] if site.is_decreasing() else levels
        return self._constrain(name, self._families[name].quantiles(site, levels, **self._parameters_of(name)))

    def _constrain(self, name: str, unconstrained: Tensor) -> Tensor:
        transform = self._site[name].transform
        return unconstrained if transform is None else transform(unconstrained)

    def _require_setup(self, method: str, *args: Any, **kwargs: Any) -> None:
        if self.prototype_trace is None and (args or kwargs):
            self.setup(*args, **kwargs)
        if self.prototype_trace is None:
            raise RuntimeError(
                f"{type(self).__name__}.{method}: the guide has no parameters yet; call guide.setup(*args) with "
                "the model's arguments first"
            )

    def start_at(self, distributions: Mapping[str, Distribution], *, scales: bool = True) -> None:
        """Start these sites at the mean and, elementwise, the standard deviation of a distribution on their support.

        Both are taken in unconstrained space, where the distribution is the pushforward of one there; of any other
        distribution with a finite mean, the mean alone. :class:`~pyro_radial.PriorChain` starts a guide so at the
        chained prior.

        :param distributions: distributions by site name; sites without one start as they would.
        :param bool scales: whether the sites start as wide as the distributions too.
        :raises RuntimeError: if the guide has its parameters already.
        :raises ValueError: once it gets them, naming the site, for a distribution of another shape.
        """
        if self.prototype_trace is not None:
            raise RuntimeError(f"{type(self).__name__}.start_at: the guide has its parameters already")
        self._start, self._start_spread = dict(distributions), scales

    def scales_start_at_distribution(self, name: str) -> bool:
        """Whether a site started as wide as a distribution given to :meth:`start_at`."""
        return name in self._spread_started

    @torch.no_grad()
    def scale_change(self) -> dict[str, float]:
        """How far each site's scales, or concentrations, have moved: the root mean square of log(now / initial)."""
        self._require_setup("scale_change")
        result = {}
        for name, initial in self._initial_spreads.items():
            spread = self._families[name].spread(**self._parameters_of(name))
            assert spread is not None
            result[name] = float((spread / initial.to(spread.device)).log().square().mean().sqrt())
        return result

    def chosen_families(self) -> dict[str, Family]:
        """The family of each site by name; none before the guide has its parameters."""
        return dict(self._families)

    def point_sites(self) -> list[str]:
        """The sites whose posterior is a single value."""
        self._require_setup("point_sites")
        return [name for name, family in self._families.items() if family.is_point]

    @torch.no_grad()
    def load_means(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> MissingMeans:
        """Start the means at the values of a trained network; the scales stay.

        :param state_dict: values by site name, such as ``net.state_dict()``; names that are no site are passed over.
        :param bool strict: whether a site without a value is an error.
        :returns: the sites without a value.
        :raises ValueError: naming the site, for a missing value (if strict) or a wrong shape.
        """
        self._require_setup("load_means")
        missing = [name for name in self._site if name not in state_dict]
        if strict and missing:
            raise ValueError(f"load_means: no value for the sites {missing}; strict=False leaves these as they are")
        for name, site in self._site.items():
            if name not in missing:
                value = state_dict[name]
                target = self._trained("loc", name)
                value = value if site.transform is None else site.transform.inv(value)
                if value.shape != target.shape:
                    raise ValueError(
                        f"load_means: site '{name}' has shape {tuple(target.shape)}, "
                        f"its value in state_dict {tuple(value.shape)}"
                    )
                target.copy_(value)
        return MissingMeans(missing)

    def loc_scale_means(self) -> dict[str, Tensor]:
        """Copies of the means of real-valued sites with a location and a scale, which :meth:`set_stddevs` can set."""
        self._require_setup("loc_scale_means")
        return {
            name: self._trained("loc", name).detach().clone()
            for name, family in self._families.items()
            if isinstance(family, LocScale) and self._site[name].transform is None
        }

    @torch.no_grad()
    def set_stddevs(self, stddevs: Mapping[str, Tensor]) -> None:
        """Set the marginal standard deviations of some of the sites in :meth:`loc_scale_means`.

        :param stddevs: tensors by site that broadcast to the site's shape.
        :raises ValueError: naming the site, for a number that is not positive and finite, or for another shape.
        """
        for name, stddev in stddevs.items():
            family, target = self._families[name], self._trained("scale", name)
            assert isinstance(family, LocScale)
            if not bool(((stddev > 0) & stddev.isfinite()).all()):
                raise ValueError(f"scales must be positive and finite, got others at site '{name}'")
            try:
                scale = family.scale_of(self._site[name], stddev).to(target).expand(target.shape)
            except RuntimeError as error:
                raise ValueError(
                    f"scales must broadcast to site '{name}' of shape {tuple(target.shape)}, got shape "
                    f"{tuple(stddev.shape)}"
                ) from error
            target.copy_(transform_to(family.scale_constraint).inv(scale))

    def _trained(self, parameter: str, name: str) -> Tensor:
        """The unconstrained tensor that is trained."""
        tensor: Tensor = attrgetter(f"{self._places[name]}_unconstrained")(getattr(self, f"{parameter}s"))
        return tensor

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As in torch; the guide must have its parameters, from :meth:`setup` or a first run."""
        self._require_setup("load_state_dict")
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def __getstate__(self) -> dict[str, Any]:
        # Pyro's own method sets the model of the *original* to None.
        state = self.__dict__.copy()
        state["_model"] = None
        state["master"] = None
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> "AutoPerSite":
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        # The copy guides the same model; a file cannot hold it, but a copy in memory can.
        object.__setattr__(new, "_model", self._model)
        return new


def _init_latent(init_loc_fn: Callable[..., Any], site: Mapping[str, Any]) -> Any:
    return site["fn"].sample() if is_target(site) else init_loc_fn(site)


def places(names: Collection[str]) -> dict[str, str]:
    """The path of each site's parameters below ``locs``, ``scales``, ...: its name, or ``<name>.own`` where needed.

    A module cannot also be a parameter, so with a site ``w.lam`` the parameters of ``w`` are inside the module ``w``.
    """
    above = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
    return {name: _below(name, names) if name in above else name for name in names}


def _below(name: str, names: Collection[str]) -> str:
    path = f"{name}.own"
    while any(other == path or other.startswith(f"{path}.") for other in names):
        path += "_"
    return path
