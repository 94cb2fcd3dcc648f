# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A network as a chain of layers: its size, and which input of a layer comes from which unit of the layer before."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pyro_radial._pyro.checks import check_types

WeightLayer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
WEIGHT_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# Over features instead of channels with positions, they mix units.
POOLS = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.LPPool1d,
    nn.LPPool2d,
    nn.LPPool3d,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)
ELEMENTWISE = (
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.RReLU,
    nn.PReLU,
    nn.Sigmoid,
    nn.LogSigmoid,
    nn.Tanh,
    nn.Softplus,
    nn.Softsign,
    nn.Tanhshrink,
    nn.Softshrink,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Threshold,
    nn.Identity,
    nn.Dropout,
    nn.AlphaDropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.FeatureAlphaDropout,
)
# They mix units, which is harmless only where none is cut: before the first layer and after the last.
AT_THE_ENDS = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.Unflatten)


class IndexSelect(nn.Module):
    """Keep some of the ``size`` inputs of a layer, in the order of ``index``, along ``dim`` from the end.

    :func:`~pyro_radial.compression.cut_network` puts it before a layer that uses only some of its inputs.
    """

    index: Tensor

    def __init__(self, index: Tensor, size: int, dim: int = -1) -> None:
        super().__init__()
        self.size = size
        self.dim = dim
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs at ``index``."""
        return x.index_select(self.dim, self.index)

    def extra_repr(self) -> str:
        """Return how many of how many, and along which dimension."""
        return f"{len(self.index)} of {self.size}, dim={self.dim}"


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer or convolution of a chain; input ``i`` reads position ``sources[i]`` of what reaches it."""

    name: str
    module: WeightLayer
    before: Layer | None
    num_before: int  # units of the layer before, or of the network's own inputs
    positions: int  # positions of each of these units; above one only after a flatten
    sources: Tensor
    # Modules to cut along with these units: name, module, positions.
    carried: tuple[tuple[str, nn.Module, int], ...]


def read_chain(net: nn.Module) -> list[Layer]:
    """Read the layers of a network in the order they run; a ValueError names a module that does not fit."""
    layers: list[Layer] = []
    between: list[tuple[str, nn.Module]] = []  # since the last layer
    for name, module in _chain_modules(net):
        if isinstance(module, WEIGHT_LAYERS):
            layers.append(_read_layer(name, module, layers[-1] if layers else None, between))
            between = []
        else:
            between.append((name, module))
    _refuse_selects(between)
    if not layers:
        raise ValueError(
            f"net must hold a linear layer or a convolution, got {type(net).__name__} without one"
        )
    return layers


def count_weights(net: nn.Module) -> int:
    """Count the weights of linear layers and convolutions, without biases and batch norms."""
    return sum(layer.weight.numel() for layer in net.modules() if isinstance(layer, WEIGHT_LAYERS))


def count_flops(net: nn.Module, input_shape: Sequence[int]) -> int:
    r"""Count the operations of linear layers and convolutions in one prediction.

    Each output takes one multiply-add per incoming weight and one for the bias, with or without a bias. A convolution
    takes

    .. math:: (K_h K_w C_{in} + 1) \, H_{out} W_{out} C_{out}

    and a linear layer :math:`(I_{in} + 1) I_{out}`.

    Source: Oh, Adamczewski and Park (2019), *Radial and Directional Posteriors for Bayesian Neural Networks*, section
    5.2. The numbers in its table 2 do not follow its formula: they count a layer that no network of the table has, with
    16 inputs per channel of the last convolution, and leave out the last layer.
    """
    shapes_only = copy.deepcopy(net).to("meta").eval()
    reached: list[str] = []
    counts: list[int] = []

    def enter(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        reached.append(name)

    def count(layer: WeightLayer, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        counts.append((layer.weight[0].numel() + 1) * output.numel())

    for name, module in shapes_only.named_modules():
        module.register_forward_pre_hook(partial(enter, name))
        if isinstance(module, WEIGHT_LAYERS):
            module.register_forward_hook(count)
    try:
        shapes_only(torch.empty(1, *input_shape, dtype=next(net.parameters()).dtype, device="meta"))
    except (RuntimeError, ValueError, IndexError) as error:
        raise ValueError(
            f"data: x must fit the network, got rows of shape {[*input_shape]}, which fails at {reached[-1]!r}: {error}"
        ) from error
    return sum(counts)


def is_sequential(module: nn.Module) -> bool:
    """Return whether a module only runs its children in turn."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _chain_modules(net: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of nested Sequentials, by name, in the order they run; raise a ValueError for an unfit one."""
    check_types(nn.Module, net=net)
    leaves: list[tuple[str, nn.Module]] = []
    owners: dict[int, str] = {}  # of the tensors
    # A module without tensors, such as an activation, may stand in several places.
    for name, module in net.named_modules(remove_duplicate=False):
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if is_sequential(module):
            if own:
                raise ValueError(
                    f"net must hold tensors in known layers only, got {type(module).__name__} at {name!r}"
                )
            continue
        _check_known(name, module)
        _check_settings(name, module)
        for tensor in own:
            owner = owners.setdefault(id(tensor), name)
            if owner != name:
                raise ValueError(
                    f"net must have no shared tensors, got one in {owner!r} and {name!r}"
                )
        leaves.append((name, module))
    return leaves


def _check_known(name: str, module: nn.Module) -> None:
    """Raise a ValueError for a module that a chain cannot hold, or for a network that is not a Sequential."""
    known = (*WEIGHT_LAYERS, *NORMS, *POOLS, *ELEMENTWISE, *AT_THE_ENDS, nn.Flatten, IndexSelect)
    if not name or type(module) not in known:
        where = f" at {name!r}" if name else ""
        raise ValueError(
            "net must be a plain nn.Sequential of linear layers, convolutions, batch norms, pools, flattens, "
            f"dropouts and elementwise activations, got {type(module).__name__}{where}. For networks with "
            "branches or skip connections, use the library Torch-Pruning"
        )


def _check_settings(name: str, module: nn.Module) -> None:
    """Raise a ValueError for options of known modules that a cut does not support."""
    if getattr(module, "groups", 1) != 1:
        raise ValueError(
            f"net must have groups=1 in the {type(module).__name__} {name!r}, got {module.groups}"
        )
    if getattr(module, "return_indices", False):
        raise ValueError(
            f"net must have return_indices=False in the {type(module).__name__} {name!r}, got True"
        )
    # Weight norms and masks of torch.nn.utils recompute the weight from other tensors, so cutting it would do nothing.
    odd = {key for key, _ in module.named_parameters()} - {"weight", "bias"}
    if isinstance(module, WEIGHT_LAYERS) and odd:
        raise ValueError(
            f"net must have a plain parameter as the weight of {name!r}, got one made of {sorted(odd)}"
        )


def _read_layer(
    name: str, module: WeightLayer, before: Layer | None, between: list[tuple[str, nn.Module]]
) -> Layer:
    num_inputs = module.weight.shape[1]
    size, sources = num_inputs, torch.arange(num_inputs, device="cpu")
    if between and isinstance(select := between[-1][1], IndexSelect):
        size, sources = select.size, select.index
        if len(sources) != num_inputs or select.dim != 1 - module.weight.ndim:
            raise ValueError(
                f"net must have inputs of {name!r} that fit, {module}, got {between[-1][0]!r}, {select}"
            )
        between = between[:-1]
    _refuse_selects(between)
    if before is None:
        return Layer(name, module, None, size, 1, sources, ())
    return _link(name, module, before, size, sources, between)


def _link(
    name: str,
    module: WeightLayer,
    before: Layer,
    size: int,
    sources: Tensor,
    between: list[tuple[str, nn.Module]],
) -> Layer:
    """Follow the units of ``before`` through the modules between to the inputs of ``module``."""
    num_units = before.module.weight.shape[0]
    maps = not isinstance(before.module, nn.Linear)  # whether the units are channels with positions
    flattened = False
    norms = []
    for inner, other in between:
        if isinstance(other, AT_THE_ENDS) or (isinstance(other, POOLS) and not maps):
            raise ValueError(
                f"net must not mix the units of {before.name!r}, got {inner!r}, {other}"
            )
        if isinstance(other, nn.Flatten):
            if (other.start_dim, other.end_dim) != (1, -1):
                raise ValueError(
                    f"net must flatten with start_dim=1 and end_dim=-1, got {inner!r}, {other}"
                )
            flattened = flattened or maps
            maps = False
        elif isinstance(other, NORMS) or (isinstance(other, nn.PReLU) and other.num_parameters > 1):
            norms.append((inner, other, flattened))
    if isinstance(module, nn.Linear) == maps:
        needed = "an nn.Flatten" if maps else "channels with positions"
        raise ValueError(f"net must have {needed} between {before.name!r} and {name!r}, got none")
    positions = size // num_units
    if size % num_units or (positions > 1 and not flattened):
        raise ValueError(
            f"net must fit the {num_units} units of {before.name!r} at {name!r}, got {size} inputs"
        )
    carried = []
    for inner, other, after_flatten in norms:
        of_unit = positions if after_flatten else 1
        carried.append((inner, other, of_unit))
        width = other.num_parameters if isinstance(other, nn.PReLU) else other.num_features
        if width != num_units * of_unit:
            raise ValueError(
                f"net must fit the {num_units} units of {before.name!r} at {inner!r}, got {other}"
            )
    return Layer(name, module, before, num_units, positions, sources, tuple(carried))


def _refuse_selects(between: list[tuple[str, nn.Module]]) -> None:
    for name, module in between:
        if isinstance(module, IndexSelect):
            raise ValueError(
                f"net must have a layer directly after an IndexSelect, got none after {name!r}, {module}"
            )
