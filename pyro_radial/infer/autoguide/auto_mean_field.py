# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The mean-field guide: an independent normal for each element of each latent site."""

from typing import Any

from pyro_radial.infer.autoguide.base import AutoPerSite
from pyro_radial.infer.autoguide.families.family import Family
from pyro_radial.infer.autoguide.families.normal import Normal

__all__ = ["AutoMeanField"]


class AutoMeanField(AutoPerSite):
    """Guide with an independent normal for each element of each latent site.

    It is the posterior of Pyro's ``AutoNormal``, but sampled directly on each site's support, so that
    :class:`~pyro.infer.TraceMeanField_ELBO` finds the analytic KL and is correct on constrained sites.

    The usual tricks for larger networks (Farquhar, Osborne and Gal 2020, section 4.1.2) are options: a tiny initial
    width (``init_stddev=1e-3``), means trained first (``FitOptions(mean_only_epochs=10)``), early stopping
    (``FitOptions(patience=5)`` and a validation), and a smaller KL weight (``loss=RadialELBO(kl_weight=0.1)``, which is
    then not a bound).

    :param model: a Pyro model with continuous latent sites.
    :param init_loc_fn: a per-site init function; the default is that of
        :class:`~pyro_radial.infer.autoguide.AutoRadial`.
    :param float init_stddev: the initial standard deviation of every element in unconstrained space; by default 0.01 at
        sites of a network, which carry their initial value, and 0.1 at others.
    :param families: other families for some sites, as in :class:`~pyro_radial.infer.autoguide.AutoRadial`.
    :param create_plates: an optional function of the model's arguments that returns the plates to subsample with.
    :raises ValueError: for an ``init_stddev`` that is not positive and finite, and, naming the site, for a discrete
        latent site or a family that does not fit.

    Example::

        >>> import pyro, pyro.distributions as dist
        >>> guide = AutoMeanField(lambda: pyro.sample("rate", dist.LogNormal(0., 1.).expand([2]).to_event(1)))
        >>> guide.setup()
        >>> guide.posterior()["rate"].sample().shape
        torch.Size([2])
    """

    def default_family(self, name: str, site: Any) -> Family:
        """A factorized normal."""
        return Normal()
