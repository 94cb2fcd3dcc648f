# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Call a network at given tensors: with one set, or with many sets at once."""

import copy
import logging
import math
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyro_radial._pyro.checks import warn
from pyro_radial._pyro.compat import tree_leaves, tree_map_only

logger = logging.getLogger("pyro_radial")

# Norm layers that keep running statistics.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
STATISTICS_LAYERS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

# The buffers of these layers that hold statistics.
RUNNING = ("running_mean", "running_var")

# With so many rows at most, many draws at once take a half to a fifteenth of the time of one after another on a CPU;
# linear layers gain up to the second number.
FEW_ROWS, FEW_ROWS_OF_LINEAR = 8, 128

# The error that torch raises where a network uses activation checkpointing.
RECOMPUTES = "parts of the network run again in the backward pass"

# The network for one draw of its parameters.
CallAtDraw = Callable[[Mapping[str, Tensor]], Any]
# Makes the context of a call from its tensors, which it may change.
Within = Callable[[dict[str, Tensor]], AbstractContextManager[object]]


class Arguments(NamedTuple):
    """The arguments of a call of a network."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class FunctionalNet:
    """The computation of a network, which is never changed, without its parameters and buffers.

    :ivar nn.Module skeleton: a copy of the network with its tensors on the meta device; tied tensors stay tied.
    :ivar str batching: how several draws run, ``"vmap"`` or ``"loop"``.
    """

    def __init__(self, net: nn.Module) -> None:
        self.skeleton = _make_skeleton(net)
        self.batching = "vmap"
        self._has_warned_of_statistics = False
        # With activation checkpointing parts of the network run again in the backward pass. Each call then needs its
        # own modules, which still have its tensors.
        self._recomputes = False
        if any(isinstance(module, nn.RNNBase) for module in net.modules()):
            self.batching = "loop"
            logger.info(
                "%s holds a recurrent layer: draws run one after another", type(net).__name__
            )

    def single(
        self, tensors: dict[str, Tensor], inputs: Arguments, within: Within = nullcontext
    ) -> Any:
        """Call the network with one set of tensors, by name; tied tensors by their first name.

        What the network does to its buffers is done to ``tensors``, and what it does to its inputs to a copy.
        ``within`` makes a context for the call. torch's fast path of transformers is off: it reads the weights of
        layers, and calls no module in a layer's place.
        """
        inputs = tree_map_only(Tensor, torch.clone, inputs)
        original_tensors = dict(tensors)
        buffers = [
            original_tensors[name]
            for name, _ in self.skeleton.named_buffers()
            if name in original_tensors
        ]
        if not self._recomputes:
            try:
                with (
                    unchanged_on_error(lambda: buffers),
                    WITHOUT_FASTPATH,
                    within(tensors),
                    torch.autograd.graph.disable_saved_tensors_hooks(RECOMPUTES),
                    _restored(self.skeleton),
                ):
                    return functional_call(self.skeleton, tensors, inputs.args, inputs.kwargs)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                # Perhaps activation checkpointing, which needs the hooks. The call starts again where it was; a mistake
                # in it raises here again, and then nothing is remembered.
                tensors.update(original_tensors)
        with WITHOUT_FASTPATH, within(tensors):
            net = self.module(tensors)
            output = net(*inputs.args, **inputs.kwargs)
            tensors.update(net.named_buffers())
        self._recomputes = True
        self.batching = "loop"
        return output

    def many(
        self,
        shared: Mapping[str, Tensor],
        drawn: Mapping[str, Tensor],
        inputs: Arguments,
        within: Within = nullcontext,
        *,
        is_slowness_told: bool = True,
    ) -> Any:
        """Call the network with N sets of tensors, and stack the outputs along a new first dim. No buffer is changed.

        ``drawn`` are tensors ``[N, *shape]``, one slice for each set. Where vmap cannot batch the network, a warning
        says so, unless it is turned off. A TypeError if the network returns something else than tensors and plain data,
        nested in any way.
        """
        with _frozen_statistics(self.skeleton) as frozen_names:
            if frozen_names and not self._has_warned_of_statistics:
                self._has_warned_of_statistics = True
                warn(
                    "running statistics are not updated by calls in train mode with several draws; "
                    "each draw is normalized by the statistics of its own batch"
                )
            shared_tensors = {
                name: tensor for name, tensor in shared.items() if name not in frozen_names
            }
            buffers = [name for name, _ in self.skeleton.named_buffers() if name in shared_tensors]

            def run(draw: Mapping[str, Tensor]) -> Any:
                tensors = {**shared_tensors, **draw}
                # These copies take what a draw writes to its buffers.
                for name in buffers:
                    tensors[name] = shared_tensors[name].clone()
                return self.single(tensors, inputs, within)

            if self.batching == "loop":
                return loop(run, drawn)
            try:
                with _vmap_settings(self.skeleton, drawn):
                    return _vmap(run, drawn)
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError as error:
                # A mistake in the call itself raises here again, and then nothing is remembered.
                outputs = loop(run, drawn)
                if not self._recomputes:
                    self.batching = "loop"
                    reason = str(error).strip().partition("\n")[0]
                    if is_slowness_told:
                        warn(
                            f"torch.vmap cannot batch {type(self.skeleton).__name__} ({reason}): "
                            "from now on its draws run one after another"
                        )
                return outputs

    def runs_draws_together(self, num_rows: int) -> bool:
        """Return whether many draws at once take less time at so many rows than one after another."""
        own = [
            layer
            for layer in self.skeleton.modules()
            if any(True for _ in layer.parameters(recurse=False))
        ]
        is_linear = all(isinstance(layer, nn.Linear) for layer in own)
        return self.batching == "vmap" and num_rows <= (
            FEW_ROWS_OF_LINEAR if is_linear else FEW_ROWS
        )

    def module(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return a plain network around the given tensors, ties kept, in the mode of the skeleton."""
        twins = (*self.skeleton.named_parameters(), *self.skeleton.named_buffers())
        return copy.deepcopy(self.skeleton, {id(twin): tensors[name] for name, twin in twins})


def split_draws(
    values: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
) -> tuple[tuple[int, ...], dict[str, Tensor], dict[str, Tensor]]:
    """Sort values ``[*draws, *shape]`` of sites into those that all draws share and those with one slice per draw.

    Leading dims of size one are dropped for each site, since plates add them. Returns the shape of the draws, the
    values without draws, and the other values with the draws flattened.
    """
    draws: tuple[int, ...] = ()
    first_site = ""
    shared: dict[str, Tensor] = {}
    drawn: dict[str, Tensor] = {}
    for name, value in values.items():
        if name not in shapes:
            raise ValueError(
                f"parameters must have values of the sites {list(shapes)} only, got {name!r}"
            )
        shape = shapes[name]
        num_draw_dims = value.dim() - len(shape)
        if num_draw_dims < 0 or value.shape[num_draw_dims:] != shape:
            raise ValueError(
                f"site {name!r} must have a value whose shape ends in the parameter's {tuple(shape)}, "
                f"got {tuple(value.shape)}"
            )
        lead = tuple(size for size in value.shape[:num_draw_dims] if size != 1)
        if not lead:
            shared[name] = value.reshape(shape)
        elif draws in ((), lead):
            draws = lead
            first_site = first_site or name
            drawn[name] = value.reshape(math.prod(lead), *shape)
        else:
            raise ValueError(
                f"site {name!r} must have draws of shape {draws}, as site {first_site!r} has, got {lead}"
            )
    return draws, shared, drawn


def unflatten(outputs: object, draws: tuple[int, ...]) -> Any:
    """Give tensors ``[N, ...]``, nested in any way, the shape ``[*draws, ...]``."""
    return tree_map_only(Tensor, lambda tensor: tensor.reshape(*draws, *tensor.shape[1:]), outputs)


def _vmap(run: CallAtDraw, drawn: Mapping[str, Tensor]) -> Any:
    outputs: list[Any] = []

    def run_draw(draw: dict[str, Tensor]) -> tuple[Tensor, ...]:
        outputs.append(run(draw))
        return _output_tensors(outputs[-1])

    tensors = vmap(run_draw, randomness="different")(dict(drawn))
    return _replace_tensors(outputs[-1], tensors)


def loop(run: CallAtDraw, drawn: Mapping[str, Tensor]) -> Any:
    """Call ``run`` for each of the draws, and stack the outputs along a new first dim."""
    slices = [values.unbind(0) for values in drawn.values()]
    outputs = [run(dict(zip(drawn, draw, strict=True))) for draw in zip(*slices, strict=True)]
    tensors = zip(*map(_output_tensors, outputs), strict=True)
    return _replace_tensors(outputs[-1], map(torch.stack, tensors))


def _output_tensors(output: object) -> tuple[Tensor, ...]:
    """Return the tensors in the output of a network, whose other leaves must be plain data."""
    tensors = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif not (leaf is None or isinstance(leaf, bool | int | float | str)):
            raise TypeError(
                "output of the network must be of tensors, and tuples, lists and dicts of them, with several draws, "
                f"got {type(leaf).__name__}"
            )
    return tuple(tensors)


def _replace_tensors(output: object, tensors: Iterable[Tensor]) -> Any:
    """Return an output of the same structure with these tensors, in order, in place of its own."""
    remaining = iter(tensors)
    return tree_map_only(Tensor, lambda _: next(remaining), output)


def _make_skeleton(net: nn.Module) -> nn.Module:
    """Copy the modules of a network, with all parameters and buffers on the meta device; tied tensors stay tied."""
    # deepcopy takes copies from the memo: no memory is doubled, and ties stay ties.
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in net.parameters()
    }
    for buffer in net.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(net, memo)


@contextmanager
def unchanged_on_error(read: Callable[[], Collection[Tensor]]) -> Iterator[None]:
    """Undo what a call wrote into buffers if it raises; ``read`` returns the buffers as they are now."""
    saved_values = [buffer.clone() for buffer in read()]
    try:
        yield
    except Exception:
        with torch.no_grad():
            for buffer, values in zip(read(), saved_values, strict=True):
                buffer.copy_(values)
        raise


@contextmanager
def _restored(skeleton: nn.Module) -> Iterator[None]:
    """Put the skeleton's own tensors back: functional_call leaves those of the call if a module has two names."""
    with ExitStack() as restore:
        for module in skeleton.modules():
            restore.callback(module._parameters.update, dict(module._parameters))
            restore.callback(module._buffers.update, dict(module._buffers))
        yield


@contextmanager
def _frozen_statistics(skeleton: nn.Module) -> Iterator[set[str]]:
    """Let norm layers in train mode use batch statistics only; yield the names of the buffers to leave out."""
    frozen_names: set[str] = set()
    with ExitStack() as restore:
        for prefix, layer in skeleton.named_modules():
            if not isinstance(layer, STATISTICS_LAYERS) or not layer.training:
                continue
            statistics = {name: layer._buffers[name] for name in RUNNING}
            if layer.track_running_stats and None not in statistics.values():
                frozen_names.update(f"{prefix}.{name}".removeprefix(".") for name in RUNNING)
                restore.callback(setattr, layer, "track_running_stats", True)
                restore.callback(layer._buffers.update, statistics)
                layer.track_running_stats = False
                layer._buffers.update(dict.fromkeys(statistics))
        yield frozen_names


class _SharedSetting:
    """Changes a setting of the whole process: the first thread to enter makes it, the last to leave restores it."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._num_users = 0
        self._lock = threading.Lock()
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._num_users == 0:
                # Torch resets a context variable, which works only in the context where it was set.
                self._context = copy_context()
                self._context.run(self._stack.enter_context, self._make())
            self._num_users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                self._context.run(self._stack.close)


@contextmanager
def _without_fastpath() -> Iterator[None]:
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


@contextmanager
def _without_advice_on_loops() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


WITHOUT_FASTPATH = _SharedSetting(_without_fastpath)
WITHOUT_FUSED_ATTENTION = _SharedSetting(lambda: sdpa_kernel(SDPBackend.MATH))
WITHOUT_ADVICE_ON_LOOPS = _SharedSetting(_without_advice_on_loops)


@contextmanager
def _vmap_settings(skeleton: nn.Module, drawn: Mapping[str, Tensor]) -> Iterator[None]:
    """Turn off, inside the block, what vmap has no batching rule for or warns of."""
    with ExitStack() as stack:
        if any(value.device.type == "cpu" for value in drawn.values()):
            # The fused attention of the CPU has no batching rule.
            stack.enter_context(WITHOUT_FUSED_ATTENTION)
        if any(isinstance(module, nn.RNNCellBase) for module in skeleton.modules()):
            # torch warns that it loops over cells inside vmap.
            stack.enter_context(WITHOUT_ADVICE_ON_LOOPS)
        yield
