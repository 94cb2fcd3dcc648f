# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One torch optimizer for all parameters, made from a torch or a Pyro optimizer."""

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from pyro.optim.lr_scheduler import PyroLRScheduler
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from pyro_radial._pyro.compat import mark_stepped, optimizer_state_waiting, pyro_settings


class GuideOptim(ABC):
    """The settings of an optimizer that is made for a model and its guide, not for a list of parameters."""

    @abstractmethod
    def optimizer(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Optimizer:
        """Make the optimizer; ``args`` are those of the model and the guide."""

    @abstractmethod
    def scheduler(self, optimizer: Optimizer, steps: int) -> Any:
        """Make the schedule of its learning rates for a run of so many steps."""

    def advice_before(self, steps: int) -> str | None:
        """Say what to change if a run of so many steps cannot succeed."""
        return None

    def advice_after(self, optimizer: Any) -> str | None:
        """Say what to change if a run with this optimizer has ended too early."""
        return None


class GraphOptimizer(Optimizer, ABC):
    """An optimizer with a step that a graph of the loss can take.

    ``others`` is an ordinary optimizer of further parameters, or None, and ``moved`` has the tensors that :meth:`move`
    changes. While ``stopped``, a 0-d tensor, is not zero, nothing moves.
    """

    others: Optimizer | None
    moved: list[Tensor]
    stopped: Tensor

    @abstractmethod
    def write_rates(self) -> None:
        """Write the rates of the next step where :meth:`move` reads them."""

    @abstractmethod
    def move(
        self, loss: Tensor, gradients: Mapping[int, Tensor | None], scales: Mapping[int, Tensor]
    ) -> frozenset[int]:
        """Move parameters by operations that a graph can record, and return their ids."""

    @abstractmethod
    def count(self) -> None:
        """Count a step that :meth:`move` has taken."""

    @abstractmethod
    def clipped(self) -> list[Tensor]:
        """Return the parameters with gradients to clip."""


Optim = PyroOptim | GuideOptim | Callable[[list[Tensor]], Optimizer]

# The devices on which torch has fused steps.
FUSED_ON = ("cpu", "cuda")
# Settings that choose an implementation.
CHOICES = {"foreach", "fused", "capturable", "differentiable"}
# With these settings torch's fused step takes no parameters that get gradients later, as scales do after means.
STARTS_TOGETHER = {"momentum"}


class JointOptimizer:
    """Take steps of one torch optimizer while parameters may appear, as in a loop of ``SVI``.

    :param optim: an optimizer, or what makes one.
    :param clip_norm: the largest norm of all gradients together; None for no clipping.
    :param scaler: scales the loss in half precision.
    """

    def __init__(
        self, optim: Any, clip_norm: float | None = None, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        check_optim(optim if not isinstance(optim, Optimizer) else type(optim))
        self._optim, self._clip_norm = optim, clip_norm
        self._scaler = torch.amp.GradScaler("cpu", enabled=False) if scaler is None else scaler
        self.optimizer: Optimizer | None = None
        # By id, and so kept alive.
        self._known: dict[int, Tensor] = {}
        self._scheduler: Any = None
        if isinstance(optim, Optimizer):
            check_no_closure(optim)
            self.optimizer = optim

    def adopt(self, parameters: Mapping[str, Tensor]) -> None:
        """Add the parameters that are new."""
        if isinstance(self._optim, Optimizer | GuideOptim):
            return
        new = {
            name: parameter
            for name, parameter in parameters.items()
            if id(parameter) not in self._known
        }
        if not new:
            return
        self._known |= {id(parameter): parameter for parameter in new.values()}
        optim: Any = self._optim
        if self.optimizer is None:
            self.optimizer = make_optimizer(optim, new)
            if isinstance(optim, PyroLRScheduler):
                self._scheduler = optim.pt_scheduler_constructor(self.optimizer, **optim.kwargs)
                # One entry for all parameters, where Pyro has one for each.
                optim.optim_objs[next(iter(new.values()))] = self._scheduler
        elif not isinstance(optim, PyroOptim):
            self.optimizer.add_param_group({"params": list(new.values())})
        else:
            other = make_optimizer(optim, new)
            if self._scheduler is not None:
                for group in other.param_groups:
                    group["initial_lr"] = group["lr"]
                    self._scheduler.base_lrs.append(group["lr"])
            _join(self.optimizer, other)

    def start(
        self, model: Any, guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Make an optimizer that depends on the model and the guide before the first loss."""
        if isinstance(self._optim, GuideOptim) and self.optimizer is None:
            self.optimizer = self._optim.optimizer(model, guide, *args, **kwargs)

    def forget_gradients(self) -> None:
        """Free the memory of the last gradients."""
        # Without the hooks of torch's zero_grad, which take as long as a small layer.
        for parameter in [] if self.optimizer is None else optimizer_parameters(self.optimizer):
            parameter.grad = None

    def add(
        self, parameters: Mapping[str, Tensor], gradients: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Take over parameters that are new, and add gradients to theirs."""
        self.adopt(parameters)
        add_gradients(gradients)

    def apply(self, *, moved: bool = False, stepped: bool = False) -> None:
        """Take a step on the gradients; parameters without a gradient do not change.

        :param moved: whether a graph has done the part of a :class:`GraphOptimizer`.
        :param stepped: whether a graph has taken the whole step.
        """
        optimizer = self.optimizer
        if optimizer is None:
            return
        if moved or stepped:
            if isinstance(optimizer, GraphOptimizer):
                optimizer.count()
                if optimizer.others is not None and not stepped:
                    optimizer.others.step()
            mark_stepped(optimizer)
            return
        if self._clip_norm is not None:
            self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(clipped_parameters(optimizer), self._clip_norm)
        with naming_devices(optimizer):
            # After an overflow of the scaled loss it takes no step.
            self._scaler.step(optimizer)
        self._scaler.update()


def add_gradients(gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add gradients to those of their parameters."""
    for parameter, gradient in gradients:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@contextmanager
def naming_devices(optimizer: Optimizer) -> Iterator[None]:
    """Say what to do if a step fails because parameters have moved to another device than the optimizer's state."""
    try:
        yield
    except RuntimeError as error:
        for parameter, state in optimizer.state.items():
            devices = {
                value.device
                for value in state.values()
                if isinstance(value, Tensor) and value.dim()
            }
            for device in devices - {parameter.device}:
                raise ValueError(
                    f"guide and model must stay where their first step was, on {device}, got a parameter on "
                    f"{parameter.device}; after moving them make a new CompiledSVI, or a new optimizer"
                ) from error
        raise


def clipped_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters with gradients to clip."""
    return (
        optimizer.clipped()
        if isinstance(optimizer, GraphOptimizer)
        else optimizer_parameters(optimizer)
    )


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def make_optimizer(optim: Optim, parameters: Mapping[str, Tensor]) -> Optimizer:
    """Make one torch optimizer for all parameters, where each setting of a Pyro optimizer becomes a group of them."""
    check_optim(optim)
    if isinstance(optim, GuideOptim):
        raise ValueError(
            f"{type(optim).__name__} is an optimizer of a guide, not of other parameters"
        )
    if isinstance(optim, PyroOptim):
        return _of_pyro(optim, stored_names(parameters))
    optimizer = optim(list(parameters.values()))
    check_no_closure(optimizer)
    return _fused_on_cuda(optimizer)


def _fused_on_cuda(optimizer: Optimizer) -> Optimizer:
    """The same optimizer with torch's fused step, which a CUDA graph can hold, unless its maker chose another."""
    made: Any = type(optimizer)
    if made not in (Adam, AdamW, SGD) or not all(
        p.is_cuda and p.is_floating_point() for p in optimizer_parameters(optimizer)
    ):
        return optimizer
    groups = [{**group, "fused": True} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        # None leaves the choice to torch; False is a choice.
        chosen = any(group.get(choice) is not None for choice in ("foreach", "fused"))
        if chosen or any(map(group.get, (*CHOICES, *STARTS_TOGETHER))):
            return optimizer
    return made(groups, fused=True)


def _of_pyro(optim: PyroOptim, parameters: Mapping[str, Tensor]) -> Optimizer:
    if optim.pt_clip_args:
        raise ValueError(
            f"optim must not clip each parameter by itself, got {type(optim).__name__} with clip_args; use clip_norm "
            "of fit, or pyro.optim.ClippedAdam"
        )
    if optimizer_state_waiting(optim):
        raise ValueError(
            "optim must not have loaded a state of Pyro's optimizers, which is kept by parameter; load the state_dict "
            "of the torch optimizer instead"
        )
    groups: list[tuple[dict[str, Any], list[Tensor]]] = []
    for name, parameter in parameters.items():
        settings, _ = pyro_settings(optim, name)
        if not isinstance(settings, dict):
            raise ValueError(
                f"optim must return a dict of settings for each parameter, got {settings!r} for '{name}'"
            )
        if all(other != settings for other, _ in groups):
            groups.append((settings, []))
        next(members for other, members in groups if other == settings).append(parameter)
    constructor: Any = optim.pt_optim_constructor
    fused = _fused(
        constructor, {key for settings, _ in groups for key in settings}, parameters.values()
    )
    # The constructor checks the settings of each group and fills in its own defaults.
    first, *others = (
        constructor(members, **settings, **fused) for settings, members in groups or [({}, [])]
    )
    check_no_closure(first)
    for other in others:
        _join(first, other)
    return first


def _join(optimizer: Optimizer, other: Optimizer) -> None:
    """Take over another optimizer's groups, with the state that some optimizers create at once."""
    for group in other.param_groups:
        optimizer.add_param_group(group)
    optimizer.state.update(other.state)


def stored_names(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name the parameters as Pyro's store does; those outside the store keep their names."""
    store = pyro.get_param_store()
    named: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        stored = store.param_name(parameter)
        named[
            name.removesuffix("_unconstrained") if stored is None or stored in named else stored
        ] = parameter
    return named


def fused_optimizer(
    constructor: Callable[..., Optimizer], settings: Mapping[str, Any], parameters: list[Tensor]
) -> Optimizer:
    """Make an optimizer with torch's fused step, if it has one for these parameters and settings."""
    return constructor(parameters, **settings, **_fused(constructor, settings, parameters))


def _fused(
    constructor: Callable[..., Optimizer], settings: Iterable[str], parameters: Iterable[Tensor]
) -> dict[str, bool]:
    arguments = inspect.signature(constructor).parameters
    able = all(p.is_floating_point() and p.device.type in FUSED_ON for p in parameters)
    return (
        {"fused": True}
        if "fused" in arguments and not (CHOICES | STARTS_TOGETHER) & {*settings} and able
        else {}
    )


#: Adam at a learning rate of 1e-3.
DEFAULT_OPTIM: Optim = partial(fused_optimizer, Adam, {"lr": 1e-3})


def check_optim(optim: Any, argument: str = "optim") -> None:
    """Raise a ``ValueError`` that names the argument unless :func:`make_optimizer` can make an optimizer of this."""
    is_other_class = isinstance(optim, type) and not issubclass(optim, Optimizer)
    if (
        isinstance(optim, Optimizer)
        or is_other_class
        or not (callable(optim) or isinstance(optim, GuideOptim))
    ):
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


def initial_rates(optimizer: Optimizer) -> list[float | None]:
    """Return the learning rate that each group of parameters starts from; None where the optimizer has none."""
    rates = (group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups)
    return [None if rate is None else float(rate) for rate in rates]


def change_rates(
    optimizer: Optimizer, scheduler: Any, before: list[Any], now: list[Any], path: Path
) -> None:
    """Resume at other learning rates, with a warning; a rate that has decayed becomes the new rate, decayed as far."""
    if before == now:
        return
    was, new_rates = (
        " and ".join(f"{rate:g}" for rate in rates if rate is not None) for rates in (before, now)
    )
    warnings.warn(
        f"checkpoint {path} was made with lr={was}, this run resumes with lr={new_rates}",
        stacklevel=4,
    )
    for group, old, new in zip(optimizer.param_groups, before, now, strict=True):
        for name in {"lr", "initial_lr"} & group.keys():
            group[name] = group[name] * (new / old) if old else new
    _start_from(scheduler, [group.get("initial_lr") for group in optimizer.param_groups])


def check_fused_state(optimizer: Optimizer, saved: dict[str, Any], path: Path) -> None:
    """Check a saved state for torch's fused steps, which check no shape, and give it the parameters' strides."""
    groups = zip(optimizer.param_groups, saved["param_groups"], strict=True)
    parameters = [(p, there.get("fused")) for group, there in groups for p in group["params"]]
    for number, state in saved["state"].items():
        parameter, fused = parameters[number]
        for name, value in state.items():
            if not fused or name == "step" or not isinstance(value, Tensor):
                continue
            if value.shape != parameter.shape:
                raise ValueError(
                    f"checkpoint {path} is from another optimizer: {name} of parameter {number} must have shape "
                    f"{tuple(parameter.shape)}, got {tuple(value.shape)}"
                )
            state[name] = torch.empty_like(parameter).copy_(value)


def _start_from(scheduler: Any, rates: list[Any]) -> None:
    """Give a scheduler, and the schedulers that it consists of, the rates that it multiplies."""
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = list(rates)
    for part in getattr(scheduler, "_schedulers", ()):
        _start_from(part, rates)
