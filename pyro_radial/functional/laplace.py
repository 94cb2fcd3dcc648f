# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A network with the mean and the widths of a Gaussian process: its first weights, and a Laplace approximation."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from pyro_radial._pyro.checks import non_negative_integer, warn
from pyro_radial._pyro.types import Model
from pyro_radial.functional.gaussian import cholesky, distinct_covariances, with_diagonal
from pyro_radial.functional.priors.function_prior import (
    FunctionPrior,
    check_points,
    check_prior,
    require_moments,
)
from pyro_radial.infer.data import Rows, move
from pyro_radial.infer.posthoc.laplace import TrainedNetwork, output_hessian
from pyro_radial.infer.prediction.guide_draws import sample_at
from pyro_radial.infer.prediction.linearized import (
    LinearizedGuide,
    Marginals,
    linearized_marginals,
    sample_noise,
)
from pyro_radial.nn.linearized.linearization import CovarianceBlock, Linearization, undisturbed
from pyro_radial.nn.linearized.site_moments import sites_of_network
from pyro_radial.nn.modules import device_of, dtype_of, evaluating

#: The most numbers in the Jacobian at the points, in float64: two gigabytes.
MAX_NUMBERS = 2**28
#: Eigenvalues of the prior's covariance below this share of the largest are left out.
LEAST_EIGENVALUE = 1e-9
#: A network that holds a smaller share of the prior's variance at the points is warned of.
LEAST_VARIANCE_RATIO = 0.95
#: The share of the prior's variance that is added at each point while the mean is moved, first much, then next to none.
SLACKS = (1e-2, 1e-5)
#: Steps of the mean end when one gains fewer nats, or after many losses; a mean that misses more nats is named.
LEAST_GAIN, MOST_DAMPING, MOST_MISSED = 1e-3, 1e10, 0.5
#: Rows of data in one pass.
CHUNK = 256
#: The standard deviation of the noise in each weight of a distribution with a density, as a share of the weight's own.
NOISE_SHARE = 1e-5
#: The most points, the shift in standard deviations and the least correlation that tell length scales.
MOST_ROWS, SHIFT, LEAST_CORRELATION = 50, 0.3, 1e-3


class FunctionSpaceLaplace(LinearizedGuide):
    """A guide with a correlated normal posterior on all weights of a network and points at all other sites.

    A draw of the weights is ``w + F z`` with standard normal z, so their covariance is the product of F and its
    transpose. The linearized network has the posterior's widths. The network at drawn weights does not, because F is
    wide where the data and the prior's points leave the weights free.

    :param values: the values of all sites by name.
    :param weights: the sites of the weights, in the network's order.
    :param factor: F, ``[P, R]``, with rows for one site after another.
    """

    weights_can_be_drawn = False

    def __init__(self, values: dict[str, Tensor], weights: Sequence[str], factor: Tensor) -> None:
        super().__init__(values)
        self._weights = tuple(weights)
        self.register_buffer("factor", factor)

    def _means(self) -> dict[str, Tensor]:
        """Return the means of the weights by site."""
        values = self.median()
        return {name: values[name] for name in self._weights}

    def covariance(self) -> Tensor:
        """Return the covariance of the weights, ``[P, P]``."""
        factor = self.get_buffer("factor")
        return factor @ factor.mT

    def get_posterior(self) -> dist.LowRankMultivariateNormal:
        """Return the distribution of all weights as one vector ``[P]``, in float64.

        Each weight has noise besides, of 1e-5 times its standard deviation, since F alone has no density.
        """
        mean = torch.cat([value.flatten() for value in self._means().values()])
        factor = self.get_buffer("factor").double()
        stddev = torch.linalg.vector_norm(factor, dim=-1)
        noise = NOISE_SHARE * stddev.clamp_min(NOISE_SHARE * stddev.max())
        return dist.LowRankMultivariateNormal(mean.double(), factor, noise.square())

    def joint_marginals(self, model: Model) -> Marginals:
        """Return a function of rows: the means ``[N, K]`` and covariances ``[N, K, K]`` of the linearized network."""
        factor = self.get_buffer("factor")
        block = CovarianceBlock(self._weights, torch.zeros_like(factor[:, 0]), factor=factor)
        return linearized_marginals(model, Linearization(model, self._means(), [block]))

    def forward(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """Sample all sites."""
        factor = self.get_buffer("factor")
        means = self._means()
        changes = _split_by_weight(factor @ sample_noise(factor[0]), means)
        weights = {name: mean + changes[name].view_as(mean) for name, mean in means.items()}
        return sample_at({**self.median(), **weights})


@torch.no_grad()
def function_space_laplace(
    model: Any,
    trained: Any,
    data: Any,
    prior: FunctionPrior,
    points: Tensor,
    *,
    num_steps: int = 100,
) -> FunctionSpaceLaplace:
    r"""Approximate the posterior of a network under a Gaussian prior on functions, linear in its weights.

    With the covariance :math:`K \approx U \Lambda U^T` of the prior at points X, and the Jacobian J there in the
    weights w around their most probable values :math:`w_0`, the weights of least norm with the functions :math:`U
    \Lambda^{1/2}` are

    .. math:: B = J^T (J J^T)^{-1} U \Lambda^{1/2}, \qquad w = w_0 + B a, \quad a \sim \mathcal N(0, I),

    so at X the linearized network has the prior's width. The posterior precision of a is :math:`A = I + \sum_n (J_n
    B)^T H_n J_n B`, with the Hessian :math:`H_n` of the negative log-likelihood in the outputs, and the covariance of
    the weights is :math:`B A^{-1} B^T`. Put X where predictions are made, the training inputs included; far from its
    points the width is unknown. Predict with ``method="linearized"``.

    Before that, damped Gauss-Newton steps in a lead the network to the most probable function, of least

    .. math:: -\sum_n \log p(y_n | f(x_n)) + \tfrac12 \big(f(X) - m\big)^T K^{-1} \big(f(X) - m\big),

    with the prior's mean m. Start the network with :func:`init_to_prior`; it needs no other training.

    Source: Cinquin et al. (2024), "FSP-Laplace", arXiv 2407.13711, section 3, who find the mean by stochastic
    gradients, and restrict the weights to the range of :math:`J^T U`. The widths at X are then not the prior's.

    :param model: a :class:`~pyro_radial.SupervisedModel` of a :class:`~pyro_radial.BayesianModule`, with a categorical,
        Bernoulli, Gaussian or Poisson likelihood.
    :param trained: its guide, with the first weights as medians, or a network with these weights.
    :param data: the training rows, in any form that :func:`~pyro_radial.fit` takes.
    :param FunctionPrior prior: a prior with moments, such as :class:`~pyro_radial.functional.GaussianProcess`.
    :param Tensor points: X, ``[M, ...]``.
    :param int num_steps: the most steps with a hundredth of K's variance added on its diagonal, and again with a
        hundred-thousandth; fewer once they gain nothing. 0 keeps the given weights.
    :returns: a guide of all weights and points at other sites. Its ``covariance()`` and ``get_posterior()`` hold the
        weights in the network's order, and :class:`~pyro_radial.functional.PosteriorProcess` takes the latter.
    :raises ValueError: for another model or likelihood, a prior without moments or a covariance at the points, points
        that do not fit into memory. A FloatingPointError if the given weights have no finite density.

    Example::

        >>> from torch import nn
        >>> from pyro_radial import BayesianModule, SupervisedModel, predict
        >>> from pyro_radial.functional import GaussianProcess, init_to_prior
        >>> from pyro_radial.nn import likelihoods
        >>> prior = GaussianProcess(lambda a, b: torch.exp(-0.5 * (a - b.T) ** 2))
        >>> x, points = torch.zeros(1, 1), torch.linspace(-2, 2, 15)[:, None]
        >>> network = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
        >>> network = init_to_prior(network, prior, points)
        >>> model = SupervisedModel(BayesianModule(network), likelihoods.Gaussian(scale=0.1))
        >>> guide = function_space_laplace(model, network, (x, x), prior, points)
        >>> draws = predict(model, guide, torch.tensor([[0.0], [2.0]]), num_samples=500, method="linearized")
        >>> [round(float(stddev), 1) for stddev in draws.epistemic_variance.sqrt()]  # at the datum, and away from it
        [0.1, 1.0]
    """
    check_prior(prior)
    check_points(points, "points")
    non_negative_integer("num_steps", num_steps)
    network = TrainedNetwork(model, trained)
    rows = Rows(data, "data", dtype_of(model))
    weights = {name: network.values[name] for name in sites_of_network(model)}
    if not weights:
        raise ValueError(
            f"model must have a network whose parameters are sites, got sites {sorted(network.values)}"
        )
    points = move(points, device_of(model)).to(next(iter(weights.values())))
    with undisturbed(), evaluating(model):
        linear = Linearization(model, weights, [])
        num_outputs = linear.structure(points).num_outputs
        _check_size(len(points), num_outputs, sum(value.numel() for value in weights.values()))
        moments = require_moments(prior, points, num_outputs)
        functions = _prior_factor(moments[1])
        if num_steps:
            weights = _most_probable(model, network, weights, rows, points, moments, num_steps)
            network.values.update(weights)
            linear = Linearization(model, weights, [])
        jacobian = linear.jacobian(points)[1]
        basis = _basis(jacobian, functions)
        network_variance = (jacobian.double() @ basis).square().sum()
        variance_ratio = float(network_variance / functions.square().sum())
        if variance_ratio < LEAST_VARIANCE_RATIO:
            warn(
                f"The linearized network holds {100 * variance_ratio:.0f} % of the prior's variance at the points, so "
                "its posterior is too narrow. Use more or steeper units, another activation, or a smoother prior."
            )
        *_, precision = _data_terms(linear, network, rows, basis)
    eigenvalues, vectors = torch.linalg.eigh(with_diagonal(precision, 1.0))
    factor = basis @ (vectors * eigenvalues.rsqrt())
    if factor.shape[1] > len(factor):
        # The same product with as many columns as weights.
        factor = torch.linalg.qr(factor.mT).R.mT
    return FunctionSpaceLaplace(network.values, list(weights), factor.to(points))


def _split_by_weight(vectors: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows ``[P, ...]`` that belong to each weight."""
    rows = vectors.split([value.numel() for value in weights.values()])
    return dict(zip(weights, rows, strict=True))


def _data_terms(
    linear: Linearization, network: TrainedNetwork, rows: Rows, basis: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the negative log-likelihood of all data, and its gradient ``[R]`` and Hessian ``[R, R]`` along a basis."""
    noise = {name: value.double() for name, value in network.noise.items()}
    nll: Any = 0.0
    gradient: Any = 0.0
    hessian: Any = 0.0
    for index in torch.arange(len(rows), device="cpu").split(CHUNK):
        x, y = move(rows.take(index), basis.device)
        f, jacobian = linear.jacobian(x)
        along_basis = jacobian.double() @ basis
        output_hessians = output_hessian(network.likelihood, f.double(), noise)
        y = y.double() if y.is_floating_point() else y
        with torch.enable_grad():
            f = f.double().requires_grad_()
            chunk_nll = -network.likelihood.observation(f, **noise).log_prob(y).sum()
            (slope,) = torch.autograd.grad(chunk_nll, f)
        nll = nll + chunk_nll.detach()
        gradient = gradient + (along_basis * slope.unsqueeze(-1)).sum((0, 1))
        hessian = hessian + (along_basis.mT @ output_hessians @ along_basis).sum(0)
    scale = (network.likelihood.num_data or len(rows)) / len(rows)
    return scale * nll, scale * gradient, scale * hessian


def _most_probable(
    model: Model,
    network: TrainedNetwork,
    weights: dict[str, Tensor],
    rows: Rows,
    points: Tensor,
    moments: tuple[Tensor, Tensor],
    num_steps: int,
) -> dict[str, Tensor]:
    """Move the weights to the most probable function, and warn if the steps end above it.

    :param weights: the first weights by site.
    :param moments: the prior's mean ``[N, O]`` and covariances ``[O, N, N]`` at the N points, in float64.
    :param num_steps: the most steps with each of ``SLACKS``.
    :returns: the moved weights by site, in the same shapes.
    """
    mean, covariances = moments
    num_outputs = mean.shape[1]
    variance = covariances.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)

    def measure(root: Tensor, functions: Tensor, weights: dict[str, Tensor]) -> _Measurement:
        linear = Linearization(model, weights, [])
        f, jacobian = linear.jacobian(points)
        basis = _basis(jacobian, functions)
        gap = torch.linalg.solve_triangular(
            root, (f.double() - mean).mT.unsqueeze(-1), upper=False
        ).flatten()
        nll, gradient, hessian = _data_terms(linear, network, rows, basis)
        return _Measurement(
            nll + 0.5 * gap.square().sum(), gap + gradient, with_diagonal(hessian, 1.0), basis
        )

    for slack in SLACKS:
        root = cholesky(with_diagonal(covariances, slack * variance))
        functions = (
            torch.block_diag(*root.expand(num_outputs, -1, -1))
            .unflatten(0, (num_outputs, -1))
            .transpose(0, 1)
        )
        weights, missed = _descend(partial(measure, root, functions), weights, num_steps)
    if not missed < MOST_MISSED:
        warn(
            f"The steps ended {missed:.1f} nats above the most probable function of the linearized network, so means "
            "may be off. Call again with the guide as trained, or take other units or more points."
        )
    return weights


class _Measurement(NamedTuple):
    """A negative log-density, its gradient ``[R]`` and Hessian ``[R, R]`` along a basis of the weights ``[P, R]``."""

    objective: Tensor
    gradient: Tensor
    hessian: Tensor
    basis: Tensor


def _descend(
    measure: Callable[[dict[str, Tensor]], _Measurement], weights: dict[str, Tensor], num_steps: int
) -> tuple[dict[str, Tensor], float]:
    """Return the weights after Levenberg-Marquardt steps, and the nats an undamped step would gain in a linear model.

    The damping is that of Nielsen, algorithm 3.16 of Madsen, Nielsen and Tingleff (2004), "Methods for Non-Linear Least
    Squares Problems".
    """
    at = measure(weights)
    if not bool(at.objective.isfinite()):
        raise FloatingPointError(
            "trained must have weights with a finite log-likelihood of data, got none"
        )
    damping = 1.0
    growth = 2.0
    for _ in range(num_steps):
        damped = at.hessian + damping * at.basis.mT @ at.basis
        a = -torch.linalg.solve(damped, at.gradient)
        updated_weights = {
            name: weights[name] + change.view_as(weights[name]).to(weights[name])
            for name, change in _split_by_weight(at.basis @ a, weights).items()
        }
        measurement = measure(updated_weights)
        gain = float(at.objective - measurement.objective)
        if gain > 0.0:
            ratio = gain / float(-a @ (at.gradient + 0.5 * at.hessian @ a))
            weights = updated_weights
            at = measurement
            damping *= max(1.0 / 3.0, 1.0 - (2.0 * min(ratio, 1.0) - 1.0) ** 3)
            growth = 2.0
        else:
            damping *= growth
            growth *= 2.0
        if 0.0 < gain < LEAST_GAIN or damping > MOST_DAMPING:
            break
    return weights, 0.5 * float(at.gradient @ torch.linalg.solve(at.hessian, at.gradient))


def _check_size(num_points: int, num_outputs: int, num_weights: int) -> None:
    size = num_points * num_outputs * max(num_weights, num_points * num_outputs)
    if size > MAX_NUMBERS:
        raise ValueError(
            f"points must be fewer, because the Jacobian of {num_points} points with {num_outputs} outputs in "
            f"{num_weights:,} weights, or the covariances, have {size:,} numbers, more than {MAX_NUMBERS:,}"
        )


def _prior_factor(covariances: Tensor) -> Tensor:
    """Return leading eigenvectors ``[N, O, R]`` of the prior's covariances, times the roots of their eigenvalues.

    Eigenvalues below a billionth of the largest are left out.
    """
    num_outputs = len(covariances)
    distinct = distinct_covariances(covariances)
    cholesky(distinct)  # Raises an error unless it is positive definite.
    pairs = list(map(torch.linalg.eigh, distinct))
    if len(distinct) < num_outputs:
        pairs = pairs * num_outputs
    eigenvalues = torch.cat([values for values, _ in pairs]).clamp_min(0.0)
    vectors = torch.block_diag(*(vectors for _, vectors in pairs))
    columns = (vectors * eigenvalues.sqrt()).unflatten(0, (num_outputs, -1)).transpose(0, 1)
    order = eigenvalues.argsort(descending=True)
    return columns[..., order[eigenvalues[order] > LEAST_EIGENVALUE * eigenvalues.max()]]


def _basis(jacobian: Tensor, functions: Tensor) -> Tensor:
    """Return the weights of least norm ``[P, R]`` with functions ``[N, O, R]``, in float64."""
    jacobian = jacobian.double().flatten(0, 1)
    return jacobian.mT @ torch.cholesky_solve(
        functions.flatten(0, 1), cholesky(jacobian @ jacobian.mT)
    )


@torch.no_grad()
def init_to_prior(network: nn.Module, prior: FunctionPrior, points: Tensor) -> nn.Module:
    r"""Start the first layer of a network with the length scales of a prior, where the points are.

    Input i has the length scale

    .. math:: \ell_i^{-2} = -\frac{2}{\delta_i^2} \log \mathrm{corr}\big(f(x), f(x + \delta_i e_i)\big),

    in the mean over points, with :math:`\delta_i` of 0.3 standard deviations of the input; under an RBF kernel it is
    the kernel's own. Weights are drawn from :math:`\mathcal N(0, \ell_i^{-2})`, the spectral density of such a kernel.
    A bias puts the unit's zero at one of the points. Torch's own start knows neither.

    Source: Rahimi and Recht (2007), "Random Features for Large-Scale Kernel Machines", algorithm 1, with another bias.

    :param network: a module whose first linear layer takes the inputs; other layers keep their weights.
    :param FunctionPrior prior: a prior with moments.
    :param Tensor points: the training inputs and points where predictions are made, ``[M, D]``.
    :returns: the network.
    :raises ValueError: for a network whose first layer is not linear in D inputs, and a prior without moments.

    Example::

        >>> from pyro_radial.functional import GaussianProcess
        >>> prior = GaussianProcess(lambda a, b: torch.exp(-0.5 * ((a - b.T) / 0.2) ** 2))
        >>> first = init_to_prior(nn.Linear(1, 1_000), prior, torch.linspace(-1, 1, 20)[:, None])
        >>> round(float(first.weight.detach().std()))  # 1 / 0.2
        5
    """
    check_prior(prior)
    check_points(points, "points")
    layer = next((module for module in network.modules() if isinstance(module, nn.Linear)), None)
    if layer is None or points.shape[1:] != (layer.in_features,):
        raise ValueError(
            f"network must start with a linear layer of inputs {list(points.shape[1:])}, got {layer}"
        )
    rows = points[:: -(-len(points) // MOST_ROWS)].double()
    size = len(rows)
    shifts = SHIFT * points.double().std(0, correction=0)
    pace = torch.ones_like(shifts)
    for i, shift in enumerate(shifts.where(shifts > 0.0, SHIFT)):
        shifted_rows = (
            rows + shift * torch.eye(len(shifts), dtype=rows.dtype, device=rows.device)[i]
        )
        covariance = require_moments(prior, torch.cat([rows, shifted_rows]), 1)[1][0]
        variance = covariance.diagonal()
        correlation = covariance.diagonal(size) / (variance[:size] * variance[size:]).sqrt()
        pace[i] = (-2.0 * correlation.clamp(LEAST_CORRELATION, 1.0).log().mean()).sqrt() / shift
    layer.weight.normal_().mul_(pace)
    if layer.bias is not None:
        at = points[torch.randint(len(points), (layer.out_features,), device=points.device)]
        layer.bias.copy_(-(layer.weight * at.to(layer.weight)).sum(-1))
    return network
