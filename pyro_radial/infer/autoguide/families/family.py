# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What a guide asks of a posterior family."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from pyro.nn.module import PyroParam
from torch import Tensor
from torch.distributions import IndependentTransform, Transform, biject_to

from pyro_radial._pyro.compat import helpful_support_errors
from pyro_radial.distributions.constraints import is_on_sphere, is_real
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.nn.local.unit_noise import UnitNoise, unit_noise

__all__ = ["Family", "Site"]


@dataclass(frozen=True)
class Site:
    """A latent site as a family sees it, in the space where the family makes its distribution.

    :param str name: of the site.
    :param torch.Size shape: of its value, plates at full size.
    :param int event_dim: how many of the last dimensions are one event.
    :param float init_stddev: the marginal standard deviation to start at, where the family has none of its own.
    :param transform: from that space to the site's support, or None where they are the same.
    """

    name: str
    shape: torch.Size
    event_dim: int
    init_stddev: float
    transform: Transform | None = None

    def is_decreasing(self) -> bool:
        """Whether the transform turns the order of values around.

        :raises ValueError: naming the site, where it has no transform for each element.
        """
        transform = self.transform
        while isinstance(transform, IndependentTransform):
            transform = transform.base_transform
        if transform is None:
            return False
        if transform.domain.event_dim or transform.codomain.event_dim:
            raise ValueError(
                f"site '{self.name}' is transformed by {type(transform).__name__}, which mixes its elements: "
                "they have no closed-form marginal quantiles; draw samples instead"
            )
        return bool(transform.sign < 0)


class Family:
    """A kind of posterior. Override what differs; a guide of any mixture of families needs no more than this.

    The parameters of a site are kept in the guide under their plural: the parameter ``scale`` of the site ``w`` is
    ``guide.scales.w``. An object holds settings alone, so one can serve any number of sites and guides.

    Example::

        >>> import pyro
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

    #: Whether its posterior is a single value, which no later prior can be.
    is_point = False

    def transform(self, site: Mapping[str, Any]) -> Transform | None:
        """The map from where the distribution is made to the support of a Pyro site; None where that is the support.

        :raises ValueError: naming the site and its support, if the family cannot serve it.
        """
        support = site["fn"].support
        if is_on_sphere(support):
            kind = type(leaf(site["fn"])).__name__
            raise ValueError(
                f"{type(self).__name__}: site '{site['name']}' is a direction ({kind}), which no transform leads to. "
                "AutoRadialDirectional has a family for it; or use poutine.reparam with ProjectedNormalReparam"
            )
        if is_real(support):
            return None
        with helpful_support_errors(site):
            return biject_to(support)

    def initial(self, site: Site, value: Tensor) -> dict[str, PyroParam]:
        """The parameters of a site that starts at this value, ``[*site.shape]``; each tensor a copy."""
        raise NotImplementedError(f"{type(self).__name__} must define initial(site, value)")

    def initial_at(self, site: Site, value: Tensor, distribution: Any, spread: bool) -> dict[str, PyroParam]:
        """The parameters of a site that starts where a distribution on its support is.

        :param Tensor value: where it would start without, for its shape, dtype and device.
        :param distribution: such as the posterior of an earlier task.
        :param bool spread: whether it starts as wide as that too.
        :raises ValueError: naming the site, for a distribution of another shape.
        """
        return self.initial(site, value)

    def distribution(self, site: Site, **parameters: Tensor) -> Any:
        """The posterior in the space of ``Site.shape``, from the parameters that :meth:`initial` names."""
        raise NotImplementedError(f"{type(self).__name__} must define distribution(site, ...)")

    def guide_distribution(self, site: Site, **parameters: Tensor) -> Any:
        """What a guide samples from, where that differs from the posterior in how it is evaluated."""
        return self.distribution(site, **parameters)

    def on_support(self, site: Site, distribution: Any) -> Any:
        """The distribution on the site's own support."""
        if site.transform is None:
            return distribution
        # The cache makes the inverse of a sample exact, where rounding would move it.
        return dist.TransformedDistribution(distribution, [site.transform.with_cache()], validate_args=False)

    def local_noise(self, name: str, distribution: Any) -> UnitNoise | None:
        """The noise of a guide at a network's weights, for :func:`~pyro_radial.poutine.local_reparameterization`.

        :param str name: of the site.
        :param distribution: the posterior on the site's support.
        :returns: the noise, or None for a posterior without any.
        :raises ValueError: naming the site, for a posterior whose noise has no such form.
        """
        noise = unit_noise(distribution)
        if noise is None:
            raise ValueError(
                f"local_reparameterization: site '{name}' must have a normal or a radial posterior, got "
                f"{type(self).__name__} with {type(leaf(distribution)).__name__}; give it another "
                "family, or train with drawn weights"
            )
        return noise

    def center(self, site: Site, **parameters: Tensor) -> Tensor:
        """The median of each element, ``[*site.shape]``."""
        return parameters["loc"]

    def quantiles(self, site: Site, levels: Sequence[float], **parameters: Tensor) -> Tensor:
        """Quantiles of each element's marginal, ``[len(levels), *site.shape]``.

        :raises ValueError: naming the site, where they have no closed form.
        """
        raise ValueError(f"site '{site.name}' has a {type(self).__name__} posterior, without closed-form quantiles")

    def spread(self, **parameters: Tensor) -> Tensor | None:
        """What says how wide the posterior is, to see whether training moved it; None for a point."""
        return parameters.get("scale")
