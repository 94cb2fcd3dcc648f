# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""An independent normal distribution for each element (mean field), and its limit, a point estimate."""

from collections.abc import Sequence

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution, constraints
from pyro.nn.module import PyroParam
from torch import Tensor
from torch.distributions import Distribution

from pyro_radial.infer.autoguide.families.family import Family, LocScale, Site, start_at


class Normal(LocScale):
    """A factorized normal distribution; on a constrained site its pushforward, e.g. a log-normal on a positive one.

    :param float init_stddev: the initial standard deviation of every element in unconstrained space; the guide's by
        default.
    :param bool shared_scale: one scale for all elements of an event, or one for each element.

    Example::

        >>> import pyro
        >>> from pyro_radial import AutoRadial
        >>> def model():
        ...     pyro.sample("weight", dist.Normal(0., 1.).expand([2, 3]).to_event(2))
        ...     pyro.sample("bias", dist.Normal(0., 1.).expand([2]).to_event(1))
        >>> guide = AutoRadial(model, families={"bias": Normal()})
        >>> guide.setup()
        >>> {site: type(distribution).__name__ for site, distribution in guide.posterior().items()}
        {'weight': 'RadialNormal', 'bias': 'Independent'}
    """

    def distribution(self, site: Site, *, loc: Tensor, scale: Tensor) -> TorchDistribution:  # type: ignore[override]
        """Return ``Normal(loc, scale)`` with the site's event dimensions."""
        # The constraint keeps scales positive, so there is nothing to validate.
        return dist.Normal(loc, scale, validate_args=False).to_event(site.event_dim)

    def quantiles(  # type: ignore[override]
        self, site: Site, levels: Sequence[float], *, loc: Tensor, scale: Tensor
    ) -> Tensor:
        """Return the quantiles of each element's normal."""
        probabilities = torch.tensor(levels, dtype=loc.dtype, device=loc.device)
        return dist.Normal(loc, scale).icdf(probabilities.reshape(-1, *(1,) * loc.dim()))


class Delta(Family):
    r"""A point estimate at the posterior mode, in the site's own space: ``AutoDelta`` for one site.

    On all sites, as in the example, it is the plain network. :func:`~pyro_radial.fit` starts at the network's own
    values and minimizes, per datum,

    .. math:: -\frac1N \sum_n \log p(y_n \mid f(x_n)) - \frac\lambda N \log p(w),

    where :math:`\lambda` is the ``kl_weight`` of :class:`~pyro_radial.TermsELBO`: 1 for the posterior mode, 0 for
    maximum likelihood. A prior :math:`N(0, \tau^2)` is a weight decay of :math:`\lambda / \tau^2 N`. Gradients are N
    times those of this loss, so divide a learning rate of SGD by N. One draw of :func:`~pyro_radial.predict` is enough.
    :class:`~pyro_radial.PriorChain` leaves these sites out, because a point cannot be a later prior.

    Example::

        >>> import torch
        >>> from torch import nn
        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, fit, predict
        >>> from pyro_radial.nn import likelihoods
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> model = SupervisedModel(BayesianModule(net, prior=dist.Normal(0., 1.)), likelihoods.Gaussian())
        >>> guide = AutoRadial(model, families={".": Delta()})
        >>> x = torch.randn(64, 2)
        >>> result = fit(model, guide, (x, x.sum(-1, keepdim=True)), epochs=2, progress=False)
        >>> predict(model, guide, x, num_samples=1).mean.shape
        torch.Size([64, 1])
        >>> type(guide.posterior()["0.bias"]).__name__
        'Delta'
    """

    is_point = True

    def initial(self, site: Site, value: Tensor) -> dict[str, PyroParam]:
        """Return the value."""
        return {"loc": PyroParam(value.clone(), constraints.real, site.event_dim)}

    def initial_at(
        self, site: Site, value: Tensor, distribution: Distribution, spread: bool
    ) -> dict[str, PyroParam]:
        """Return the mean of the distribution in unconstrained space, if it is known."""
        return self.initial(site, start_at(site, value, distribution)[0])

    def distribution(self, site: Site, *, loc: Tensor) -> TorchDistribution:  # type: ignore[override]
        """Return a ``Delta`` at ``loc``."""
        return dist.Delta(loc, event_dim=site.event_dim)

    def on_support(self, site: Site, distribution: Distribution) -> TorchDistribution:
        """Return a ``Delta`` at the transformed value, with no Jacobian."""
        assert site.transform is not None
        value = site.transform(distribution.mean)
        # A transform may change the number of event dimensions, as the one of a covariance does.
        return dist.Delta(value, event_dim=site.event_dim + value.dim() - distribution.mean.dim())

    def local_noise(self, name: str, distribution: Distribution) -> None:
        """Return None, because a point has no noise."""

    def quantiles(self, site: Site, levels: Sequence[float], *, loc: Tensor) -> Tensor:  # type: ignore[override]
        """Return the value, at every level."""
        return loc.expand(len(levels), *loc.shape)
