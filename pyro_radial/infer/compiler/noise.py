# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Move the random draws out of a graph: they are drawn first, and the graph takes them as inputs."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pyro_radial.infer.compiler.state import Metadata

aten = torch.ops.aten
EMPTY = (
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
)
# Operations that fill their first argument with noise, whatever its values, and faster calls of the same.
FILLING: dict[Any, Callable[..., Tensor]] = {
    aten.normal_.default: Tensor.normal_,
    aten.uniform_.default: Tensor.uniform_,
    aten.bernoulli_.float: Tensor.bernoulli_,
    aten.exponential_.default: Tensor.exponential_,
}
LIKE = (aten.randn_like.default, aten.rand_like.default)
STANDARD_NORMAL = (aten.randn.default, aten.randn_like.default)
STANDARD_UNIFORM = (aten.rand.default, aten.rand_like.default)
# Slices of one tensor of noise begin at multiples of this many elements, so that kernels can read them in vectors.
ALIGNED = 64

Draw = Callable[[], list[Tensor]]


class Source(NamedTuple):
    """A random operation of a graph: a function that draws its result, and the properties of the result."""

    draw: Callable[[], Tensor]
    #: ``torch.randn`` or ``torch.rand`` if the result can be a slice of one larger draw, else None.
    standard: Any
    metadata: Metadata


def split_noise(module: GraphModule) -> tuple[Draw, GraphModule]:
    """Split a graph into a function that draws all its noise, and a graph that takes the noise as its last inputs.

    So compiled code and the graph can be compared on the same noise. On a CPU the draws come in the order of the graph,
    so they are those of the graph itself. On other devices all standard normal numbers are one draw, and all uniform
    ones another. A graph whose draws depend on values, such as those of a gamma distribution, is not split; then the
    function returns an empty list.
    """
    module = copy.deepcopy(module)
    nodes = [node for node in module.graph.nodes if _is_random(node)]
    sources: list[Source] = []
    for node in nodes:
        source = _source_of(node)
        if source is None:
            return list, module
        sources.append(source)
    if not sources:
        return list, module
    last_input = module.graph.find_nodes(op="placeholder")[-1]
    for number, node in reversed(list(enumerate(nodes))):
        with module.graph.inserting_after(last_input):
            noise = module.graph.placeholder(f"noise_{number}")
        if node.target is aten.native_dropout.default:
            _replace_dropout(module, node, noise)
        else:
            node.replace_all_uses_with(noise)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    on_host = all(source.metadata.device.type == "cpu" for source in sources)
    return partial(_draw_one_by_one if on_host else _draw_together, sources), module


def _draw_one_by_one(sources: Sequence[Source]) -> list[Tensor]:
    """Return the draw of each source, in the order of the graph."""
    return [source.draw() for source in sources]


def _draw_together(sources: Sequence[Source]) -> list[Tensor]:
    """Return the draw of each source; those with the same distribution, dtype and device are slices of one draw."""
    draws: dict[int, Tensor] = {}
    groups: dict[Any, list[int]] = {}
    for number, source in enumerate(sources):
        if source.standard is None:
            draws[number] = source.draw()
        else:
            groups.setdefault(
                (source.standard, source.metadata.dtype, source.metadata.device), []
            ).append(number)
    for (function, dtype, device), members in groups.items():
        padded = [
            -(-sources[number].metadata.shape.numel() // ALIGNED) * ALIGNED for number in members
        ]
        slices = function(sum(padded), dtype=dtype, device=device).split(padded)
        for number, piece in zip(members, slices, strict=True):
            shape = sources[number].metadata.shape
            draws[number] = piece[: shape.numel()].view(shape)
    return [draws[number] for number in range(len(sources))]


def _is_random(node: Node) -> bool:
    """Return whether a node draws random numbers."""
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(
        node.target, "tags", ()
    )


def _source_of(node: Node) -> Source | None:
    """Return the source of a node's draw, or None if the draw depends on values that the graph computes."""
    target: Any = node.target
    args = node.args
    kwargs = dict(node.kwargs)
    if kwargs.pop("generator", None) is not None:
        return None
    if target is aten.native_dropout.default:
        x, drop_probability, train = args
        if not train or not isinstance(x, Node):
            return None
        mask: Metadata = x.meta["metadata"]._replace(dtype=torch.bool)
        draw = partial(_draw_dropout_mask, mask.shape, float(drop_probability), mask.device)  # type: ignore[arg-type]
        return Source(draw, None, mask)
    metadata: Metadata | None = node.meta.get("metadata")
    if metadata is None:
        return None
    if target in FILLING:
        if not _is_empty(args[0]):
            return None
        draw = partial(_draw_into_memory, FILLING[target], metadata, args[1:], kwargs)
    elif target in LIKE:
        draw = partial(_draw_into_memory, target, metadata, (), {})
    elif node.all_input_nodes:
        return None
    else:
        draw = partial(target, *args, **kwargs)
    standard = None
    if metadata.is_contiguous() and target in STANDARD_NORMAL:
        standard = torch.randn
    elif metadata.is_contiguous() and target in STANDARD_UNIFORM:
        standard = torch.rand
    return Source(draw, standard, metadata)


def _is_empty(node: object) -> bool:
    """Return whether a node is newly allocated memory that no other operation reads."""
    while isinstance(node, Node) and len(node.users) == 1:
        if node.target in EMPTY:
            return True
        node = node.args[0] if node.target is aten.detach.default else None
    return False


def _draw_into_memory(
    fill: Callable[..., Tensor],
    metadata: Metadata,
    args: Sequence[object],
    kwargs: dict[str, Any],
) -> Tensor:
    """Return the draw of an operation that fills memory, in new memory with these properties."""
    return fill(metadata.empty(), *args, **kwargs)


def _draw_dropout_mask(shape: torch.Size, drop_probability: float, device: torch.device) -> Tensor:
    """Return the mask of a dropout, true where an element is not dropped."""
    return torch.rand(shape, device=device) >= drop_probability


def _replace_dropout(module: GraphModule, node: Node, mask: Node) -> None:
    """Replace a dropout in a graph by products of its input, its mask and the factor for the dropped elements."""
    x, drop_probability, _ = node.args
    factor = 1.0 / (1.0 - float(drop_probability)) if float(drop_probability) < 1.0 else 0.0  # type: ignore[arg-type]
    with module.graph.inserting_before(node):
        product = module.graph.call_function(aten.mul.Tensor, (x, mask))
        output = module.graph.call_function(aten.mul.Tensor, (product, factor))
    for user in list(node.users):
        user.replace_all_uses_with(output if user.args[1] == 0 else mask)
        module.graph.erase_node(user)
