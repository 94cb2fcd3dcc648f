# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A plain network in the middle of a posterior."""

from typing import Any

import torch
from torch import nn

from pyro_radial.distributions.constraints import is_on_sphere
from pyro_radial.infer.autoguide.base import AutoPerSite
from pyro_radial.nn import BayesianModule

__all__ = ["mean_network"]


@torch.no_grad()
def mean_network(bnn: BayesianModule, guide: AutoPerSite) -> nn.Module:
    r"""The plain network to cut and to use alone: directions at their means, all other sites at their medians.

    A mean direction is :math:`A(\kappa) \mu`, shorter than one: a group whose direction is not known at all becomes
    zero, as it is in the mean of the weights, where ``bnn.to_module(guide.median())`` would give it its full radius.

    :param BayesianModule bnn: the Bayesian network.
    :param guide: its trained guide, of the library.
    :returns: a plain network with copies of everything.

    Example::

        >>> from pyro_radial import AutoRadialDirectional
        >>> from pyro_radial.nn.priors import RadialDirectionalPrior
        >>> net = nn.Linear(3, 2)
        >>> bnn = BayesianModule(net, RadialDirectionalPrior())
        >>> guide = AutoRadialDirectional(bnn, init_mean_cosine=0.999)
        >>> guide.setup(torch.zeros(1, 3))
        >>> ratio = mean_network(bnn, guide).weight / net.weight
        >>> bool(((ratio > 0.998) & (ratio < 1.0)).all())
        True
    """
    draw, posterior = guide.median(), dict[str, Any](guide.posterior())
    means = {site: distribution.mean for site, distribution in posterior.items() if is_on_sphere(distribution.support)}
    return bnn.to_module({**draw, **means})
