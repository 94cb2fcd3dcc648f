# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Scales of a trained network's weights up to one number, from the weights alone or from training rows."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from pyro_radial._pyro.checks import positive_count, positive_float
from pyro_radial._pyro.compat import tree_map
from pyro_radial._pyro.random_state import seeded
from pyro_radial.distributions.moments import moments
from pyro_radial.infer.prediction.trained_network import TrainedNetwork, some_rows, trained_values
from pyro_radial.infer.training.data import num_rows, take

__all__ = ["RelativeScales", "activation_scales", "constant", "curvature_scales", "norm", "radius", "singular_values"]

#: From the name of a site and its mean to standard deviations that broadcast to it, up to one number for all sites.
RelativeScales = Callable[[str, Tensor], Any]

# Numbers in the gradients of a chunk of rows: a tenth of a gigabyte in float32.
MAX_GRADIENTS = 2**25
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def constant(name: str, mean: Tensor) -> float:
    """The same for every weight: the searched number is the standard deviation."""
    return 1.0


def radius(name: str, mean: Tensor) -> float:
    r""":math:`1 / \sqrt D` for a site of D weights: the searched number is how far a draw is from each site's mean.

    With radial posteriors it is the paper's sigma, equal for all sites.
    """
    return mean.numel() ** -0.5


def norm(name: str, mean: Tensor) -> Tensor:
    """The root mean square of a site's weights: the searched number is noise in proportion to the weights."""
    return _positive(mean.square().mean().sqrt())


def singular_values(name: str, mean: Tensor) -> Tensor:
    r"""The largest singular value of a site over that of unit noise, :math:`s_1 / (\sqrt m + \sqrt n)`.

    The expected largest singular value of m x n standard normals is at most :math:`\sqrt m + \sqrt n`, so that the
    searched number is about the noise's over the weights'. A vector is a matrix of one column, a kernel one with a row
    for each output.

    Source: Davidson and Szarek (2001), "Local operator theory, random matrices and Banach spaces", theorem 2.13.

    Example::

        >>> singular_values("weight", torch.diag(torch.tensor([4.0, 1.0, 1.0, 1.0])))
        tensor(1.)
    """
    matrix = mean.reshape(mean.shape[0], -1) if mean.dim() else mean.reshape(1, 1)
    largest = torch.linalg.matrix_norm(matrix, ord=2)
    return _positive(largest / (math.sqrt(matrix.shape[0]) + math.sqrt(matrix.shape[1])))


def activation_scales(model: Any, guide: Any, data: Any, *, max_rows: int = 1000) -> RelativeScales:
    r"""The same noise at the outputs of every layer: :math:`(\mathrm E \|a\|^2)^{-1/2}` for weights with inputs a.

    A weight's noise of standard deviation s moves an output of its layer by :math:`s \|a\|`, a bias's by s, so that the
    searched number is the standard deviation of what each site adds to an output of its layer.

    :param model: a :class:`~pyro_radial.SupervisedModel` of a :class:`~pyro_radial.BayesianModule`.
    :param guide: its guide, with the trained means.
    :param data: training rows, as :func:`~pyro_radial.fit` takes them.
    :param int max_rows: how many of them to pass through the network.
    :returns: one number for each site.
    :raises ValueError: for another model, and, from the function, naming a site that is no weight or bias of a linear
        or convolutional layer that is called.

    Example::

        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
        >>> from pyro_radial.nn import likelihoods
        >>> model = SupervisedModel(BayesianModule(nn.Linear(4, 3)), likelihoods.Categorical())
        >>> guide, x, y = AutoRadial(model), torch.ones(5, 4), torch.tensor([0, 1, 2, 0, 1])
        >>> guide.setup(x, y)
        >>> scales = activation_scales(model, guide, (x, y))
        >>> scales("weight", torch.zeros(3, 4)), scales("bias", torch.zeros(3))
        (tensor(0.5000), 1.0)
    """
    positive_count("activation_scales: max_rows", max_rows)
    network = TrainedNetwork(model, trained_values(guide, "activation_scales"), "activation_scales")
    x, _, _ = some_rows(model, data, max_rows, "activation_scales")
    squares: dict[str, list[Tensor]] = {}

    def seen(place: str) -> Callable[..., None]:
        return lambda module, args: squares.setdefault(place, []).append(args[0].square().mean())

    layers = {place: module for place, module in network.skeleton.named_modules() if isinstance(module, LAYERS)}
    handles = [module.register_forward_pre_hook(seen(place)) for place, module in layers.items()]
    try:
        with torch.no_grad():
            network(x)
    finally:
        for handle in handles:
            handle.remove()

    def scales(name: str, mean: Tensor) -> Tensor | float:
        place, _, kind = name.rpartition(".")
        if place not in squares or kind not in ("weight", "bias"):
            raise ValueError(
                f"activation_scales: site '{name}' must be the weight or bias of a linear or convolutional layer that "
                f"the network calls, got those at {sorted(squares)}"
            )
        if kind == "bias":
            return 1.0
        return _positive(torch.stack(squares[place]).mean() * mean[0].numel()).rsqrt()

    return scales


def curvature_scales(
    model: Any, guide: Any, data: Any, *, max_rows: int = 1000, prior_precision: float | None = None
) -> RelativeScales:
    r"""A diagonal Laplace approximation, :math:`(h_i + \delta_i)^{-1/2}` for each weight.

    With the prior's precision :math:`\delta` and the diagonal of the Fisher information of all N training rows,

    .. math:: h_i = N\, \mathrm E_x \mathrm E_{y \sim p(y | f(x))} (\partial_{w_i} \log p(y | f(x)))^2,

    which for the likelihoods here is the generalized Gauss-Newton matrix's, from one draw of y for each row; the
    searched number is the root of a temperature, 1 for the approximation itself.

    Source: MacKay (1992), "A Practical Bayesian Framework for Backpropagation Networks"; Martens (2020), "New Insights
    and Perspectives on the Natural Gradient Method", section 9.2.

    :param model: a :class:`~pyro_radial.SupervisedModel` of a :class:`~pyro_radial.BayesianModule`.
    :param guide: its guide, with the trained means.
    :param data: training rows, as :func:`~pyro_radial.fit` takes them.
    :param int max_rows: how many of them to take, each with a backward pass of its own.
    :param float prior_precision: of every weight; by default that of the model's prior.
    :returns: standard deviations of each site's shape.
    :raises ValueError: for another model, one without a likelihood, a network that torch.func cannot differentiate row
        by row, and, from the function, naming a site that is no parameter of the network or has no prior variance.

    Example::

        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
        >>> from pyro_radial.nn import likelihoods
        >>> model = SupervisedModel(BayesianModule(nn.Linear(4, 3)), likelihoods.Categorical())
        >>> guide, x, y = AutoRadial(model), torch.zeros(5, 4), torch.tensor([0, 1, 2, 0, 1])
        >>> guide.setup(x, y)
        >>> scales = curvature_scales(model, guide, (x, y), prior_precision=4.0)
        >>> scales("weight", torch.zeros(3, 4))[0]
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    positive_count("curvature_scales: max_rows", max_rows)
    if prior_precision is not None:
        prior_precision = positive_float("curvature_scales: prior_precision", prior_precision)
    network = TrainedNetwork(model, trained_values(guide, "curvature_scales"), "curvature_scales")
    x, _, number = some_rows(model, data, max_rows, "curvature_scales")
    squares = _squared_gradients(network, x)
    number = network.likelihood.num_data or number
    prior = {} if prior_precision is not None else _prior_precisions(guide)

    def scales(name: str, mean: Tensor) -> Tensor:
        if name not in squares:
            raise ValueError(
                f"curvature_scales: site '{name}' must be a parameter of the network, got one besides {sorted(squares)}"
            )
        precision = prior.get(name) if prior_precision is None else prior_precision
        if precision is None:
            raise ValueError(f"curvature_scales: site '{name}' has a prior without a variance; give prior_precision")
        return (number / num_rows(x) * squares[name] + precision).rsqrt()

    return scales


def _squared_gradients(network: TrainedNetwork, x: Any) -> dict[str, Tensor]:
    """The squared gradients of the log-density of drawn targets, summed over rows, by parameter."""
    size = sum(value.numel() for value in network.parameters.values())
    chunk = max(1, MAX_GRADIENTS // max(1, size))
    total = {name: torch.zeros_like(value) for name, value in network.parameters.items()}

    def of_row(row: Any, score: Tensor) -> dict[str, Tensor]:
        one = tree_map(lambda tensor: tensor.unsqueeze(0), row)
        _, pull = vjp(lambda parameters: network(one, parameters).squeeze(0), network.parameters)  # type: ignore[misc]
        found: dict[str, Tensor] = pull(score)[0]
        return found

    for start in range(0, num_rows(x), chunk):
        rows = take(x, slice(start, start + chunk))
        scores = _scores(network, rows, start)
        try:
            if network.bnn.batching == "vmap":
                gradients = vmap(of_row, randomness="different")(rows, scores)
                squares = {name: gradient.square().sum(0) for name, gradient in gradients.items()}
            else:
                singles = [of_row(_row(rows, index), score) for index, score in enumerate(scores)]
                squares = {name: torch.stack([s[name] for s in singles]).square().sum(0) for name in total}
        except RuntimeError as error:
            raise ValueError(
                "curvature_scales: model must have a network that torch.func can differentiate for each row by itself, "
                f"got one that it cannot: {str(error).strip().splitlines()[0]}"
            ) from error
        for name, square in squares.items():
            total[name] += square
    return total


def _row(x: Any, index: int) -> Any:
    return tree_map(lambda tensor: tensor[index], x)


def _scores(network: TrainedNetwork, rows: Any, seed: int) -> Tensor:
    """The gradients of the log-density of targets, drawn from the network's own predictions, in its outputs."""
    with torch.enable_grad():
        f = network(rows).detach().requires_grad_()
        observation = network.likelihood.observation(f, **network.noise)
        with seeded(seed, f.device), torch.no_grad():
            y = observation.sample()
        (scores,) = torch.autograd.grad(observation.log_prob(y).sum(), f)
    return scores


def _prior_precisions(guide: Any) -> dict[str, Tensor | None]:
    """One over the prior's variance, by site."""
    found: dict[str, Tensor | None] = {}
    for name, site in guide.prototype_trace.iter_stochastic_nodes():
        stddev = moments(site["fn"]).stddev
        found[name] = None if stddev is None else stddev.detach().square().reciprocal()
    return found


def _positive(number: Tensor) -> Tensor:
    """A number that may be zero, as of weights that are all zero, as one that a scale can be made of."""
    return number.clamp_min(torch.finfo(number.dtype).tiny ** 0.5)
