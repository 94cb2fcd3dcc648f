# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Every KL rule of the library, as one table."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from itertools import product
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
    LowRankMultivariateNormal,
    MultivariateNormal,
    Normal,
    Transform,
    TransformedDistribution,
    kl_divergence,
    register_kl,
)

from pyro_radial._pyro.compat import own_mask
from pyro_radial.distributions.half_cauchy import kl_normal_to_log_gamma
from pyro_radial.distributions.kl_formulas.kl_to_normal import kl_to_normal, standardize
from pyro_radial.distributions.kl_formulas.shared import directions
from pyro_radial.distributions.kl_formulas.to_radial import normal_to_radial, radial_to_radial
from pyro_radial.distributions.numerics import event_sum, to_accumulation_dtype
from pyro_radial.distributions.radial_normal import RadialNormal
from pyro_radial.distributions.row_operator import row_operator
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
    drop_repeats,
    elementary,
    is_reshape,
    leaf,
    mask_of,
    pull_back,
    remove_masks,
)


def kl_by_cross_entropy(q: Distribution, p: Distribution) -> Tensor:
    r"""Return the KL from a radial or normal distribution to one of either kind, under any nesting of wrappers.

    To a factorized normal :math:`N(m, t^2)` it is closed: the cross-entropy needs only the mean and the variance of
    each element.

    .. math:: KL = -H(q) + \tfrac12 \sum_i \left[\log 2\pi t_i^2
        + \frac{\sigma_i^2 / D + (\mu_i - m_i)^2}{t_i^2}\right].

    To a radial distribution, with :math:`\rho = \|(w - m) / t\|`, the log-area S of the unit sphere and v_i the
    variance of q's element,

    .. math:: KL = -H(q) + \tfrac12 \log\tfrac\pi2 + S + \sum_i \log t_i
        + \tfrac12 \sum_i \frac{v_i + (\mu_i - m_i)^2}{t_i^2} + (D - 1)\, E_q \log \rho.

    The last term has no closed form. It is an unbiased estimate with fixed directions, exact for proportional scales
    and equal means, and zero with zero gradient at q = p. ``pyro.settings`` has the number of directions,
    ``radial_kl_directions`` (small events take more), and their seed, ``radial_kl_seed`` (None draws fresh ones in each
    call). With a seed the KL is a function of the parameters with an exact gradient, also under ``vmap`` and
    ``torch.compile``; its measured noise is below 0.4 % of max(KL, 100 nats), and larger if one
    ratio :math:`\sigma_i / t_i` is far above all others. At equal scales the KL has a cone in the means, of slope about
    1.2533 (D - 1) in units of t: the means do not move until the gradient of the likelihood exceeds that.

    A mask on either side masks that side's log-density, as in a sampled ELBO: the KL is the expectation of
    ``q.log_prob(w) - p.log_prob(w)``.

    Source: Farquhar, Osborne and Gal (2020), "Radial Bayesian Neural Networks", eq. 43 and 44. They leave out the last
    term, without which the KL can be negative (as they note).
    """
    kinds = RadialNormal | Normal
    if not isinstance(leaf(q), kinds) or not isinstance(leaf(p), kinds):
        raise NotImplementedError
    kl = _masked_divergence(q, p)
    # Repeats in p's batch may have been folded to size one.
    return kl.to(leaf(q).loc.dtype).expand(torch.broadcast_shapes(q.batch_shape, p.batch_shape))


def kl_of_masked(q: MaskedDistribution, p: MaskedDistribution) -> Tensor | float:
    """Return the KL of two masked distributions: by the rule above if one is radial, else by Pyro's rule."""
    if isinstance(leaf(q), RadialNormal) or isinstance(leaf(p), RadialNormal):
        return kl_by_cross_entropy(q, p)
    if own_mask(q) is False or own_mask(p) is False:
        return 0.0
    return scale_and_mask(kl_divergence(q.base_dist, p.base_dist), mask=own_mask(q) & own_mask(p))


def kl_radial_to_multivariate_normal(q: RadialNormal, p: MultivariateNormal) -> Tensor:
    """Return the KL from one radius per vector to a normal with full covariance."""
    precision = p.precision_matrix.diagonal(dim1=-2, dim2=-1)
    cross_entropy = 0.5 * (q.variance * precision).sum(-1) - p.log_prob(q.loc)
    return (cross_entropy - q.accumulated_entropy()).to(q.loc.dtype)


def kl_correlated_normal_to_normal(
    q: MultivariateNormal | LowRankMultivariateNormal, p: Distribution
) -> Tensor:
    r"""Return the KL from a normal with a covariance to independent normals, under any nesting of wrappers.

    .. math:: KL = \sum_i KL(q_i \| p_i) + \sum_i \log \sigma_i - \tfrac12 \log\det\Sigma,

    with the marginal q_i and its standard deviation :math:`\sigma_i`; the last two terms, the total correlation of q,
    are what independent elements cannot express. For a low-rank covariance :math:`S (I + F F^T) S` they are

    .. math:: \tfrac12 \sum_i \log(1 + \|F_i\|^2) - \tfrac12 \log\det(I + F^T F).
    """
    if not isinstance(leaf(p), Normal):
        raise NotImplementedError
    if isinstance(q, MultivariateNormal):
        conditional_stddev = q.scale_tril.diagonal(dim1=-2, dim2=-1)
        total_correlation = (q.stddev / conditional_stddev).log().sum(-1)
    else:
        factor = q.cov_factor / q.cov_diag.sqrt().unsqueeze(-1)
        eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        marginals = factor.square().sum(-1).log1p().sum(-1)
        total_correlation = 0.5 * (marginals - torch.logdet(eye + factor.mT @ factor))
    return kl_by_cross_entropy(Independent(Normal(q.loc, q.stddev), 1), p) + total_correlation


def kl_of_transformed(q: TransformedDistribution, p: Distribution) -> Tensor:
    """Return the KL of two distributions that are the same bijection of two others: the KL of the others.

    For example, it gives a log-radial or log-normal guide its closed-form KL to ``LogNormal(...).to_event(1)``.
    """
    transforms = elementary(q.transforms)
    if not all(transform.bijective for transform in transforms):
        raise NotImplementedError
    if is_reshape(transforms) and isinstance(leaf(p), Normal):
        return kl_divergence(q.base_dist, _reshape_normals(p, transforms))
    try:
        pulled_back = pull_back(p, transforms)
    except ValueError as error:
        # The inverse of a transform of whole events does not apply to every distribution.
        raise NotImplementedError from error
    return kl_divergence(q.base_dist, pulled_back)


def _reshape_normals(p: Distribution, transforms: Sequence[Transform]) -> Distribution:
    """Return the independent normals that reshapes turn into p."""
    if remove_masks(p) is not p:
        raise NotImplementedError
    shape = p.batch_shape + p.event_shape
    loc = leaf(p).loc.expand(shape)
    scale = leaf(p).scale.expand(shape)
    for transform in reversed(transforms):
        loc = transform.inv(loc)
        scale = transform.inv(scale)
    return Independent(Normal(loc, scale, validate_args=False), transforms[0].domain.event_dim)


class _Parameters(NamedTuple):
    """The parameters of q at full shape, as ``loc + scale * noise``."""

    loc: Tensor
    scale: Tensor
    # How many last dimensions share one radius; None for independent normal noise.
    radius_dim: int | None
    # The factor between an element's squared scale and its variance.
    elements_per_radius: int
    # The entropy of the elements of one radius at scale one.
    unit_entropy: float


def _read_parameters(q: Distribution) -> _Parameters:
    inner = leaf(q)
    shape = q.batch_shape + q.event_shape
    loc = inner.loc.expand(shape)
    scale = inner.scale.expand(shape)
    if isinstance(inner, RadialNormal):
        return _Parameters(loc, scale, inner.event_dim, inner.num_elements, inner.unit_entropy)
    return _Parameters(loc, scale, None, 1, 0.5 * (1.0 + math.log(2.0 * math.pi)))


def _masked_divergence(q: Distribution, p: Distribution) -> Tensor:
    """Return the divergence of distributions with masks; no large terms cancel where both sides count."""
    try:
        q_mask = mask_of(q)
        p_mask = mask_of(p)
    except ValueError:
        # A mask covers single elements of an event: each side sums the elements that its mask keeps.
        return _cross_entropy(q, p) - _entropy(q)
    kl = _divergence(remove_masks(q), remove_masks(p))
    if q_mask is p_mask:
        return scale_and_mask(kl, mask=q_mask)
    q_on = torch.as_tensor(True if q_mask is None else q_mask, device=kl.device)
    p_on = torch.as_tensor(True if p_mask is None else p_mask, device=kl.device)
    one_sided = torch.where(
        p_on, _cross_entropy(remove_masks(q), remove_masks(p)), -_entropy(remove_masks(q))
    )
    return torch.where(q_on & p_on, kl, torch.where(q_on | p_on, one_sided, 0.0))


def _divergence(q: Distribution, p: Distribution) -> Tensor:
    """Return the divergence of distributions without masks, as a sum with one term for each element."""
    parameters = _read_parameters(q)
    if isinstance(leaf(p), RadialNormal):
        return carry_to_batch(partial(_divergence_to_radial, parameters), p)
    normal = leaf(p)
    shape = p.batch_shape + p.event_shape
    # A number for each element is computed only where they differ.
    scale = drop_repeats(parameters.scale)
    center = drop_repeats(normal.loc.expand(shape))
    unit = drop_repeats(normal.scale.expand(shape))
    radius = None if parameters.radius_dim is None else parameters.elements_per_radius
    kl = kl_to_normal(parameters.loc, scale, center, unit, len(q.event_shape), radius)
    if radius is None:
        return kl
    # Each radius adds the same constant; it is added last.
    constant = 0.5 * radius * math.log(2.0 * math.pi) - parameters.unit_entropy
    return to_accumulation_dtype(kl) + q.event_shape.numel() // radius * constant


_radial_to_radial = row_operator("radial_to_radial", radial_to_radial)
_normal_to_radial = row_operator("normal_to_radial", normal_to_radial)


def _divergence_to_radial(q: _Parameters, p: RadialNormal) -> Tensor:
    """Return the divergence to a radial distribution without wrappers.

    The parameters of q have the shape ``[*batch, *event]``, with the event of p last; the result is ``[*batch]``, one
    number for each radius of p.

    :raises NotImplementedError: for a radial q with other radii than p.
    """
    if q.radius_dim is not None and q.radius_dim != p.event_dim:
        # More than one radius is left to integrate over.
        raise NotImplementedError
    # Repeated batch dimensions, such as those of particles, are computed once.
    tensors = torch.broadcast_tensors(
        *(drop_repeats(t, p.event_dim) for t in (q.loc, q.scale, p.loc, p.scale))
    )
    # The event becomes one last dimension.
    loc, scale, center, unit = (
        t.flatten(t.dim() - p.event_dim) if p.event_dim else t.unsqueeze(-1) for t in tensors
    )
    # The repeats count if a wrapper sums over their dimension.
    shape = torch.broadcast_shapes(q.loc.shape, p.loc.shape)
    shape = shape[: len(shape) - p.event_dim]
    if p.num_elements == 1:
        # The distributions are normal.
        return kl_to_normal(loc, scale, center, unit, 1).expand(shape)
    ratio, shift = standardize(loc, scale, center, unit)
    kl = _normal_to_radial if q.radius_dim is None else _radial_to_radial
    return kl(ratio, shift, directions(ratio)).expand(shape)


def _entropy(q: Distribution) -> Tensor:
    """Return the entropy with sums in the accumulation dtype."""
    return carry_to_batch(
        lambda q: q.accumulated_entropy() if isinstance(q, RadialNormal) else q.entropy(), q
    )


def _cross_entropy(q: Distribution, p: Distribution) -> Tensor:
    """Return E[-log p(w)]. Everything broadcasts, because q's parameters have the full shape."""
    return carry_to_batch(partial(_cross_entropy_without_wrappers, _read_parameters(q)), p)


def _cross_entropy_without_wrappers(q: _Parameters, p: RadialNormal | Normal) -> Tensor:
    """Return E[-log p(w)] for a radial or a normal p without wrappers, one number for each element of its batch."""
    if isinstance(p, RadialNormal):
        log_scale = event_sum(q.scale.log(), p.event_dim)
        return _divergence_to_radial(q, p) + (
            log_scale + p.num_elements // q.elements_per_radius * q.unit_entropy
        )
    scale = drop_repeats(p.scale)
    ratio, shift = standardize(q.loc, q.scale, drop_repeats(p.loc), scale)
    quadratic = 0.5 * (ratio.square() / q.elements_per_radius + shift.square())
    return quadratic + (scale.log() + 0.5 * math.log(2.0 * math.pi))


# The rules are registered on torch's classes: Pyro's rule for ``Independent`` peels the layers and wraps the rest in
# torch's ``Independent``, so it would silently miss a rule on Pyro's subclass. A rule that does not apply raises
# ``NotImplementedError``, which tells :class:`~pyro.infer.TraceMeanField_ELBO` to sample the KL. Pairs that torch or
# Pyro register themselves (Independent to Independent) stay theirs and end in one of the rows below. The exception is
# masked to masked, if one is radial: Pyro's rule uses one mask for both sides, which is right only if they are equal.
_KINDS = (RadialNormal, Normal, Independent, MaskedDistribution, ExpandedDistribution)
_REGISTERED_ELSEWHERE = {
    (Normal, Normal),
    (Independent, Independent),
    (MaskedDistribution, MaskedDistribution),
}
# Torch considers two equal bijections different if they are made of several parts.
_BIJECTIONS = (Pushforward, LogNormal, Independent, ExpandedDistribution, Gamma, InverseGamma)

RULES: list[tuple[type[Distribution], type[Distribution], Callable[..., Tensor | float]]] = [
    *(
        (q, p, kl_by_cross_entropy)
        for q, p in product(_KINDS, _KINDS)
        if (q, p) not in _REGISTERED_ELSEWHERE
    ),
    (MaskedDistribution, MaskedDistribution, kl_of_masked),
    (RadialNormal, MultivariateNormal, kl_radial_to_multivariate_normal),
    *((MultivariateNormal, p, kl_correlated_normal_to_normal) for p in _KINDS[2:]),
    *((LowRankMultivariateNormal, p, kl_correlated_normal_to_normal) for p in _KINDS[2:]),
    *((TransformedDistribution, p, kl_of_transformed) for p in _BIJECTIONS),
    (Normal, TransformedDistribution, kl_normal_to_log_gamma),
    (VonMisesFisherStable, VonMisesFisherStable, kl_von_mises_fisher),
    (VonMisesFisherStable, HypersphericalUniform, kl_von_mises_fisher_to_uniform),
    (HypersphericalUniform, VonMisesFisherStable, kl_uniform_to_von_mises_fisher),
    (HypersphericalUniform, HypersphericalUniform, kl_uniform),
]


@cache  # Torch compares rules by identity where several apply.
def _if_shapes_fit(rule: Callable[..., Tensor | float]) -> Callable[..., Tensor | float]:
    """Return the rule for distributions of one event shape whose batches broadcast; it leaves others to sampling."""

    @wraps(rule)
    def kl(q: Distribution, p: Distribution) -> Tensor | float:
        sizes = zip(reversed(q.batch_shape), reversed(p.batch_shape), strict=False)
        if q.event_shape != p.event_shape or not all(m == n or 1 in (m, n) for m, n in sizes):
            raise NotImplementedError
        return rule(q, p)

    return kl


for _q, _p, _rule in RULES:
    register_kl(_q, _p)(_if_shapes_fit(_rule))
