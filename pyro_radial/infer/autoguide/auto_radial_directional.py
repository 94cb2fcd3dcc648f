# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The radial and directional guide."""

from collections.abc import Callable
from typing import Any, Literal

from pyro_radial.distributions.constraints import is_on_sphere, is_real
from pyro_radial.infer.autoguide.base import AutoPerSite
from pyro_radial.infer.autoguide.families.directional import VonMisesFisher
from pyro_radial.infer.autoguide.families.family import Families, Family
from pyro_radial.infer.autoguide.families.normal import Normal
from pyro_radial.infer.autoguide.families.radial import Radial
from pyro_radial.infer.autoguide.initialization import init_to_network

__all__ = ["AutoRadialDirectional"]


class AutoRadialDirectional(AutoPerSite):
    r"""Guide with a von Mises-Fisher distribution on directions, log-normals on positive sites, and normals elsewhere.

    With the prior :class:`~pyro_radial.nn.priors.RadialDirectionalPrior` every KL has a closed form. Other models with
    continuous latent sites work too.

    A direction's mean is a free vector, normalized. Under a uniform prior a group costs
    :math:`\kappa A(\kappa) + \log C(\kappa) + S` nats, with the ratio A of Bessel functions and the log-area S of the
    sphere. With one shared concentration :math:`\kappa` every group pays for the sharpest; with
    ``shared_concentration=False`` a group that is not needed can become uniform at no cost.

    Source: Oh, Adamczewski and Park (2019), "Radial and Directional Posteriors for Bayesian Neural Networks", eq. 10.

    :param model: a Pyro model with continuous latent sites.
    :param init_loc_fn: a per-site init function; the default is that of :class:`~pyro_radial.AutoRadial`.
    :param float init_stddev: the initial marginal standard deviation of the other sites in unconstrained space; by
        default 0.01 at sites of a network, which carry their initial value, and 0.1 at others.
    :param float init_mean_cosine: A, the initial E[mu . x] of every direction, between 0 and 1 (0.9 in the paper). It
        sets :math:`\kappa` to :math:`A (n - A^2) / (1 - A^2)` in n dimensions (Banerjee et al. 2005, eq. 4.4).
    :param bool shared_concentration: one concentration for the whole site, or one for each group.
    :param str rest: "normal" or "radial", the family of sites on the whole line.
    :param families: other families for some sites, as in :class:`~pyro_radial.AutoRadial`.
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
        init_stddev: float | None = None,
        init_mean_cosine: float = 0.9,
        shared_concentration: bool = True,
        rest: Literal["normal", "radial"] = "normal",
        families: Families | None = None,
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(
            model, init_loc_fn=init_loc_fn, init_stddev=init_stddev, families=families, create_plates=create_plates
        )
        if rest not in ("normal", "radial"):
            raise ValueError(f'rest must be "normal" or "radial", got {rest!r}')
        self._direction: Family = VonMisesFisher(init_mean_cosine, shared_concentration)
        self._on_the_line: Family = Radial() if rest == "radial" else Normal()

    def default_family(self, name: str, site: Any) -> Family:
        """The family for the support of the site: the sphere, the whole line, or a constrained space."""
        support = site["fn"].support
        if is_on_sphere(support):
            return self._direction
        return self._on_the_line if is_real(support) else Normal()
