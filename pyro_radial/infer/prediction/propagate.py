# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Outputs of a network from one pass: the means and variances of all its units, from layer to layer."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from pyro.distributions import Delta
from torch import Tensor
from torch.distributions import Normal
from torch.nn import functional as F

from pyro_radial._pyro.types import Guide, Model
from pyro_radial.distributions.numerics import append_dims
from pyro_radial.distributions.radial_normal import RadialNormal
from pyro_radial.distributions.wrappers import drop_repeats, leaf
from pyro_radial.infer.prediction.linearized import (
    Marginals,
    joint_posterior,
    moments_for_network,
)
from pyro_radial.nn.supervised import find_layer, network_of

# Nodes and weights for the mean of a function of a standard normal number.
NODES, NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(9)
# A rectifier passes or stops what is this many standard deviations from zero.
FAR = 10.0
Rule = Callable[..., Any]
OutputMoments = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class UncertainTensor(Tensor):
    """A tensor of numbers whose means and variances are known, taken as uncorrelated and normal.

    Functions of torch return the means and variances of their results, by the rules in ``RULES``. So a network computes
    with such tensors in place of inputs or weights, whatever its ``forward`` does.
    """

    means: Tensor
    variances: Tensor
    #: Of the output of a linear layer: the means of its weights, and the variances of its inputs.
    mixing: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, means: Tensor, variances: Tensor) -> "UncertainTensor":
        """Return the tensor with these moments; ``variances`` broadcast to the shape of ``means``."""
        # It has no values itself, so code that goes past the rules fails instead of reading means.
        tensor = torch.empty_like(means, device="meta").as_subclass(cls)
        tensor.means = means
        tensor.variances = variances.expand(means.shape)
        return tensor

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        name = function.__name__
        is_in_place = options.pop("inplace", False) or name in IN_PLACE
        has_rule = name in RULES and (not is_in_place or isinstance(args[0], cls))
        output = RULES[name](function, *args, **options) if has_rule else NotImplemented
        if output is NotImplemented:
            raise TypeError(f"torch's {name!r} has no rule for means and variances in this use")
        if not is_in_place:
            return output
        # Views of a tensor have views of its moments, so they change too.
        args[0].means.copy_(output.means)
        args[0].variances.copy_(output.variances)
        args[0].mixing = None
        return args[0]


def propagated_moments(model: Model, guide: Guide, x: Tensor) -> OutputMoments:
    r"""Return a function of rows: means ``[N, *outputs]``, variances ``[N, O]``, covariances ``[N, O, O]`` of outputs.

    An output's variance comes from its own weights in a last linear layer; covariances come from the uncertain inputs
    of that layer, which all outputs share.

    A linear layer or a convolution with independent inputs a and weights w has outputs with the moments

    .. math:: m = \sum_i E[w_i] E[a_i], \qquad
        v = \sum_i \mathrm{Var}[a_i] E[w_i]^2 + \mathrm{Var}[w_i] (E[a_i]^2 + \mathrm{Var}[a_i]).

    Functions of one unit have the moments of a normal input, in closed form for rectifiers, by quadrature for others.
    Units are taken as uncorrelated, with these exceptions. All inputs of an average over pixels are taken as fully
    correlated, since they share weights. The largest of several pixels has the variance of the one with the largest
    mean. A layer or a group norm divides by the root of the expected square. Weights of a radial posterior are
    uncorrelated, but they share a radius and are not independent; here their moments alone count. As correlations are
    left out, variances of deep networks are too small, which :func:`calibrated` corrects on average.

    Source: Frey and Hinton (1999), "Variational Learning in Nonlinear Gaussian Belief Networks", for rectifiers;
    Wieczorek, de Andrade, Möllenhoff and Rohrbach (2026), "Calibrated Sampling-Free Uncertainty Estimation in Bayesian
    Deep Learning", for one pass with variational posteriors; they have a factor for each layer.

    :param x: a row of inputs, for a guide that takes inputs.
    :raises ValueError: for a model without a known network, a prior that makes other sites, a site without a normal
        or radial posterior, and from the function for a layer without a rule.
    """
    network = network_of(model)
    posterior = joint_posterior(guide, x, "propagate")
    means, blocks = moments_for_network(model, posterior)
    covariances = {block.sites[0]: block.covariance for block in blocks}
    parameters: dict[str, Tensor] = {}
    for site in network.bnn.sites_in_use:
        inner = leaf(posterior[site]) if site in posterior else None
        if not isinstance(inner, Normal | RadialNormal | Delta):
            raise ValueError(
                f"guide must have a normal or radial posterior at site '{site}' for method='propagate', got "
                f"{type(inner).__name__ if inner else 'none'}"
            )
        variances = covariances[site]
        first_variance = variances.flatten()[:1]
        if bool((variances == first_variance).all()):
            # One number, which layers need not multiply with each input.
            variances = first_variance.expand(variances.shape)
        parameters[site] = UncertainTensor.of(means[site], variances)
    function = network.copy_of_function()

    def moments(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        try:
            f = function(rows, parameters)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, RuntimeError, TypeError) as error:
            raise ValueError(
                "method must be 'draws', the default, for a network that 'propagate' cannot follow: it stops"
                f"{find_layer(error)}: {error}"
            ) from error
        if f.mixing is None or f.dim() != 2:
            output_variances = f.variances.reshape(len(rows), -1)
            return f.means, torch.zeros_like(output_variances), torch.diag_embed(output_variances)
        weights, input_variances = f.mixing
        shared = (weights * input_variances.unsqueeze(-2)) @ weights.mT
        separate = f.variances - shared.diagonal(dim1=-2, dim2=-1)
        return f.means, separate.clamp_min(0.0), shared

    return moments


def calibrated(moments: OutputMoments, rows: Tensor, draws: Tensor) -> Marginals:
    """Return the moments with the shared covariance times one factor: then draws at some rows have their variance.

    :param draws: functions at these rows, ``[S, n, *outputs]``.
    """
    _, separate, shared = moments(rows)
    missing = draws.var(0).mean() - separate.mean()
    uncalibrated = shared.diagonal(dim1=-2, dim2=-1).mean()
    factor = (missing / uncalibrated.clamp_min(torch.finfo(separate.dtype).tiny)).clamp_min(0.0)

    def marginals(rows: Tensor) -> tuple[Tensor, Tensor]:
        f, separate, shared = moments(rows)
        return f, factor * shared + torch.diag_embed(separate)

    return marginals


def even_normals(num_samples: int, num_outputs: int, like: Tensor) -> Tensor:
    """Return equally likely values ``[S, O]`` of standard normal numbers, in the same order every time.

    Each column has the mean 0 and the variance 1, and with more values than columns no two columns are correlated.
    """
    levels = (torch.arange(num_samples, dtype=torch.float64) + 0.5) / num_samples
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(num_samples, num_outputs, generator=generator).argsort(0)
    values = torch.special.ndtri(levels)[order]
    if num_samples > num_outputs:
        factor = torch.linalg.cholesky(values.mT @ values / num_samples)
        values = torch.linalg.solve_triangular(factor, values.mT, upper=False).mT
    return values.to(like)


def _means(value: Any) -> Any:
    """Return the means, also of tensors in a list or tuple, or what is no uncertain tensor as it is."""
    if isinstance(value, list | tuple):
        return type(value)(map(_means, value))
    return value.means if isinstance(value, UncertainTensor) else value


def _variances(value: Any) -> Any:
    """Return the variances, zero for known numbers, also of tensors in a list or tuple."""
    if isinstance(value, list | tuple):
        return type(value)(map(_variances, value))
    if isinstance(value, UncertainTensor):
        return value.variances
    is_known = isinstance(value, Tensor) and value.is_floating_point()
    return torch.zeros_like(value) if is_known else value


def _by_moment(function: Rule, *args: Any, **options: Any) -> Any:
    """Apply a function that only moves numbers, or tells a shape, to means and variances."""
    means = function(*map(_means, args), **options)
    if not isinstance(means, Tensor):
        return means
    return UncertainTensor.of(means, function(*map(_variances, args), **options))


def _sum(function: Rule, *terms: Any) -> UncertainTensor:
    means = function(*map(_means, terms))
    variances: Any = [term.variances for term in terms if isinstance(term, UncertainTensor)]
    return UncertainTensor.of(means, sum(variances[1:], start=variances[0]))


def _linear(
    function: Rule, x: Any, weight: Any, bias: Any = None, *options: Any, **named_options: Any
) -> UncertainTensor:
    """Return the moments of a linear layer or a convolution."""
    means = _means(weight)
    second_moment = _means(x).square()
    terms: Any = []
    if isinstance(x, UncertainTensor):
        terms.append(function(x.variances, means.square(), None, *options, **named_options))
        second_moment = second_moment + x.variances
    if isinstance(weight, UncertainTensor):
        variances = drop_repeats(weight.variances)
        is_grouped = means.dim() > 2 and x.shape[1] != means.shape[1]
        # A weight with one variance gives all outputs the same one.
        rows = len(means) if is_grouped else len(variances)
        variances = variances.expand(rows, *means.shape[1:])
        terms.append(function(second_moment, variances, None, *options, **named_options))
    if isinstance(bias, UncertainTensor):
        terms.append(append_dims(bias.variances, means.dim() - 2))
    output_means = function(_means(x), means, _means(bias), *options, **named_options)
    outputs = UncertainTensor.of(output_means, sum(terms[1:], start=terms[0]))
    if means.dim() == 2:
        outputs.mixing = (means, _variances(x))
    return outputs


def _rectified(function: Rule, x: UncertainTensor, negative_slope: float = 0.0) -> UncertainTensor:
    r"""Return the moments of max(x, 0), with ratio r of mean and deviation s, from :math:`g = r \Phi(r) + \phi(r)`.

    The mean is :math:`s g`, the variance :math:`s^2 (\Phi(r) + g (r - g))`, the covariance with x :math:`s^2 \Phi(r)`.
    """
    stddev = x.variances.clamp_min(torch.finfo(x.variances.dtype).tiny).sqrt_()
    ratio = (x.means / stddev).clamp_(-FAR, FAR)
    below = torch.erfc(ratio * math.sqrt(0.5)).mul_(0.5)
    above = 1.0 - below
    density = (ratio * ratio).mul_(-0.5).exp_().mul_(1.0 / math.sqrt(2.0 * math.pi))
    means = stddev.mul_(density).addcmul_(x.means, above)
    tail = torch.addcmul(density, ratio, below, value=-1.0)
    ratio_of_variances = torch.addcmul(above, density.addcmul_(ratio, above), tail, value=-1.0)
    if negative_slope:
        bend = 1.0 - negative_slope
        means = negative_slope * x.means + bend * means
        ratio_of_variances = (
            negative_slope**2 + bend**2 * ratio_of_variances + 2.0 * negative_slope * bend * above
        )
    return UncertainTensor.of(means, ratio_of_variances.clamp_min_(0.0).mul_(x.variances))


def _smooth(function: Rule, x: UncertainTensor, *args: Any, **options: Any) -> UncertainTensor:
    """Return the moments of a smooth function of each number, by Gauss-Hermite quadrature."""
    stddev = x.variances.sqrt()
    values = torch.stack(
        [function(x.means + node * stddev, *args, **options) for node in NODES.tolist()]
    )
    weights = torch.from_numpy(NODE_WEIGHTS / NODE_WEIGHTS.sum()).to(values)
    means = torch.tensordot(weights, values, 1)
    return UncertainTensor.of(means, torch.tensordot(weights, (values - means).square(), 1))


def _average(function: Rule, x: UncertainTensor, *args: Any, **options: Any) -> UncertainTensor:
    """Return the moments of an average of fully correlated numbers: their deviations are averaged."""
    stddev = function(x.variances.sqrt(), *args, **options)
    return UncertainTensor.of(function(x.means, *args, **options), stddev.square())


def _max_pooled(function: Rule, x: UncertainTensor, *args: Any, **options: Any) -> UncertainTensor:
    """Return the moments of the pixel with the largest mean."""
    options["return_indices"] = True
    means, indices = getattr(F, function.__name__)(x.means, *args, **options)
    pixels = -int(function.__name__[-2])
    variances = x.variances.flatten(pixels).gather(-1, indices.flatten(pixels))
    return UncertainTensor.of(means, variances.view_as(means))


def _dropped(function: Rule, x: UncertainTensor, p: float = 0.5, training: bool = True) -> Any:
    return NotImplemented if training else x


def _batch_norm(
    function: Rule,
    x: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if training or running_mean is None or running_var is None:
        return NotImplemented
    means = F.batch_norm(x.means, running_mean, running_var, weight, bias, False, momentum, eps)
    scale = (running_var + eps).rsqrt() if weight is None else (running_var + eps).rsqrt() * weight
    return UncertainTensor.of(means, x.variances * append_dims(scale.square(), x.dim() - 2))


def _layer_norm(
    function: Rule, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    dims = tuple(range(-len(shape), 0))
    centered = x - x.means.mean(dims, keepdim=True)
    square = (centered.means.square() + x.variances).mean(dims, keepdim=True)
    return _affine(_affine(centered, (square + eps).rsqrt(), None), weight, bias)


def _group_norm(
    function: Rule, x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    groups = _layer_norm(function, x.reshape(len(x), num_groups, -1), (-1,), eps=eps)
    channels_last = groups.reshape(x.shape).movedim(1, -1)
    return _affine(channels_last, weight, bias).movedim(-1, 1)


def _affine(x: Any, scale: Any, shift: Any) -> Any:
    """Multiply with known numbers and add others, if they are given."""
    if scale is not None:
        x = UncertainTensor.of(x.means * scale, x.variances * scale.square())
    return x if shift is None else x + shift


def _rules(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


#: The rule of each function of torch, by the function's name: ``rule(function, *args, **kwargs)``.
RULES: dict[str, Rule] = {
    **_rules(_by_moment, "__get__ __getitem__ __len__ cat clone contiguous detach dim"),
    **_rules(_by_moment, "embedding expand flatten float movedim numel permute reshape size"),
    **_rules(_by_moment, "squeeze stack to transpose unflatten unsqueeze view"),
    **_rules(_sum, "add add_ sub __rsub__ neg"),
    **_rules(_linear, "linear conv1d conv2d conv3d"),
    **_rules(_rectified, "relu relu_ leaky_relu"),
    **_rules(_smooth, "tanh sigmoid gelu silu softplus elu selu celu mish"),
    **_rules(_average, "mean avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d"),
    **_rules(_average, "adaptive_avg_pool2d adaptive_avg_pool3d"),
    **_rules(_max_pooled, "max_pool1d max_pool2d max_pool3d adaptive_max_pool1d"),
    **_rules(_max_pooled, "adaptive_max_pool2d adaptive_max_pool3d"),
    **_rules(_dropped, "dropout dropout1d dropout2d dropout3d alpha_dropout"),
    **_rules(_dropped, "feature_alpha_dropout"),
    **_rules(_batch_norm, "batch_norm"),
    **_rules(_group_norm, "group_norm"),
    **_rules(_layer_norm, "layer_norm"),
}
IN_PLACE = ("add_", "relu_")
