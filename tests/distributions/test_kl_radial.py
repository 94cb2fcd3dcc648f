# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The KL to a radial distribution, against references that share no code with it."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions.torch_distribution import ExpandedDistribution
from scipy.special import digamma, gammaln
from torch.distributions import kl_divergence

from pyro_radial.distributions import RadialNormal
from pyro_radial.distributions.kl_formulas.shared import num_directions
from tests.helpers.distributions import FAMILIES, assert_kl_is_that_of_samples, kl_of

STEP = 0.2


def standard(dim, dtype=torch.double):
    return torch.zeros(dim, dtype=dtype), torch.ones(dim, dtype=dtype)


def spread_ratios(dim, decades=1.0):
    return 10.0 ** (decades * (2.0 * torch.rand(dim, dtype=torch.double) - 1.0))


def shift_of_length(length, dim):
    vector = torch.randn(dim, dtype=torch.double)
    return length * vector / vector.norm()


def mean_log(log_transform):
    """The mean over columns of E log X from the logarithm of its Laplace transform, by the trapezoid rule in log s."""
    s = np.exp(np.arange(-60.0, 90.0, STEP))[:, None]
    return STEP * (np.exp(-s) - np.exp(log_transform(s))).sum(0).mean()


def kl_by_quadrature(family, ratio, shift):
    """The exact KL to a standard radial: for normal q, for radial q at equal means, and for radial q at D = 2."""
    ratio, shift = np.asarray(ratio), np.asarray(shift)
    a, dim = ratio**2, len(ratio)
    radial = family == "radial"

    def quadratic_form(s):
        return -(0.5 * np.log1p(2.0 * a * s) + s * shift**2 / (1.0 + 2.0 * a * s)).sum(-1, keepdims=True)

    if radial and (shift != 0.0).any():
        assert dim == 2
        # A cusp where u points along the shift leaves an error near 1e-7.
        angles = (np.arange(2000) + 0.5) * math.pi / 2000
        u = np.stack([np.cos(angles), np.sin(angles)], -1)
        big_a, c = u**2 @ a, (shift**2).sum()
        gap = np.maximum(big_a * c - (u @ (ratio * shift)) ** 2, 0.0)
        mean_log_square = mean_log(
            lambda s: -0.5 * np.log1p(2.0 * big_a * s) - s * (c + 2.0 * s * gap) / (1.0 + 2.0 * big_a * s)
        )
    else:
        mean_log_square = mean_log(quadratic_form)
        if radial:
            mean_log_square += -digamma(dim / 2) - np.euler_gamma - 2.0 * math.log(2.0)
    area = math.log(2.0) + 0.5 * dim * math.log(math.pi) - gammaln(dim / 2)
    if radial:
        constants = 0.5 * (dim - 1) * (np.euler_gamma + math.log(2.0)) - 0.5
    else:
        constants = area + 0.5 * math.log(math.pi / 2) - 0.5 * dim * math.log(2.0 * math.pi * math.e)
    mean_square = a.sum() / (dim if radial else 1) + (shift**2).sum()
    return float(constants - np.log(ratio).sum() + 0.5 * mean_square + 0.5 * (dim - 1) * mean_log_square)


def independent_calls(family, ratio, shift, count):
    """As many calls with directions of their own, as rows of one batch."""
    dim = len(ratio)
    # In a batch, as many directions as a call for one distribution alone takes.
    with pyro.settings.context(radial_kl_directions=num_directions(dim)):
        return kl_of(family)(shift.repeat(count, 1), ratio.repeat(count, 1), *standard(dim, ratio.dtype))


def assert_mean_is(values, expected, rounding=1e-9):
    # 4.5 standard errors: one in 10^5 for each of some dozens of comparisons.
    error = values.std(0) / len(values) ** 0.5
    assert bool(((values.mean(0) - expected).abs() <= 4.5 * error + rounding).all())


# --- where the KL is exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shape", "event_dim"), [((1,), 1), ((2,), 1), ((7,), 1), ((3, 40, 5), 2), ((20_000,), 1)])
def test_it_is_zero_with_zero_gradients_at_the_prior(shape, event_dim, dtype):
    start = [torch.randn(shape, dtype=dtype), 0.1 + torch.rand(shape, dtype=dtype)]
    loc, scale, center, unit = (tensor.clone().requires_grad_() for tensor in start + start)
    value = kl_divergence(RadialNormal(loc, scale, event_dim), RadialNormal(center, unit, event_dim))
    dim = math.prod(shape[len(shape) - event_dim :])
    # 1 / D is rounded to the dtype, the mean logarithm is good to some 1e-14, and there are D - 1 of it.
    tolerance = torch.finfo(dtype).eps + 3e-14 * (dim + 1)
    torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=tolerance)
    by_loc, by_scale, by_center, by_unit = torch.autograd.grad(value.sum(), (loc, scale, center, unit))
    assert not by_loc.any()
    assert not by_center.any()
    # The control variates' slopes are differences, good to some 1e-9 and multiplied by D times the square of u_i.
    for gradient in (by_scale * scale, by_unit * unit):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dim", [2, 5, 200, 157_000])
@pytest.mark.parametrize("factor", [0.1, 1.0, 10.0])
def test_at_equal_means_and_proportional_scales_it_is_that_of_half_normals(dim, factor):
    loc, unit = torch.randn(dim, dtype=torch.double), 0.5 + torch.rand(dim, dtype=torch.double)
    value = float(kl_of("radial")(loc, factor * unit, loc, unit))
    exact = 0.5 * (factor**2 - 1.0) - math.log(factor)
    # A factor times a number is rounded; sums of D such numbers.
    assert value == pytest.approx(exact, rel=1e-12, abs=2e-14 * dim)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_one_element_it_is_the_kl_of_normals(family):
    loc, scale, center, unit = torch.rand(4, 9, 1, dtype=torch.double) + 0.2
    exact = kl_divergence(dist.Normal(loc, scale), dist.Normal(center, unit)).squeeze(-1)
    torch.testing.assert_close(kl_of(family)(loc, scale, center, unit), exact, rtol=1e-13, atol=1e-14)
    element = dist.Normal(loc[:, 0], scale[:, 0])
    q = element if family == "normal" else RadialNormal(loc[:, 0], scale[:, 0], 0)
    torch.testing.assert_close(kl_divergence(q, RadialNormal(center[:, 0], unit[:, 0], 0)), exact)


# --- the estimate: unbiased, low-variance, of the right slope


@pytest.mark.parametrize(
    ("family", "dim", "length"),
    [
        *(("radial", dim, 0.0) for dim in (2, 5, 200)),
        *(("radial", 2, length) for length in (0.01, 1.0, 10.0)),
        *(("normal", dim, length) for dim in (2, 5, 200) for length in (0.0, 0.3, 10.0)),
    ],
)
def test_its_mean_is_the_integral(family, dim, length):
    ratio, shift = spread_ratios(dim), shift_of_length(length, dim)
    values = independent_calls(family, ratio, shift, 100)
    assert_mean_is(values, kl_by_quadrature(family, ratio, shift), rounding=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dim", [2, 20, 2000])
@pytest.mark.parametrize("length", [0.0, 1.0, 10.0])
def test_one_call_is_within_a_percent(family, dim, length):
    for ratio in (torch.full((dim,), 0.1).double(), torch.ones(dim).double(), spread_ratios(dim)):
        values = independent_calls(family, ratio, shift_of_length(length, dim), 40)
        # Over 40 calls a standard deviation is known to 11 %; none of these is close to the limit.
        assert float(values.std()) <= 0.01 * max(100.0, float(values.mean()))


@pytest.mark.parametrize("length", [1e-4, 1e-5])
def test_it_has_a_cone_in_the_means(length):
    dim = 2000
    shift = shift_of_length(length, dim).requires_grad_()
    center, unit = standard(dim)
    value = kl_of("radial")(shift, unit, center, unit)
    # E sqrt(1 - u_1^2), with u_1^2 from Beta(1/2, (D - 1) / 2).
    mean_sine = math.exp(2 * gammaln(dim / 2) - gammaln((dim - 1) / 2) - gammaln((dim + 1) / 2))
    slope = math.sqrt(math.pi / 2) * (dim - 1) * mean_sine
    # The next order is smaller by the length; a direction's own sine differs from its mean by 1 / D.
    assert float(value.detach()) / length == pytest.approx(slope, rel=2 * length + 2 / dim)
    (gradient,) = torch.autograd.grad(value, shift)
    along = float(gradient @ shift.detach()) / length
    assert along == pytest.approx(slope, rel=5 * length + 2 / dim)


def differences(function, point, step=1e-4):
    """Central differences of a function of one vector."""
    steps = step * np.eye(len(point))
    return np.array([(function(point + s) - function(point - s)) / (2.0 * step) for s in steps])


@pytest.mark.parametrize(
    ("family", "dim", "length"), [("normal", 6, 0.0), ("normal", 6, 2.0), ("radial", 6, 0.0), ("radial", 2, 1.0)]
)
def test_the_mean_of_its_gradients_is_that_of_the_exact_kl(family, dim, length):
    ratio, shift = spread_ratios(dim, 0.5), shift_of_length(length, dim)
    center, unit = torch.randn(dim, dtype=torch.double), 0.5 + torch.rand(dim, dtype=torch.double)
    parameters = [center + unit * shift, unit * ratio, center, unit]
    rows = [tensor.repeat(100, 1).requires_grad_() for tensor in parameters]
    gradients = torch.autograd.grad(kl_of(family)(*rows).sum(), rows)
    by_shift = differences(lambda d: kl_by_quadrature(family, ratio, d), shift.numpy()) if length else np.zeros(dim)
    by_ratio = differences(lambda s: kl_by_quadrature(family, s, shift), ratio.numpy())
    by_shift, by_ratio = torch.tensor(by_shift), torch.tensor(by_ratio)
    expected = [by_shift / unit, by_ratio / unit, -by_shift / unit, -(by_shift * shift + by_ratio * ratio) / unit]
    for gradient, exact in zip(gradients, expected, strict=True):
        # Differences are good to 1e-6 here, over angles with a cusp to 1e-3.
        assert_mean_is(gradient, exact, rounding=2e-3 if family == "radial" and length else 1e-5)


# --- shapes and wrappers

FULL = (3, 4, 5)
MASK = torch.tensor([True, False, True])
ROWS = torch.arange(12).reshape(3, 4) % 3 > 0


def leaves(shape=FULL):
    return torch.randn(shape, dtype=torch.double), 0.3 + torch.rand(shape, dtype=torch.double)


def radial(event_dim, shape=FULL):
    return RadialNormal(*leaves(shape), event_dim)


def normal(event_dim, shape=FULL):
    return dist.Normal(*leaves(shape)).to_event(event_dim)


def expanded(distribution, batch_shape):
    return ExpandedDistribution(distribution, torch.Size(batch_shape))


NESTINGS = {
    "normal matrices": lambda: (normal(2), radial(2)),
    "normal in two steps": lambda: (normal(1).to_event(1), radial(2)),
    "normal to a radius per row": lambda: (normal(2), radial(1).to_event(1)),
    "no shared radius": lambda: (radial(0).to_event(2), radial(0).to_event(2)),
    "a prior with fewer batch dims": lambda: (radial(1), radial(1, (5,))),
    "a guide with fewer batch dims": lambda: (radial(1, (5,)), radial(1, (4, 5))),
    "normal with fewer batch dims": lambda: (normal(1, (5,)), radial(1, (4, 5))),
    "an expanded prior": lambda: (radial(2), radial(2, (4, 5)).expand([3])),
    "an expanded guide": lambda: (radial(2, (4, 5)).expand([3]), radial(2)),
    "both expanded": lambda: (radial(1, (5,)).expand([4]), radial(1, (5,)).expand([4])),
    "one number for all elements": lambda: tuple(
        RadialNormal(*(torch.tensor(number, dtype=torch.double).expand(5) for number in numbers))
        for numbers in ((0.0, 1.0), (1.0, 2.0))
    ),
    "a lazily expanded guide": lambda: (expanded(radial(1, (5,)), [3]), radial(1, (3, 5))),
    "particles over a plate": lambda: (radial(1, (4, 5)).expand([6, 4]), radial(1, (5,)).expand([6, 4])),
    "particles of a normal": lambda: (dist.Normal(*leaves((5,))).expand([6, 1, 5]).to_event(1), radial(1, (5,))),
    "rows of one distribution, masked": lambda: (
        radial(1, (5,)).expand([4]).to_event(1).mask(True),
        radial(1, (5,)).expand([4]).to_event(1),
    ),
    "rows of one distribution, expanded": lambda: (
        expanded(radial(1, (5,)).expand([4]).to_event(1), [2]),
        expanded(radial(1, (5,)).expand([4]).to_event(1), [2]),
    ),
    "rows of one normal, masked": lambda: (
        dist.Normal(*leaves((5,))).expand([4, 5]).to_event(2),
        radial(1, (5,)).expand([4]).to_event(1).mask(torch.tensor(True)),
    ),
    "a masked prior": lambda: (radial(2), radial(2).mask(MASK)),
    "a prior masked as a whole": lambda: (radial(2), radial(2).mask(False)),
    "a masked guide": lambda: (radial(2).mask(MASK), radial(2)),
    "both masked": lambda: (normal(2).mask(MASK), radial(2).mask(torch.tensor([True, False, False]))),
    "masked rows": lambda: (radial(1).to_event(1), radial(1).mask(ROWS).to_event(1)),
    "masked rows of one distribution": lambda: (
        radial(1).to_event(1),
        radial(1, (5,)).expand([3, 4]).mask(ROWS).to_event(1),
    ),
}


@pytest.mark.parametrize("make", NESTINGS.values(), ids=NESTINGS.keys())
def test_it_is_that_of_samples_under_any_nesting(make):
    # The noise of 1000 directions is much less than that of the samples.
    with pyro.settings.context(radial_kl_directions=1000):
        assert_kl_is_that_of_samples(*make())


def test_radii_shared_differently_are_left_to_sampling():
    for q, p in (
        (radial(2), radial(1).to_event(1)),
        (radial(1).to_event(1), radial(2)),
        (radial(1), radial(1).to_event(1)),
        (normal(1), radial(2)),
    ):
        with pytest.raises(NotImplementedError):
            kl_divergence(q, p)


# --- numerics


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dim", [2, 50])
@pytest.mark.parametrize("ratio", [1e-6, 1.0, 1e6, None])
def test_in_float32_extreme_distributions_have_finite_values_and_gradients(family, dim, ratio):
    scale = torch.logspace(-6, 6, dim) if ratio is None else torch.full((dim,), ratio)
    lengths = torch.tensor([0.0, 1e-30, 1e-20, 1e-10, 1e-3, 1.0, 1e3, 1e6])
    for vector in (torch.randn(dim), torch.eye(dim)[0], torch.eye(dim)[-1], 1.0 / scale):
        # The last of these is a direction of the noise for which the line through the other center is hit.
        shift = lengths[:, None] * vector / vector.norm()
        rows = [shift, scale.repeat(len(shift), 1), torch.zeros_like(shift), torch.ones_like(shift)]
        rows = [tensor.requires_grad_() for tensor in rows]
        value = kl_of(family)(*rows)
        assert bool((torch.isfinite(value) & (value > -1.0)).all())
        assert all(bool(torch.isfinite(g).all()) for g in torch.autograd.grad(value.sum(), rows))
