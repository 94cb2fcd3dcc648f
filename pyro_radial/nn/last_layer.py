# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Watch what the layers of a network compute in a run, and find the linear layer that computes the output."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn


def parameter_names(layer_name: str) -> tuple[str, str]:
    """Return the names of the weight and the bias of a layer."""
    prefix = f"{layer_name}." if layer_name else ""
    return f"{prefix}weight", f"{prefix}bias"


@contextmanager
def hooked(
    layers: Mapping[str, nn.Module], hook: Callable[[str, Tensor, Tensor], Tensor | None]
) -> Iterator[None]:
    """Call ``hook(layer_name, input, output)`` after each call of one of the layers inside the block.

    A tensor that it returns replaces the layer's output.
    """
    with ExitStack() as hooks:
        for layer_name, layer in layers.items():
            called = partial(_call_hook, hook, layer_name)
            hooks.enter_context(layer.register_forward_hook(called, with_kwargs=True))
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


class LastLayerFinder:
    """Finds the linear layer whose output is the network's output, in a run of the network."""

    def __init__(self) -> None:
        #: The name of the layer in the network; None before a run, and for a network that ends with something else.
        self.layer_name: str | None = None
        #: Whether the network calls the layer once, with a vector for each row.
        self.takes_vectors_once = False

    @contextmanager
    def watching(self, network: nn.Module) -> Iterator[None]:
        """Find the layer in each run of the network inside the block."""
        modules = network.named_modules()
        layers = {
            layer_name: layer for layer_name, layer in modules if isinstance(layer, nn.Linear)
        }
        calls: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}

        def note_call(layer_name: str, inputs: Tensor, output: Tensor) -> None:
            calls.setdefault(layer_name, []).append((inputs, output, output.clone()))

        def find_last(module: nn.Module, args: object, output: object) -> None:
            output = getattr(output, "logits", output)
            for layer_name, layer_calls in calls.items():
                inputs, layer_output, output_at_call = layer_calls[-1]
                is_same_memory = (
                    isinstance(output, Tensor)
                    and output.shape == layer_output.shape
                    and output.data_ptr() == layer_output.data_ptr()
                )
                # A layer whose output changes in place afterwards does not compute the network's.
                if is_same_memory and torch.equal(layer_output, output_at_call):
                    self.layer_name = layer_name
                    self.takes_vectors_once = len(layer_calls) == 1 and inputs.dim() == 2
                    break
            calls.clear()

        with hooked(layers, note_call), network.register_forward_hook(find_last):
            yield
