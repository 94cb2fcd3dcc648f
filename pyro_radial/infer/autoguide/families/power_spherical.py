# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A power spherical distribution on a site of directions."""

from typing import Any

from pyro_radial.distributions.power_spherical import PowerSpherical as Power
from pyro_radial.infer.autoguide.families.directional import Directional

__all__ = ["PowerSpherical"]


class PowerSpherical(Directional):
    r"""A :class:`~pyro_radial.distributions.PowerSpherical` with a free mean direction and a concentration.

    The parameters are ``loc``, a vector that is normalized to the mean direction, and ``concentration``. Its KL to a
    uniform and to a von Mises-Fisher prior is closed. To another power spherical distribution, which is the prior
    after a :class:`~pyro_radial.PriorChain` in its exact form, it is sampled: without bias, and named by
    ``RadialELBO(strict_kl=True)``. For a chain take :class:`~pyro_radial.infer.autoguide.families.VonMisesFisher`.

    Source: De Cao and Aziz (2020), "The Power Spherical distribution".

    :param float init_mean_cosine: E[mu . x] of every direction at the start, between 0 and 1. It sets :math:`\kappa` to
        :math:`(n - 1) A / (1 - A)` in n dimensions, exactly.
    :param bool shared_concentration: one concentration for a site, or one for each of its directions.
    :raises ValueError: for a cosine out of its range.

    Example::

        >>> import pyro
        >>> from pyro_radial import AutoMeanField
        >>> from pyro_radial.distributions import HypersphericalUniform
        >>> def model():
        ...     pyro.sample("x", HypersphericalUniform(3))
        >>> guide = AutoMeanField(model, families={"x": PowerSpherical(init_mean_cosine=0.5)})
        >>> guide.setup()
        >>> guide.posterior()["x"].mean.norm()
        tensor(0.5000)
    """

    kind = Power

    def concentration_at(self, mean_cosine: Any, size: int) -> Any:
        """The inverse of the mean cosine, kappa / (kappa + n - 1)."""
        return (size - 1) * mean_cosine / (1.0 - mean_cosine)
