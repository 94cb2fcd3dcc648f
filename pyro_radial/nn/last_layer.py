# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Watch what the layers of a network compute in a run, and find the linear layer that computes the output."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn


def parameter_names(place: str) -> tuple[str, str]:
    """Return the names of the weight and the bias of the layer at a place in the network."""
    prefix = f"{place}." if place else ""
    return f"{prefix}weight", f"{prefix}bias"


@contextmanager
def hooked(
    layers: Mapping[str, nn.Module], hook: Callable[[str, Tensor, Tensor], Tensor | None]
) -> Iterator[None]:
    """Call ``hook(place, input, output)`` after each call of one of the layers inside the block.

    A tensor that it returns takes the place of the layer's output.
    """
    with ExitStack() as hooks:
        for place, layer in layers.items():
            called = partial(_call_hook, hook, place)
            hooks.enter_context(layer.register_forward_hook(called, with_kwargs=True))
        yield


def _call_hook(
    hook: Callable[[str, Tensor, Tensor], Tensor | None],
    place: str,
    layer: nn.Module,
    args: tuple[Tensor, ...],
    kwargs: dict[str, Tensor],
    output: Tensor,
) -> Tensor | None:
    first = args[0] if args else next(iter(kwargs.values()))
    return hook(place, first, output)


class LastLayerFinder:
    """Finds the linear layer whose output is the network's output, in a run of the network."""

    def __init__(self) -> None:
        #: The place of the layer in the network; None before a run, and for a network that ends with something else.
        self.place: str | None = None
        #: Whether the network calls the layer once, with a vector for each row.
        self.takes_vectors_once = False

    @contextmanager
    def watching(self, network: nn.Module) -> Iterator[None]:
        """Find the layer in each run of the network inside the block."""
        modules = network.named_modules()
        layers = {place: layer for place, layer in modules if isinstance(layer, nn.Linear)}
        calls: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}

        def note_call(place: str, inputs: Tensor, output: Tensor) -> None:
            calls.setdefault(place, []).append((inputs, output, output.clone()))

        def find_last(module: nn.Module, args: object, output: object) -> None:
            output = getattr(output, "logits", output)
            for place, found in calls.items():
                inputs, own, before = found[-1]
                is_own = (
                    isinstance(output, Tensor)
                    and output.shape == own.shape
                    and output.data_ptr() == own.data_ptr()
                )
                # A layer whose output changes in place afterwards does not compute the network's.
                if is_own and torch.equal(own, before):
                    self.place = place
                    self.takes_vectors_once = len(found) == 1 and inputs.dim() == 2
                    break
            calls.clear()

        with hooked(layers, note_call), network.register_forward_hook(find_last):
            yield
