# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Every KL rule of the library, as one table.

The rules are registered on torch's classes: Pyro's ``Independent`` rule peels its layers and wraps what is left in
torch's ``Independent``, so a rule on Pyro's subclass would be missed, silently. A rule that does not apply raises
``NotImplementedError``, which is how :class:`~pyro.infer.TraceMeanField_ELBO` knows to fall back on sampling.
"""

import math
from collections.abc import Callable

import torch
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from pyro.distributions.util import scale_and_mask, sum_rightmost
from torch import Tensor
from torch.distributions import (
    Distribution,
    Independent,
    MultivariateNormal,
    Normal,
    TransformedDistribution,
    kl_divergence,
    register_kl,
)
from torch.distributions.transforms import AffineTransform, ComposeTransform, IndependentTransform, Transform

from pyro_radial.distributions.radial_normal import RadialNormal, accumulation_dtype
from pyro_radial.distributions.wrappers import WRAPPERS, leaf


def kl_to_factorised_normal(q: Distribution, p: Distribution) -> Tensor:
    r"""KL from a radial (or normal) law to a factorised normal, under any nesting of wrappers.

    .. math:: KL = -H(q) + \tfrac12 \sum_i \left[\log 2\pi t_i^2
        + \frac{\sigma_i^2 / D + (\mu_i - m_i)^2}{t_i^2}\right]

    The cross-entropy needs the mean and the variance of each element alone, so the dependence between the elements
    of a radial law does not matter. A mask on either side masks that side's log-density, as it does in a sampled
    ELBO: the rule is the exact expectation of ``q.log_prob(w) - p.log_prob(w)``.
    """
    if not isinstance(leaf(q), RadialNormal | Normal) or q.event_shape != p.event_shape:
        raise NotImplementedError
    mean, variance = _moments(q)
    kl = _cross_entropy(mean, variance, p) - _entropy(q)
    # Where q has no batch of its own, p's may have been folded to size one.
    return kl.to(mean.dtype).expand(torch.broadcast_shapes(q.batch_shape, p.batch_shape))


def kl_radial_to_multivariate_normal(q: RadialNormal, p: MultivariateNormal) -> Tensor:
    """KL from one radius per vector to a full-covariance normal: the same sum, with p's precision in the middle."""
    if q.event_dim != 1:
        raise NotImplementedError
    precision = p.precision_matrix.diagonal(dim1=-2, dim2=-1)
    cross_entropy = 0.5 * (q.variance * precision).sum(-1) - p.log_prob(q.loc)
    return (cross_entropy - q.accumulated_entropy()).to(q.loc.dtype)


def kl_of_transformed(q: TransformedDistribution, p: Distribution) -> Tensor:
    """KL between two laws that are the same bijection of simpler ones: the KL of the simpler ones.

    This gives, for example, a log-radial or log-normal guide its closed-form KL to ``LogNormal(...).to_event(1)``.
    """
    return kl_divergence(q.base_dist, _pull_back(p, _elementary(q.transforms)))


def _moments(q: Distribution) -> tuple[Tensor, Tensor]:
    if isinstance(q, ExpandedDistribution):
        shape = q.batch_shape + q.event_shape
        mean, variance = _moments(q.base_dist)
        return mean.expand(shape), variance.expand(shape)
    if isinstance(q, WRAPPERS):
        return _moments(q.base_dist)
    return q.mean, q.variance


def _entropy(q: Distribution) -> Tensor:
    """Entropy with sums in the accumulation dtype."""
    if isinstance(q, RadialNormal):
        return q.accumulated_entropy()
    if isinstance(q, Independent):
        return sum_rightmost(_entropy(q.base_dist), q.reinterpreted_batch_ndims)
    if isinstance(q, MaskedDistribution):
        return scale_and_mask(_entropy(q.base_dist), mask=q._mask)
    if isinstance(q, ExpandedDistribution):
        return _entropy(q.base_dist).expand(q.batch_shape)
    entropy = q.entropy()
    return entropy.to(accumulation_dtype(entropy))


def _cross_entropy(mean: Tensor, variance: Tensor, p: Distribution) -> Tensor:
    """E[-log p(w)] for any law of w with these elementwise moments."""
    if isinstance(p, Independent):
        dims = tuple(range(-p.reinterpreted_batch_ndims, 0))
        per_element = _cross_entropy(mean, variance, p.base_dist)
        return per_element.sum(dims, dtype=accumulation_dtype(per_element)) if dims else per_element
    if isinstance(p, MaskedDistribution):
        return scale_and_mask(_cross_entropy(mean, variance, p.base_dist), mask=p._mask)
    if isinstance(p, ExpandedDistribution):
        # The moments carry the full shape already, and everything below broadcasts.
        return _cross_entropy(mean, variance, p.base_dist)
    if isinstance(p, Normal):
        loc, scale = _unexpanded(p.loc), _unexpanded(p.scale)
        quadratic = (variance + (mean - loc).square()) * (0.5 / scale.square())
        return quadratic + (scale.log() + 0.5 * math.log(2.0 * math.pi))
    raise NotImplementedError


def _unexpanded(tensor: Tensor) -> Tensor:
    """The tensor with its repeated dimensions at size one: the scale of N(0, 1) on a million weights is one number."""
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _elementary(transforms: list[Transform]) -> list[Transform]:
    """The transforms with composition, reinterpreted dimensions and the trivial affine map peeled off."""
    flat: list[Transform] = []
    for transform in transforms:
        if isinstance(transform, IndependentTransform):
            flat += _elementary([transform.base_transform])
        elif isinstance(transform, ComposeTransform):
            flat += _elementary(transform.parts)
        elif not _is_identity(transform):
            flat.append(transform)
    return flat


def _is_identity(transform: Transform) -> bool:
    # biject_to(positive) is exp followed by an affine map with these very numbers.
    if not isinstance(transform, AffineTransform) or isinstance(transform.loc, Tensor):
        return False
    return transform.loc == 0 and not isinstance(transform.scale, Tensor) and transform.scale == 1


def _pull_back(p: Distribution, transforms: list[Transform]) -> Distribution:
    """The law whose image under ``transforms`` is p."""
    if isinstance(p, Independent):
        return Independent(_pull_back(p.base_dist, transforms), p.reinterpreted_batch_ndims, validate_args=False)
    if isinstance(p, ExpandedDistribution):
        return _pull_back(p.base_dist, transforms).expand(p.batch_shape)
    if isinstance(p, TransformedDistribution) and _elementary(p.transforms) == transforms:
        return p.base_dist
    raise NotImplementedError


# Pairs that torch or Pyro register themselves (Independent on Independent, masked on masked) are left to them:
# both end in one of the rows below.
RULES: list[tuple[type[Distribution], type[Distribution], Callable[..., Tensor]]] = [
    (RadialNormal, Normal, kl_to_factorised_normal),
    (RadialNormal, Independent, kl_to_factorised_normal),
    (RadialNormal, MaskedDistribution, kl_to_factorised_normal),
    (RadialNormal, ExpandedDistribution, kl_to_factorised_normal),
    (RadialNormal, MultivariateNormal, kl_radial_to_multivariate_normal),
    (Normal, Independent, kl_to_factorised_normal),
    (Normal, MaskedDistribution, kl_to_factorised_normal),
    (Normal, ExpandedDistribution, kl_to_factorised_normal),
    (Independent, Normal, kl_to_factorised_normal),
    (Independent, MaskedDistribution, kl_to_factorised_normal),
    (Independent, ExpandedDistribution, kl_to_factorised_normal),
    (MaskedDistribution, Normal, kl_to_factorised_normal),
    (MaskedDistribution, Independent, kl_to_factorised_normal),
    (MaskedDistribution, ExpandedDistribution, kl_to_factorised_normal),
    (ExpandedDistribution, Normal, kl_to_factorised_normal),
    (ExpandedDistribution, Independent, kl_to_factorised_normal),
    (ExpandedDistribution, MaskedDistribution, kl_to_factorised_normal),
    (ExpandedDistribution, ExpandedDistribution, kl_to_factorised_normal),
    (TransformedDistribution, Independent, kl_of_transformed),
    (TransformedDistribution, ExpandedDistribution, kl_of_transformed),
]

for _q, _p, _rule in RULES:
    register_kl(_q, _p)(_rule)
