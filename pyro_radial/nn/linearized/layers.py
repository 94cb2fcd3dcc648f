# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Covariances of a linearized network's outputs, carried to the output layer by layer."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from pyro_radial.nn.bayesian_module import BayesianModule, modules_of
from pyro_radial.nn.last_layer import hooked
from pyro_radial.nn.linearized.site_function import SiteFunction, gradients

# Numbers in the gradients of a chunk of rows; more would leave the cache of a processor.
MAX_GRADIENTS = 2**22


class LinearLayer(NamedTuple):
    """A linear or convolutional layer by its name in the network, and the sites of its random parameters."""

    name: str
    weight: str | None
    bias: str | None
    #: The shape of its output for one input.
    shape: tuple[int, ...] = ()

    @property
    def is_dense(self) -> bool:
        """Whether its output is a vector."""
        return len(self.shape) == 1


def linear_layers(
    function: SiteFunction, names: Collection[str], values: Mapping[str, Tensor], x: Tensor
) -> tuple[LinearLayer, ...] | None:
    """Find the layers that hold all random parameters of a function, by a run at these values and inputs.

    :param names: the sites of the random parameters.
    :returns: the layers, or None if another module holds one of the parameters, or if a layer is not called exactly
        once, with a vector or an image for each input.
    """
    layers = _find_layers(function.model, names)
    if layers is None:
        return None
    leaves = {name: value.detach().requires_grad_() for name, value in values.items()}
    modules = _modules(function, layers)
    # The shape of a layer's output for one input; empty if the layer is called again, or with another input.
    shapes: dict[str, tuple[int, ...]] = {}

    def detach_output(name: str, a: Tensor, output: Tensor) -> Tensor:
        has_row_per_input = a.dim() == (2 if isinstance(modules[name], nn.Linear) else 4) and len(
            a
        ) == len(x)
        shapes[name] = tuple(output.shape[1:]) if has_row_per_input and name not in shapes else ()
        return output.detach()

    with torch.enable_grad(), hooked(modules, detach_output):
        output = function(leaves, x)
    # A weight that is also used outside of its layer still has a gradient.
    is_used_outside = any(
        gradient is not None for gradient in gradients(output, list(leaves.values()))
    )
    are_called_once = all(shapes.get(layer.name) for layer in layers)
    if is_used_outside or not are_called_once:
        return None
    return tuple(layer._replace(shape=shapes[layer.name]) for layer in layers)


def layerwise_terms(
    function: SiteFunction,
    layers: Sequence[LinearLayer],
    mean: Mapping[str, Tensor],
    variance: Mapping[str, Tensor],
    x: Tensor,
) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor]]]:
    r"""Return values ``[N, O]`` of the function, and terms J ``[N, O, R]`` and v ``[N or 1, R]`` of their covariances.

    For each input the covariance of the outputs is :math:`\sum J\,diag(v) J^T`. With the inputs :math:`a_l` of layer
    l, the gradients :math:`\delta_l` of all outputs in the outputs of the layer, and the variances :math:`V_l, v_l` of
    its weight and bias, a layer of vectors has the term

    .. math:: J = \delta_l, \qquad v = V_l a_l^2 + v_l,

    which needs no Jacobian in the weights. A convolution has the Jacobian in its weights, summed over positions.
    """
    like = next(iter(mean.values()))
    shifts = {layer.name: like.new_zeros(len(x), *layer.shape) for layer in layers}
    modules = _modules(function, layers)

    def run_shifted(shifts: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        inputs: dict[str, Tensor] = {}

        def add_shift(name: str, a: Tensor, output: Tensor) -> Tensor:
            inputs[name] = a
            return output + shifts[name]

        with hooked(modules, add_shift):
            return function(mean, x), inputs

    values, pull, inputs = vjp(run_shifted, shifts, has_aux=True)  # type: ignore[misc]
    # Rows are independent, so one pass gives the gradients of an output in all of them.
    eye = torch.eye(values.shape[-1], dtype=values.dtype, device=values.device)
    (deltas,) = vmap(pull, out_dims=1)(eye.unsqueeze(1).expand(-1, len(x), -1))

    def terms() -> Iterator[tuple[Tensor, Tensor]]:
        for layer in layers:
            a = inputs[layer.name]
            delta = deltas[layer.name]
            weight = None if layer.weight is None else variance[layer.weight]
            bias = None if layer.bias is None else variance[layer.bias]
            if layer.is_dense:
                # At least one of the two has a variance.
                layer_variance = (
                    bias if weight is None else nn.functional.linear(a.square(), weight, bias)
                )
                yield delta, layer_variance.expand(len(a), -1)  # type: ignore[union-attr]
                continue
            if weight is not None:
                convolution: Any = modules[layer.name]
                # The part of the input that each output of a convolution sees, [N, K, positions].
                patches = nn.functional.unfold(
                    a,
                    convolution.kernel_size,
                    convolution.dilation,
                    convolution.padding,
                    convolution.stride,
                )
                by_weight = delta.flatten(3).flatten(1, 2) @ patches.mT
                yield by_weight.unflatten(1, delta.shape[1:3]).flatten(2), weight.reshape(1, -1)
            if bias is not None:
                yield delta.flatten(3).sum(-1), bias.unsqueeze(0)

    return values, terms()


def num_chunks(
    layers: Sequence[LinearLayer], variance: Mapping[str, Tensor], num_outputs: int, num_rows: int
) -> int:
    """Return into how many chunks to split the rows, so that the gradients of one chunk fit a processor's cache."""
    size = 0
    largest = 0
    for layer in layers:
        size += math.prod(layer.shape)
        if layer.weight and not layer.is_dense:
            largest = max(largest, variance[layer.weight].numel())
    return min(num_rows, -(-num_rows * num_outputs * (size + largest) // MAX_GRADIENTS))


def _find_layers(model: object, names: Collection[str]) -> tuple[LinearLayer, ...] | None:
    """Return the layers that own these sites, or None if other modules own some of them."""
    networks = modules_of(BayesianModule, model)
    if len(networks) != 1 or networks[0].batching != "vmap" or not networks[0].has_plain_sites:
        return None
    skeleton = networks[0].skeleton
    site_of = {
        id(parameter): name for name, parameter in skeleton.named_parameters() if name in names
    }
    if len(site_of) != len(names):
        return None
    layers: list[LinearLayer] = []
    layer_sites: list[str] = []
    for layer_name, module in skeleton.named_modules():
        sites = {
            leaf: site_of[id(parameter)]
            for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(parameter) in site_of
        }
        if sites and not _is_known(module):
            return None
        if sites:
            layers.append(LinearLayer(layer_name, sites.get("weight"), sites.get("bias")))
            layer_sites += sites.values()
    # A parameter that two layers share is not the parameter of one layer.
    return tuple(layers) if len(layer_sites) == len(set(layer_sites)) else None


def _is_known(module: nn.Module) -> bool:
    """Return whether this is a linear layer, or a convolution with the patches that ``unfold`` gives."""
    if type(module) is nn.Conv2d:
        return (
            module.groups == 1
            and module.padding_mode == "zeros"
            and not isinstance(module.padding, str)
        )
    return type(module) is nn.Linear


def _modules(function: SiteFunction, layers: Sequence[LinearLayer]) -> dict[str, nn.Module]:
    """Return the modules of the layers, by their names in the network."""
    skeleton = modules_of(BayesianModule, function.model)[0].skeleton
    return {layer.name: skeleton.get_submodule(layer.name) for layer in layers}
