# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""An accelerator for tests on machines without one.

Its tensors say that they are on another device, hold their values in CPU memory, and raise an error where they meet a
CPU tensor as a GPU's would. Its random numbers are those of torch's CPU generator, so results must equal the CPU's.
:data:`traffic` counts what the host reads and what is copied in either direction.

The device is torch's own slot for foreign devices. :func:`start` must run before the first backward pass of a
process, because then autograd makes one thread for each device; so the tests run in a process of their own.

What it cannot see: a kernel that a GPU lacks, has in another precision or runs in another order; a generator of its
own, so a forgotten seed of a device's generator is not noticed; asynchronous execution; memory; memory formats that
kernels choose; compiled and captured graphs; code that asks for ``cuda`` by name; autocast, which it ignores.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

aten = torch.ops.aten

NAME = "pretend"
COPIES = (aten._to_copy.default, aten.copy_.default)
# These read a value, or a size that depends on values, on the host.
READS = (
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.masked_select.default,
    aten._unique2.default,
)
# A GPU copies indices that are in host memory.
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)

#: Values that the host read ("reads"), and tensors copied "to the host" and "to the device".
traffic: Counter[str] = Counter()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Yield a counter of the traffic inside the block."""
    before, inside = traffic.copy(), Counter[str]()
    yield inside
    inside.update(traffic - before)


class DeviceTensor(Tensor):
    """A tensor that says it is on that device; ``held`` has its values."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> "DeviceTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(op, args, kwargs or {})

    def __repr__(self) -> str:
        return f"DeviceTensor({self.held})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        made.__dict__.update({name: value for name, value in vars(self).items() if name != "held"})
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (self.held.detach(), self.requires_grad)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **kwargs: Any) -> Any:
        raise TypeError(f"can't convert {NAME} device type tensor to numpy")


def _restored(held: Tensor, requires_grad: bool) -> Tensor:
    return DeviceTensor(held).requires_grad_(requires_grad)


def compute(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values, and refuse tensors of several devices."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    hosts = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
    if torch.Tag.inplace_view in op.tags and ours:
        op(ours[0].held, *args[1:], **kwargs)
        with no_dispatch():  # The tensor's own shape.
            return op(*args, **kwargs)
    asked = kwargs.get("device")
    if asked is not None and asked.type == NAME:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    kwargs.pop("pin_memory", None)
    on_device = bool(ours) if asked is None else asked.type == NAME
    if op is aten.copy_.default:
        on_device = isinstance(args[0], DeviceTensor)
    if op in COPIES:
        traffic["to the host"] += bool(ours) and not on_device
        traffic["to the device"] += bool(hosts) and on_device
    elif ours:
        _check_together(op, ours, hosts)
    traffic["reads"] += bool(ours) and op in READS
    held_by = {id(tensor.held): tensor for tensor in ours}

    def result(value: Any) -> Any:
        if not isinstance(value, Tensor) or not on_device or isinstance(value, DeviceTensor):
            return value
        known = held_by.get(id(value))
        if known is not None and known.shape != value.shape:
            raise NotImplementedError(f"{op} changes a shape in place")
        return DeviceTensor(value) if known is None else known

    inner = pytree.tree_map_only(DeviceTensor, lambda tensor: tensor.held, (args, kwargs))
    return pytree.tree_map(result, op(*inner[0], **inner[1]))


def _check_together(op: Any, ours: list[DeviceTensor], hosts: list[Tensor]) -> None:
    """Raise an error where a GPU would: only elementwise operations take numbers from the host."""
    if op in INDEXING:
        traffic["to the device"] += len(hosts)
        return
    scalars_too = torch.Tag.pointwise in op.tags
    wrong = [tensor for tensor in hosts if tensor.device.type == "cpu" and not (scalars_too and tensor.dim() == 0)]
    if wrong:
        shapes = [[tuple(tensor.shape) for tensor in part] for part in (ours, wrong)]
        raise RuntimeError(f"{op} got tensors on {NAME}, of shapes {shapes[0]}, and on the CPU, of shapes {shapes[1]}")


class _Module:
    """What torch asks of a device's module."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


# Operations that make a tensor where none is there to dispatch on; autograd runs some of them in its own threads.
FACTORIES = (
    *("empty.memory_format", "empty_strided", "_copy_from", "copy_"),
    # torch makes these by resizing an empty tensor.
    *("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm", "randperm.generator"),
    *("tril_indices", "triu_indices"),
)
_kernels = torch.library.Library("aten", "IMPL")
_autocast = torch.library.Library("_", "IMPL")


class Generator(torch._C.Generator):
    """Torch's generator, and the CPU's for the device, which must draw the same numbers."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator.__new__(torch._C.Generator, "cpu" if torch.device(device).type == NAME else device)


def start() -> None:
    """Make the device known to torch."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as set_up

    set_up(NAME, backend_module=_Module())
    torch.Generator = Generator  # type: ignore[misc]
    torch.serialization.add_safe_globals([_restored])
    # Autocast leaves the device's dtypes alone.
    _autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in FACTORIES:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        _kernels.impl(name, lambda *args, op=op, **kwargs: compute(op, args, kwargs), "PrivateUse1")
