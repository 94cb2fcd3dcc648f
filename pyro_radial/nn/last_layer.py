# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Watch what the layers of a network compute in a run, and find the linear layer that computes the output."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def hooked(
    layers: Mapping[str, nn.Module], hook: Callable[[str, Tensor, Tensor], Tensor | None]
) -> Iterator[None]:
    """Call ``hook(layer_name, input, output)`` after each call of one of the layers inside the block.

    A tensor that it returns replaces the layer's output.
    """
    with ExitStack() as hooks:
        for layer_name, layer in layers.items():
            hooks.enter_context(
                layer.register_forward_hook(partial(_call_hook, hook, layer_name), with_kwargs=True)
            )
        yield


def _call_hook(
    hook: Callable[[str, Tensor, Tensor], Tensor | None],
    layer_name: str,
    layer: nn.Module,
    args: tuple[Tensor, ...],
    kwargs: dict[str, Tensor],
    output: Tensor,
) -> Tensor | None:
    layer_input = args[0] if args else next(iter(kwargs.values()))
    return hook(layer_name, layer_input, output)


def find_output_layer(network: nn.Module, run: Callable[[], object]) -> tuple[str | None, bool]:
    """Find the linear layer whose output is the network's output, by a function that runs the network.

    :returns: the name of the layer, None for a network that ends with something else; and whether the network calls the
        layer once, with a vector for each row.
    """
    layers = {
        name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear)
    }
    calls: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    outputs: list[Any] = []

    def note_call(layer_name: str, inputs: Tensor, output: Tensor) -> None:
        calls.setdefault(layer_name, []).append((inputs, output, output.clone()))

    hook = network.register_forward_hook(lambda module, args, output: outputs.append(output))
    with hooked(layers, note_call), hook:
        run()
    output = getattr(outputs[-1], "logits", outputs[-1])
    for layer_name, layer_calls in calls.items():
        inputs, layer_output, output_at_call = layer_calls[-1]
        is_same_memory = (
            isinstance(output, Tensor)
            and output.shape == layer_output.shape
            and output.data_ptr() == layer_output.data_ptr()
        )
        # A layer whose output changes in place afterwards does not compute the network's.
        if is_same_memory and torch.equal(layer_output, output_at_call):
            return layer_name, len(layer_calls) == 1 and inputs.dim() == 2
    return None, False
