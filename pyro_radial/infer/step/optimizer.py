# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Make one torch optimizer for all parameters from a torch or a Pyro optimizer, and take its steps."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.optim import PyroLRScheduler, PyroOptim
from pyro.poutine import Trace
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pyro_radial._pyro.checks import warn
from pyro_radial._pyro.compat import (
    mark_stepped,
    optimizer_state_waiting,
    pyro_settings,
    take_step,
)
from pyro_radial._pyro.types import Node

# The share of the steps in which learning rates rise.
WARM_UP = 0.05


def rise_and_fall(optimizer: Optimizer, steps: int) -> LambdaLR:
    """Let learning rates rise in 5 % of the steps, then fall to zero along a cosine; step it after each step."""
    rising = max(1, round(WARM_UP * steps))

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        share = min(1.0, (step - rising) / max(1, steps - rising))
        return 0.5 * (1.0 + math.cos(math.pi * share))

    return LambdaLR(optimizer, factor)


Optim = PyroOptim | Callable[[list[Tensor]], Optimizer]

# The types of devices on which torch has fused steps.
FUSED_ON = ("cpu", "cuda")
# Settings by which a user chooses an implementation of the step.
CHOICES = {"foreach", "fused", "capturable", "differentiable"}
# With these settings torch's fused step fails if a parameter gets its first gradient after others, as scales may.
STARTS_TOGETHER = {"momentum"}


class JointOptimizer:
    """Take steps of one torch optimizer; new parameters may appear at any step, as in ``SVI``.

    :param optim: a torch optimizer, a Pyro optimizer, or a function from parameters to an optimizer.
    :param clip_norm: the largest norm of all gradients together; None for no clipping.
    """

    def __init__(self, optim: Any, clip_norm: float | None = None) -> None:
        self._optim = optim
        self._clip_norm = clip_norm
        self.optimizer: Optimizer | None = None
        # The names of the parameters that the optimizer has.
        self._names: dict[Tensor, str] = {}
        # The options of a Pyro optimizer by which each parameter's gradient is clipped by itself.
        self._clips: dict[Tensor, dict[str, float]] = {}
        self._scheduler: Any = None
        if isinstance(optim, Optimizer):
            check_no_closure(optim)
            self.optimizer = optim
        else:
            check_optim(optim)

    def adopt(self, parameters: Mapping[str, Tensor]) -> None:
        """Add parameters that are new to the optimizer, which is made from the first ones.

        A parameter that was made again, as Pyro's decaying average of a baseline is in each step, takes the place of
        the former one and starts without state.
        """
        if isinstance(self._optim, Optimizer):
            return
        new_parameters: dict[str, Tensor] = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter not in self._names
        }
        if self.optimizer is not None and new_parameters:
            self._replace(self.optimizer, new_parameters)
        if not new_parameters:
            return
        self._names.update({parameter: name for name, parameter in new_parameters.items()})
        optim: Any = self._optim
        if isinstance(optim, PyroOptim):
            for name, parameter in stored_names(new_parameters).items():
                _, clips = pyro_settings(optim, name)
                if clips:
                    self._clips[parameter] = clips
        if self.optimizer is None:
            self.optimizer = make_optimizer(optim, new_parameters, clips_elsewhere=True)
            self.optimizer.register_state_dict_post_hook(self._save_names)
            self.optimizer.register_load_state_dict_pre_hook(self._check_names)
            if isinstance(optim, PyroLRScheduler):
                self._scheduler = optim.pt_scheduler_constructor(self.optimizer, **optim.kwargs)
                # Pyro has a scheduler for each parameter; this one is for all.
                optim.optim_objs[next(iter(new_parameters.values()))] = self._scheduler
            elif isinstance(optim, PyroOptim) and not optim.optim_objs:
                optim.optim_objs = UnusedOptimizers()
        elif not isinstance(optim, PyroOptim):
            self.optimizer.add_param_group({"params": list(new_parameters.values())})
        else:
            new_optimizer = make_optimizer(optim, new_parameters, clips_elsewhere=True)
            if self._scheduler is not None:
                for group in new_optimizer.param_groups:
                    group["initial_lr"] = group["lr"]
                    self._scheduler.base_lrs.append(group["lr"])
            _take_over_groups(self.optimizer, new_optimizer)

    def _replace(self, optimizer: Optimizer, new_parameters: dict[str, Tensor]) -> None:
        """Replace parameters that were made again, and take the new ones from ``new_parameters``."""
        for group in optimizer.param_groups:
            for position, former in enumerate(group["params"]):
                # A user may have added parameters that have no name here.
                name = self._names.get(former, "")
                if name in new_parameters:
                    parameter = new_parameters.pop(name)
                    group["params"][position] = parameter
                    optimizer.state.pop(former, None)
                    # Some optimizers make their state before the first step.
                    own_optimizer = make_optimizer(
                        self._optim, {name: parameter}, clips_elsewhere=True
                    )
                    optimizer.state.update(own_optimizer.state)
                    del self._names[former]
                    self._names[parameter] = name
                    if former in self._clips:
                        self._clips[parameter] = self._clips.pop(former)

    def _save_names(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Add the names of the parameters to the groups of a state."""
        for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            saved["names"] = [self._names[parameter] for parameter in group["params"]]

    def _check_names(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Raise a ``ValueError`` if a saved state is of other parameters, or has them in another order."""
        current = optimizer.state_dict()["param_groups"]
        for group, saved in zip(current, state_dict["param_groups"], strict=False):
            if saved.get("names", group["names"]) != group["names"]:
                raise ValueError(
                    f"state_dict must be of the optimizer's parameters, {group['names']} in this order, got "
                    f"{saved['names']}"
                )

    @property
    def eager_reason(self) -> str | None:
        """Why the step must not be a part of a graph; None if it may be."""
        is_clipped = self._clip_norm is not None or self._clips
        return "gradients are clipped" if is_clipped else None

    def forget_gradients(self) -> None:
        """Set the gradients of all parameters to None."""
        if self.optimizer is None:
            return
        # The hooks of torch's zero_grad would take as long as a small layer.
        for parameter in optimizer_parameters(self.optimizer):
            parameter.grad = None

    def apply(self, *, stepped: bool = False) -> None:
        """Take a step on the gradients; parameters without a gradient do not change.

        :param stepped: whether a graph has taken the step.
        """
        optimizer = self.optimizer
        if optimizer is None:
            return
        if stepped:
            mark_stepped(optimizer)
            return
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(optimizer_parameters(optimizer), self._clip_norm)
        for parameter, clips in self._clips.items():
            if parameter.grad is not None and clips.get("clip_norm") is not None:
                torch.nn.utils.clip_grad_norm_(parameter, clips["clip_norm"])
            if parameter.grad is not None and clips.get("clip_value") is not None:
                torch.nn.utils.clip_grad_value_(parameter, clips["clip_value"])
        with naming_devices(optimizer):
            take_step(optimizer)


class UnusedOptimizers(dict[Tensor, Any]):
    """The ``optim_objs`` of a Pyro optimizer that one torch optimizer stands in for; a warning says so to a reader."""

    def __iter__(self) -> Iterator[Tensor]:
        warn(
            "optim has no optimizers of single parameters here; read and change those of svi.optimizer, such as its "
            "param_groups and state_dict()"
        )
        return super().__iter__()

    def values(self) -> Any:
        """Return the optimizers after the warning."""
        return [self[parameter] for parameter in self]


def add_gradients(gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add gradients to those of their parameters."""
    for parameter, gradient in gradients:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@contextmanager
def naming_devices(optimizer: Optimizer) -> Iterator[None]:
    """Explain an error of a step in the block if parameters are on another device than the optimizer's state."""
    try:
        yield
    except RuntimeError as error:
        for parameter, state in optimizer.state.items():
            for value in state.values():
                # Counts of steps, which are 0-d, may be on another device.
                has_elements = isinstance(value, Tensor) and value.dim() > 0
                if has_elements and value.device != parameter.device:
                    raise ValueError(
                        f"guide and model must stay where their first step was, on {value.device}, got a parameter on "
                        f"{parameter.device}; after moving them make a new CompiledSVI, or a new optimizer"
                    ) from error
        raise


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def make_optimizer(
    optim: PyroOptim | Callable[[list[Tensor]], Optimizer],
    parameters: Mapping[str, Tensor],
    *,
    clips_elsewhere: bool = False,
) -> Optimizer:
    """Make one torch optimizer for all parameters, where each setting of a Pyro optimizer becomes a group of them.

    ``optim`` has passed :func:`check_optim`.

    :param clips_elsewhere: whether the caller clips gradients where Pyro would.
    :raises ValueError: for a Pyro optimizer that clips, because the torch optimizer does not.
    """
    if isinstance(optim, PyroOptim) and optim.pt_clip_args and not clips_elsewhere:
        raise ValueError(
            f"optim must not clip each parameter by itself, got {type(optim).__name__} with clip_args; use clip_norm "
            "of fit, or pyro.optim.ClippedAdam"
        )
    if isinstance(optim, PyroOptim):
        return _make_from_pyro(optim, stored_names(parameters))
    optimizer = optim(list(parameters.values()))
    check_no_closure(optimizer)
    return _fuse_on_cuda(optimizer)


def _fuse_on_cuda(optimizer: Optimizer) -> Optimizer:
    """Give an optimizer on a GPU torch's fused step, which a CUDA graph can contain, if no setting excludes it."""
    kind: Any = type(optimizer)
    if kind not in (Adam, AdamW, SGD):
        return optimizer
    for parameter in optimizer_parameters(optimizer):
        if not (parameter.is_cuda and parameter.is_floating_point()):
            return optimizer
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        # None leaves the choice to torch; False is a user's choice.
        is_chosen = group.get("foreach") is not None or group.get("fused") is not None
        if is_chosen or any(map(group.get, (*CHOICES, *STARTS_TOGETHER))):
            return optimizer
        groups.append({**group, "fused": True})
    return kind(groups, fused=True)


def _make_from_pyro(optim: PyroOptim, parameters: Mapping[str, Tensor]) -> Optimizer:
    """Make a torch optimizer with the settings that a Pyro optimizer has for parameters of these names."""
    if optimizer_state_waiting(optim):
        raise ValueError(
            "optim must not have loaded a state of Pyro's optimizers, which is kept by parameter; load the state_dict "
            "of the torch optimizer instead"
        )
    groups: list[tuple[dict[str, Any], list[Tensor]]] = []
    names: set[str] = set()
    for name, parameter in parameters.items():
        settings, _ = pyro_settings(optim, name)
        if not isinstance(settings, dict):
            raise ValueError(
                f"optim must return a dict of settings for each parameter, got {settings!r} for '{name}'"
            )
        names.update(settings)
        _members_with(settings, groups).append(parameter)
    constructor: Any = optim.pt_optim_constructor
    fused = _fused_setting(constructor, names, parameters.values())
    # The constructor checks the settings of each group and fills in its own defaults.
    joint_optimizer, *group_optimizers = (
        constructor(members, **settings, **fused) for settings, members in groups or [({}, [])]
    )
    check_no_closure(joint_optimizer)
    for group_optimizer in group_optimizers:
        _take_over_groups(joint_optimizer, group_optimizer)
    return joint_optimizer


def _members_with(
    settings: dict[str, Any], groups: list[tuple[dict[str, Any], list[Tensor]]]
) -> list[Tensor]:
    """Return the list of parameters of the group with these settings; add a group if there is none."""
    for group_settings, members in groups:
        if group_settings == settings:
            return members
    groups.append((settings, []))
    return groups[-1][1]


def _take_over_groups(optimizer: Optimizer, second_optimizer: Optimizer) -> None:
    """Move the groups of a second optimizer to the first, with the state that some optimizers have from the start."""
    for group in second_optimizer.param_groups:
        optimizer.add_param_group(group)
    optimizer.state.update(second_optimizer.state)


def unconstrained_parameters(*traces: Trace) -> dict[str, Tensor]:
    """Return the unconstrained parameters in traces by name."""
    parameters: dict[str, Tensor] = {}
    for trace in traces:
        for name, node in dict[str, Node](trace.nodes).items():
            if node["type"] == "param":
                value = node["value"]
                constrained = hasattr(value, "unconstrained")
                parameters[name] = value.unconstrained() if constrained else value
    return parameters


def stored_names(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name the parameters as Pyro's store does; those outside the store keep their names."""
    store = pyro.get_param_store()
    named: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        stored = store.param_name(parameter)
        if stored is None or stored in named:
            stored = name.removesuffix("_unconstrained")
        named[stored] = parameter
    return named


def fused_optimizer(
    constructor: Callable[..., Optimizer], settings: Mapping[str, Any], parameters: list[Tensor]
) -> Optimizer:
    """Make an optimizer with torch's fused step, if it has one for these parameters and settings."""
    return constructor(parameters, **settings, **_fused_setting(constructor, settings, parameters))


def _fused_setting(
    constructor: Callable[..., Optimizer], settings: Iterable[str], parameters: Iterable[Tensor]
) -> dict[str, bool]:
    """Return ``{"fused": True}`` if torch has a fused step for these parameters and settings, else an empty dict."""
    if "fused" not in inspect.signature(constructor).parameters:
        return {}
    if (CHOICES | STARTS_TOGETHER) & {*settings}:
        return {}
    can_fuse = all(p.is_floating_point() and p.device.type in FUSED_ON for p in parameters)
    return {"fused": True} if can_fuse else {}


#: Adam at a learning rate of 1e-3.
DEFAULT_OPTIM: Optim = partial(fused_optimizer, Adam, {"lr": 1e-3})


def check_optim(optim: Any, argument: str = "optim") -> None:
    """Raise a ``ValueError`` that names the argument unless :func:`make_optimizer` can make an optimizer of this."""
    is_other_class = isinstance(optim, type) and not issubclass(optim, Optimizer)
    if isinstance(optim, Optimizer) or is_other_class or not callable(optim):
        raise ValueError(
            f"{argument} must be a function from parameters to a torch optimizer, such as partial(torch.optim.Adam, "
            f"lr=1e-3), or a Pyro optimizer, got {type(optim).__name__}"
        )


def check_no_closure(optimizer: Optimizer) -> None:
    """Raise a ``ValueError`` for an optimizer that evaluates the loss itself."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optim must make an optimizer that steps without a closure, got {type(optimizer).__name__}, which "
            "evaluates the loss several times in one step"
        )


def check_fused_state(optimizer: Optimizer, saved: dict[str, Any], path: Path) -> None:
    """Check the shapes of a saved state, and give its tensors the strides of the parameters.

    Only states of fused steps are checked, because these steps check nothing and could crash the process.
    """
    is_fused: list[bool] = []
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        is_fused += [bool(saved_group.get("fused"))] * len(group["params"])
    parameters = optimizer_parameters(optimizer)
    for number, state in saved["state"].items():
        if not is_fused[number]:
            continue
        parameter = parameters[number]
        for name, value in state.items():
            if name == "step" or not isinstance(value, Tensor):
                continue
            if value.shape != parameter.shape:
                raise ValueError(
                    f"checkpoint {path} is from another optimizer: {name} of parameter {number} must have shape "
                    f"{tuple(parameter.shape)}, got {tuple(value.shape)}"
                )
            state[name] = torch.empty_like(parameter).copy_(value)
