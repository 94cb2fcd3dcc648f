# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A model and its guide as one thing to train, copy and put back."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer import ELBO
from torch import Tensor, nn

from pyro_radial._pyro.one_at_a_time import one_at_a_time
from pyro_radial._pyro.random_state import seeded
from pyro_radial.infer.training.checkpoint import State, check_entries, copied
from pyro_radial.infer.training.data import device_of, evaluating
from pyro_radial.infer.training.gradient_step import autocasting
from pyro_radial.infer.training.not_finite import unwarned
from pyro_radial.infer.training.processes import Processes

__all__ = ["Trained"]


class Trained:
    """Model and guide, and what training changes of them: of either module and of neither.

    :param model: a Pyro model.
    :param nn.Module guide: its guide.
    :param batch: inputs and targets to run both on once, so that all parameters exist.
    :param torch.dtype autocast: what the model computes in while it is trained; None for its own dtype.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: nn.Module,
        batch: tuple[Any, Any],
        autocast: torch.dtype | None = None,
    ) -> None:
        self.model, self.guide = model, guide
        self.device = device_of(guide, model)
        self.run = model if autocast is None else autocasting(model, autocast, self.device)
        self._loose = self._make_parameters(batch)

    def module(self, loss: ELBO) -> nn.Module:
        """The loss of model and guide, a module that is called with inputs and targets."""
        return loss(self.run, self.guide)  # type: ignore[arg-type]

    def set_up(self, loss: ELBO, batch: tuple[Any, Any]) -> None:
        """Evaluate the loss once, for what it finds out or draws at its first call alone; the modules stay as they are.

        What goes wrong here is left to the first step, which says where it was.
        """
        with unwarned(), evaluating(self.model, self.guide), torch.no_grad(), suppress(Exception):
            self.module(loss)(*batch)

    def parameters(self, loss: ELBO) -> dict[str, Tensor]:
        """Everything that an optimizer can change, by name."""
        return {**dict(loss(self.model, self.guide).named_parameters()), **self._loose}  # type: ignore[arg-type]

    def state(self) -> dict[str, State]:
        """What a checkpoint must hold of the guide, of the model and of neither module."""
        model = self.model.state_dict() if isinstance(self.model, nn.Module) else {}
        # By position, since names in Pyro's store count the instances made in a process.
        loose: State = {str(position): value for position, value in enumerate(self._loose.values())}
        return {"guide": self.guide.state_dict(), "model": model, "loose": loose}

    def copy_of_state(self) -> dict[str, State]:
        """The same, and further training does not change it."""
        return {role: copied(entries) for role, entries in self.state().items()}

    def check(self, path: Path, state: State) -> None:
        """Raise a ``ValueError`` if a checkpoint's state is that of another model or guide."""
        for role, entries in self.state().items():
            check_entries(path, "model" if role == "loose" else role, entries, state[role])

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Put back what :meth:`copy_of_state` returned."""
        self.guide.load_state_dict(state["guide"])
        if isinstance(self.model, nn.Module):
            self.model.load_state_dict(state["model"])
        for name, value in self.state()["loose"].items():
            value.copy_(state["loose"][name])

    def take_over(self, processes: Processes) -> None:
        """Give model and guide the state that they have in the first process."""
        if processes.size == 1:
            return
        state = self.state()
        entries = {role: {n: v for n, v in part.items() if not isinstance(v, Tensor)} for role, part in state.items()}
        processes.take_over([value for part in state.values() for value in part.values() if isinstance(value, Tensor)])
        if any(entries.values()):
            first = processes.from_first(lambda: entries)
            self.load({role: part | first[role] for role, part in state.items()})

    def _make_parameters(self, batch: tuple[Any, Any]) -> dict[str, Tensor]:
        """Run everything once, so that an optimizer finds all parameters; returns those that are in neither module."""
        model, guide = self.model, self.guide
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
            # Under the name of a module's parameter Pyro's store may hold that of a namesake, which is not used.
            namesake = isinstance(value, nn.Parameter) and isinstance(model, nn.Module)
            if id(value) not in known and not namesake:
                loose[name] = value
        return loose
