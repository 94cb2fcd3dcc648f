# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What a training run is of, in plain values: a resume of it and its other processes must agree with them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pyro_radial.infer.autoguide import AutoPerSite
from pyro_radial.infer.elbo import RadialELBO
from pyro_radial.infer.training.checkpoint import differences, plain
from pyro_radial.infer.training.fingerprint import described
from pyro_radial.infer.training.processes import Processes
from pyro_radial.nn.bayesian_module import submodules

__all__ = ["check_alike", "details", "settings_of"]

Settings = dict[str, Any]


def settings_of(model: Any, guide: nn.Module, loss: RadialELBO, optimizer: Optimizer, **given: Any) -> Settings:
    """The settings by their names, as far as they are known at a glance.

    :param given: of the call, as they are.
    """
    # The learning rate may change between resumes.
    defaults = {name: value for name, value in plain(optimizer.defaults).items() if name != "lr"}
    return {
        "guide": type(guide).__name__,
        "likelihood": type(getattr(model, "likelihood", None)).__name__,
        "loss": type(loss).__name__,
        "kl_weight": described(getattr(loss, "kl_weight", None))[""],
        "num_particles": loss.num_particles,
        "optimizer": f"{type(optimizer).__name__}({defaults})",
        **given,
    }


def details(
    model: Any,
    guide: nn.Module,
    loss: RadialELBO,
    scheduler: Any,
    optimizer: Optimizer,
    parameters: Mapping[str, Tensor],
) -> Settings:
    """The settings of all that takes part, down to layers, kernels and the code of functions.

    :param parameters: all that the optimizer may train, by name.
    """
    guides = [part for part in submodules(guide) if isinstance(part, AutoPerSite)]
    # A family's settings do not show in its parameters.
    families = {name: described(family) for part in guides for name, family in part.chosen_families().items()}
    return {
        "model": described(model),
        "loss settings": described(loss),
        # The learning rates may change between resumes.
        "scheduler": {name: part for name, part in described(scheduler).items() if not name.startswith("base_lrs")},
        "families": families,
        # After the model, since other layers have other parameters.
        "optimizer groups": described(_groups(optimizer, parameters, dict(loss(model, guide).named_parameters()))),
    }


def check_alike(processes: Processes, own: Settings) -> None:
    """Refuse processes that would not train the same.

    :param Processes processes: all of them.
    :param own: what this one would train.
    :raises ValueError: in all of them, naming what differs and both values.
    """
    first, *others = processes.gather(own)
    for rank, other in enumerate(others, start=1):
        for name, one, two in differences(first, other):
            raise ValueError(
                "fit: every process must train the same model on the same data with the same settings, got "
                f"{name}={one!r} in process 0 and {name}={two!r} in process {rank}"
            )


def _groups(optimizer: Optimizer, parameters: Mapping[str, Tensor], of_modules: Mapping[str, Tensor]) -> list[Settings]:
    """Of each group of parameters which they are, and their settings."""
    # Others by position, since names in Pyro's store count the instances made in a process.
    names = {id(p): name if name in of_modules else str(number) for number, (name, p) in enumerate(parameters.items())}
    settings = optimizer.defaults.keys() - {"lr"}
    return [
        {
            "parameters": ", ".join(names.get(id(parameter), "another") for parameter in group["params"]),
            **{name: value for name, value in group.items() if name in settings},
        }
        for group in optimizer.param_groups
    ]
