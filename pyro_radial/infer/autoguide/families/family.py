# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The base classes of posterior families, and the choice of a family for each site."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions import TorchDistribution, constraints
from pyro.nn.module import PyroParam
from torch import Tensor
from torch.distributions import Distribution, IndependentTransform, Transform, biject_to

from pyro_radial._pyro.checks import optional, positive_float
from pyro_radial._pyro.compat import helpful_support_errors, periodic_repeat
from pyro_radial._pyro.types import Node
from pyro_radial.distributions.constraints import is_on_sphere, is_real
from pyro_radial.distributions.moments import moments
from pyro_radial.distributions.numerics import to_accumulation_dtype
from pyro_radial.distributions.wrappers import Transformed, leaf
from pyro_radial.nn.local.unit_noise import UnitNoise, unit_noise


@dataclass(frozen=True)
class Site:
    """A latent site as a family sees it, in the space where the family makes its distribution.

    :param str name: the name of the site.
    :param torch.Size shape: the shape of its value, with plates at full size.
    :param int event_dim: the number of dimensions of one event.
    :param float init_stddev: the initial marginal standard deviation, unless the family has its own.
    :param transform: the map from that space to the site's support; None if they are equal.
    """

    name: str
    shape: torch.Size
    event_dim: int
    init_stddev: float
    transform: Transform | None = None

    @classmethod
    def of(
        cls,
        name: str,
        prior_site: Node,
        transform: Transform | None,
        init_stddev: float,
    ) -> tuple["Site", Tensor]:
        """Return the site of a trace of the model, and its unconstrained initial value with plates at full size."""
        value = prior_site["value"].detach()
        unconstrained = value if transform is None else transform.inv(value)
        # A transform may change the number of event dimensions, as the one of a covariance does.
        event_dim = prior_site["fn"].event_dim + unconstrained.dim() - value.dim()
        for frame in prior_site["cond_indep_stack"]:
            full_size = frame.full_size or frame.size
            if full_size != frame.size:
                unconstrained = periodic_repeat(unconstrained, full_size, frame.dim - event_dim)
        unconstrained = unconstrained.contiguous()
        return cls(name, unconstrained.shape, event_dim, init_stddev, transform), unconstrained

    def is_decreasing(self) -> bool:
        """Return whether the transform reverses the order of values.

        :raises ValueError: naming the site, if the transform mixes elements.
        """
        transform = self.transform
        while isinstance(transform, IndependentTransform):
            transform = transform.base_transform
        if transform is None:
            return False
        if transform.domain.event_dim or transform.codomain.event_dim:
            raise ValueError(
                f"site '{self.name}' is transformed by {type(transform).__name__}, which mixes its elements: "
                "they have no closed-form marginal quantiles; name other sites with sites=[...], or draw samples"
            )
        return bool(transform.sign < 0)


class Family:
    """Base class of posterior families.

    The guide keeps the parameter ``scale`` of the site ``w`` as ``guide.scales.w``. A family holds only settings, so
    one object serves any number of sites and guides.

    Example::

        >>> import pyro, pyro.distributions as dist
        >>> from pyro_radial import AutoRadial
        >>> from pyro_radial.infer.autoguide import families
        >>> class Laplace(families.LocScale):
        ...     def distribution(self, site, *, loc, scale):
        ...         return dist.Laplace(loc, scale / 2**0.5, validate_args=False).to_event(site.event_dim)
        >>> def model():
        ...     pyro.sample("w", dist.Normal(0., 1.).expand([3]).to_event(1))
        >>> guide = AutoRadial(model, families={"w": Laplace()})
        >>> guide.setup()
        >>> guide.posterior()["w"].stddev
        tensor([0.1000, 0.1000, 0.1000])
    """

    #: Whether the posterior is a single value, which cannot be a later prior.
    is_point = False

    def transform(self, site: Node) -> Transform | None:
        """Return the map from the distribution's space to the support of a Pyro site; None if they are equal.

        :raises ValueError: naming the site and its support, if the family does not fit.
        """
        support = site["fn"].support
        if is_on_sphere(support):
            kind = type(leaf(site["fn"])).__name__
            raise ValueError(
                f"{type(self).__name__}: site '{site['name']}' is a direction ({kind}), which no transform leads to. "
                "Use AutoRadialDirectional, or poutine.reparam with ProjectedNormalReparam"
            )
        if is_real(support):
            return None
        with helpful_support_errors(site):
            return biject_to(support)

    def initial(self, site: Site, value: Tensor) -> dict[str, PyroParam]:
        """Return the parameters of a site that starts at ``value``, ``[*site.shape]``; each tensor a copy."""
        raise NotImplementedError(f"{type(self).__name__} must define initial(site, value)")

    def initial_at(
        self, site: Site, value: Tensor, distribution: Distribution, spread: bool
    ) -> dict[str, PyroParam]:
        """Return the parameters of a site that starts at a distribution on its support.

        :param Tensor value: the start without the distribution; gives shape, dtype and device.
        :param distribution: a distribution, such as the posterior of an earlier task.
        :param bool spread: whether to take over its width too.
        :raises ValueError: naming the site, for a distribution of another shape.
        """
        return self.initial(site, value)

    def distribution(self, site: Site, **parameters: Tensor) -> TorchDistribution:
        """Return the posterior in the space of ``Site.shape``, from the parameters that :meth:`initial` names."""
        raise NotImplementedError(f"{type(self).__name__} must define distribution(site, ...)")

    def guide_distribution(self, site: Site, **parameters: Tensor) -> TorchDistribution:
        """Return the distribution to sample from in a guide, if it is evaluated differently from the posterior."""
        return self.distribution(site, **parameters)

    def on_support(self, site: Site, distribution: Distribution) -> TorchDistribution:
        """Return the distribution on the support of a site with a transform."""
        assert site.transform is not None
        # The cache makes the inverse of a sample exact, where rounding would move it.
        return Transformed(distribution, [site.transform.with_cache()], validate_args=False)

    def local_noise(self, name: str, distribution: Distribution) -> UnitNoise | None:
        """Return the noise of a network's weights for :func:`~pyro_radial.poutine.local_reparameterization`.

        :param str name: the name of the site.
        :param distribution: the posterior on the site's support.
        :returns: the noise, or None for a posterior without noise.
        :raises ValueError: naming the site, if the posterior is neither normal nor radial.
        """
        return unit_noise(name, distribution)

    def center(self, site: Site, **parameters: Tensor) -> Tensor:
        """Return the median of each element, ``[*site.shape]``."""
        return parameters["loc"]

    def quantiles(self, site: Site, levels: Sequence[float], **parameters: Tensor) -> Tensor:
        """Return the quantiles of each element's marginal, ``[len(levels), *site.shape]``.

        :raises ValueError: naming the site, if they have no closed form.
        """
        raise ValueError(
            f"site '{site.name}' has a {type(self).__name__} posterior, without closed-form quantiles"
        )

    def spread(self, **parameters: Tensor) -> Tensor | None:
        """Return the width of the posterior, which shows whether training moved it; None for a point."""
        return parameters.get("scale")


class LocScale(Family):
    """Base class of families with parameters ``loc`` (real) and ``scale`` (positive).

    Both have the site's shape. With ``shared_scale`` the dimensions of an event have size one in ``scale``: ``[1, 1]``
    for a weight matrix.

    A subclass defines ``distribution``, and :meth:`scale_of` if the scale is not the marginal standard deviation.

    :param float init_stddev: the initial marginal standard deviation of every element in unconstrained space; the
        guide's by default.
    :param bool shared_scale: one scale for all elements of an event, or one for each element.
    :raises ValueError: if it is not positive and finite.
    """

    #: The constraint of scales; the learning rate of scales applies to its argument.
    scale_constraint: Any = constraints.softplus_positive

    def __init__(self, init_stddev: float | None = None, *, shared_scale: bool = False) -> None:
        self.init_stddev = optional(positive_float, "init_stddev", init_stddev)
        self.shared_scale = shared_scale

    def scale_of(self, site: Site, stddev: Any) -> Any:
        """Return the scale with this marginal standard deviation."""
        return stddev

    def initial_scale(self, site: Site) -> float:
        """Return the initial scale of every element."""
        return self.scale_of(site, self.init_stddev or site.init_stddev)

    def initial(self, site: Site, value: Tensor) -> dict[str, PyroParam]:
        """Return the value, and the initial scale."""
        shared_dims = site.event_dim if self.shared_scale else 0
        shape = site.shape[: len(site.shape) - shared_dims] + (1,) * shared_dims
        return self.parameters_at(
            site, value.clone(), value.new_full(shape, self.initial_scale(site))
        )

    def initial_at(
        self, site: Site, value: Tensor, distribution: Distribution, spread: bool
    ) -> dict[str, PyroParam]:
        """Return parameters at the mean and the elementwise standard deviation of a distribution, if they are known."""
        loc, stddev = start_at(site, value, distribution)
        if stddev is None or not spread:
            return self.initial(site, loc)
        return self.parameters_at(
            site, loc, self.scale_at(site, torch.empty_like(value).copy_(stddev))
        )

    def scale_at(self, site: Site, stddevs: Tensor) -> Tensor:
        """Return the scale with these standard deviations, ``[*site.shape]``.

        A shared one has the least KL to independent normals with these: its precision is the mean of theirs.
        """
        if self.shared_scale and site.event_dim:
            event = tuple(range(-site.event_dim, 0))
            precision = to_accumulation_dtype(stddevs).square().reciprocal()
            stddevs = precision.mean(event, keepdim=True).rsqrt().to(stddevs)
        return self.scale_of(site, stddevs)

    def parameters_at(self, site: Site, loc: Tensor, scale: Tensor) -> dict[str, PyroParam]:
        """Return the parameters with these values."""
        # A plate selects the rows of a mini-batch by the event_dim of a parameter.
        return {
            "loc": PyroParam(loc, constraints.real, site.event_dim),
            "scale": PyroParam(scale, self.scale_constraint, site.event_dim),
        }


#: Families by site names or patterns, or a function of a site's name and the site.
Families = Mapping[str, Family] | Callable[[str, Node], Family | None]


def choose_families(
    families: Families | None, sites: Mapping[str, Node]
) -> dict[str, Family | None]:
    """Return the user's families by site; sites that the user leaves open have None or are not in it.

    :param families: a mapping from site names, or regular expressions searched in them, to families; a name goes before
        a pattern. Or a function of a site's name and the site that returns a family or None.
    :param sites: Pyro's sites by name.
    :raises ValueError: naming the key or the site, for a key without a site, two patterns for one site, an invalid
        pattern, or a value that is not a family.
    """
    if families is None:
        return {}
    if callable(families):
        by_site = {name: families(name, site) for name, site in sites.items()}
    else:
        by_site = _choose_by_key(families, sites)
    for name, family in by_site.items():
        if not isinstance(family, Family | None):
            raise ValueError(
                f"families: the value for site '{name}' must be a Family, got {type(family).__name__}"
            )
    return by_site


def _choose_by_key(
    families: Mapping[str, Family], sites: Mapping[str, Node]
) -> dict[str, Family | None]:
    """Return the families of a mapping by site; a name goes before a pattern."""
    keys_by_site: dict[str, list[str]] = {}
    for key in families:
        names = [key] if key in sites else _match_sites(key, sites)
        if not names:
            raise ValueError(f"families: {key!r} names no site and matches none of {sorted(sites)}")
        for name in names:
            if name == key or name not in families:
                keys_by_site.setdefault(name, []).append(key)
    for name, keys in keys_by_site.items():
        if len(keys) > 1:
            raise ValueError(
                f"families: site '{name}' matches {len(keys)} patterns, {keys}; let only one match it"
            )
    return {name: families[keys[0]] for name, keys in keys_by_site.items()}


def _match_sites(key: str, sites: Collection[str]) -> list[str]:
    """Return the sites whose names match a regular expression."""
    try:
        pattern = re.compile(key)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"families: {key!r} is neither a site nor a valid regular expression ({error})"
        ) from error
    return [name for name in sites if pattern.search(name)]


def start_at(site: Site, value: Tensor, distribution: Distribution) -> tuple[Tensor, Tensor | None]:
    """Return a distribution's unconstrained mean, or else the value, and its elementwise standard deviation if known.

    The mean is a copy: training changes parameters in place, which must not move the distribution's own tensors.
    """
    mean, stddev = moments(distribution, site.transform)
    loc = value.clone()
    if mean is not None:
        try:
            loc.copy_(mean)
        except RuntimeError:
            raise ValueError(
                f"start_at: the distribution of site '{site.name}' has shape {tuple(mean.shape)}, which does not "
                f"expand to the site's {tuple(site.shape)} in unconstrained space"
            ) from None
    return loc, stddev
