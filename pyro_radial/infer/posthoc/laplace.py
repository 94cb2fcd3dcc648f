# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A Laplace approximation of the last layer of a trained network."""

import math
from typing import Any, Literal

import pyro
import pyro.distributions as dist
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from pyro_radial._pyro.checks import positive_count, positive_float
from pyro_radial.infer.posthoc.last_layer import LastLayer, find_last_layer
from pyro_radial.infer.posthoc.output_hessian import output_hessian
from pyro_radial.infer.posthoc.trained_network import TrainedNetwork, trained_values
from pyro_radial.infer.training.data import Rows, device_of, dtype_of, move

__all__ = ["MAX_FULL", "LastLayerLaplace", "last_layer_laplace"]

#: The most weights of a full Hessian: it then holds 72 MB, and its eigenvectors take some five seconds.
MAX_FULL = 3000
WHO = "last_layer_laplace"
NOISE_SITE = "_last_layer_noise"
# Where the evidence is looked at: powers of ten.
LEAST, MOST, STEPS = -8, 8, 161


class LastLayerLaplace(nn.Module):
    r"""A guide with a normal posterior on the weights of a network's last layer; all other sites are points.

    The weights, as a matrix ``[K, E]`` with the bias as its last column, are flattened row by row. With the
    eigenvalues :math:`\lambda` of the Hessian H of the negative log-likelihood, and its eigenvectors Q, a draw is
    :math:`\theta + Q (\lambda + \delta)^{-1/2} z`.

    Made by :func:`last_layer_laplace`.

    :ivar float prior_precision: :math:`\delta`.
    :ivar float log_evidence: Laplace's approximation of the log marginal likelihood of the last layer, in nats.
    """

    def __init__(
        self,
        values: dict[str, Tensor],
        layer: LastLayer,
        eigenvalues: Tensor,
        basis: tuple[Tensor, ...],
        prior_precision: float,
        log_evidence: float,
    ) -> None:
        super().__init__()
        self.layer, self.prior_precision, self.log_evidence = layer, prior_precision, log_evidence
        self._names = tuple(values)
        like = values[layer.weight]
        for position, value in enumerate(values.values()):
            self.register_buffer(f"value_{position}", value)
        for position, vectors in enumerate(basis):
            self.register_buffer(f"basis_{position}", vectors.to(like))
        self.register_buffer("stddev", (eigenvalues + prior_precision).rsqrt().to(like))
        self._num_factors = len(basis)

    @property
    def values(self) -> dict[str, Tensor]:
        """The trained values of all sites."""
        return {name: self.get_buffer(f"value_{position}") for position, name in enumerate(self._names)}

    @property
    def mean(self) -> Tensor:
        """The trained weights of the last layer, ``[P]``."""
        return self.layer.matrix(self.values).flatten()

    def covariance(self) -> Tensor:
        """The covariance of the last layer's weights, ``[P, P]``."""
        factor = self._rotated(torch.eye(len(self.mean), dtype=self.mean.dtype, device=self.mean.device))
        return factor.mT @ factor

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample all sites."""
        values, mean = self.values, self.mean
        z = pyro.sample(NOISE_SITE, dist.Normal(torch.zeros_like(mean), 1.0).to_event(1), infer={"is_auxiliary": True})
        matrix = (mean + self._rotated(z)).reshape_as(self.layer.matrix(values))
        values.update(self.layer.parts(matrix))
        return {name: pyro.sample(name, dist.Delta(value, event_dim=value.dim())) for name, value in values.items()}

    def _rotated(self, z: Tensor) -> Tensor:
        """What unit noise ``[..., P]`` adds to the weights."""
        scaled = z * self.get_buffer("stddev")
        basis = [self.get_buffer(f"basis_{position}") for position in range(self._num_factors)]
        if len(basis) == 1:
            return scaled @ basis[0].mT
        left, right = basis
        return (left @ scaled.unflatten(-1, (len(left), len(right))) @ right.mT).flatten(-2)


@torch.no_grad()
def last_layer_laplace(
    model: Any,
    trained: Any,
    data: Any,
    *,
    prior_precision: float | Literal["evidence"] = "evidence",
    structure: Literal["full", "kronecker"] = "full",
    chunk_size: int = 1024,
) -> LastLayerLaplace:
    r"""A normal posterior on the weights of the last layer, from the curvature of the loss at the trained weights.

    Its precision is :math:`H + \delta I`, with the Hessian of the negative log-likelihood in the last layer's weights

    .. math:: H = \sum_n \Lambda_n \otimes \phi_n \phi_n^T, \qquad
        \Lambda_n = -\partial^2 \log p(y_n | f) / \partial f^2, \quad \phi_n \text{ the layer's inputs,}

    which is the generalized Gauss-Newton matrix too, since the network is linear in these weights: for linear
    regression the posterior is exact. ``structure="kronecker"`` replaces it by
    :math:`\frac 1 N \sum_n \Lambda_n \otimes \sum_n \phi_n \phi_n^T`, for layers too large for the whole. With
    ``num_data`` of the likelihood H is scaled from the rows given to these.

    The prior is :math:`N(0, \delta^{-1})` for each weight of the layer, whatever prior the model has. "evidence" takes
    the :math:`\delta` that maximizes Laplace's approximation of the marginal likelihood at the trained weights
    :math:`\theta`, of which the terms with :math:`\delta` are

    .. math:: -\tfrac{\delta}{2} \|\theta\|^2 + \tfrac{P}{2} \log \delta - \tfrac 1 2 \sum_i \log(\lambda_i + \delta).

    Source: MacKay (1992), "The Evidence Framework Applied to Classification Networks"; Kristiadi, Hein and Hennig
    (2020), "Being Bayesian, Even Just a Bit, Fixes Overconfidence in ReLU Networks"; Daxberger et al. (2021), "Laplace
    Redux", for the evidence of a network that is trained already.

    :param model: a :class:`~pyro_radial.SupervisedModel` of a :class:`~pyro_radial.BayesianModule`, with a categorical,
        Bernoulli, Gaussian or Poisson likelihood.
    :param trained: its guide, whose medians are the trained weights, or the trained network itself.
    :param data: the training rows, as :func:`~pyro_radial.fit` takes them.
    :param prior_precision: :math:`\delta`, or "evidence".
    :param str structure: of H: "full", for at most 3000 weights, or "kronecker".
    :param int chunk_size: rows in one pass.
    :returns: a guide for :func:`~pyro_radial.predict`.
    :raises ValueError: naming the argument, for another model or likelihood, a network that does not end with a linear
        layer whose weight is a site of its own, a site without a value, a full H of too many weights, and evidence
        without a maximum.

    Example::

        >>> from pyro_radial import BayesianModule, SupervisedModel, predict
        >>> from pyro_radial.nn import likelihoods
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = SupervisedModel(BayesianModule(network), likelihoods.Categorical())
        >>> x, y = torch.randn(50, 4), torch.randint(3, (50,))
        >>> guide = last_layer_laplace(model, network, (x, y), prior_precision=1.0)
        >>> guide.covariance().shape, predict(model, guide, x, num_samples=8).mean.shape
        (torch.Size([27, 27]), torch.Size([50, 3]))
    """
    if structure not in ("full", "kronecker"):
        raise ValueError(f"{WHO}: structure must be 'full' or 'kronecker', got {structure!r}")
    if prior_precision != "evidence":
        prior_precision = positive_float(f"{WHO}: prior_precision", prior_precision)
    positive_count(f"{WHO}: chunk_size", chunk_size)
    network = TrainedNetwork(model, trained_values(trained, WHO), WHO)
    rows = Rows(data, f"{WHO}: data", dtype_of(model))
    device = device_of(model)
    layer = find_last_layer(network, move(rows.take(torch.arange(min(2, len(rows))))[0], device), WHO)
    weights = layer.matrix(network.values)
    if structure == "full" and weights.numel() > MAX_FULL:
        raise ValueError(
            f"{WHO}: structure must be 'kronecker' for more than {MAX_FULL} weights, got 'full' for the "
            f"{weights.numel()} of site '{layer.weight}' and its bias"
        )
    outputs, inputs = weights.shape
    curvature = _Curvature(outputs, inputs, structure, weights.device)
    for index in torch.arange(len(rows)).split(chunk_size):
        x, y = (move(part, device) for part in rows.take(index))
        features, f = layer.features(network, x)
        curvature.add(features.double(), output_hessian(network.likelihood, f.double(), network.noise, WHO))
        observation = network.likelihood.observation(f, **network.noise)
        curvature.log_likelihood += float(observation.log_prob(network.likelihood.check_target(f, y)).sum())
    factor = (network.likelihood.num_data or len(rows)) / len(rows)
    eigenvalues, basis = curvature.decomposed(factor)
    square = float(weights.double().square().sum())
    if prior_precision == "evidence":
        prior_precision = _best_precision(square, eigenvalues)
    evidence = factor * curvature.log_likelihood + _evidence(prior_precision, square, eigenvalues)
    return LastLayerLaplace(network.values, layer, eigenvalues, basis, prior_precision, evidence)


class _Curvature:
    """The Hessian of the negative log-likelihood, chunk by chunk of rows, in double precision."""

    def __init__(self, outputs: int, inputs: int, structure: str, device: torch.device) -> None:
        self.full = structure == "full"
        self.rows, self.log_likelihood = 0, 0.0
        shape = (outputs, outputs, inputs, inputs) if self.full else (inputs, inputs)
        self.inputs = torch.zeros(shape, dtype=torch.float64, device=device)
        self.outputs = torch.zeros(outputs, outputs, dtype=torch.float64, device=device)

    def add(self, features: Tensor, hessians: Tensor) -> None:
        self.rows += len(features)
        self.outputs += hessians.sum(0)
        if not self.full:
            self.inputs += features.mT @ features
            return
        for k in range(len(self.outputs)):
            for m in range(k + 1):
                self.inputs[k, m] += (features * hessians[:, k, m, None]).mT @ features

    def decomposed(self, factor: float) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The eigenvalues ``[P]``, and the eigenvectors, of one matrix or of two factors."""
        if not self.full:
            (g, left), (a, right) = torch.linalg.eigh(self.outputs / self.rows), torch.linalg.eigh(factor * self.inputs)
            return torch.outer(g.clamp_min(0.0), a.clamp_min(0.0)).flatten(), (left, right)
        size = len(self.outputs) * self.inputs.shape[-1]
        # Only the lower triangle is there, and is read.
        matrix = self.inputs.transpose(1, 2).reshape(size, size)
        eigenvalues, vectors = torch.linalg.eigh(factor * matrix)
        return eigenvalues.clamp_min(0.0), (vectors,)


def _evidence(precision: float, square: float, eigenvalues: Tensor) -> float:
    """The terms of the log evidence with the prior's precision, for the squared norm of the weights."""
    shrunk = 0.5 * (len(eigenvalues) * math.log(precision) - float((eigenvalues + precision).log().sum()))
    return shrunk - 0.5 * precision * square


def _best_precision(square: float, eigenvalues: Tensor) -> float:
    """The precision of the largest evidence."""

    def loss(log: float) -> float:
        return -_evidence(10.0**log, square, eigenvalues)

    grid = torch.linspace(LEAST, MOST, STEPS, dtype=torch.float64).tolist()
    best = min(range(STEPS), key=lambda index: loss(grid[index]))
    if best in (0, STEPS - 1):
        raise ValueError(
            f"{WHO}: prior_precision must be given, got 'evidence', which has no maximum between 1e{LEAST} and 1e{MOST}"
        )
    found = minimize_scalar(loss, bounds=(grid[best - 1], grid[best + 1]), method="bounded", options={"xatol": 1e-6})
    return float(10.0**found.x)
