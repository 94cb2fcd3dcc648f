# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The mean-field guide: an independent normal for each element of each latent site."""

from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_radial._checks import positive_float
from pyro_radial.infer.autoguide.initialization import init_to_network
from pyro_radial.infer.autoguide.loc_scale import DEFAULT_INIT_STDDEV, AutoLocScale


class AutoMeanField(AutoLocScale):
    """A guide with a factorized normal for each latent site: the baseline of every comparison.

    The same posterior family as Pyro's ``AutoNormal``, but sampled directly on each site's support, so that
    :class:`~pyro.infer.TraceMeanField_ELBO` finds the analytic KL and is right on constrained sites.

    :param model: a Pyro model with continuous latent sites.
    :param init_loc_fn: a per-site init function; the default is that of
        :class:`~pyro_radial.infer.autoguide.AutoRadial`.
    :param float init_scale: the standard deviation every element starts at, in unconstrained space; 0.01 by default,
        chosen by ``benchmarks/init_scale.py``.
    :param create_plates: an optional function of the model's arguments that returns the plates to subsample with.
    :raises ValueError: for an ``init_scale`` that is not a positive finite number, and, naming the site, for a
        discrete latent site.

    Example::

        >>> import pyro
        >>> guide = AutoMeanField(lambda: pyro.sample("rate", dist.LogNormal(0., 1.).expand([2]).to_event(1)))
        >>> guide.setup()
        >>> guide.posterior()["rate"].sample().shape
        torch.Size([2])
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        init_loc_fn: Callable[..., Any] = init_to_network,
        init_scale: float = DEFAULT_INIT_STDDEV,
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(model, init_loc_fn=init_loc_fn, create_plates=create_plates)
        self._init_scale = positive_float("init_scale", init_scale)

    def _initial_scale(self, name: str, unconstrained: Tensor, event_dim: int) -> float:
        return self._init_scale

    def _site_posterior(self, name: str, *parameters: Tensor) -> dist.Distribution:
        loc, scale = parameters
        # The softplus keeps scales positive, so that checking each element at every step would find nothing.
        return dist.Normal(loc, scale, validate_args=False).to_event(self._event_dims[name])

    def _unconstrained_quantiles(self, name: str, levels: list[float]) -> Tensor:
        loc, scale = self._site_parameters(name)
        probabilities = torch.tensor(levels, dtype=loc.dtype, device=loc.device)
        probabilities = probabilities.reshape(-1, *(1,) * loc.dim())
        return dist.Normal(loc, scale).icdf(probabilities)
