# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What all guides of the library share: one distribution per latent site, sampled directly on the site's support."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.initialization import InitMessenger
from torch import Tensor
from torch.distributions import Transform, biject_to

from pyro_radial._compat import helpful_support_errors, periodic_repeat, prototype_hide_fn
from pyro_radial._naming import UniquelyNamed
from pyro_radial.distributions.constraints import is_on_sphere
from pyro_radial.infer.autoguide.initialization import has_real_support
from pyro_radial.nn.likelihood import is_target


class AutoPerSite(UniquelyNamed, AutoGuide):
    """Base of the guides: an independent posterior for each latent site.

    Each site is sampled *directly* from a distribution on its support. An auxiliary normal plus a ``Delta``, as in
    Pyro's ``AutoNormal``, loses every analytic KL, and on constrained sites makes
    :class:`~pyro.infer.TraceMeanField_ELBO` wrong by the log-Jacobian.

    A subclass says what parameters a site has (:meth:`_init_site`, :meth:`_site_parameters`), what distribution they
    make (:meth:`_site_posterior`, in unconstrained space) and where its center is (:meth:`_site_center`).

    :param model: a Pyro model.
    :param init_loc_fn: a per-site init function, as in :mod:`pyro.infer.autoguide.initialization`.
    :param create_plates: an optional function of the model's arguments that returns the plates to subsample with.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        init_loc_fn: Callable[..., Any],
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        self.init_loc_fn = init_loc_fn
        super().__init__(InitMessenger(partial(_init_latent, init_loc_fn))(model), create_plates=create_plates)
        self._transforms: dict[str, Transform | None] = {}

    @staticmethod
    def _prototype_hide_fn(msg: Any) -> bool:
        # Without targets the model samples them, to predict; they are no latent site even then.
        return prototype_hide_fn(msg) or is_target(msg)

    def _init_site(self, name: str, unconstrained: Tensor, event_dim: int) -> None:
        """Make the parameters of one site from its full-size initial value."""
        raise NotImplementedError

    def _site_parameters(self, name: str) -> tuple[Tensor, ...]:
        """The parameters of one site, for :meth:`_site_posterior`."""
        raise NotImplementedError

    def _site_posterior(self, name: str, *parameters: Tensor) -> dist.Distribution:
        """The distribution of the unconstrained value of one site."""
        raise NotImplementedError

    def _site_center(self, name: str) -> Tensor:
        """The median of the unconstrained value of one site, at full size."""
        raise NotImplementedError

    def _guide_distribution(self, name: str, *parameters: Tensor) -> dist.Distribution:
        """The distribution that is sampled in the guide, where it differs from the posterior in how it is evaluated."""
        return self._site_posterior(name, *parameters)

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """Make the parameters now, by running the model once on these arguments; nothing where they exist.

        After this an optimizer, ``load_state_dict`` and ``DistributedDataParallel`` can take the guide.
        """
        if self.prototype_trace is not None:
            return
        try:
            self._setup_prototype(*args, **kwargs)
        except Exception:
            # A guide that failed half-way must not pass for one that has its parameters.
            self.prototype_trace = None
            raise

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        for name, site in self._sites():
            self._transforms[name] = self._transform_of(site)
            unconstrained = site["value"].detach()
            transform = self._transforms[name]
            if transform is not None:
                unconstrained = transform.inv(unconstrained)
            if not torch.isfinite(unconstrained).all():
                raise ValueError(f"{type(self).__name__}: the initial value of site '{name}' is not finite")
            # A transform may change the number of event dimensions, as the one of a covariance does.
            event_dim = site["fn"].event_dim + unconstrained.dim() - site["value"].dim()
            self._init_site(name, _repeat_to_full_size(unconstrained, site, event_dim), event_dim)
            # Only the shape is of use from here on, and a copy of a network's weights is worth saving.
            site["value"] = site["value"].detach().to("meta")

    def _transform_of(self, site: Mapping[str, Any]) -> Transform | None:
        """The map from where a site's distribution is made to the site's support, or None where that is the support."""
        if is_on_sphere(site["fn"].support):
            raise ValueError(
                f"{type(self).__name__}: site '{site['name']}' is a direction, which no transform leads to; "
                "AutoRadialDirectional has a distribution for it"
            )
        return None if has_real_support(site) else _site_transform(site)

    def _sites(self) -> Iterator[tuple[str, Any]]:
        assert self.prototype_trace is not None
        return self.prototype_trace.iter_stochastic_nodes()

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every latent site; the same arguments as the model."""
        self.setup(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        result = {}
        for name, site in self._sites():
            with ExitStack() as stack:
                for frame in site["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                distribution = self._guide_distribution(name, *self._site_parameters(name))
                result[name] = pyro.sample(name, self._on_support(name, distribution))
        return result

    def _on_support(self, name: str, distribution: Any) -> Any:
        transform = self._transforms[name]
        if transform is None:
            return distribution
        # The cache makes the inverse of a sample exact, where rounding would move it.
        return dist.TransformedDistribution(distribution, [transform.with_cache()], validate_args=False)

    @torch.no_grad()
    def posterior(self) -> dict[str, dist.Distribution]:
        """``{site: distribution}`` on each site's support, at full plate size, detached from training."""
        self._require_setup("posterior")
        result = {}
        for name in self._transforms:
            parameters = [p.detach().clone() for p in self._site_parameters(name)]
            result[name] = self._on_support(name, self._site_posterior(name, *parameters))
        return result

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The posterior median of every site, elementwise; arguments are needed only before the first run."""
        self._require_setup("median", *args, **kwargs)
        return {name: self._constrain(name, self._site_center(name).detach().clone()) for name in self._transforms}

    @torch.no_grad()
    def quantiles(self, quantiles: Sequence[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Quantiles of each element's marginal, ``{site: [len(quantiles), *shape]}``.

        :param quantiles: numbers strictly between 0 and 1.
        :raises ValueError: for a site whose transform mixes elements (a simplex, a covariance), since the
            marginals of its elements are then not images of the marginals in unconstrained space.
        """
        self._require_setup("quantiles", *args, **kwargs)
        levels = [float(q) for q in quantiles]
        if not all(0.0 < q < 1.0 for q in levels):
            raise ValueError(f"quantiles must lie strictly between 0 and 1, got {levels}")
        return {name: self._site_quantiles(name, levels) for name in self._transforms}

    def _site_quantiles(self, name: str, levels: list[float]) -> Tensor:
        transform = self._transforms[name]
        if transform is not None:
            while isinstance(transform, torch.distributions.IndependentTransform):
                transform = transform.base_transform
            if transform.domain.event_dim or transform.codomain.event_dim:
                raise ValueError(
                    f"site '{name}' is transformed by {type(transform).__name__}, which mixes its elements: "
                    "they have no closed-form marginal quantiles; draw samples instead"
                )
            if transform.sign < 0:
                levels = [1.0 - q for q in levels]
        return self._constrain(name, self._unconstrained_quantiles(name, levels))

    def _unconstrained_quantiles(self, name: str, levels: list[float]) -> Tensor:
        raise NotImplementedError

    def _constrain(self, name: str, unconstrained: Tensor) -> Tensor:
        transform = self._transforms[name]
        return unconstrained if transform is None else transform(unconstrained)

    def _require_setup(self, method: str, *args: Any, **kwargs: Any) -> None:
        if self.prototype_trace is None and (args or kwargs):
            self.setup(*args, **kwargs)
        if self.prototype_trace is None:
            raise RuntimeError(
                f"{type(self).__name__}.{method}: the guide has no parameters yet; call guide.setup(*args) with "
                "the model's arguments first"
            )

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


def _site_transform(site: Mapping[str, Any]) -> Transform:
    with helpful_support_errors(site):
        return biject_to(site["fn"].support)


def _repeat_to_full_size(value: Tensor, site: Mapping[str, Any], event_dim: int) -> Tensor:
    """The value of a subsampled site repeated to the size of its plates, so that every row has parameters."""
    for frame in site["cond_indep_stack"]:
        full_size = frame.full_size or frame.size
        if full_size != frame.size:
            value = periodic_repeat(value, full_size, frame.dim - event_dim)
    return value.contiguous()
