# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Whether two samples of vectors are of one distribution."""

import math

import torch
from scipy import stats
from torch import Tensor


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
