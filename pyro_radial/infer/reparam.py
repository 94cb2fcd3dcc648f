# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Reparameterizers for Pyro's ``poutine.reparam``."""

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.reparam.reparam import Reparam
from torch import Tensor
from torch.distributions import Distribution

from pyro_radial.distributions.half_cauchy import half_cauchy_factors, half_cauchy_value
from pyro_radial.distributions.wrappers import leaf, map_leaf


class HalfCauchyReparam(Reparam):
    r"""Write a half-Cauchy site as the root of a product of two sites with closed-form KLs.

    The site x becomes two positive latent sites of its shape, and a deterministic value:

    .. math:: \mathtt{x\_gamma} \sim \mathrm{Gamma}(\tfrac12, \mathrm{rate} = 1 / \gamma^2), \quad
        \mathtt{x\_inverse\_gamma} \sim \mathrm{InverseGamma}(\tfrac12, 1), \quad
        \mathtt{x} = \sqrt{\mathtt{x\_gamma} \cdot \mathtt{x\_inverse\_gamma}}.

    The distribution of x does not change. A log-normal has no closed-form KL to a half-Cauchy distribution, but it has
    one to each factor. The site may be ``HalfCauchy`` under any nesting of ``expand``, ``to_event`` and ``mask``.

    Source: Oh, Adamczewski and Park (2019), "Radial and Directional Posteriors", section 3.1, with the square root that
    they omit.

    :raises ValueError: naming the site, if it is observed or has another distribution.

    Example::

        >>> import pyro.poutine as poutine
        >>> from pyro_radial import AutoMeanField, TermsELBO
        >>> @poutine.reparam(config={"radius": HalfCauchyReparam()})
        ... def model():
        ...     return pyro.sample("radius", dist.HalfCauchy(1.0).expand([3]).to_event(1))
        >>> guide = AutoMeanField(model)
        >>> loss = TermsELBO(strict_kl=True)(model, guide)()
        >>> sorted(guide.posterior())
        ['radius_gamma', 'radius_inverse_gamma']
    """

    def apply(self, msg: Any) -> Any:
        """Make the two sites and the value; ``poutine.reparam`` calls this."""
        name = msg["name"]
        fn = msg["fn"]
        value = msg["value"]
        half_cauchy = leaf(fn)
        if not isinstance(half_cauchy, torch.distributions.HalfCauchy):
            raise ValueError(
                f"the distribution of site '{name}' must be HalfCauchy, got {type(half_cauchy).__name__}"
            )
        if msg["is_observed"]:
            raise ValueError(
                f"site '{name}' must be latent to have two factors, got an observed site"
            )
        scale = half_cauchy.scale

        def factor(kind: str, distribution: Distribution, start: Tensor | None) -> Tensor:
            nested = map_leaf(lambda _: distribution, fn)
            return pyro.sample(f"{name}_{kind}", nested, obs=start, infer={"is_observed": False})

        gamma, inverse_gamma = half_cauchy_factors(scale)
        if value is None:
            gamma_value = factor("gamma", gamma, None)
            value = half_cauchy_value(gamma_value, factor("inverse_gamma", inverse_gamma, None))
        else:
            # The factors of an initial value are equal in units of the scales of their distributions.
            factor("gamma", gamma, value * scale)
            factor("inverse_gamma", inverse_gamma, value / scale)
        return {
            "fn": dist.Delta(value, event_dim=fn.event_dim).mask(False),
            "value": value,
            "is_observed": True,
        }
