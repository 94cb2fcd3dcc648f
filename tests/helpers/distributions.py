# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""KLs, those to a radial distribution among them, and two samples of one distribution."""

import math

import pyro.distributions as dist
import torch
from scipy import stats
from torch import Tensor
from torch.distributions import kl_divergence

from pyro_radial.distributions import RadialNormal

FAMILIES = ["radial", "normal"]


class Halves(dist.TorchDistribution):
    """A distribution without an ``expand`` of its own: Pyro's general one changes in place when it is done again."""

    arg_constraints = {}
    support = dist.constraints.real
    has_rsample = True

    def __init__(self):
        super().__init__(validate_args=False)

    def rsample(self, sample_shape=torch.Size()):
        return torch.full(sample_shape, 0.5)


def parameters(*shape, dtype=torch.double):
    """A location and a scale of each of the two distributions."""
    return [make(*shape, dtype=dtype) + low for make, low in ((torch.randn, 0.0), (torch.rand, 0.3)) * 2]


def kl_of(family):
    """The KL from a distribution of a family to a radial one."""

    def kl(loc, scale, center, unit):
        q = RadialNormal(loc, scale, validate_args=False)
        if family == "normal":
            q = dist.Normal(loc, scale, validate_args=False).to_event(1)
        return kl_divergence(q, RadialNormal(center, unit, validate_args=False))

    return kl


def assert_kl_is_that_of_samples(q, p, count: int = 5_000) -> None:
    """Within 4.5 standard errors, one in 10^5 for each element; 1e-9 is for rounding where both are a constant."""
    kl = kl_divergence(q, p)
    batch_shape = torch.broadcast_shapes(q.batch_shape, p.batch_shape)
    assert kl.shape == batch_shape
    value = (q if q.batch_shape == batch_shape else q.expand(batch_shape)).sample(torch.Size((count,)))
    draws = q.log_prob(value) - p.log_prob(value)
    assert bool(((draws.mean(0) - kl).abs() <= 4.5 * draws.std(0) / count**0.5 + 1e-9).all())


def assert_same_distribution(first: Tensor, second: Tensor, level: float = 1e-4) -> None:
    """Means, variances, joint second moments, those of squares, and all quantiles of each element and of the norm.

    :param first: ``[N, ...]``.
    :param second: the same shape, drawn independently of it.
    :param level: the probability to fail where they are, for each family of comparisons.
    """
    a, b = (sample.detach().double().flatten(1) for sample in (first, second))
    assert torch.isfinite(a).all()
    assert torch.isfinite(b).all()
    assert_same_mean(a, b, level)
    center, spread = b.mean(0), b.std(0)
    a, b = (a - center) / spread, (b - center) / spread
    for power in (1, 2):
        assert_same_mean(*(_products(sample**power) for sample in (a, b)), level)
    for one, other in zip([*a.T, a.norm(dim=1)], [*b.T, b.norm(dim=1)], strict=True):
        assert stats.ks_2samp(one.numpy(), other.numpy()).pvalue > level / (a.shape[1] + 1)


def assert_same_mean(a: Tensor, b: Tensor, level: float = 1e-4) -> None:
    """Elementwise, within the sampling error of both."""
    error = ((a.var(0) + b.var(0)) / len(a)).sqrt()
    most = stats.norm.isf(level / (2 * error.numel()))
    assert bool(((a.mean(0) - b.mean(0)).abs() <= most * error + 1e-12).all()), (a.mean(0) - b.mean(0)) / error
    assert math.isfinite(most)


def _products(sample: Tensor) -> Tensor:
    """All products of two elements, the squares among them."""
    rows, columns = torch.triu_indices(sample.shape[1], sample.shape[1])
    return sample[:, rows] * sample[:, columns]
