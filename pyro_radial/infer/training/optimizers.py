# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One torch optimizer for all parameters, from Pyro's optimizers, which have one for each, or from torch's."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyro
from pyro.optim import PyroOptim
from pyro.optim.lr_scheduler import PyroLRScheduler
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from pyro_radial._pyro.compat import optimizer_state_waiting, pyro_settings

__all__ = ["JointOptimizer", "check_steps_alone", "fused_optimizer", "joint_optimizer", "stored_names"]

# The devices on which torch has fused steps.
FUSED_ON = ("cpu", "cuda")

# Settings that choose an implementation.
CHOICES = {"foreach", "fused", "capturable", "differentiable"}

# Settings under which torch's fused step takes no parameters that join later, as scales do after `pretrain_epochs`.
STARTS_TOGETHER = {"momentum"}


class JointOptimizer:
    """Steps of one torch optimizer, whose parameters may become more.

    Parameters that a Pyro optimizer has other settings for are in a group of their own. Its states
    (``optim.get_state()``, ``save``, ``load``) are by parameter as ever, so a run under ``SVI`` goes on here and the
    other way round, and ``step()`` of a Pyro scheduler changes the rate here.

    :param optim: a Pyro optimizer or scheduler, a torch optimizer, or a function from parameters to one.
    :param str who: what errors call the caller.
    :raises ValueError: for anything else, or an optimizer that cannot step on gradients alone.
    """

    def __init__(self, optim: Any, who: str) -> None:
        if not callable(optim) and not isinstance(optim, Optimizer):
            raise ValueError(
                f"{who}: optim must be a Pyro optimizer such as pyro.optim.Adam, a torch optimizer, or a function from "
                f"parameters to one, got {type(optim).__name__}"
            )
        self._optim, self._who = optim, who
        self.optimizer: Optimizer | None = None
        self._scheduler: Any = None
        self._clips: dict[Tensor, Mapping[str, float]] = {}
        if isinstance(optim, Optimizer):
            self._take(optim)

    def adopt(self, parameters: Mapping[str, Tensor]) -> None:
        """Take up the parameters that are not known yet; those that they replace are let go.

        :param parameters: by their names in Pyro's store.
        """
        if isinstance(self._optim, Optimizer):
            return
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        known = {parameter for group in groups for parameter in group["params"]}
        new = {name: parameter for name, parameter in parameters.items() if parameter not in known}
        if not new:
            return
        if not isinstance(self._optim, PyroOptim):
            if self.optimizer is None:
                self._take(self._optim(list(new.values())))
            else:
                self.optimizer.add_param_group({"params": list(new.values())})
            return
        self._adopt_by_settings(self._optim, new)

    def step(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """One step; parameters without a gradient stay as they are."""
        optimizer = self.optimizer
        if optimizer is None:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        for parameter, gradient in gradients:
            parameter.grad = gradient
            clip = self._clips.get(parameter)
            if clip:
                _clip(parameter, **clip)
        optimizer.step()

    def forget_gradients(self) -> None:
        """Drop those of the last step, before memory is needed for the next."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def _take(self, optimizer: Optimizer) -> None:
        check_steps_alone(optimizer, self._who)
        self.optimizer = optimizer

    def _adopt_by_settings(self, optim: PyroOptim, parameters: Mapping[str, Tensor]) -> None:
        self._clips |= {parameter: _settings(optim, name, self._who)[1] for name, parameter in parameters.items()}
        new = joint_optimizer(optim, parameters, self._who)
        if self.optimizer is None:
            self._take(new)
            if isinstance(optim, PyroLRScheduler):
                self._scheduler = optim.pt_scheduler_constructor(new, **optim.kwargs)
        else:
            if self._scheduler is not None:
                for group in new.param_groups:
                    # A scheduler counts for all groups alike.
                    group["initial_lr"] = group["lr"]
                    self._scheduler.base_lrs.append(group["lr"])
            _join(self.optimizer, new)
        self._register(optim, parameters)

    def _register(self, optim: PyroOptim, parameters: Mapping[str, Tensor]) -> None:
        """Let Pyro's optimizer find what it would have for each parameter, and take over states that it has loaded."""
        assert self.optimizer is not None
        waiting = optimizer_state_waiting(optim)
        for name, parameter in parameters.items():
            share: Any = _Share(self.optimizer, parameter, self._who)
            if self._scheduler is not None:
                share = _ScheduledShare(share, self._scheduler, leads=not optim.optim_objs)
            state = waiting.pop(name, None)
            if state is not None:
                for part, content in (
                    ((share, state["scheduler"]), (share.optimizer, state["optimizer"]))
                    if "scheduler" in state
                    else ((share, state),)
                ):
                    part.load_state_dict(content)
            optim.optim_objs[parameter], optim.grad_clip[parameter] = share, None


class _Share:
    """One parameter's part of an optimizer, with the state that an optimizer of its own would have."""

    def __init__(self, joint: Optimizer, parameter: Tensor, who: str) -> None:
        self.joint, self.parameter, self.who = joint, parameter, who

    @property
    def _group(self) -> dict[str, Any]:
        return next(g for g in self.joint.param_groups if any(p is self.parameter for p in g["params"]))

    def state_dict(self) -> dict[str, Any]:
        """As torch's."""
        state = self.joint.state.get(self.parameter)
        return {"state": {0: state} if state else {}, "param_groups": [{**self._group, "params": [0]}]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As torch's, which knows what goes to which dtype and device."""
        settings = {key: value for key, value in self._group.items() if key not in ("params", "initial_lr")}
        alone = type(self.joint)([self.parameter], **_of_constructor(type(self.joint), settings))
        # Which implementation takes the steps is no part of a state.
        loaded = {**state["param_groups"][0], **{key: self._group[key] for key in CHOICES & self._group.keys()}}
        alone.load_state_dict({"state": state["state"], "param_groups": [loaded]})
        self.joint.state[self.parameter] = alone.state[self.parameter]
        self._group.update({k: v for k, v in alone.param_groups[0].items() if k != "params"})

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Refuses: nobody else may step on what belongs together."""
        raise RuntimeError(
            f"{self.who}: its Pyro optimizer must be left to it, got a step of another SVI; give that one an optimizer "
            "of its own"
        )


class _ScheduledShare:
    """The same under a scheduler, of which one share takes the steps for all."""

    def __init__(self, share: _Share, scheduler: Any, leads: bool) -> None:
        self.optimizer, self.scheduler, self.leads = share, scheduler, leads

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The scheduler's."""
        self.scheduler.load_state_dict(dict(state))

    def step(self, *args: Any, **kwargs: Any) -> None:
        """One step of the rate."""
        if self.leads:
            self.scheduler.step(*args, **kwargs)


def joint_optimizer(optim: PyroOptim, parameters: Mapping[str, Tensor], who: str) -> Optimizer:
    """One torch optimizer, with a group for each of the settings that a Pyro optimizer has for these parameters.

    :param optim: a Pyro optimizer, or a scheduler, of which the optimizer alone is made.
    :param parameters: by their names in Pyro's store.
    :param str who: what errors call the caller.
    :raises ValueError: naming the parameter, where a function of the name returns no dict; for an optimizer that cannot
        step on gradients alone.
    """
    groups: list[tuple[dict[str, Any], list[Tensor]]] = []
    for name, parameter in parameters.items():
        settings = _settings(optim, name, who)[0]
        same = next((members for other, members in groups if other == settings), None)
        if same is None:
            groups.append((settings, [parameter]))
        else:
            same.append(parameter)
    constructor: Any = optim.pt_optim_constructor
    fused = _fused(constructor, {key for settings, _ in groups for key in settings}, parameters.values())
    # Each from the constructor, for what it checks, and for its own defaults where others have settings.
    first, *others = (constructor(members, **settings, **fused) for settings, members in groups or [({}, [])])
    check_steps_alone(first, who)
    for other in others:
        _join(first, other)
    return first


def stored_names(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters by their names in Pyro's store; those that it does not have keep the name that they come with."""
    store = pyro.get_param_store()
    named: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        stored = store.param_name(parameter)
        named[name.removesuffix("_unconstrained") if stored is None or stored in named else stored] = parameter
    return named


def fused_optimizer(
    constructor: Callable[..., Optimizer], settings: Mapping[str, Any], parameters: list[Tensor]
) -> Optimizer:
    """An optimizer with torch's fused step, where it has one for these parameters and nothing else is asked for."""
    return constructor(parameters, **settings, **_fused(constructor, settings, parameters))


def _fused(
    constructor: Callable[..., Optimizer], settings: Iterable[str], parameters: Iterable[Tensor]
) -> dict[str, bool]:
    arguments = inspect.signature(constructor).parameters
    able = all(p.is_floating_point() and p.device.type in FUSED_ON for p in parameters)
    return {"fused": True} if "fused" in arguments and not (CHOICES | STARTS_TOGETHER) & {*settings} and able else {}


def _settings(optim: PyroOptim, name: str, who: str) -> tuple[dict[str, Any], dict[str, float]]:
    settings, clips = pyro_settings(optim, name)
    if not isinstance(settings, dict):
        raise ValueError(
            f"{who}: optim must have a dict of settings for each parameter, got {settings!r} from its function for "
            f"'{name}'"
        )
    return settings, clips


def _join(optimizer: Optimizer, other: Optimizer) -> None:
    """Take over the parameters of another optimizer, with the state that some make at once."""
    for group in other.param_groups:
        optimizer.add_param_group(group)
    optimizer.state.update(other.state)


def check_steps_alone(optimizer: Optimizer, who: str) -> None:
    """Raise a ``ValueError`` for an optimizer that evaluates the loss itself."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{who}: optim must make an optimizer that steps without a closure, got {type(optimizer).__name__}, which "
            "evaluates the loss several times in one step"
        )


def _of_constructor(constructor: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key in inspect.signature(constructor).parameters}


def _clip(parameter: Tensor, clip_norm: float | None = None, clip_value: float | None = None) -> None:
    """As Pyro clips: each parameter by itself."""
    if clip_norm is not None:
        clip_grad_norm_([parameter], clip_norm)
    if clip_value is not None:
        clip_grad_value_([parameter], clip_value)
