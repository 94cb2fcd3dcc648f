# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Every KL rule of the library, as one table."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from pyro.distributions.util import scale_and_mask
from torch import Tensor
from torch.distributions import (
    Distribution,
    Gamma,
    Independent,
    InverseGamma,
    LogNormal,
    MultivariateNormal,
    Normal,
    TransformedDistribution,
    kl_divergence,
    register_kl,
)

from pyro_radial._pyro.compat import own_mask
from pyro_radial.distributions.half_cauchy import kl_normal_to_log_gamma
from pyro_radial.distributions.kl_formulas.kl_to_normal import kl_to_normal, standardized
from pyro_radial.distributions.kl_formulas.normal_to_radial import normal_to_radial
from pyro_radial.distributions.kl_formulas.radial_to_radial import radial_to_radial
from pyro_radial.distributions.kl_formulas.shared import directions
from pyro_radial.distributions.radial_directional import RadialDirectional, kl_radial_directional
from pyro_radial.distributions.radial_normal import RadialNormal
from pyro_radial.distributions.row_operator import row_operator
from pyro_radial.distributions.special import accumulation_dtype
from pyro_radial.distributions.von_mises_fisher import (
    HypersphericalUniform,
    VonMisesFisherStable,
    kl_uniform,
    kl_uniform_to_von_mises_fisher,
    kl_von_mises_fisher,
    kl_von_mises_fisher_to_uniform,
)
from pyro_radial.distributions.wrappers import (
    Pushforward,
    carry_to_batch,
    elementary,
    leaf,
    mask_of,
    pull_back,
    unexpanded,
    unmasked,
)

__all__ = [
    "RULES",
    "kl_by_cross_entropy",
    "kl_of_masked",
    "kl_of_transformed",
    "kl_radial_to_multivariate_normal",
]


def kl_by_cross_entropy(q: Distribution, p: Distribution) -> Tensor:
    r"""KL from a radial or normal distribution to a factorized normal or a radial distribution, under any nesting of
    wrappers.

    To a factorized normal :math:`N(m, t^2)` it is closed, since the cross-entropy needs the mean and the variance of
    each element alone:

    .. math:: KL = -H(q) + \tfrac12 \sum_i \left[\log 2\pi t_i^2
        + \frac{\sigma_i^2 / D + (\mu_i - m_i)^2}{t_i^2}\right].

    To a radial distribution, with :math:`\rho = \|(w - m) / t\|`, the log-area S of the unit sphere and v_i the
    variance of q's element,

    .. math:: KL = -H(q) + \tfrac12 \log\tfrac\pi2 + S + \sum_i \log t_i
        + \tfrac12 \sum_i \frac{v_i + (\mu_i - m_i)^2}{t_i^2} + (D - 1)\, E_q \log \rho.

    Farquhar, Osborne and Gal (2020), eq. 43 and 44, leave out the last term, without which it can be negative (as a
    note of theirs says). It is the one term without a closed form: an unbiased estimate with fixed directions,
    exact for proportional scales and equal means, zero with zero gradient at q = p. ``pyro.settings`` has the number
    of directions, ``radial_kl_directions`` (small events take more), and their seed, ``radial_kl_seed`` (None for
    fresh ones in each call). With a seed it is a function of the parameters, and its gradient the derivative of that,
    also under ``vmap`` and ``torch.compile``. One call's standard deviation, and with it how far below zero it can
    fall, is below 1 % of max(KL, 100 nats) in the cases of ``benchmarks/distributions/radial_kl.py``; it is more where
    one element's ratio :math:`\sigma_i / t_i` is far above all others. At equal scales the KL has a cone in the means,
    of slope about 1.2533 (D - 1) in units of t: they do not move until the likelihood's gradient exceeds that.

    A mask on either side masks that side's log-density, as it does in a sampled ELBO: the rule is the expectation
    of ``q.log_prob(w) - p.log_prob(w)``. So it is where both sides are masked, each by its own.
    """
    if not isinstance(leaf(q), RadialNormal | Normal) or not isinstance(leaf(p), RadialNormal | Normal):
        raise NotImplementedError
    if q.event_shape != p.event_shape:
        raise NotImplementedError
    kl = _with_masks(q, p)
    # Where q has no batch of its own, p's may have been folded to size one.
    return kl.to(leaf(q).loc.dtype).expand(torch.broadcast_shapes(q.batch_shape, p.batch_shape))


def kl_of_masked(q: MaskedDistribution, p: MaskedDistribution) -> Tensor | float:
    """KL of two masked distributions: by the rule above where that applies, else where both masks are set."""
    try:
        return kl_by_cross_entropy(q, p)
    except NotImplementedError:
        masks = own_mask(q), own_mask(p)
        if any(mask is False for mask in masks):
            return 0.0
        return scale_and_mask(kl_divergence(q.base_dist, p.base_dist), mask=masks[0] & masks[1])


def kl_radial_to_multivariate_normal(q: RadialNormal, p: MultivariateNormal) -> Tensor:
    """KL from one radius per vector to a full-covariance normal: the same sum, with p's precision in the middle."""
    if q.event_dim != 1:
        raise NotImplementedError
    precision = p.precision_matrix.diagonal(dim1=-2, dim2=-1)
    cross_entropy = 0.5 * (q.variance * precision).sum(-1) - p.log_prob(q.loc)
    return (cross_entropy - q.accumulated_entropy()).to(q.loc.dtype)


def kl_of_transformed(q: TransformedDistribution, p: Distribution) -> Tensor:
    """KL between two distributions that are the same bijection of simpler ones: the KL of the simpler ones.

    This gives, for example, a log-radial or log-normal guide its closed-form KL to ``LogNormal(...).to_event(1)``.
    """
    return kl_divergence(q.base_dist, pull_back(p, elementary(q.transforms)))


class _Parameters(NamedTuple):
    """What a divergence needs of q, at full shape: ``loc + scale * noise``, where an event's noise is of one kind.

    ``radius_dim`` is how many of the last dimensions share one radius, or None for independent normal noise.
    """

    loc: Tensor
    scale: Tensor
    radius_dim: int | None
    unit_entropy: float  # of the elements of one radius at scale one

    @property
    def elements_per_radius(self) -> int:
        """By which the variance of an element is less than its squared scale."""
        return 1 if self.radius_dim is None else self.loc.shape[self.loc.dim() - self.radius_dim :].numel()


def _parameters(q: Distribution) -> _Parameters:
    inner, shape = leaf(q), q.batch_shape + q.event_shape
    radial = isinstance(inner, RadialNormal)
    unit_entropy = inner.unit_entropy if radial else 0.5 * (1.0 + math.log(2.0 * math.pi))
    return _Parameters(
        inner.loc.expand(shape), inner.scale.expand(shape), inner.event_dim if radial else None, unit_entropy
    )


def _with_masks(q: Distribution, p: Distribution) -> Tensor:
    """The divergence as one sum wherever both sides count, so that what is large in both never cancels."""
    try:
        q_mask, p_mask = mask_of(q), mask_of(p)
    except ValueError:
        # Single elements of an event are masked: each side is a sum of its own elements.
        return _cross_entropy(q, p) - _entropy(q)
    kl = _divergence(unmasked(q), unmasked(p))
    if q_mask is p_mask:
        return scale_and_mask(kl, mask=q_mask)
    q_on, p_on = (torch.as_tensor(True if mask is None else mask, device=kl.device) for mask in (q_mask, p_mask))
    alone = torch.where(p_on, _cross_entropy(unmasked(q), unmasked(p)), -_entropy(unmasked(q)))
    return torch.where(q_on & p_on, kl, torch.where(q_on | p_on, alone, 0.0))


def _divergence(q: Distribution, p: Distribution) -> Tensor:
    """Without masks the two have the same sums, and each element one term in them."""
    parameters = _parameters(q)
    if isinstance(leaf(p), RadialNormal):
        return carry_to_batch(partial(_divergence_to_radial, parameters), p)
    loc, scale, other, shape = parameters.loc, parameters.scale, leaf(p), p.batch_shape + p.event_shape
    center, unit = (unexpanded(tensor.expand(shape)) for tensor in (other.loc, other.scale))
    if parameters.radius_dim is None:
        return kl_to_normal(loc, scale, center, unit, len(q.event_shape))
    kl = kl_to_normal(loc, scale, center, unit, len(q.event_shape), parameters.elements_per_radius)
    # What the radii add is the same for each, and added last.
    radii = q.event_shape.numel() // parameters.elements_per_radius
    constant = 0.5 * parameters.elements_per_radius * math.log(2.0 * math.pi) - parameters.unit_entropy
    return kl.to(accumulation_dtype(kl)) + radii * constant


_radial_to_radial = row_operator("radial_to_radial", radial_to_radial)
_normal_to_radial = row_operator("normal_to_radial", normal_to_radial)


def _divergence_to_radial(q: _Parameters, p: RadialNormal) -> Tensor:
    loc, scale, center, unit, shape = _against_radial(q, p)
    if p.num_elements == 1:
        # The distributions are normal.
        return kl_to_normal(loc, scale, center, unit, 1).expand(shape)
    ratio, shift = standardized(loc, scale, center, unit)
    kl = _normal_to_radial if q.radius_dim is None else _radial_to_radial
    return kl(ratio, shift, directions(ratio)).expand(shape)


def _entropy(q: Distribution) -> Tensor:
    """Entropy with sums in the accumulation dtype."""
    return carry_to_batch(_entropy_of_leaf, q)


def _entropy_of_leaf(q: Distribution) -> Tensor:
    return q.accumulated_entropy() if isinstance(q, RadialNormal) else q.entropy()


def _cross_entropy(q: Distribution, p: Distribution) -> Tensor:
    """E[-log p(w)]. That q has the full shape already is why everything broadcasts."""
    return carry_to_batch(partial(_cross_entropy_to_leaf, _parameters(q)), p)


def _cross_entropy_to_leaf(q: _Parameters, p: Distribution) -> Tensor:
    if isinstance(p, RadialNormal):
        log_scale = q.scale.log().sum(tuple(range(-p.event_dim, 0)) or None, dtype=accumulation_dtype(q.scale))
        return _divergence_to_radial(q, p) + (log_scale + p.num_elements // q.elements_per_radius * q.unit_entropy)
    assert isinstance(p, Normal)
    scale = unexpanded(p.scale)
    ratio, shift = standardized(q.loc, q.scale, unexpanded(p.loc), scale)
    quadratic = 0.5 * (ratio.square() / q.elements_per_radius + shift.square())
    return quadratic + (scale.log() + 0.5 * math.log(2.0 * math.pi))


def _against_radial(q: _Parameters, p: RadialNormal) -> tuple[Tensor, Tensor, Tensor, Tensor, torch.Size]:
    """The parameters of both with the event as one last dimension, and the batch shape of all."""
    if q.radius_dim is not None and q.radius_dim != p.event_dim:
        # Radii that are shared differently on the two sides leave more than one to integrate over.
        raise NotImplementedError
    # Repeated batch dimensions, such as those of particles, repeat one value.
    tensors = torch.broadcast_tensors(*(unexpanded(t, p.event_dim) for t in (q.loc, q.scale, p.loc, p.scale)))
    loc, scale, center, unit = (t.flatten(t.dim() - p.event_dim) if p.event_dim else t.unsqueeze(-1) for t in tensors)
    # Each repeat counts where a wrapper sums over its dimension.
    shape = torch.broadcast_shapes(q.loc.shape, p.loc.shape)
    return loc, scale, center, unit, shape[: len(shape) - p.event_dim]


# The rules are registered on torch's classes: Pyro's ``Independent`` rule peels its layers and wraps what is left in
# torch's ``Independent``, so a rule on Pyro's subclass would be missed, silently. A rule that does not apply raises
# ``NotImplementedError``, which is how :class:`~pyro.infer.TraceMeanField_ELBO` knows to fall back on sampling.
# A pair that torch or Pyro register themselves (Independent on Independent) is left to them: it ends in one of the rows
# below. But for masked on masked: Pyro's row takes one mask for both sides, which is right if they have the same.
RULES: list[tuple[type[Distribution], type[Distribution], Callable[..., Tensor | float]]] = [
    (RadialNormal, RadialNormal, kl_by_cross_entropy),
    (RadialNormal, Normal, kl_by_cross_entropy),
    (RadialNormal, Independent, kl_by_cross_entropy),
    (RadialNormal, MaskedDistribution, kl_by_cross_entropy),
    (RadialNormal, ExpandedDistribution, kl_by_cross_entropy),
    (RadialNormal, MultivariateNormal, kl_radial_to_multivariate_normal),
    (Normal, RadialNormal, kl_by_cross_entropy),
    (Normal, Independent, kl_by_cross_entropy),
    (Normal, MaskedDistribution, kl_by_cross_entropy),
    (Normal, ExpandedDistribution, kl_by_cross_entropy),
    (Independent, RadialNormal, kl_by_cross_entropy),
    (Independent, Normal, kl_by_cross_entropy),
    (Independent, MaskedDistribution, kl_by_cross_entropy),
    (Independent, ExpandedDistribution, kl_by_cross_entropy),
    (MaskedDistribution, RadialNormal, kl_by_cross_entropy),
    (MaskedDistribution, Normal, kl_by_cross_entropy),
    (MaskedDistribution, Independent, kl_by_cross_entropy),
    (MaskedDistribution, ExpandedDistribution, kl_by_cross_entropy),
    (MaskedDistribution, MaskedDistribution, kl_of_masked),
    (ExpandedDistribution, RadialNormal, kl_by_cross_entropy),
    (ExpandedDistribution, Normal, kl_by_cross_entropy),
    (ExpandedDistribution, Independent, kl_by_cross_entropy),
    (ExpandedDistribution, MaskedDistribution, kl_by_cross_entropy),
    (ExpandedDistribution, ExpandedDistribution, kl_by_cross_entropy),
    # Torch takes two equal bijections for different ones, if they are made of several.
    (TransformedDistribution, Pushforward, kl_of_transformed),
    (TransformedDistribution, LogNormal, kl_of_transformed),
    (TransformedDistribution, Independent, kl_of_transformed),
    (TransformedDistribution, ExpandedDistribution, kl_of_transformed),
    (TransformedDistribution, Gamma, kl_of_transformed),
    (TransformedDistribution, InverseGamma, kl_of_transformed),
    (Normal, TransformedDistribution, kl_normal_to_log_gamma),
    (RadialDirectional, RadialDirectional, kl_radial_directional),
    (VonMisesFisherStable, VonMisesFisherStable, kl_von_mises_fisher),
    (VonMisesFisherStable, HypersphericalUniform, kl_von_mises_fisher_to_uniform),
    (HypersphericalUniform, VonMisesFisherStable, kl_uniform_to_von_mises_fisher),
    (HypersphericalUniform, HypersphericalUniform, kl_uniform),
    # Between two power spherical distributions there is none.
    # Pyro has a rule from a point to anything.
]

for _q, _p, _rule in RULES:
    register_kl(_q, _p)(_rule)
