# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A model and its guide as one thing to train, copy and put back."""

from collections.abc import Callable
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from pyro_radial._pyro.random_numbers import one_at_a_time, seeded
from pyro_radial.infer.training.checkpoint import Checkpoint, State, copied
from pyro_radial.infer.training.data import device_of, evaluating

__all__ = ["Trained"]


class Trained:
    """Everything that training changes in a model and a guide, and parameters outside both.

    :param model: a Pyro model ``model(x, y)``.
    :param guide: its guide.
    :param batch: inputs and targets to run both on once, so that all parameters exist.
    """

    def __init__(self, model: Callable[..., Any], guide: nn.Module, batch: tuple[Any, Any]) -> None:
        self.model, self.guide, self.device = model, guide, device_of(guide, model)
        self._loose = _make_parameters(model, guide, batch)

    def modules(self) -> dict[str, State]:
        """The state of the guide, of the model, and of parameters outside both."""
        model = self.model.state_dict() if isinstance(self.model, nn.Module) else {}
        # By position, because names in Pyro's store count the instances that a process has made.
        loose: State = {str(position): value for position, value in enumerate(self._loose.values())}
        return {"guide": self.guide.state_dict(), "model": model, "loose": loose}

    def copy_of_modules(self) -> dict[str, State]:
        """Copy :meth:`modules`, so that further training does not change it."""
        return {role: copied(entries) for role, entries in self.modules().items()}

    @torch.no_grad()
    def load_modules(self, state: State) -> None:
        """Load what :meth:`copy_of_modules` returned."""
        self.guide.load_state_dict(state["guide"])
        if isinstance(self.model, nn.Module):
            self.model.load_state_dict(state["model"])
        for name, value in self.modules()["loose"].items():
            value.copy_(state["loose"][name])

    def check_entries(self, checkpoint: Checkpoint, state: State) -> None:
        """Raise a ``ValueError`` if a checkpoint's state is from another model or guide."""
        for role, entries in self.modules().items():
            checkpoint.check_entries("model" if role == "loose" else role, state[role], entries)


def _make_parameters(model: Callable[..., Any], guide: nn.Module, batch: tuple[Any, Any]) -> dict[str, Tensor]:
    """Run model and guide once, so that all parameters exist; returns those outside both modules."""
    with one_at_a_time(), evaluating(model, guide), torch.no_grad(), poutine.block():
        getattr(guide, "setup", guide)(*batch)
        with seeded(0, device_of(guide, model)), poutine.trace(param_only=True) as capture:
            drawn = poutine.trace(guide).get_trace(*batch)
            poutine.replay(model, trace=drawn)(*batch)
    modules = [module for module in (model, guide) if isinstance(module, nn.Module)]
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    loose = {}
    for name, site in capture.trace.nodes.items():
        value: Any = site["value"]
        value = value.unconstrained() if hasattr(value, "unconstrained") else value
        # Under the name of a module's parameter, Pyro's store can hold an unused namesake.
        namesake = isinstance(value, nn.Parameter) and isinstance(model, nn.Module)
        if id(value) not in known and not namesake:
            loose[name] = value
    return loose
