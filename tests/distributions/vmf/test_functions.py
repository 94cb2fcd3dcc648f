# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Each number below is the largest error on the points of its test, over true values of 60 digits."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from mpmath import MPContext
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, vmap

from pyro_radial.distributions.vmf import bessel
from pyro_radial.distributions.vmf.bessel import bessel_plan
from pyro_radial.distributions.vmf.functions import (
    cosine_variance,
    log_mean_exp_cosine,
    log_vmf_peak,
    mean_cosine,
    mean_cosine_gap,
    vmf_kl,
    vmf_kl_to_uniform,
)
from tests.helpers.devices import CountHostReads, recent_compiler

TRUTH_FILE = Path(__file__).resolve().parents[4] / "shared" / "data" / "numerics" / "vmf_truth.npz"
SCALARS = [log_mean_exp_cosine, mean_cosine, cosine_variance, mean_cosine_gap, log_vmf_peak, vmf_kl_to_uniform]
# Relative errors in float64. In float32 all are rounded once, which costs at most half a unit in the last place.
LIMITS = {"L": 1e-15, "A": 1e-15, "A'": 1e-14, "A''": 1e-13, "M": 1e-14, "U": 5e-14, "gap": 5e-14}
ROUNDING = 6.1e-8
# A precision of its own: mpmath's global one is anybody's to change.
mp = MPContext()
mp.dps = 60


@cache
def true_cumulants(dim, concentration):
    """L, A, A' and A'' from the series of 0F1, summed outward from its largest term.

    With weights c_j in kappa^2j, the operator kappa d/dkappa takes L to the cumulants of 2j.
    """
    kappa, half = mp.mpf(concentration), mp.mpf(dim) / 2
    x = kappa**2 / 4
    mode = int(mp.floor((mp.sqrt((half - 1) ** 2 + 4 * x) - half - 1) / 2)) if x > half else 0
    moments = [mp.mpf(0)] * 4
    for direction in (1, -1):
        j, weight = mode, mp.mpf(1)
        while weight > mp.mpf(10) ** -60 and j >= 0:
            if direction == 1 or j < mode:
                power = weight
                for order in range(4):
                    moments[order] += power
                    power *= 2 * (j - mode)
            weight *= x / ((j + 1) * (j + half)) if direction == 1 else j * (j - 1 + half) / x
            j += direction
    first, second, third = (moment / moments[0] for moment in moments[1:])
    log_mode = mode * mp.log(x) - mp.loggamma(mode + 1) - mp.loggamma(half + mode) + mp.loggamma(half) if mode else 0
    variance = second - first**2
    mean = (first + 2 * mode) / kappa
    slope = (variance - kappa * mean) / kappa**2
    skew = third - 3 * first * second + 2 * first**3
    return log_mode + mp.log(moments[0]), mean, slope, (skew - 3 * kappa**2 * slope - kappa * mean) / kappa**3


def relative_error(tensor, truth):
    return max(float(abs(mp.mpf(x) / t - 1)) for x, t in zip(tensor.double().tolist(), truth, strict=True))


def errors(dim, concentration, cumulants):
    """The relative error of every scalar at some concentrations, as a dictionary."""
    leaf = concentration.clone().requires_grad_()
    variance = cosine_variance(leaf, dim)
    (bend,) = torch.autograd.grad(variance.sum(), leaf)
    kappas = [mp.mpf(k) for k in concentration.tolist()]
    ls, means, slopes, bends = zip(*cumulants, strict=True)
    both = list(zip(kappas, ls, means, strict=True))
    return {
        "L": relative_error(log_mean_exp_cosine(concentration, dim), ls),
        "A": relative_error(mean_cosine(concentration, dim), means),
        "A'": relative_error(variance.detach(), slopes),
        "A''": relative_error(bend, bends),
        "M": relative_error(log_vmf_peak(concentration, dim), [k - value for k, value, _ in both]),
        "U": relative_error(vmf_kl_to_uniform(concentration, dim), [k * a - value for k, value, a in both]),
        "gap": relative_error(mean_cosine_gap(concentration, dim), [k * (1 - a) for k, _, a in both]),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("dim", [2, 7, 23, 784, 12345, 10**5])
def test_scalars_are_right_to_the_last_digits(dim, dtype):
    concentration = torch.tensor([1.7e-6, 0.00137, 0.731, 12.9, 411.3, 27183.5]).to(dtype)
    measured = errors(dim, concentration, [true_cumulants(dim, k) for k in concentration.tolist()])
    for name, error in measured.items():
        assert error <= (LIMITS[name] if dtype == torch.float64 else ROUNDING), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scalars_are_right_to_the_last_digits_on_a_grid_up_to_a_million(dtype):
    dims, kappas, truth = _grid()
    worst = dict.fromkeys(LIMITS, 0.0)
    for dim in sorted(set(dims.tolist())):
        rows = dims == dim
        cumulants = [[mp.mpf(high) + mp.mpf(low) for high, low in row[:4]] for row in truth[rows].tolist()]
        measured = errors(dim, torch.tensor(kappas[rows], dtype=dtype), cumulants)
        worst = {name: max(worst[name], measured[name]) for name in worst}
    for name, error in worst.items():
        assert error <= (LIMITS[name] if dtype == torch.float64 else ROUNDING), name


def _grid():
    if not TRUTH_FILE.exists():
        pytest.skip("no table of true values beside the checkout")
    with np.load(TRUTH_FILE) as table:
        return table["m"], table["kappa"], table["val"]


@pytest.mark.parametrize(
    ("formula", "order", "limit"), [(bessel.log_mean_exp, 0, 4e-7), (bessel.mean, 1, 3e-7), (bessel.variance, 2, 5e-6)]
)
def test_formulas_keep_the_digits_of_float32_when_they_work_in_it(formula, order, limit):
    # A device without float64 has nothing else.
    concentration = torch.logspace(-6, 4.4, 12)
    for dim in (2, 7, 23, 784, 12345):
        truth = [true_cumulants(dim, k)[order] for k in concentration.tolist()]
        assert relative_error(formula(concentration, bessel_plan(dim)), truth) <= limit


def test_in_three_dimensions_the_scalars_are_the_closed_forms():
    kappa = torch.tensor([0.5, 3.0, 50.0], dtype=torch.double)
    mean, log_mean_exp = 1 / kappa.tanh() - 1 / kappa, (kappa.sinh() / kappa).log()
    torch.testing.assert_close(mean_cosine(kappa, 3), mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(cosine_variance(kappa, 3), kappa.square().reciprocal() - kappa.sinh() ** -2)
    torch.testing.assert_close(log_mean_exp_cosine(kappa, 3), log_mean_exp, rtol=1e-14, atol=1e-14)


RATIOS = (1e-3, 0.1, 0.36, 0.37, 0.5, 0.9, 0.9999, 1.0001, 2.0, 2.7, 2.75, 100.0)


@pytest.mark.parametrize("dim", [2, 7, 23, 784, 12345])
def test_the_kl_and_its_gradients_keep_their_digits_at_every_ratio_of_concentrations(dim):
    points = torch.tensor([[q, q * r, gap] for q in (0.0137, 7.3, 911.7) for r in RATIOS for gap in (0.0, 0.25)])
    truth = [true_kl(dim, *point) for point in points.tolist()]
    for dtype, limits in ((torch.float64, (5e-13, 1e-14, 1e-9)), (torch.float32, (ROUNDING,) * 3)):
        q, p, gap = (column.to(dtype).requires_grad_() for column in points.unbind(1))
        kl = vmf_kl(q, p, gap, dim)
        found = [kl.detach(), *torch.autograd.grad(kl.sum(), (q, p))]
        for tensor, true, limit in zip(found, zip(*truth, strict=True), limits, strict=True):
            assert relative_error(tensor, true) <= limit


def true_kl(dim, q, p, gap):
    """The KL and its derivatives in q and p, by the direct formulas in 60 digits."""
    (log_q, mean_q, variance_q, _), (log_p, mean_p, _, _) = true_cumulants(dim, q), true_cumulants(dim, p)
    q, p = mp.mpf(q), mp.mpf(p)
    kl = p * gap * mean_q + log_p - log_q - mean_q * (p - q)
    return kl, (q - p + p * gap) * variance_q, mean_p - mean_q + gap * mean_q


@pytest.mark.parametrize("dim", [2, 3, 41, 500, 10**5])
def test_concentration_zero_is_exactly_the_uniform_distribution(dim):
    zero = torch.zeros((), dtype=torch.double, requires_grad=True)
    for scalar in (log_mean_exp_cosine, mean_cosine, mean_cosine_gap, log_vmf_peak, vmf_kl_to_uniform):
        assert scalar(zero, dim) == 0
    variance = cosine_variance(zero, dim)
    assert float(variance.detach()) == pytest.approx(1 / dim, rel=1e-15)
    assert torch.autograd.grad(variance, zero)[0] == 0


@pytest.mark.parametrize("dim", [3, 41])
def test_gradients_of_first_and_second_order_agree_with_finite_differences(dim):
    kappa = torch.tensor([0.4, 7.0, 300.0], dtype=torch.double, requires_grad=True)
    for scalar in SCALARS:
        assert gradcheck(lambda k, scalar=scalar: scalar(k, dim), kappa)
        assert gradgradcheck(lambda k, scalar=scalar: scalar(k, dim), kappa)
    p = torch.tensor([0.5, 11.0, 20.0], dtype=torch.double, requires_grad=True)
    gap = torch.tensor([0.1, 0.3, 1.2], dtype=torch.double, requires_grad=True)
    assert gradcheck(lambda *args: vmf_kl(*args, dim), (kappa, p, gap))
    assert gradgradcheck(lambda *args: vmf_kl(*args, dim), (kappa, p, gap))


@pytest.mark.parametrize("dim", [3, 500])
def test_the_variance_has_two_more_derivatives(dim):
    kappa = torch.tensor([0.4, 7.0, 300.0], dtype=torch.double, requires_grad=True)
    assert gradgradcheck(lambda k: 100.0 * cosine_variance(k, dim), kappa)


def test_every_scalar_and_its_gradients_map_over_a_batch():
    dim = 40
    kappa = torch.tensor([0.0, 0.4, 7.0, 300.0], dtype=torch.double, requires_grad=True)
    for scalar in SCALARS:
        value = scalar(kappa, dim)
        (first,) = torch.autograd.grad(value.sum(), kappa, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), kappa)
        one = lambda k, scalar=scalar: scalar(k, dim)  # noqa: E731
        torch.testing.assert_close(vmap(one)(kappa), value)
        torch.testing.assert_close(vmap(grad(one))(kappa), first)
        torch.testing.assert_close(vmap(grad(grad(one)))(kappa.detach()), second)
    p = torch.tensor([[0.2], [50.0]], dtype=torch.double)
    gap = torch.tensor(0.3, dtype=torch.double)
    rows = vmap(lambda p: vmf_kl(kappa, p, gap, dim))(p)
    torch.testing.assert_close(rows, vmf_kl(kappa, p, gap, dim))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@recent_compiler
def test_a_graph_compiled_for_any_shape_takes_the_dimension_from_a_tensor():
    def of_rows(loc):
        return vmf_kl(loc.norm(dim=-1), torch.tensor(5.0), torch.tensor(0.3), loc.shape[-1])

    torch._dynamo.reset()
    compiled = torch.compile(of_rows, fullgraph=True, backend="eager", dynamic=True)
    for shape in ((2, 50), (3, 60)):
        loc = torch.randn(shape)
        torch.testing.assert_close(compiled(loc), of_rows(loc))


def test_nothing_reads_a_tensor_on_the_host():
    q, p = (torch.ones(shape, requires_grad=True) for shape in ((3,), (2, 1)))
    with CountHostReads() as reads:
        for dim in (30, 500):
            total = vmf_kl(q, p, torch.ones(()), dim) + sum(scalar(q, dim) for scalar in SCALARS)
            first = torch.autograd.grad(total.sum(), (q, p), create_graph=True)
            torch.autograd.grad(first[0].sum(), q)
    assert reads.count == 0


def test_the_kl_broadcasts_and_answers_in_the_widest_dtype_given():
    q, p, gap = torch.rand(4, 1), torch.rand(3, dtype=torch.double), torch.rand(2, 1, 1)
    kl = vmf_kl(q, p, gap, 10)
    assert (kl.shape, kl.dtype) == ((2, 4, 3), torch.double)
    assert vmf_kl(q, p.float(), gap, 10).dtype == torch.float32
    assert kl[1, 2, 0] == pytest.approx(float(vmf_kl(q[2, 0], p[0], gap[1, 0, 0], 10)), rel=1e-6)
    for scalar in SCALARS:
        assert scalar(q.half(), 10).dtype == torch.half
