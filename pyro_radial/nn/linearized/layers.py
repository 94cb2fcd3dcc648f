# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Variances of a linearized network, carried to the output layer by layer."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from pyro_radial.nn.bayesian_module import BayesianModule, submodules
from pyro_radial.nn.linearized.site_function import SiteFunction, gradients
from pyro_radial.nn.site_priors import ParameterPrior

__all__ = ["LinearLayer", "layerwise_marginals", "linear_layers", "networks_in"]


class LinearLayer(NamedTuple):
    """A layer by its place in the network, and the sites of its random parameters."""

    place: str
    weight: str | None
    bias: str | None


def networks_in(model: Any) -> list[BayesianModule]:
    """The networks of a model with parameters that are sites."""
    return [module for module in submodules(model) if isinstance(module, BayesianModule)]


def linear_layers(
    function: SiteFunction, names: Collection[str], values: Mapping[str, Tensor], x: Tensor
) -> tuple[LinearLayer, ...] | None:
    """Return the linear layers that contain all random parameters of a function, tried at values and inputs, or None.

    Each layer must be called once, with a vector for each input.
    """
    layers = _owners(function.model, names)
    if layers is None:
        return None
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    called: list[str] = []

    def cut(layer: LinearLayer, a: Tensor, output: Tensor) -> Tensor:
        if a.dim() == 2 and len(a) == len(x):
            called.append(layer.place)
        return output.detach()

    with torch.enable_grad(), _hooked(function, layers, cut):
        output = function(leaves, x)
    # A weight that is also used outside of its layer still has a gradient.
    beside = any(gradient is not None for gradient in gradients(output, list(leaves.values())))
    once = sorted(called) == sorted(layer.place for layer in layers)
    return layers if once and not beside else None


def layerwise_marginals(
    function: SiteFunction,
    layers: Sequence[LinearLayer],
    mean: Mapping[str, Tensor],
    variance: Mapping[str, Tensor],
    x: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""Return mean and variance of each output of the linearized function, two tensors ``[N, O]``.

    .. math:: \sum_l \delta_l^2 (V_l a_l^2 + v_l),

    with the inputs :math:`a_l` of layer l, the gradients :math:`\delta_l` of an output in the outputs of the layer, and
    the variances :math:`V_l, v_l` of its weight and bias.
    """
    skeleton = networks_in(function.model)[0].skeleton
    like = next(iter(mean.values()))
    shifts = {layer.place: like.new_zeros(len(x), _linear(skeleton, layer.place).out_features) for layer in layers}

    def shifted(shifts: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        inputs: dict[str, Tensor] = {}

        def add(layer: LinearLayer, a: Tensor, output: Tensor) -> Tensor:
            inputs[layer.place] = a
            return output + shifts[layer.place]

        with _hooked(function, layers, add):
            return function(mean, x), inputs

    values, pull, inputs = vjp(shifted, shifts, has_aux=True)  # type: ignore[misc]
    # Rows are independent, so one pass gives the gradients of an output in all of them.
    eye = torch.eye(values.shape[-1], dtype=values.dtype, device=values.device)
    (deltas,) = vmap(pull, out_dims=1)(eye.unsqueeze(1).expand(-1, len(x), -1))
    spread = torch.zeros_like(values)
    for layer in layers:
        own = _output_variance(layer, variance, inputs[layer.place])
        delta = deltas[layer.place]
        # A product with itself has a cheaper gradient than a square.
        spread = spread + ((delta * delta) @ own.unsqueeze(-1)).squeeze(-1)
    return values, spread


def _output_variance(layer: LinearLayer, variance: Mapping[str, Tensor], a: Tensor) -> Tensor:
    """The variance of a layer's outputs for fixed inputs, ``[N, out]``; at least one of its parameters has one."""
    weight = None if layer.weight is None else variance[layer.weight]
    bias = None if layer.bias is None else variance[layer.bias]
    if weight is None:
        assert bias is not None
        return bias.expand(len(a), -1)
    return nn.functional.linear(a.square(), weight, bias)


def _owners(model: Any, names: Collection[str]) -> tuple[LinearLayer, ...] | None:
    """The linear layers that own these sites, or None if other modules own some of them."""
    networks = networks_in(model)
    if len(networks) != 1 or isinstance(networks[0].prior, ParameterPrior):
        return None
    skeleton = networks[0].skeleton
    site_of = {id(parameter): name for name, parameter in skeleton.named_parameters() if name in names}
    if len(site_of) != len(names):
        return None
    layers: list[LinearLayer] = []
    owned: list[int] = []
    for place, module in skeleton.named_modules():
        own = {leaf: id(p) for leaf, p in module.named_parameters(recurse=False, remove_duplicate=False)}
        random = {leaf: identity for leaf, identity in own.items() if identity in site_of}
        if random and type(module) is not nn.Linear:
            return None
        if random:
            weight, bias = (site_of.get(own.get(leaf, 0)) for leaf in ("weight", "bias"))
            layers.append(LinearLayer(place, weight, bias))
            owned += random.values()
    # A parameter that two layers share is not the parameter of one layer.
    return tuple(layers) if len(owned) == len(set(owned)) else None


def _linear(skeleton: nn.Module, place: str) -> nn.Linear:
    layer = skeleton.get_submodule(place)
    assert isinstance(layer, nn.Linear)
    return layer


@contextmanager
def _hooked(
    function: SiteFunction, layers: Sequence[LinearLayer], change: Callable[[LinearLayer, Tensor, Tensor], Tensor]
) -> Iterator[None]:
    """Replace the output of each layer by a function of the layer, its input and its output."""

    def hook(layer: LinearLayer) -> Callable[..., Tensor]:
        return lambda module, args, output: change(layer, args[0], output)

    skeleton = networks_in(function.model)[0].skeleton
    handles = [_linear(skeleton, layer.place).register_forward_hook(hook(layer)) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
