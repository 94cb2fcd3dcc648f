# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A Laplace approximation of the last layer of a trained network."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import pyro.poutine as poutine
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from pyro_radial._pyro.checks import check_choice, positive_count, positive_float, warn
from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial._pyro.types import Batch, Model
from pyro_radial.infer.data import Rows, move
from pyro_radial.infer.prediction.guide_draws import sample_at
from pyro_radial.infer.prediction.linearized import (
    LinearizedGuide,
    Marginals,
    probit_logits,
    sample_noise,
)
from pyro_radial.nn.bayesian_module import check_fixed
from pyro_radial.nn.last_layer import find_output_layer, hooked
from pyro_radial.nn.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from pyro_radial.nn.modules import device_of, dtype_of, evaluating
from pyro_radial.nn.named_likelihoods import NamedLikelihoods
from pyro_radial.nn.supervised import for_likelihood, inputs_of, network_of

#: The largest number of weights of a full Hessian, which then has 72 MB; its eigenvectors take five seconds.
MAX_FULL = 3000
# The grid of the evidence, in powers of ten.
LEAST, MOST, STEPS = -8, 8, 161
#: A precision by evidence that costs a row more nats is warned of.
MOST_LOST = 0.1
ONE_OUTPUT = (
    "wrap the network in a module that returns one output, as the page on trained networks does"
)


class LastLayerLaplace(LinearizedGuide):
    r"""A guide with a normal posterior on the weights of the last layer and points at all other sites.

    The weights form a matrix ``[K, E]`` with the bias as its last column, flattened row by row. With eigenvalues
    :math:`\lambda` and eigenvectors Q of the Hessian, a draw is :math:`\theta + Q (\lambda + \delta)^{-1/2} z`.

    :ivar float prior_precision: :math:`\delta`.
    :ivar float log_evidence: Laplace's approximation of the log marginal likelihood of the last layer, in nats.
    """

    def __init__(
        self,
        values: dict[str, Tensor],
        layer: "LastLayer",
        eigenvalues: Tensor,
        basis: tuple[Tensor, ...],
        prior_precision: float,
        log_evidence: float,
    ) -> None:
        super().__init__(values)
        self.layer = layer
        self.prior_precision = prior_precision
        self.log_evidence = log_evidence
        like = values[layer.weight]
        for position, vectors in enumerate(basis):
            self.register_buffer(f"basis_{position}", vectors.to(like))
        self.register_buffer("stddev", (eigenvalues + prior_precision).rsqrt().to(like))
        self._num_factors = len(basis)

    @property
    def mean(self) -> Tensor:
        """The mean of the last layer's weights, ``[P]``."""
        return self.layer.matrix(self.median()).flatten()

    def covariance(self) -> Tensor:
        """Return the covariance of the last layer's weights, ``[P, P]``."""
        mean = self.mean
        factor = self._rotate(torch.eye(len(mean), dtype=mean.dtype, device=mean.device))
        return factor.mT @ factor

    def joint_marginals(self, model: Model) -> Marginals:
        """Return a function of rows: the means ``[N, K]`` and covariances ``[N, K, K]`` of outputs, which are exact."""
        network = TrainedNetwork(model, self)
        covariance = self.output_covariance()

        def marginals(x: Tensor) -> tuple[Tensor, Tensor]:
            features, f = self.layer.features(network, x)
            return f, covariance(features)

        return marginals

    def output_covariance(self) -> "OutputCovariance":
        """Return a module of the layer's inputs: the covariances of outputs, which are exact."""
        basis = self._basis()
        variances = self.get_buffer("stddev").square().reshape_as(self.layer.matrix(self.median()))
        full = self.covariance().reshape(2 * variances.shape) if len(basis) == 1 else None
        return OutputCovariance(variances, full, basis)

    def forward(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """Sample all sites."""
        values = self.median()
        mean = self.mean
        matrix = (mean + self._rotate(sample_noise(mean))).reshape_as(self.layer.matrix(values))
        values.update(self.layer.split(matrix))
        return sample_at(values)

    def _rotate(self, z: Tensor) -> Tensor:
        """Compute the change of the weights from unit noise ``[..., P]``."""
        return _project(z * self.get_buffer("stddev"), [vectors.mT for vectors in self._basis()])

    def _basis(self) -> list[Tensor]:
        """Return the matrix of eigenvectors, or its two factors."""
        return [self.get_buffer(f"basis_{position}") for position in range(self._num_factors)]


class OutputCovariance(nn.Module):
    """Covariances ``[N, K, K]`` of outputs from the last layer's inputs ``[N, E]``.

    :param Tensor variances: variances along the basis, ``[K, E]``.
    :param Tensor full: the covariance ``[K, E, K, E]`` of the weights, or None if the basis is a product of two.
    :param basis: eigenvectors.
    """

    def __init__(self, variances: Tensor, full: Tensor | None, basis: Sequence[Tensor]) -> None:
        super().__init__()
        self.register_buffer("full", full)
        if full is None:
            for name, tensor in zip(("output_basis", "input_basis"), basis, strict=True):
                self.register_buffer(name, tensor)
            self.register_buffer("variances", variances)

    def forward(self, features: Tensor) -> Tensor:
        """Return the covariances of the outputs."""
        if self.full is not None:
            if torch.compiler.is_compiling():
                # The search for the best order of three would fix the number of rows.
                by_features = torch.einsum("ne,kemf->nkmf", features, self.full)
                return torch.einsum("nkmf,nf->nkm", by_features, features)
            return torch.einsum("ne,kemf,nf->nkm", features, self.full, features)
        output_basis = self.get_buffer("output_basis")
        squares = (features @ self.get_buffer("input_basis")).square()
        by_direction = squares @ self.get_buffer("variances").mT
        return (output_basis * by_direction.unsqueeze(1)) @ output_basis.mT


def _project(vectors: Tensor, basis: Sequence[Tensor]) -> Tensor:
    """Return the coordinates of vectors [..., P] along the columns of one matrix, or of a product of two."""
    if len(basis) == 1:
        return vectors @ basis[0]
    output_basis, input_basis = basis
    matrix = vectors.unflatten(-1, (len(output_basis), len(input_basis)))
    return (output_basis.mT @ matrix @ input_basis).flatten(-2)


@torch.no_grad()
def last_layer_laplace(
    model: Callable[..., object],
    trained: object,
    data: Any,
    *,
    prior_precision: float | Literal["evidence"] = "evidence",
    structure: Literal["full", "kronecker"] | None = None,
    chunk_size: int = 1024,
) -> LastLayerLaplace:
    r"""Approximate the posterior of the last layer's weights by a normal distribution at the trained weights.

    The precision is :math:`H + \delta I`, with the Hessian of the negative log-likelihood in the last layer's weights,

    .. math:: H = \sum_n \Lambda_n \otimes \phi_n \phi_n^T, \qquad
        \Lambda_n = -\partial^2 \log p(y_n | f) / \partial f^2, \quad \phi_n \text{ the layer's inputs,}

    scaled to ``num_data`` of the likelihood. With a Gaussian likelihood the mean moves to the most probable weights of
    the layer, so for linear regression the posterior and the evidence are exact. Otherwise it stays at the trained
    weights, as if they were most probable. ``structure="kronecker"`` uses :math:`\frac 1 N \sum_n \Lambda_n \otimes
    \sum_n \phi_n \phi_n^T`, for large layers. The prior of each weight of the layer is :math:`N(0, \delta^{-1})`,
    whatever the model's prior. "evidence" maximizes Laplace's approximation of the marginal likelihood; its terms with
    :math:`\delta` are

    .. math:: -\tfrac{\delta}{2} \|\theta\|^2 + \tfrac{P}{2} \log \delta - \tfrac 1 2 \sum_i \log(\lambda_i + \delta).

    If a network has memorized the rows, the evidence can find a precision that is far too small. A warning says so if
    the probit's mean log-likelihood on the rows is lower than the network's by more than 0.1 nats. Choose the precision
    on validation rows then, as the page on trained networks does.

    Source: MacKay (1992), "The Evidence Framework Applied to Classification Networks"; Kristiadi, Hein and Hennig
    (2020), "Being Bayesian, Even Just a Bit, Fixes Overconfidence in ReLU Networks"; Daxberger et al. (2021), "Laplace
    Redux".

    :param model: a :class:`~pyro_radial.SupervisedModel` of a :class:`~pyro_radial.BayesianModule`, with a categorical,
        Bernoulli, Gaussian or Poisson likelihood.
    :param trained: its guide, with the trained weights as medians, or the trained network itself.
    :param data: the training rows, in any form that :func:`~pyro_radial.fit` takes.
    :param prior_precision: :math:`\delta`, or "evidence".
    :param str structure: "full" or "kronecker"; by default full for at most 3000 weights.
    :param int chunk_size: rows in one pass.
    :returns: a guide for :func:`~pyro_radial.predict`, with ``prior_precision`` and ``log_evidence``. The methods
        "linearized", which is exact here, and "probit" need one pass.
    :raises ValueError: for another model or likelihood, a network that does not end in a random linear layer of its
        own, a site without a value, a full H of too many weights, and evidence without a maximum.

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
    check_choice("structure", structure, ("full", "kronecker", None))
    if prior_precision != "evidence":
        prior_precision = positive_float("prior_precision", prior_precision)
    positive_count("chunk_size", chunk_size)
    network = TrainedNetwork(model, trained)
    rows = Rows(data, "data", dtype_of(model))
    device = device_of(model)
    example, _ = rows.take(torch.arange(min(2, len(rows)), device="cpu"))
    layer = find_last_layer(network, move(example, device))
    weights = layer.matrix(network.values)
    if structure == "full" and weights.numel() > MAX_FULL:
        raise ValueError(
            f"structure must be 'kronecker' for more than {MAX_FULL} weights, got 'full' for the "
            f"{weights.numel()} of site '{layer.weight}' and its bias"
        )
    structure = structure or ("full" if weights.numel() <= MAX_FULL else "kronecker")
    curvature = _Curvature(weights, structure)
    exact = type(network.likelihood) is Gaussian
    gradient = torch.zeros_like(weights, dtype=torch.float64)
    log_likelihood = 0.0
    for index in reversed(torch.arange(len(rows), device="cpu").split(chunk_size)):
        x, y = move(rows.take(index), device)
        features, f = layer.features(network, x)
        hessians = output_hessian(network.likelihood, f.double(), network.noise)
        curvature.add(features.double(), hessians)
        y = network.likelihood.check_target(f, y)
        if exact:
            gradient += torch.einsum("nkm,nm,ne->ke", hessians, (f - y).double(), features.double())
        log_probs = network.likelihood.observation(f, **network.noise).log_prob(y)
        log_likelihood += float(log_probs.sum())
    factor = (network.likelihood.num_data or len(rows)) / len(rows)
    eigenvalues, basis = curvature.decompose(factor, len(rows))
    start = _project(weights.double().flatten(), basis)
    slope = factor * _project(gradient.flatten(), basis) if exact else None
    by_evidence = prior_precision == "evidence"
    if prior_precision == "evidence":
        prior_precision = _find_best_precision(eigenvalues, start, slope)
    if exact:
        mode = _find_mode(prior_precision, eigenvalues, start, slope)
        mode = _project(mode, [vectors.mT for vectors in basis])
        network.values.update(layer.split(mode.to(weights).reshape_as(weights)))
    evidence = _evidence(prior_precision, eigenvalues, start, slope)
    guide = LastLayerLaplace(
        network.values,
        layer,
        eigenvalues,
        basis,
        prior_precision,
        factor * log_likelihood + evidence,
    )
    if by_evidence and isinstance(network.likelihood, Categorical | Bernoulli):
        # The rows in the last pass, which are the first ones.
        _, covariance = guide.joint_marginals(model)(x)
        by_probit = network.likelihood.observation(probit_logits(f, covariance))
        lost = (network.likelihood.observation(f).log_prob(y) - by_probit.log_prob(y)).mean()
        if lost > MOST_LOST:
            warn(
                f"prior_precision={prior_precision:.2g} by evidence lowers the mean log-likelihood "
                f"of the rows given by {lost:.2f} nats, as if the network has memorized them. "
                "Choose prior_precision on validation rows, or use TemperatureScaling."
            )
    return guide


class _Curvature:
    """The Hessian of the negative log-likelihood, chunk by chunk of rows, in double precision."""

    def __init__(self, weights: Tensor, structure: str) -> None:
        outputs, inputs = weights.shape
        self.full = structure == "full"
        shape = (outputs, outputs, inputs, inputs) if self.full else (inputs, inputs)
        self.inputs = torch.zeros(shape, dtype=torch.float64, device=weights.device)
        self.outputs = torch.zeros(outputs, outputs, dtype=torch.float64, device=weights.device)

    def add(self, features: Tensor, hessians: Tensor) -> None:
        self.outputs += hessians.sum(0)
        if not self.full:
            self.inputs += features.mT @ features
            return
        for k in range(len(self.outputs)):
            for m in range(k + 1):
                self.inputs[k, m] += (features * hessians[:, k, m, None]).mT @ features

    def decompose(self, factor: float, num_rows: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the eigenvalues ``[P]``, and the eigenvectors of one matrix or of two factors."""
        if not self.full:
            g, output_basis = torch.linalg.eigh(self.outputs / num_rows)
            a, input_basis = torch.linalg.eigh(factor * self.inputs)
            eigenvalues = torch.outer(g.clamp_min(0.0), a.clamp_min(0.0)).flatten()
            return eigenvalues, (output_basis, input_basis)
        size = len(self.outputs) * self.inputs.shape[-1]
        # eigh reads only the lower triangle, which is filled.
        matrix = self.inputs.transpose(1, 2).reshape(size, size)
        eigenvalues, vectors = torch.linalg.eigh(factor * matrix)
        return eigenvalues.clamp_min(0.0), (vectors,)


def _find_mode(
    precision: float, eigenvalues: Tensor, start: Tensor, slope: Tensor | None
) -> Tensor:
    """Return the most probable weights from the slope of the negative log-likelihood at the start, or the start."""
    return start if slope is None else (eigenvalues * start - slope) / (eigenvalues + precision)


def _evidence(precision: float, eigenvalues: Tensor, start: Tensor, slope: Tensor | None) -> float:
    """Return the terms of the log evidence with the prior's precision, all along the eigenvectors."""
    mode = _find_mode(precision, eigenvalues, start, slope)
    gain = 0.0 if slope is None else (start - mode) * (slope + 0.5 * eigenvalues * (mode - start))
    shrunk = 0.5 * (precision / (eigenvalues + precision)).log()
    return float((shrunk - 0.5 * precision * mode.square() + gain).sum())


def _find_best_precision(eigenvalues: Tensor, start: Tensor, slope: Tensor | None) -> float:
    """Find the precision with the largest evidence."""

    def loss(log: float) -> float:
        return -_evidence(10.0**log, eigenvalues, start, slope)

    grid = torch.linspace(LEAST, MOST, STEPS, dtype=torch.float64).tolist()
    best = min(range(STEPS), key=lambda index: loss(grid[index]))
    if best in (0, STEPS - 1):
        raise ValueError(
            f"prior_precision must be given, got 'evidence', which has no maximum between 1e{LEAST} and 1e{MOST}"
        )
    optimum = minimize_scalar(
        loss, bounds=(grid[best - 1], grid[best + 1]), method="bounded", options={"xatol": 1e-6}
    )
    return float(10.0**optimum.x)


def output_hessian(likelihood: Likelihood, f: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
    r"""Return the Hessian :math:`-\partial^2 \log p(y | f) / \partial f^2`, ``[N, K, K]``.

    It takes outputs ``[N, K]`` and the other arguments of the likelihood's distribution, and does not depend on y for
    these likelihoods.
    """
    hessian = HESSIANS.get(type(likelihood))
    if hessian is None:
        names = [kind.__name__ for kind in HESSIANS]
        raise ValueError(
            f"likelihood must be one of {', '.join(names)}, got {type(likelihood).__name__}"
        )
    if f.dim() != 2 or likelihood.event_dim != 1:
        raise ValueError(
            f"likelihood must be of outputs [N, K], with event_dim=1, got outputs {list(f.shape)} and "
            f"event_dim={likelihood.event_dim}"
        )
    return hessian(f, noise)


def _categorical(f: Tensor, noise: Mapping[str, Tensor]) -> Tensor:
    p = f.softmax(-1)
    return p.diag_embed() - p.unsqueeze(-1) * p.unsqueeze(-2)


# By exact class, because a subclass may have another distribution.
HESSIANS: dict[type[Likelihood], Callable[[Tensor, Mapping[str, Tensor]], Tensor]] = {
    Categorical: _categorical,
    Bernoulli: lambda f, noise: (f.sigmoid() * (-f).sigmoid()).diag_embed(),
    Gaussian: lambda f, noise: torch.ones_like(f).div(noise["scale"].to(f).square()).diag_embed(),
    Poisson: lambda f, noise: f.exp().diag_embed(),
}


class TrainedNetwork:
    """The network of a model in evaluation mode, with all sites at trained values; see :func:`last_layer_laplace`."""

    def __init__(self, model: Model, trained: object) -> None:
        if hasattr(trained, "median"):
            with torch.no_grad(), poutine.block():
                values = trained.median()
        elif isinstance(trained, nn.Module):
            values = dict(trained.named_parameters())
        else:
            raise ValueError(
                f"trained must be a guide or a torch network, got {type(trained).__name__}"
            )
        values = {name: value.detach().clone() for name, value in values.items()}
        network = network_of(model)
        if isinstance(network.likelihood, NamedLikelihoods):
            raise ValueError(
                "model must have one likelihood, got one for each of the outputs "
                f"{list(network.likelihood.by_name)}; {ONE_OUTPUT}"
            )
        if not isinstance(network.likelihood, Likelihood):
            raise ValueError(
                f"model must have a likelihood, got {type(model).__name__} without one"
            )
        self.likelihood: Likelihood = network.likelihood
        with one_at_a_time(), torch.no_grad(), poutine.block(), evaluating(model):
            drawn = network.draw(poutine.trace(sample_at).get_trace(values))
            sites = [name for name, _ in drawn.trace.iter_stochastic_nodes()]
            missing = [name for name in sites if name not in values]
            if missing:
                raise ValueError(
                    f"no value for the sites {missing} of the model, got values for {sorted(values)}"
                )
            self._functional = network.bnn.computation()
            #: The modules that compute.
            self.skeleton = self._functional.skeleton
            self._parameters: dict[str, Tensor] = {
                **network.bnn.fixed_tensors(),
                **drawn.parameters,
            }
        if isinstance(trained, nn.Module) and not hasattr(trained, "median"):
            check_fixed(
                network.bnn, "trained", {**trained.state_dict(), **dict(trained.named_buffers())}
            )
        initial_scale = getattr(self.likelihood, "_first_scale", None)
        if initial_scale is not None and _is_close(drawn.noise["scale"], initial_scale):
            raise ValueError(
                "likelihood must have a trained scale, got learn_scale=True at its first value "
                f"{initial_scale}: train it, or give Gaussian(scale=...) the root mean square of residuals on "
                "validation rows"
            )
        #: The values of the model's sites.
        self.values = {name: values[name] for name in sites}
        #: The arguments of the likelihood's distribution besides the network's output.
        self.noise = drawn.noise

    def run(self, x: Batch) -> Tensor:
        """Compute the network's output at some rows."""
        output = for_likelihood(
            self._functional.single(self._parameters, inputs_of(x)), self.likelihood
        )
        if not isinstance(output, Tensor):
            raise ValueError(
                f"model must have a network that returns one tensor, got {type(output).__name__}; {ONE_OUTPUT}"
            )
        return output


def _is_close(numbers: Tensor, others: Tensor | float) -> bool:
    """Return whether numbers are others up to rounding in single precision."""
    return bool(((numbers / others - 1.0).abs() < 1e-5).all())


class LastLayer(NamedTuple):
    """A linear layer's name in the network, and the sites of its weight and bias (None for a fixed bias)."""

    module_name: str
    weight: str
    bias: str | None

    def features(self, network: TrainedNetwork, x: Batch) -> tuple[Tensor, Tensor]:
        """Return the layer's inputs ``[N, E]``, with a final one for a random bias, and the outputs ``[N, K]``."""
        calls: list[Tensor] = []
        layers = {self.module_name: network.skeleton.get_submodule(self.module_name)}
        with hooked(layers, lambda name, inputs, output: calls.append(inputs.clone())):
            f = network.run(x)
        (inputs,) = calls
        return self.with_ones(inputs), f

    def with_ones(self, inputs: Tensor) -> Tensor:
        """Return the layer's inputs with a final one for a random bias."""
        if self.bias is None:
            return inputs
        return torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)

    def matrix(self, values: dict[str, Tensor]) -> Tensor:
        """Return the random parameters as one matrix ``[K, E]``, with the bias as its last column."""
        weight = values[self.weight]
        if self.bias is None:
            return weight
        return torch.cat([weight, values[self.bias].unsqueeze(-1)], 1)

    def split(self, matrix: Tensor) -> dict[str, Tensor]:
        """Return the values of the sites in such a matrix."""
        if self.bias is None:
            return {self.weight: matrix}
        return {self.weight: matrix[:, :-1], self.bias: matrix[:, -1]}


def find_last_layer(network: TrainedNetwork, x: Batch) -> LastLayer:
    """Find the linear layer that computes the network's output, by a run at a few inputs.

    :raises ValueError: if the network does not end with a linear layer, called once with a vector for each row, or if
        its weight is fixed or shared.
    """
    layer_name, takes_vectors_once = find_output_layer(network.skeleton, lambda: network.run(x))
    if layer_name is None or not takes_vectors_once:
        modules = network.skeleton.named_modules()
        linear = [name for name, module in modules if isinstance(module, nn.Linear)]
        raise ValueError(
            "model must have a network that ends with a linear layer, which it calls once with a vector for each row, "
            f"got {type(network.skeleton).__name__} with the linear layers {sorted(linear)}"
        )
    prefix = f"{layer_name}." if layer_name else ""
    weight = f"{prefix}weight"
    bias = f"{prefix}bias"
    shared = network.skeleton.get_submodule(layer_name).weight
    named = network.skeleton.named_parameters(remove_duplicate=False)
    owners = [name for name, parameter in named if parameter is shared]
    if weight not in network.values or len(owners) > 1:
        raise ValueError(
            f"site '{weight}' of the last layer must be random and its own, got a weight of {owners} and the sites "
            f"{sorted(network.values)}"
        )
    return LastLayer(layer_name, weight, bias if bias in network.values else None)
