# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Every undocumented name of Pyro or torch that the library uses, so that a change there breaks one line."""

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from unittest import mock

import pyro
import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.infer.autoguide.guides import prototype_hide_fn
from pyro.infer.autoguide.utils import deep_setattr, helpful_support_errors
from pyro.infer.trace_mean_field_elbo import _check_mean_field_requirement as check_mean_field_requirement
from pyro.infer.util import Dice, shared_intermediates  # type: ignore[attr-defined]
from pyro.nn import PyroModule
from pyro.ops import packed
from pyro.ops.einsum.adjoint import require_backward
from pyro.ops.rings import MarginalRing
from pyro.ops.tensor_utils import periodic_repeat
from pyro.optim import PyroOptim
from pyro.params.param_store import module_from_param_with_module_name, normalize_param_name, user_param_name
from pyro.poutine import runtime
from pyro.util import check_model_guide_match, check_site_shape
from torch import Tensor, compiler, nn
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = [
    "OVERRIDDEN",
    "CompilerMissingError",
    "adopt",
    "capturing",
    "check_mean_field_requirement",
    "check_model_guide_match",
    "check_site_shape",
    "compile_graph",
    "constant_in_graphs",
    "deep_setattr",
    "forget_handlers",
    "forget_stored",
    "handlers_around",
    "has_hooks",
    "helpful_support_errors",
    "host_reads_removed",
    "initial_scale",
    "is_capturing",
    "is_deterministic",
    "is_traced",
    "loc_and_scale",
    "mark_stepped",
    "optimizer_state_waiting",
    "own_mask",
    "periodic_repeat",
    "prototype_hide_fn",
    "pyro_settings",
    "record_graph",
    "rendezvous",
    "set_context",
    "standard_gamma",
    "stop_where",
    "stored_name",
    "stored_parameters",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]

F = TypeVar("F", bound=Callable[..., Any])

# The undocumented methods that our subclasses override, by Pyro's class.
OVERRIDDEN = {
    "AutoGuide": ("_create_plates", "_prototype_hide_fn", "_setup_prototype"),
    "ELBO": ("_get_traces", "_guess_max_plate_nesting", "_vectorized_num_particles"),
    "TraceMeanField_ELBO": ("_get_trace",),
}


def is_deterministic(site: Mapping[str, Any]) -> bool:
    """Whether a site holds a computed value, which Pyro treats as observed.

    ``pyro.deterministic`` marks its sites; a ``Reparam`` leaves a site with its density masked out.
    """
    masked_out = isinstance(site["fn"], MaskedDistribution) and own_mask(site["fn"]) is False
    return bool(site["infer"].get("_deterministic", False)) or masked_out


class _Capturing(threading.local):
    now = False


_capturing = _Capturing()


def is_capturing() -> bool:
    """Whether this thread records a graph in a :func:`capturing` block, where the host must not read values."""
    return _capturing.now


@contextmanager
def capturing() -> Iterator[None]:
    """Let :func:`is_capturing` return true inside the block."""
    before, _capturing.now = _capturing.now, True
    try:
        yield
    finally:
        _capturing.now = before


def is_traced() -> bool:
    """Whether a compiler or ``make_fx`` records what is computed."""
    return compiler.is_compiling() or get_proxy_mode() is not None


def own_mask(distribution: MaskedDistribution) -> Any:
    """The mask of a masked distribution: a bool, or a tensor that broadcasts over its batch."""
    return distribution._mask


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def initial_scale(guide: Any) -> float:
    """The initial scale of Pyro's ``AutoNormal`` or ``AutoDiagonalNormal``."""
    return float(guide._init_scale)


def loc_and_scale(guide: Any, name: str) -> tuple[Tensor, Tensor]:
    """The location and scale of a site in Pyro's ``AutoNormal``."""
    loc, scale = guide._get_loc_and_scale(name)
    return loc, scale


def mark_stepped(optimizer: Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has taken a step, although another object took it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def rendezvous(timeout: timedelta) -> tuple[Any, int, int]:
    """The store, the rank and the number of processes from the environment variables of ``torch.distributed``."""
    # Missing in builds of torch without distributed training.
    from torch.distributed import rendezvous as found  # type: ignore[attr-defined]

    store, rank, size = next(found("env://", timeout=timeout))
    return store, rank, size


def stored_name(module: PyroModule, parameter: str | None = None) -> str:
    """The name of a module, or of one of its parameters, in Pyro's parameter store."""
    return module._pyro_name if parameter is None else module._pyro_get_fullname(parameter)


def forget_stored(root: str) -> None:
    """Remove the parameters of a module and its submodules from Pyro's parameter store, replaced ones included."""
    store = pyro.get_param_store()
    below = (f"{root}.", f"{root}$$$")
    for name in [name for name in list(store._params) if name.startswith(below)]:
        store._params.pop(name, None)
        store._constraints.pop(name, None)
    for tensor in [tensor for tensor, name in list(store._param_to_name.items()) if name.startswith(below)]:
        store._param_to_name.pop(tensor, None)


def standard_gamma(shape: Tensor) -> Tensor:
    """Draws from gamma distributions with rate one, without the in-place clamp that ``torch.func.vmap`` refuses."""
    return torch._standard_gamma(shape)


def set_context(module: PyroModule, context: Any) -> None:
    """Set a module's context, which decides whether its parameters are read from Pyro's store."""
    module._pyro_context = context


def adopt(module: PyroModule, name: str, of: PyroModule | None = None) -> None:
    """Give a module another name in Pyro's parameter store, and the context of ``of`` or a new one.

    Pyro's own way refuses modules that have run, such as a copy.
    """
    module._pyro_name = name
    module._pyro_context = (PyroModule() if of is None else of)._pyro_context


def stored_parameters() -> dict[str, Tensor]:
    """The dict of unconstrained parameters in Pyro's store."""
    stored: dict[str, Tensor] = pyro.get_param_store()._params
    return stored


def handlers_around() -> bool:
    """Whether any of Pyro's handlers is active."""
    return bool(runtime._PYRO_STACK)


def forget_handlers() -> None:
    """Leave all of Pyro's handlers and plates, whoever entered them."""
    runtime._PYRO_STACK.clear()
    runtime._DIM_ALLOCATOR._stack.clear()


def constant_in_graphs(function: F) -> F:
    """Do what ``torch.compiler.assume_constant_result`` does, without importing the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def record_graph(function: Callable[..., Any], inputs: Sequence[Tensor]) -> GraphModule:
    """Record the operations of a function of tensors by running it."""
    # Without a shared mode of fake tensors, each result makes its own, with the whole call stack.
    with tracing(TracingContext(FakeTensorMode())):
        return make_fx(function)(*inputs)


@contextmanager
def host_reads_removed(loss: type) -> Iterator[None]:
    """Replace the functions with which Pyro's losses read numbers on the host, to return them and to warn."""
    modules = {sys.modules[base.__module__] for base in loss.__mro__}
    # A function in place of a loss may call any.
    modules |= {module for name, module in sys.modules.items() if name.startswith("pyro.infer.")}
    with ExitStack() as stack:
        for module in modules:
            if hasattr(module, "torch_item"):
                stack.enter_context(mock.patch.object(module, "torch_item", _detached))
            if hasattr(module, "warn_if_nan"):
                stack.enter_context(mock.patch.object(module, "warn_if_nan", return_value=None))
        stack.enter_context(mock.patch.object(Dice, "compute_expectation", _expectation))
        # For distributions that were made with validation on.
        stack.enter_context(mock.patch.object(torch.distributions.Distribution, "_validate_sample", _no_check))
        yield


def _expectation(dice: Any, costs: Mapping[Any, Any]) -> Any:
    """Pyro's ``Dice.compute_expectation``, which reads on the host whether a probability is zero, without doing so."""
    with shared_intermediates() as cache:
        ring, expected = MarginalRing(cache=cache), torch.zeros(())
        for ordinal, terms in costs.items():
            factors = dice._get_log_factors(ordinal)
            scale = math.exp(sum(x for x in factors if not isinstance(x, Tensor)))
            factors = [x for x in factors if isinstance(x, Tensor)]
            queries = {frozenset(x._pyro_dims): x for x in reversed(factors)}
            for cost in terms:
                if frozenset(cost._pyro_dims) not in queries:
                    query = torch.zeros_like(cost)
                    query._pyro_dims = cost._pyro_dims  # type: ignore[attr-defined]
                    factors.append(query)
                    queries[frozenset(cost._pyro_dims)] = query
            wanted = {key: queries[key] for key in (frozenset(cost._pyro_dims) for cost in terms)}
            for query in wanted.values():
                require_backward(query)
            ring.sumproduct(factors, set[str]().union(*(x._pyro_dims for x in factors)) - ordinal)._pyro_backward()
            for cost in terms:
                query = wanted[frozenset(cost._pyro_dims)]
                prob = query._pyro_backward_result.exp()
                prob._pyro_dims = query._pyro_dims
                cost, prob = packed.broadcast_all(cost, prob)
                expected = expected + scale * (prob * cost.masked_fill(prob <= 0, 0.0)).sum()
    return expected


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _no_check(distribution: Any, value: Any) -> None:
    pass


class CompilerMissingError(RuntimeError):
    """Inductor found no compiler on this machine."""


def compile_graph(
    module: GraphModule, examples: Sequence[Tensor], options: Mapping[str, Any]
) -> Callable[..., Sequence[Tensor]]:
    """Compile a graph by inductor, without the guards of ``torch.compile``.

    :raises CompilerMissingError: if there is no compiler.
    """
    from torch._inductor import compile as inductor
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        compiled: Callable[..., Sequence[Tensor]] = inductor(module, list(examples), options=dict(options))
    except Exception as error:
        causes = [error, error.__cause__, error.__context__, getattr(error, "inner_exception", None)]
        if any(isinstance(cause, InvalidCxxCompiler | CppCompileError) for cause in causes):
            raise CompilerMissingError(str(error).splitlines()[0]) from error
        raise
    return compiled


def pyro_settings(optim: PyroOptim, name: str) -> tuple[dict[str, Any], dict[str, float]]:
    """The settings and the clipping options that an optimizer of Pyro's has for a parameter of this name."""
    parts = module_from_param_with_module_name(name), user_param_name(name)
    settings, clips = optim.pt_optim_args, optim.pt_clip_args
    if callable(settings):
        settings = settings(normalize_param_name(name)) if optim.pt_optim_args_argc == 1 else settings(*parts)
    return settings, dict(clips(*parts) if callable(clips) else clips)


def optimizer_state_waiting(optim: PyroOptim) -> dict[str, Any]:
    """The loaded states, by name, of parameters that an optimizer of Pyro's has not seen yet."""
    waiting: dict[str, Any] = optim._state_waiting_to_be_consumed
    return waiting


def stop_where(optimizer: Optimizer, stopped: Tensor | None) -> bool:
    """Let an optimizer's steps do nothing while a 0-d tensor is one, without a host synchronization.

    ``torch.amp.GradScaler`` uses this for fused optimizers.

    :returns: whether the optimizer supports it.
    """
    able = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    if able:
        optimizer.found_inf = stopped  # type: ignore[attr-defined]
    return able
