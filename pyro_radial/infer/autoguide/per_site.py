# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The base class of all guides: one posterior per latent site, of a chosen family, on the site's own support."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.distributions.transforms import SoftplusTransform
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.nn import PyroModule
from torch import Tensor
from torch.distributions import Distribution, transform_to

from pyro_radial._pyro.checks import (
    check_choice,
    optional,
    positive_float,
    proper_fraction,
    warn,
)
from pyro_radial._pyro.compat import (
    deep_setattr,
    is_subsample,
    prototype_hide_fn,
    tree_leaves,
    tree_map,
)
from pyro_radial._pyro.naming import UniquelyNamed
from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial._pyro.types import Message, Model, Node
from pyro_radial.infer.autoguide.families.family import (
    Families,
    Family,
    LocScale,
    Site,
    choose_families,
)
from pyro_radial.infer.autoguide.initial_states import (
    InitialStates,
    find_missing,
    unconstrain_mean,
    unconstrain_stddev,
)
from pyro_radial.infer.autoguide.initialization import (
    init_by,
    init_to_network,
)
from pyro_radial.nn.likelihoods import is_target
from pyro_radial.nn.local.unit_noise import ASKS, OFFER, PARAMETER
from pyro_radial.nn.modules import keeping_buffers
from pyro_radial.poutine.local_reparameterization import LocalReparameterizationMessenger

# Measured (benchmarks/PAST.md): with 0.003 the best on average, and better on two of three data sets.
NETWORK_INIT_STDDEV = 0.01
# The start of Pyro's AutoNormal.
INIT_STDDEV = 0.1

#: What scales are trained for: the loss, or the score of predictions.
Widths = Literal["elbo", "predictive"]
ELBO_WIDTHS: Widths = "elbo"


class MissingMeans(NamedTuple):
    """The sites for which :meth:`AutoPerSite.load_means` found no value."""

    missing_sites: list[str]


class LocScaleSite(NamedTuple):
    """A site with a location and a scale, and both parameters in unconstrained space, as they are trained."""

    family: LocScale
    site: Site
    loc: Tensor
    scale: Tensor

    def constrained_scale(self) -> tuple[Tensor, Tensor]:
        """Return the scales as the distribution takes them, and the derivative of ``scale`` by their logarithms."""
        to_scale = transform_to(self.family.scale_constraint)
        scale = to_scale(self.scale)
        if isinstance(to_scale, SoftplusTransform):
            return scale, scale * (1.0 + self.scale.exp().reciprocal())
        return scale, scale * torch.exp(-to_scale.log_abs_det_jacobian(self.scale, scale))


class AutoPerSite(UniquelyNamed, AutoGuide):
    """Base class of guides with an independent posterior for each latent site.

    Each site is sampled *directly* from a distribution on its support. An auxiliary normal plus a ``Delta``, as in
    Pyro's ``AutoNormal``, loses every analytic KL, and on constrained sites makes
    :class:`~pyro.infer.TraceMeanField_ELBO` wrong by the log-Jacobian.

    A subclass defines :meth:`default_family`. Parameters are ``<plural>.<site>``, such as ``locs.w`` and ``scales.w``;
    if there is another site ``w.lam``, the parameters of ``w`` are ``locs.w.own`` and ``scales.w.own``.

    :param model: a Pyro model.
    :param init_loc_fn: a per-site init function, as in :mod:`pyro.infer.autoguide.initialization`.
    :param float init_stddev: the initial marginal standard deviation of every element in unconstrained space; by
        default 0.01 at sites of a network, which carry their initial value, and 0.1 at others.
    :param str widths: "elbo" or "predictive", as in :class:`~pyro_radial.AutoMeanField`.
    :param families: other families for some sites, as in :class:`~pyro_radial.infer.autoguide.AutoRadial`.
    :param create_plates: an optional function of the model's arguments that returns the plates to subsample with.
    :raises ValueError: for an ``init_stddev`` that is not positive and finite; once the model has run, for a discrete
        latent site, a family that does not fit its site, a key of ``families`` without a site, or two patterns for one
        site.
    """

    def __init__(
        self,
        model: Model,
        *,
        init_loc_fn: Callable[..., object] = init_to_network,
        init_stddev: float | None = None,
        widths: Widths = ELBO_WIDTHS,
        families: Families | None = None,
        create_plates: Callable[..., object] | None = None,
    ) -> None:
        self.init_loc_fn = init_loc_fn
        initialize = InitMessenger(
            lambda site: site["fn"].sample() if is_target(site) else init_by(init_loc_fn, site)
        )
        super().__init__(initialize(model), create_plates=create_plates)
        self._init_stddev = optional(positive_float, "init_stddev", init_stddev)
        check_choice("widths", widths, get_args(Widths))
        #: Whether a site has one scale, which is not trained by the loss.
        self.has_shared_scales = widths != ELBO_WIDTHS
        self._user_families = families
        # The plates with rows that are given to the model.
        self._given_rows: set[str] = set()
        self._initial_states = InitialStates()
        # By site, empty before the guide has parameters: the family; the shape and transform; the path of the
        # parameters below ``locs``, ``scales``, ...; and the names of the parameters, such as ``loc``.
        self._families: dict[str, Family] = {}
        self._site: dict[str, Site] = {}
        self._paths: dict[str, str] = {}
        self._parameter_names: dict[str, tuple[str, ...]] = {}

    def default_family(self, name: str, site: Node) -> Family:
        """Return the family of a site that ``families`` leaves open; ``site`` is a node of Pyro's trace."""
        raise NotImplementedError(f"{type(self).__name__} must define default_family(name, site)")

    def _prototype_hide_fn(self, msg: Any) -> bool:
        # Pyro shows it each site of the model, also a plate's choice of rows.
        if is_subsample(msg) and msg["value"] is not None:
            self._given_rows.add(msg["name"])
        # Without targets the model samples them to predict; they are not latent sites.
        return prototype_hide_fn(msg) or is_target(msg)

    def setup(self, *args: object, **kwargs: object) -> None:
        """Make the parameters by running the model once on these arguments, unless they exist.

        Afterwards an optimizer, ``load_state_dict`` and ``DistributedDataParallel`` can use the guide. Buffers of the
        model, such as running statistics of batch norm, do not change.
        """
        if self.prototype_trace is not None:
            return
        try:
            with one_at_a_time():
                self._setup_prototype(*args, **kwargs)
        except Exception:
            # A guide that failed half-way has no parameters.
            self.prototype_trace = None
            raise

    def _setup_prototype(self, *args: object, **kwargs: object) -> None:
        # A network in train mode keeps its running statistics.
        with keeping_buffers(poutine.unwrap(self.model)):
            super()._setup_prototype(*args, **kwargs)
        if (self if self.master is None else self.master()).create_plates is None:
            self._check_rows(args, kwargs)
        sites = dict(self._latent_sites())
        self._paths = parameter_paths(sites)
        by_site = choose_families(self._user_families, sites)
        for name, site in sites.items():
            self._make_parameters(name, site, by_site.get(name) or self.default_family(name, site))
            # Only the shape is needed from here on; this saves a copy of a network's weights.
            site["value"] = site["value"].detach().to("meta")
        # Last, so that a failed setup can be repeated from the same start.
        self._initial_states.give({}, take_widths=False)

    def _check_rows(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Raise a ValueError if the guide draws other rows of a plate than the model is given; warn if it may."""
        lengths = {len(leaf) for leaf in tree_leaves((args, kwargs)) if getattr(leaf, "shape", ())}
        for name, site in self._latent_sites():
            for frame in site["cond_indep_stack"]:
                text = (
                    f"{type(self).__name__}: site '{name}' is in the plate '{frame.name}', and the guide draws "
                    f"{frame.size} of its {frame.full_size} rows by itself. To train on given rows, pass their "
                    "numbers, and let model and guide make the same plate: create_plates=lambda rows, ...: "
                    f"pyro.plate('{frame.name}', {frame.full_size}, subsample=rows, dim={frame.dim}), a function of "
                    "the model's arguments"
                )
                if frame.name in self._given_rows and frame.size != frame.full_size:
                    raise ValueError(text)
                # Without row numbers, an argument with as many rows as the plate draws can only be the batch.
                if frame.size in lengths and frame.full_size not in lengths:
                    warn(text)

    def _make_parameters(self, name: str, prior_site: Node, family: Family) -> None:
        """Make the parameters of a site where they start, and keep what is known about the site."""
        of_network = "initial_value" in prior_site["infer"]
        default = NETWORK_INIT_STDDEV if of_network else INIT_STDDEV
        transform = family.transform(prior_site)
        site, value = Site.of(name, prior_site, transform, self._init_stddev or default)
        if not torch.isfinite(value).all():
            raise ValueError(
                f"{type(self).__name__}: the initial value of site '{name}' is not finite"
            )
        parameters = self._initial_states.make_parameters(family, site, value)
        for parameter, initial in parameters.items():
            deep_setattr(self._container(parameter, name), self._paths[name], initial)
        self._families[name] = family
        self._site[name] = site
        self._parameter_names[name] = tuple(parameters)
        if self.has_shared_scales and not family.is_point:
            if not isinstance(family, LocScale) or not family.shared_scale:
                raise ValueError(
                    f"families: with widths='predictive', site '{name}' must have a family with one scale, such as "
                    f"families.Normal(shared_scale=True), got {type(family).__name__}"
                )
            self._trained_tensor("scale", name).requires_grad_(False)

    def _container(self, parameter: str, site: str) -> PyroModule:
        """Return the module that holds this parameter of all sites."""
        plural = f"{parameter}s"
        if hasattr(type(self), plural):
            raise ValueError(
                f"site '{site}': a family's parameter must not be called {parameter!r}"
            )
        if plural not in self._modules:
            setattr(self, plural, PyroModule())
        return getattr(self, plural)

    def _latent_sites(self) -> Iterator[tuple[str, Message]]:
        assert self.prototype_trace is not None
        return self.prototype_trace.iter_stochastic_nodes()

    def _parameters_of(self, name: str) -> dict[str, Tensor]:
        """Return the parameters of one site, subsampled inside a plate."""
        get_parameter = attrgetter(self._paths[name])
        return {
            parameter: get_parameter(getattr(self, f"{parameter}s"))
            for parameter in self._parameter_names[name]
        }

    def forward(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """Sample every latent site; takes the arguments of the model."""
        self.check_store()
        self.setup(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        result = {}
        for name, prior_site in self._latent_sites():
            with ExitStack() as stack:
                for frame in prior_site["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                asks = prior_site["infer"].get(ASKS)
                if asks is not None and asks(*args, **kwargs):
                    stack.enter_context(LocalReparameterizationMessenger())
                family = self._families[name]
                site = self._site[name]
                distribution = family.guide_distribution(site, **self._parameters_of(name))
                if site.transform is not None:
                    distribution = family.on_support(site, distribution)
                is_parameter = prior_site["infer"].get(PARAMETER)
                infer: Any = {OFFER: family.local_noise} if is_parameter else {}
                result[name] = pyro.sample(name, distribution, infer=infer)
        return result

    @torch.no_grad()
    def posterior(self) -> dict[str, dist.Distribution]:
        """Return the posterior as ``{site: distribution}``, on each site's support, at full plate size and detached."""
        self._require_setup("posterior")
        result: dict[str, dist.Distribution] = {}
        for name, family in self._families.items():
            parameters = tree_map(lambda value: value.detach().clone(), self._parameters_of(name))
            site = self._site[name]
            distribution = family.distribution(site, **parameters)
            if site.transform is not None:
                distribution = family.on_support(site, distribution)
            result[name] = distribution
        return result

    @torch.no_grad()
    def median(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """Return the elementwise posterior median of every site; arguments are needed only before the first run."""
        self._require_setup("median", *args, **kwargs)
        medians = {}
        for name, family in self._families.items():
            center = family.center(self._site[name], **self._parameters_of(name))
            medians[name] = self._constrain(name, center.detach().clone())
        return medians

    @torch.no_grad()
    def quantiles(
        self,
        quantiles: Sequence[float],
        *args: object,
        sites: Collection[str] | None = None,
        **kwargs: object,
    ) -> dict[str, Tensor]:
        """Return the quantiles of each element's marginal, ``{site: [len(quantiles), *shape]}``.

        :param quantiles: numbers strictly between 0 and 1.
        :param sites: the names of the sites; all by default.
        :raises ValueError: for an unknown site, or one with a transform that mixes elements, such as a simplex or a
            covariance.
        """
        self._require_setup("quantiles", *args, **kwargs)
        levels = [
            proper_fraction(f"quantiles[{index}]", level) for index, level in enumerate(quantiles)
        ]
        names = list(self._families)
        if isinstance(sites, str):
            sites = [sites]
        selected = names if sites is None else list(sites)
        if not set(selected) <= set(names):
            raise ValueError(f"sites must be among {names}, got {selected}")
        result = {}
        for name in selected:
            site = self._site[name]
            of_site = [1.0 - level for level in levels] if site.is_decreasing() else levels
            values = self._families[name].quantiles(site, of_site, **self._parameters_of(name))
            result[name] = self._constrain(name, values)
        return result

    def _constrain(self, name: str, unconstrained: Tensor) -> Tensor:
        transform = self._site[name].transform
        return unconstrained if transform is None else transform(unconstrained)

    def _require_setup(self, method: str, *args: object, **kwargs: object) -> None:
        """Set the guide up if there are arguments; raise a RuntimeError if it has no parameters then."""
        if args or kwargs:
            self.setup(*args, **kwargs)
        if self.prototype_trace is None:
            raise RuntimeError(
                f"{type(self).__name__}.{method}: the guide has no parameters yet; call guide.setup(*args) with the "
                "model's arguments first"
            )

    def start_at(self, distributions: Mapping[str, Distribution], *, scales: bool = True) -> None:
        """Start sites at the mean and the elementwise standard deviation of distributions on their support.

        Both are taken in unconstrained space; if the distribution is not a pushforward from there, only its mean is
        used. :class:`~pyro_radial.PriorChain` starts its guides at the chained prior this way.

        :param distributions: distributions by site name; other sites start as usual.
        :param bool scales: whether to take over the width of the distributions too.
        :raises RuntimeError: if the guide already has parameters.
        :raises ValueError: at setup, naming the site, for a distribution of another shape.
        """
        if self.prototype_trace is not None:
            raise RuntimeError(f"{type(self).__name__}.start_at: the guide already has parameters")
        self._initial_states.give(distributions, take_widths=scales)

    def scales_start_at_distribution(self, name: str) -> bool:
        """Return whether a site took over the width of a distribution given to :meth:`start_at`."""
        return name in self._initial_states.with_given_width

    @torch.no_grad()
    def scale_change(self) -> dict[str, float]:
        """Return the root mean square of log(current / initial) of each site's scales or concentrations."""
        self._require_setup("scale_change")
        result = {}
        for name, initial in self._initial_states.spreads.items():
            spread = self._families[name].spread(**self._parameters_of(name))
            assert spread is not None
            result[name] = float((spread / initial.to(spread.device)).log().square().mean().sqrt())
        return result

    def chosen_families(self) -> dict[str, Family]:
        """Return the family of each site by name; empty before the guide has parameters."""
        return dict(self._families)

    def point_sites(self) -> list[str]:
        """Return the sites with a point estimate."""
        self._require_setup("point_sites")
        return [name for name, family in self._families.items() if family.is_point]

    @torch.no_grad()
    def load_means(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> MissingMeans:
        """Set the means to the values of a trained network; the scales do not change.

        :param state_dict: values by site name, such as ``net.state_dict()``. Other parameters and buffers of a
            network must be equal to the model's, which do not change.
        :param bool strict: whether a site without a value is an error, and a value without a site if the model is not a
            module with a :class:`~pyro_radial.BayesianModule`.
        :returns: the sites without a value.
        :raises ValueError: naming the site, for a missing or unknown value (if strict), a wrong shape, other values of
            what the network has besides its sites, such as running statistics, or a value that is NaN or outside the
            interior of the site's support.
        """
        self._require_setup("load_means")
        model = poutine.unwrap(self.model) if self._model else None
        missing = find_missing(model, self._site, state_dict, strict)
        # All are checked before the first one changes.
        means = {}
        for name, site in self._site.items():
            if name not in missing:
                shape = self._trained_tensor("loc", name).shape
                means[name] = unconstrain_mean(site, shape, state_dict[name])
        for name, mean in means.items():
            self._trained_tensor("loc", name).copy_(mean)
        return MissingMeans(missing)

    def loc_scale_sites(self) -> dict[str, LocScaleSite]:
        """Return the sites with a location and a scale, and their parameters."""
        self._require_setup("loc_scale_sites")
        result = {}
        for name, family in self._families.items():
            if isinstance(family, LocScale):
                loc = self._trained_tensor("loc", name)
                scale = self._trained_tensor("scale", name)
                result[name] = LocScaleSite(family, self._site[name], loc, scale)
        return result

    @torch.no_grad()
    def set_stddevs(self, stddevs: Mapping[str, Tensor]) -> None:
        """Set the marginal standard deviations of some of the sites in :meth:`loc_scale_sites`, each broadcast.

        :raises ValueError: naming the site, for a number that is not positive and finite, or for another shape.
        """
        for name, stddev in stddevs.items():
            family = self._families.get(name)
            if not isinstance(family, LocScale):
                raise ValueError(
                    f"stddevs must name sites with a location and a scale, got {name!r}"
                )
            target = self._trained_tensor("scale", name)
            target.copy_(unconstrain_stddev(family, self._site[name], target, stddev))

    def _trained_tensor(self, parameter: str, name: str) -> Tensor:
        """Return the unconstrained tensor that is trained."""
        return attrgetter(f"{parameter}s.{self._paths[name]}_unconstrained")(self)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state as in torch; the guide must have its parameters from :meth:`setup` or a first run."""
        self._require_setup("load_state_dict")
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def __getstate__(self) -> dict[str, Any]:
        # Pyro's own method would set the model of the *original* to None.
        return {**self.__dict__, "_model": None, "master": None}

    def __deepcopy__(self, memo: dict[int, object]) -> "AutoPerSite":
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        # A copy in memory keeps the model, which a file cannot hold.
        object.__setattr__(twin, "_model", self._model)
        return twin


def parameter_paths(names: Collection[str]) -> dict[str, str]:
    """Return the path of each site's parameters below ``locs``, ``scales``, ...: its name, or ``<name>.own``.

    A module cannot also be a parameter, so with a site ``w.lam`` the parameters of ``w`` are inside the module ``w``,
    at ``w.own``.
    """
    above: set[str] = set()
    for name in names:
        for end, letter in enumerate(name):
            if letter == ".":
                above.add(name[:end])
    paths = {name: name for name in names}
    for name in above & paths.keys():
        paths[name] = f"{name}.own"
        while any(
            site_name == paths[name] or site_name.startswith(f"{paths[name]}.")
            for site_name in names
        ):
            paths[name] += "_"
    return paths
