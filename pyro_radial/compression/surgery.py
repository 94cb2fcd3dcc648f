# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Exact removal of units from a network."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pyro_radial._pyro.checks import check_types
from pyro_radial.compression.graph import IndexSelect, Layer, is_sequential, read_chain
from pyro_radial.compression.scores import Cut, Scores

SIZES = {
    "out_features",
    "in_features",
    "out_channels",
    "in_channels",
    "num_features",
    "num_parameters",
}


def complete_cut(net: nn.Sequential, cut: Cut, scores: Scores | None = None) -> Cut:
    """Complete a cut with everything that follows from it, as masks over the outputs and inputs of every layer.

    A unit that no layer uses any more is cut, and so is every use of a cut unit. A layer (or the network's inputs) that
    would be left without units keeps one, with a warning. This is the unit with the highest score, where an input
    counts the lower of its own and its unit's score. Without scores it is the unit with the largest product of the
    norms of its incoming and outgoing weights.

    Arguments and errors are those of :func:`cut_network`; the masks are on the CPU.
    """
    layers = read_chain(net)
    _check_fit(layers, cut, scores)
    outputs = {layer.name: _mask(cut.outputs, layer, 0) for layer in layers}
    inputs = {layer.name: _mask(cut.inputs, layer, 1) for layer in layers}
    if not outputs[layers[-1].name].all():
        raise ValueError(
            f"cut.outputs[{layers[-1].name!r}] must keep all outputs of the network, got some cut"
        )
    for layer in layers:
        # The unit before that each input belongs to.
        owners = (layer.sources // layer.positions).cpu()
        units = _units_before(layer, outputs)
        used = inputs[layer.name] & units[owners]
        if not used.any():
            used = _rescue(layer, owners, inputs[layer.name], scores)
        inputs[layer.name] = used
        if layer.before:
            outputs[layer.before.name] = torch.zeros_like(units).index_fill_(0, owners[used], True)
    return Cut(outputs, inputs)


def cut_network(net: nn.Sequential, cut: Cut, scores: Scores | None = None) -> nn.Sequential:
    """Build a smaller network that computes what the network does without the cut units.

    Its outputs equal those of the network whose cut units have zero weights and biases, incoming and outgoing. This
    holds to rounding, and in training too, but dropouts and fractional pools draw other random numbers. Modules keep
    their names and settings, and share nothing with the original. Where a layer uses only some of its inputs, an
    ``IndexSelect`` before it picks them, named as the layer with ``_inputs``.

    :param net: a :class:`~torch.nn.Sequential`, nested or not, of linear layers, convolutions without groups, pools,
        flattens from dimension 1, elementwise activations, dropouts, and batch norms after a layer. The tensors of
        batch norms and of a :class:`~torch.nn.PReLU` are cut along with the units. Softmaxes, other flattens and
        :class:`~torch.nn.Unflatten` are allowed before the first layer and after the last. Not changed.
    :param cut: the units to keep.
    :param scores: how much the units matter, to choose the unit that a layer keeps if the cut would leave none.
    :returns: nested Sequentials as in the network.
    :raises ValueError: naming the argument, if the network is not such a chain or an argument does not fit it.

    Example::

        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> cut_network(net, Cut(outputs={"0": torch.tensor([True, False, True])}))
        Sequential(
          (0): Linear(in_features=4, out_features=2, bias=True)
          (1): ReLU()
          (2): Linear(in_features=2, out_features=2, bias=True)
        )
    """
    whole = complete_cut(net, cut, scores)
    smaller: dict[str, nn.Module] = {}
    selects: dict[str, IndexSelect] = {}
    for layer in read_chain(net):
        smaller[layer.name] = _cut_module(
            layer.module, whole.outputs[layer.name], whole.inputs[layer.name]
        )
        units = _units_before(layer, whole.outputs)
        for name, module, positions in layer.carried:
            smaller[name] = _cut_module(module, units.repeat_interleave(positions))
        arriving = units.repeat_interleave(layer.positions)
        size = int(arriving.sum())
        new_position = arriving.cumsum(0) - 1
        used = layer.sources.cpu()[whole.inputs[layer.name]]
        index = new_position[used]
        if not torch.equal(index, torch.arange(size, device="cpu")):
            weight = layer.module.weight
            select = IndexSelect(index.to(weight.device), size, dim=1 - weight.ndim)
            selects[layer.name] = select.train(layer.module.training)
    return _rebuild(net, "", smaller, selects)


def _check_fit(layers: Sequence[Layer], cut: Cut, scores: Scores | None) -> None:
    """Raise a ValueError for masks and scores of unknown layers or of another number of units."""
    check_types(Cut, cut=cut)
    sizes = {layer.name: layer.module.weight.shape[:2] for layer in layers}
    named = {"cut.outputs": (cut.outputs, 0), "cut.inputs": (cut.inputs, 1)}
    if scores is not None:
        check_types(Scores, scores=scores)
        named |= {"scores.outputs": (scores.outputs, 0), "scores.inputs": (scores.inputs, 1)}
    for argument, (values, side) in named.items():
        for name, value in values.items():
            if name not in sizes:
                raise ValueError(f"{argument} must be of the layers {[*sizes]}, got {name!r}")
            if len(value) != sizes[name][side]:
                raise ValueError(
                    f"{argument}[{name!r}] must be of {sizes[name][side]} units, got {len(value)}"
                )


def _mask(masks: Mapping[str, Tensor], layer: Layer, side: int) -> Tensor:
    everything = torch.ones(layer.module.weight.shape[side], dtype=torch.bool, device="cpu")
    return masks.get(layer.name, everything).detach().cpu()


def _units_before(layer: Layer, outputs: Mapping[str, Tensor]) -> Tensor:
    """Return which units of the layer before are kept; the network's own inputs arrive whether they are used or not."""
    if layer.before:
        return outputs[layer.before.name]
    return torch.ones(layer.num_before, dtype=torch.bool, device="cpu")


def _rescue(layer: Layer, owners: Tensor, kept: Tensor, scores: Scores | None) -> Tensor:
    """Return inputs for a layer that has none left: the best one, and those of its unit that the cut keeps."""
    best = int(_strengths(layer, owners, scores).argmax())
    unit = int(owners[best])
    if layer.before:
        message = f"layer {layer.before.name!r} would be cut to nothing; its unit {unit} is kept"
    else:
        message = f"all inputs of the network would be cut; input {unit} is kept"
    warnings.warn(message, UserWarning, stacklevel=4)
    used = kept & (owners == unit)
    used[best] = True
    return used


def _strengths(layer: Layer, owners: Tensor, scores: Scores | None) -> Tensor:
    """Return how much each input of a layer matters."""
    known = []
    if scores is not None and layer.before and layer.before.name in scores.outputs:
        known.append(scores.outputs[layer.before.name].detach().cpu()[owners])
    if scores is not None and layer.name in scores.inputs:
        known.append(scores.inputs[layer.name].detach().cpu())
    if known:
        return torch.minimum(known[0], known[-1])
    norms = layer.module.weight.detach().transpose(0, 1).flatten(1).norm(dim=1).cpu()
    if layer.before:
        norms = norms * layer.before.module.weight.detach().flatten(1).norm(dim=1).cpu()[owners]
    return norms


def _cut_module(module: nn.Module, *kept: Tensor) -> nn.Module:
    """Return a layer of fewer outputs and inputs, or a batch norm or PReLU of fewer units."""
    # The copy keeps every setting; only its tensors and their sizes are replaced.
    small = copy.deepcopy(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        for dim, mask in enumerate(kept[: tensor.ndim]):  # The number of batches seen is a scalar.
            setattr(small, name, _part(getattr(small, name), dim, mask))
    for name in SIZES & vars(module).keys():
        setattr(small, name, int(kept[name.startswith("in_")].sum()))
    return small


def _part(tensor: Tensor, dim: int, kept: Tensor) -> Tensor:
    part = tensor.detach().index_select(dim, kept.nonzero().squeeze(1).to(tensor.device))
    return nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part


def _rebuild(
    net: nn.Module,
    prefix: str,
    smaller: Mapping[str, nn.Module],
    selects: Mapping[str, IndexSelect],
) -> nn.Sequential:
    """Build the Sequential anew, nested Sequentials included.

    :param prefix: the name of ``net`` in the whole network with a dot behind it; empty for the whole network.
    :param smaller: the modules that take the place of others, by their names in the whole network; others are copied.
    :param selects: the modules to put before layers, by the names of these; those in the network are left out.
    """
    children: OrderedDict[str, nn.Module] = OrderedDict()
    # named_children would leave out the second place of an activation that stands in two.
    for name, child in net.named_modules(remove_duplicate=False):
        path = prefix + name
        if not name or "." in name or isinstance(child, IndexSelect):
            continue
        if is_sequential(child):
            children[name] = _rebuild(child, f"{path}.", smaller, selects)
            continue
        if path in selects:
            children[f"{name}_inputs"] = selects[path]
        children[name] = smaller[path] if path in smaller else copy.deepcopy(child)
    rebuilt = nn.Sequential(children)
    rebuilt.training = net.training
    return rebuilt
