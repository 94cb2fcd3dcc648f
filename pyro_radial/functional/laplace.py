# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A Laplace approximation in function space: a trained network with the widths of a Gaussian process prior."""

import warnings
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor

from pyro_radial._pyro.checks import optional, positive_count
from pyro_radial.functional.gaussian import cholesky, with_diagonal
from pyro_radial.functional.priors.function_prior import FunctionPrior, check_points, check_prior
from pyro_radial.infer.autoguide.correlated import AutoCorrelated
from pyro_radial.infer.autoguide.families.family import Family
from pyro_radial.infer.autoguide.families.normal import Delta
from pyro_radial.infer.posthoc.laplace import TrainedNetwork, output_hessian
from pyro_radial.infer.training.data import Rows, device_of, dtype_of, evaluating, move
from pyro_radial.nn.linearized.linearization import CovarianceBlock, Linearization, undisturbed
from pyro_radial.nn.linearized.site_moments import sites_of_network

__all__ = ["function_space_laplace"]

#: The most numbers in the Jacobian at the points, in float64: two gigabytes.
MAX_JACOBIAN = 2**28
#: Eigenvalues of the prior's covariance below this share of the largest are left out.
LEAST_EIGENVALUE = 1e-6
#: A network that holds less of the prior's variance at the points is named.
LEAST_HELD = 0.95
#: Rows of data in one pass.
CHUNK = 256


@torch.no_grad()
def function_space_laplace(
    model: Any, trained: Any, data: Any, prior: FunctionPrior, points: Tensor, *, rank: int | None = None
) -> AutoCorrelated:
    r"""Approximate the posterior of a trained network under a Gaussian prior on functions, linear in its weights.

    With the covariance :math:`K \approx U \Lambda U^T` of the prior at points X, and the Jacobian J there in the
    weights w around their trained values :math:`w_0`, the weights of least norm with the functions :math:`U
    \Lambda^{1/2}` are

    .. math:: B = J^T (J J^T)^{-1} U \Lambda^{1/2}, \qquad w = w_0 + B a, \quad a \sim \mathcal N(0, I),

    so at X the linearized network has the prior's width. The posterior precision of a is :math:`A = I + \sum_n (J_n
    B)^T H_n J_n B`, with the Hessian :math:`H_n` of the negative log-likelihood in the outputs, and the covariance of
    the weights is :math:`B A^{-1} B^T`. Put X where predictions are made, the training inputs included; far from its
    points the width is unknown. For a model linear in its weights, with as many points as weights, the posterior is
    exact. Predict with ``method="linearized"``. Train the mean first, under the same prior, with
    :class:`~pyro_radial.functional.RKHSNorm`.

    Source: Cinquin, Pförtner, Fortuin, Hennig and Bamler (2024), "FSP-Laplace", arXiv 2407.13711, section 3, who
    restrict the weights to the range of :math:`J^T U`. The widths at X are then not the prior's; here they are.

    :param model: a :class:`~pyro_radial.SupervisedModel` of a :class:`~pyro_radial.BayesianModule`, with a categorical,
        Bernoulli, Gaussian or Poisson likelihood.
    :param trained: its guide, with the trained weights as medians, or the trained network itself.
    :param data: the training rows, in any form that :func:`~pyro_radial.fit` takes.
    :param FunctionPrior prior: a prior with moments, such as :class:`~pyro_radial.functional.GaussianProcess`.
    :param Tensor points: X, ``[M, ...]``.
    :param int rank: the number of leading eigenvectors of K over all outputs; by default those with eigenvalues above a
        millionth of the largest.
    :returns: a guide of all weights with the covariance as its factor, and points at other sites.
    :raises ValueError: for another model or likelihood, a prior without moments or with a covariance at the points that
        is not positive definite, points that do not fit into memory, and a rank above the number of function values.

    Example::

        >>> from torch import nn
        >>> from pyro_radial import BayesianModule, SupervisedModel, predict
        >>> from pyro_radial.functional import GaussianProcess
        >>> from pyro_radial.nn import likelihoods
        >>> network = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
        >>> model = SupervisedModel(BayesianModule(network), likelihoods.Gaussian(scale=0.1))
        >>> prior = GaussianProcess(lambda a, b: torch.exp(-0.5 * (a - b.T) ** 2))
        >>> x, points = torch.zeros(1, 1), torch.linspace(-2, 2, 15)[:, None]
        >>> guide = function_space_laplace(model, network, (x, x), prior, points)
        >>> draws = predict(model, guide, torch.tensor([[0.0], [2.0]]), num_samples=5_000, method="linearized")
        >>> [round(float(stddev), 1) for stddev in draws.epistemic_variance.sqrt()]  # at the datum, and away from it
        [0.1, 1.0]
    """
    check_prior(prior)
    check_points(points, "points")
    optional(positive_count, "rank", rank)
    network = TrainedNetwork(model, trained)
    rows = Rows(data, "data", dtype_of(model))
    device = device_of(model)
    weights = {name: network.values[name] for name in sites_of_network(model)}
    if not weights:
        raise ValueError(f"model must have a network whose parameters are sites, got sites {sorted(network.values)}")
    blocks = [CovarianceBlock((name,), torch.zeros_like(value)) for name, value in weights.items()]
    linear = Linearization(model, weights, blocks)
    points = move(points, device).to(next(iter(weights.values())))
    precision: Any = 0.0
    with undisturbed(), evaluating(model):
        num_outputs = linear.structure(points).num_outputs
        _check_size(len(points), num_outputs, sum(value.numel() for value in weights.values()))
        jacobian, functions = linear.jacobian(points)[1], _prior_factor(prior, points, num_outputs, rank)
        basis = _basis(jacobian, functions)
        _warn_of_stiff_network(jacobian.double() @ basis, functions)
        for index in torch.arange(len(rows)).split(CHUNK):
            f, jacobian = linear.jacobian(move(rows.take(index)[0], device))
            moved = jacobian.double() @ basis
            hessian = output_hessian(network.likelihood, f.double(), network.noise)
            precision = precision + (moved.mT @ hessian @ moved).sum(0)
    scaled = (network.likelihood.num_data or len(rows)) / len(rows) * precision
    eigenvalues, vectors = torch.linalg.eigh(with_diagonal(scaled, 1.0))
    factor = basis @ (vectors * eigenvalues.rsqrt())
    if factor.shape[1] > len(factor):
        # The same product with as many columns as weights.
        factor = torch.linalg.qr(factor.mT).R.mT
    parts = factor.split([value.numel() for value in weights.values()])
    return _guide(model, network, rows, dict(zip(weights, parts, strict=True)))


def _check_size(num_points: int, num_outputs: int, num_weights: int) -> None:
    size = num_points * num_outputs * max(num_weights, num_points * num_outputs)
    if size > MAX_JACOBIAN:
        raise ValueError(
            f"points must be fewer, because the Jacobian of {num_points} points with {num_outputs} outputs in "
            f"{num_weights:,} weights, or the covariances, have {size:,} numbers, more than {MAX_JACOBIAN:,}"
        )


def _prior_factor(prior: FunctionPrior, points: Tensor, num_outputs: int, rank: int | None) -> Tensor:
    """The leading eigenvectors ``[N, O, R]`` of the prior's covariance, times the roots of their eigenvalues."""
    try:
        _, covariances = prior.moments(points, num_outputs)
    except NotImplementedError as error:
        raise ValueError(f"prior must have moments, as GaussianProcess has: {error}") from None
    if rank is not None and rank > len(points) * num_outputs:
        raise ValueError(f"rank must be at most {len(points) * num_outputs}, the function values, got {rank}")
    one = covariances.stride(0) == 0
    cholesky(covariances[:1] if one else covariances)  # Raises an error unless it is positive definite.
    pairs = [_leading(covariance, rank) for covariance in (covariances[:1] if one else covariances)]
    pairs = pairs * num_outputs if one else pairs
    eigenvalues = torch.cat([values for values, _ in pairs])
    columns = torch.zeros(len(points), num_outputs, len(eigenvalues), dtype=torch.double, device=points.device)
    start = 0
    for output, (values, vectors) in enumerate(pairs):
        columns[:, output, start : start + len(values)] = vectors * values.sqrt()
        start += len(values)
    order = eigenvalues.argsort(descending=True)[:rank]
    return columns[..., order[eigenvalues[order] > LEAST_EIGENVALUE * eigenvalues.max()]]


def _leading(covariance: Tensor, rank: int | None) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues, and their eigenvectors: all, or at least the given number."""
    if rank is None or 4 * rank > len(covariance):
        values, vectors = torch.linalg.eigh(covariance)
        return values.clamp_min(0.0), vectors
    start = np.random.default_rng(0).standard_normal(len(covariance))
    found = eigsh(covariance.cpu().numpy(), k=rank, v0=start)
    values, vectors = (torch.from_numpy(part).to(covariance) for part in found)
    return values.clamp_min(0.0), vectors


def _basis(jacobian: Tensor, functions: Tensor) -> Tensor:
    """The weights of least norm ``[P, R]`` with functions ``[N, O, R]``, in float64."""
    jacobian = jacobian.double().flatten(0, 1)
    return jacobian.mT @ torch.cholesky_solve(functions.flatten(0, 1), cholesky(jacobian @ jacobian.mT))


def _warn_of_stiff_network(held: Tensor, functions: Tensor) -> None:
    share = float(held.square().sum() / functions.square().sum())
    if share < LEAST_HELD:
        warnings.warn(
            f"The linearized network holds {100 * share:.0f} % of the prior's variance at the points, so its posterior "
            "is too narrow. Use more or steeper units, another activation, or a smoother prior.",
            stacklevel=3,
        )


def _guide(model: Any, network: TrainedNetwork, rows: Rows, factors: dict[str, Tensor]) -> AutoCorrelated:
    points: dict[str, Family] = {name: Delta() for name in network.values if name not in factors}
    (rank,) = {factor.shape[-1] for factor in factors.values()}
    guide = AutoCorrelated(model, sites=list(factors), rank=rank, families=points)
    guide.setup(*(move(part, device_of(model)) for part in rows.take(torch.arange(min(2, len(rows))))))
    guide.load_means(network.values)
    guide.set_factor(torch.cat([factors[name] for name in guide.correlated]).to(guide.factor))
    guide.linear_only = True
    return guide
