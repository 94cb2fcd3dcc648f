# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What comes before the first step of a training: its parameters, and checks of targets and plates."""

from collections.abc import Callable

import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_radial._pyro.compat import tree_map
from pyro_radial._pyro.random_numbers import one_at_a_time, seeded
from pyro_radial._pyro.types import Batch, Model
from pyro_radial.infer.data import num_rows
from pyro_radial.infer.loss.terms import LossTerms
from pyro_radial.infer.step.optimizer import unconstrained_parameters
from pyro_radial.nn.modules import device_of, evaluating
from pyro_radial.nn.supervised import find_network


def make_parameters(
    model: Model, guide: nn.Module, batch: tuple[Batch, Batch]
) -> dict[str, Tensor]:
    """Run model and guide once, so that all parameters exist; returns those outside both modules."""
    with one_at_a_time(), evaluating(model, guide), torch.no_grad(), poutine.block():
        getattr(guide, "setup", guide)(*batch)
        with seeded(0, device_of(guide, model)), poutine.trace(param_only=True) as capture:
            drawn = poutine.trace(guide).get_trace(*batch)
            poutine.replay(model, trace=drawn)(*batch)
    module_parameters: set[Tensor] = set()
    for module in (model, guide):
        if isinstance(module, nn.Module):
            module_parameters.update(module.parameters())
    loose = {}
    for name, value in unconstrained_parameters(capture.trace).items():
        # Under the name of a module's parameter, Pyro's store can hold an unused namesake.
        namesake = isinstance(value, nn.Parameter) and isinstance(model, nn.Module)
        if value not in module_parameters and not namesake:
            loose[name] = value
    return loose


def make_target_check(model: Model, x: Batch) -> Callable[[Batch], None] | None:
    """Return a check of any number of targets of a :class:`~pyro_radial.SupervisedModel`, or None for another model."""
    network = find_network(model)
    if network is None or network.likelihood is None:
        return None
    with one_at_a_time(), evaluating(model), torch.no_grad(), poutine.block():
        values = network(x, network.sample_parameters())

    def check(y: Batch) -> None:
        # All outputs have the shape of the first.
        rows = num_rows(y)
        repeated = tree_map(lambda f: f[:1].expand(rows, *f.shape[1:]), values)
        network.likelihood.read_target(repeated, y)

    return check


def check_num_data(terms: LossTerms, num_data: int) -> None:
    """Raise a ValueError for plates of another size than the data, because then the KL has a wrong weight."""
    if not terms.nll_by_site:
        raise ValueError(
            "model must observe the targets in a sample site, as SupervisedModel does, got none"
        )
    if terms.num_data is None:
        terms.per_datum()  # It has the words for this.
    if terms.num_data != num_data:
        sites = " and ".join(f"'{name}'" for name in terms.nll_by_site)
        raise ValueError(
            f"model must observe {sites} in a plate of the size of the data, {num_data}, got one of size "
            f"{terms.num_data}: pyro.plate('data', {num_data}, subsample=...); if that size is "
            "the product of several plates, as for a table of counts, or you mean it, use "
            f"fit(..., options=FitOptions(num_data={terms.num_data}))"
        )
