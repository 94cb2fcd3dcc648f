# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Every undocumented name of Pyro or torch that the library uses, so that a change there breaks one line."""

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from importlib import import_module
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast
from unittest import mock

import pyro
import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.infer import TraceGraph_ELBO, traceenum_elbo
from pyro.infer import util as infer_util
from pyro.infer.autoguide.guides import prototype_hide_fn
from pyro.infer.autoguide.utils import deep_setattr, helpful_support_errors
from pyro.infer.trace_mean_field_elbo import (
    _check_mean_field_requirement as check_mean_field_requirement,
)
from pyro.nn import PyroModule
from pyro.ops.tensor_utils import periodic_repeat
from pyro.optim import PyroOptim
from pyro.params.param_store import (
    module_from_param_with_module_name,
    normalize_param_name,
    user_param_name,
)
from pyro.poutine import runtime
from pyro.poutine.util import site_is_subsample
from pyro.util import check_model_guide_match, check_site_shape
from torch import Tensor, compiler, nn
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules import module as torch_module
from torch.optim import Adam, Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import (
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

from pyro_radial._pyro.types import Node

__all__ = [
    "OVERRIDDEN",
    "CompilerMissingError",
    "ReplaceFunctions",
    "addresses",
    "adopt",
    "capturing",
    "check_mean_field_requirement",
    "check_model_guide_match",
    "check_site_shape",
    "compile_graph",
    "compile_library",
    "constant_in_graphs",
    "deep_setattr",
    "forget_handlers",
    "forget_stored",
    "gradient_hooks",
    "handlers_around",
    "has_hooks",
    "has_step_hooks",
    "helpful_support_errors",
    "hooks_later",
    "initial_scale",
    "is_capturing",
    "is_deterministic",
    "is_differentiated",
    "is_subsample",
    "is_traced",
    "loc_and_scale",
    "mark_stepped",
    "num_global_hooks",
    "optimizer_state_waiting",
    "own_mask",
    "periodic_repeat",
    "prototype_hide_fn",
    "pyro_settings",
    "reader_of_setting",
    "register_pytree_node",
    "remove_host_reads",
    "set_context",
    "standard_gamma",
    "steps_stop",
    "stop_where",
    "stored_name",
    "stored_parameters",
    "surrogate_loss",
    "take_step",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]

GLOBAL_HOOKS = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
    torch_module._global_backward_pre_hooks,
    torch_module._global_backward_hooks,
)
GLOBAL_STEP_HOOKS = (
    torch_optimizer._global_optimizer_pre_hooks,
    torch_optimizer._global_optimizer_post_hooks,
)
# The file of a compiled graph.
LIBRARY = "code.so"
F = TypeVar("F", bound=Callable[..., Any])

# The undocumented methods that our subclasses override, by Pyro's class.
OVERRIDDEN = {
    "AutoGuide": ("_create_plates", "_prototype_hide_fn", "_setup_prototype"),
    "ELBO": ("_get_traces", "_guess_max_plate_nesting", "_vectorized_num_particles"),
    "TraceMeanField_ELBO": ("_get_trace",),
}


def is_deterministic(site: Node) -> bool:
    """Return whether a site holds a computed value, which Pyro treats as observed.

    ``pyro.deterministic`` marks its sites; a ``Reparam`` leaves a site with its density masked out.
    """
    masked_out = isinstance(site["fn"], MaskedDistribution) and own_mask(site["fn"]) is False
    return bool(site["infer"].get("_deterministic", False)) or masked_out


#: Whether a site holds the rows that a plate took from its data. Pyro's own type of a site has fewer entries.
is_subsample: Callable[[Node], bool] = cast("Any", site_is_subsample)
#: The mask of a masked distribution: a bool, or a tensor that broadcasts over its batch.
own_mask = attrgetter("_mask")
#: Whether ``torch.func.grad`` or the like differentiates by a tensor, inside of any ``vmap``.
is_differentiated = torch._C._functorch.is_gradtrackingtensor
#: Draws from gamma distributions with rate one, without the in-place clamp that ``torch.func.vmap`` refuses.
standard_gamma = torch._standard_gamma
#: The initial scale of Pyro's ``AutoNormal`` or ``AutoDiagonalNormal``.
initial_scale = attrgetter("_init_scale")
#: The loaded states, by name, of parameters that an optimizer of Pyro's has not seen yet.
optimizer_state_waiting = attrgetter("_state_waiting_to_be_consumed")

_capture = threading.local()


@contextmanager
def capturing() -> Iterator[None]:
    """Let :func:`is_capturing` return true in the block, in this thread."""
    _capture.is_active = True
    try:
        yield
    finally:
        _capture.is_active = False


def is_capturing() -> bool:
    """Return whether this thread records a graph, where the host must not read values."""
    return getattr(_capture, "is_active", False) or get_proxy_mode() is not None


def is_traced() -> bool:
    """Return whether a compiler or our own recorder records what is computed."""
    return compiler.is_compiling() or is_capturing()


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def loc_and_scale(guide: Any, name: str) -> tuple[Tensor, Tensor]:
    """Return the location and scale of a site in Pyro's ``AutoNormal``."""
    return guide._get_loc_and_scale(name)


def mark_stepped(optimizer: Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has taken a step, although another object took it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def stored_name(module: PyroModule, parameter: str | None = None) -> str:
    """Return the name of a module, or of one of its parameters, in Pyro's parameter store."""
    return module._pyro_name if parameter is None else module._pyro_get_fullname(parameter)


def forget_stored(root: str) -> None:
    """Remove the parameters of a module and its submodules from Pyro's parameter store, replaced ones included."""
    store = pyro.get_param_store()
    below = (f"{root}.", f"{root}$$$")
    for name in list(store._params):
        if name.startswith(below):
            store._params.pop(name, None)
            store._constraints.pop(name, None)
    for tensor, name in list(store._param_to_name.items()):
        if name.startswith(below):
            store._param_to_name.pop(tensor, None)


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return the addresses of tensors, without the modes that torch would ask for each."""
    with torch._C.DisableTorchFunction():
        return list(map(Tensor.data_ptr, tensors))


def reader_of_setting(name: str) -> Callable[[], object]:
    """Return a faster ``pyro.settings.get`` of one setting."""
    module, path, _ = pyro.settings._REGISTRY[name]
    return partial(attrgetter(path), import_module(module))


def num_global_hooks() -> tuple[int, ...]:
    """Return the numbers of hooks that torch calls for each module of the process."""
    return tuple(map(len, GLOBAL_HOOKS))


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
    """Return the dict of unconstrained parameters in Pyro's store."""
    return pyro.get_param_store()._params


def handlers_around() -> list[str]:
    """Return the classes of Pyro's active handlers, the innermost last."""
    return [type(handler).__name__ for handler in runtime._PYRO_STACK]


def forget_handlers() -> None:
    """Leave all of Pyro's handlers and plates, whoever entered them."""
    runtime._PYRO_STACK.clear()
    runtime._DIM_ALLOCATOR._stack.clear()


def constant_in_graphs(function: F) -> F:
    """Do what ``torch.compiler.assume_constant_result`` does, without importing the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@contextmanager
def remove_host_reads() -> Iterator[None]:
    """Replace the functions with which Pyro's losses read numbers on the host, to return them and to warn."""
    patches: list[tuple[object, str, Callable[..., object]]] = [
        # For distributions that were made with validation on.
        (torch.distributions.Distribution, "_validate_sample", lambda *args: None),
        # Losses that enumerate compare scales, and leave out where a probability is zero; a NaN among the scales stays.
        (traceenum_elbo, "_get_common_scale", lambda scales: reduce(_maximum, scales)),
        (infer_util.Dice, "compute_expectation", _expectation),
        (
            infer_util,
            "_fulldot",
            lambda prob, cost: (prob * cost.masked_fill(prob <= 0, 0.0)).sum(),
        ),
    ]
    readers: dict[Callable[..., object], Callable[..., object]] = {
        infer_util.torch_item: lambda x: x.detach() if isinstance(x, Tensor) else x,
        pyro.util.warn_if_nan: lambda *args: None,
    }
    for module in list(sys.modules.values()):
        for reader, replacement in readers.items():
            name = reader.__name__
            if isinstance(module, ModuleType) and vars(module).get(name) is reader:
                patches.append((module, name, replacement))
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield


def _maximum(a: object, b: object) -> Tensor:
    return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))


class ReplaceFunctions(TorchFunctionMode):
    """Call other functions in place of some of torch's."""

    def __init__(self, functions: Mapping[object, Callable[..., object]]) -> None:
        super().__init__()
        self.functions = functions

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return self.functions.get(func, func)(*args, **(kwargs or {}))


def _expectation(
    dice: object,
    costs: object,
    compute: Callable[..., object] = infer_util.Dice.compute_expectation,
) -> object:
    """Do not ask on the host whether all probabilities are positive."""
    with ReplaceFunctions({Tensor.all: lambda mask: True}):
        return compute(dice, costs)


def gradient_hooks(parameter: Tensor) -> list[dict[int, Callable[..., Any]]]:
    """Return a parameter's hooks on its gradient, before and after it is accumulated, where there are any."""
    hooks = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return [by_id for by_id in hooks if by_id]


@contextmanager
def hooks_later(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Leave out the hooks of parameters on their gradients."""
    with ExitStack() as restore:
        for parameter in parameters:
            for hooks in gradient_hooks(parameter):
                restore.callback(hooks.update, dict(hooks))
                hooks.clear()
        yield


class CompilerMissingError(RuntimeError):
    """Inductor found no compiler on this machine."""


def compile_graph(
    module: GraphModule, examples: Sequence[Tensor], options: Mapping[str, object]
) -> Callable[..., Sequence[Tensor]]:
    """Compile a graph by inductor, without the guards of ``torch.compile``.

    :raises CompilerMissingError: if there is no compiler.
    """
    from torch._inductor import compile as inductor
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Without a ShapeEnv inductor leaves its caches on disk alone.
    shapes = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    fakes: list[Any] = [shapes.from_tensor(example, static_shapes=True) for example in examples]
    try:
        # Its advice, such as on lower precision, must not fail a program in which warnings are errors.
        with tracing(TracingContext(shapes)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return inductor(module, fakes, options=dict(options))
    except Exception as error:
        causes = [
            error,
            error.__cause__,
            error.__context__,
            getattr(error, "inner_exception", None),
        ]
        if any(isinstance(cause, InvalidCxxCompiler | CppCompileError) for cause in causes):
            raise CompilerMissingError(str(error).splitlines()[0]) from error
        raise


def compile_library(
    module: GraphModule, examples: Sequence[Tensor], options: Mapping[str, object], folder: Path
) -> None:
    """Compile a graph for a CPU to a library, for :func:`load_library` in another process."""
    from torch._inductor import aot_compile

    path = str(folder / LIBRARY)
    with torch.no_grad():
        aot_compile(module, tuple(examples), options={**options, "aot_inductor.output_path": path})
    # The loader reads the operations that the library leaves to torch under this name.
    for operations in folder.glob("*.wrapper.json"):
        operations.rename((folder / LIBRARY).with_suffix(".json"))


def load_library(folder: Path) -> Callable[..., Sequence[Tensor]]:
    """Load a library that :func:`compile_library` has made; this does not import inductor."""
    run = torch._C._aoti.AOTIModelContainerRunnerCpu(str(folder / LIBRARY), 1).run
    return lambda *tensors: run(list(tensors))


def pyro_settings(optim: PyroOptim, name: str) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the settings and the clipping options that an optimizer of Pyro's has for a parameter of this name."""
    names = module_from_param_with_module_name(name), user_param_name(name)
    settings, clips = optim.pt_optim_args, optim.pt_clip_args
    if callable(settings):
        settings = (
            settings(normalize_param_name(name))
            if optim.pt_optim_args_argc == 1
            else settings(*names)
        )
    return settings, dict(clips(*names) if callable(clips) else clips)


def steps_stop(optimizer: Optimizer) -> bool:
    """Return whether :func:`stop_where` works on an optimizer: on those with torch's fused steps."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def stop_where(optimizer: Optimizer, stopped: Tensor | None) -> None:
    """Let an optimizer's steps do nothing while a 0-d tensor is one, without a host synchronization."""
    if steps_stop(optimizer):
        optimizer.found_inf = stopped  # type: ignore[attr-defined]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether an optimizer calls functions before or after its steps."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return any((*hooks, *GLOBAL_STEP_HOOKS))


def surrogate_loss(loss: TraceGraph_ELBO, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the value of a ``TraceGraph_ELBO`` as a tensor, with the gradient of its surrogate."""
    elbo, surrogate = loss._loss_and_surrogate_loss(model, guide, args, kwargs)
    return surrogate - torch.as_tensor(elbo + surrogate).detach()


def take_step(optimizer: Optimizer) -> None:
    """Take a step of an optimizer; that of a fused Adam on a CPU is a call of torch's kernel alone.

    For a few small parameters, torch's entries for profilers and compilers take longer than the kernel. The optimizer
    itself takes a step in which something else happens, such as hooks; a scheduler's wrapper only counts the steps.
    """
    is_replaced = "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    may_stop = getattr(optimizer, "found_inf", None) is not None
    does_more = is_replaced or may_stop or has_step_hooks(optimizer)
    # For each group the parameters, their gradients and their state, as the kernel takes them.
    lists_by_group: list[tuple[list[Tensor], ...]] = []
    for group in optimizer.param_groups if type(optimizer) is Adam and not does_more else ():
        lists: tuple[list[Tensor], ...] = ([], [], [], [], [], [])
        optimizer._init_group(group, *lists)  # type: ignore[attr-defined]
        kinds = set(map(attrgetter("dtype", "is_cpu"), chain(*lists[:4])))
        is_fused = group["fused"] and not group.get("decoupled_weight_decay")
        if is_fused and len(kinds) == 1 and kinds.pop()[1]:
            lists_by_group.append(lists)
    if not lists_by_group or len(lists_by_group) < len(optimizer.param_groups):
        optimizer.step()
        return
    mark_stepped(optimizer)
    with torch.no_grad():
        for group, lists in zip(optimizer.param_groups, lists_by_group, strict=True):
            torch._foreach_add_(lists[-1], 1)
            torch._fused_adam_(
                *lists,
                lr=group["lr"],
                beta1=float(group["betas"][0]),
                beta2=float(group["betas"][1]),
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=group["amsgrad"],
                maximize=group["maximize"],
            )
