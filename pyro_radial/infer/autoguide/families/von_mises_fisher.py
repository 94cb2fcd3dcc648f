# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A von Mises-Fisher distribution on a site of directions."""

from typing import Any

from pyro_radial.distributions.von_mises_fisher import VonMisesFisherStable
from pyro_radial.infer.autoguide.families.directional import Directional

__all__ = ["VonMisesFisher"]


class VonMisesFisher(Directional):
    r"""A :class:`~pyro_radial.distributions.VonMisesFisherStable` with a free mean direction and a concentration.

    The parameters are ``loc``, a vector that is normalized to the mean direction, and ``concentration``.

    Source: Oh, Adamczewski and Park (2019), "Radial and Directional Posteriors for Bayesian Neural Networks", eq. 10.

    :param float init_mean_cosine: E[mu . x] of every direction at the start, between 0 and 1; 0.9 is the paper's. It
        sets :math:`\kappa` to :math:`A (n - A^2) / (1 - A^2)` in n dimensions (Banerjee et al. 2005, eq. 4.4).
    :param bool shared_concentration: one concentration for a site, or one for each of its directions.
    :raises ValueError: for a cosine out of its range.

    Example::

        >>> import pyro
        >>> from pyro_radial import AutoMeanField
        >>> from pyro_radial.distributions import HypersphericalUniform
        >>> def model():
        ...     pyro.sample("x", HypersphericalUniform(3))
        >>> guide = AutoMeanField(model, families={"x": VonMisesFisher(init_mean_cosine=0.5)})
        >>> guide.setup()
        >>> guide.posterior()["x"].mean.norm()
        tensor(0.5070)
    """

    kind = VonMisesFisherStable

    def concentration_at(self, mean_cosine: Any, size: int) -> Any:
        """By the formula above, which is an approximation, worst in few dimensions."""
        return mean_cosine * (size - mean_cosine**2) / (1.0 - mean_cosine**2)
