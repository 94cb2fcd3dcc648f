# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Find where in a Pyro program a NaN or infinity comes from, and name it in errors."""

from collections.abc import Iterable, Mapping
from contextlib import suppress

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer import ELBO
from torch import Tensor
from torch.distributions.constraints import Constraint, real

from pyro_radial._pyro.random_numbers import TorchNoise
from pyro_radial._pyro.types import Args, Guide, Kwargs, Model, Node
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.infer.loss.elbo import TermsELBO, traces_of
from pyro_radial.poutine.local_reparameterization import is_drawn


def first_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor with NaN or infinity; synchronizes with the device for each tensor."""
    for name, tensor in named:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    return None


def find_not_finite(
    loss: ELBO,
    model: Model,
    guide: Guide,
    args: Args,
    kwargs: Kwargs,
    parameters: Mapping[str, Tensor],
) -> list[str]:
    """Run the model and the guide once with the current noise, and return in words what is not finite.

    :returns: the first parameter that is not finite, else the first draw of the guide, else terms of the loss; an empty
        list if all are finite.
    """
    parameter = first_not_finite(parameters.items())
    if parameter is not None:
        return [f"parameter {parameter}"]
    noise = TorchNoise.current()
    with pyro.validation_enabled(False), torch.no_grad():
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        draw = first_not_finite(
            (name, node["value"])
            for name, node in dict[str, Node](guide_trace.iter_stochastic_nodes()).items()
            if is_drawn(node)
        )
        if draw is not None:
            return [f"a draw of site '{draw}'"]
        if isinstance(loss, TermsELBO):
            noise.restore()
            _, terms = loss.loss_and_terms(model, guide, args, kwargs, 1.0, 0)
            return terms.not_finite()
        model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(
            *args, **kwargs
        )
        model_trace.compute_log_prob()
        site = first_not_finite(
            (name, node["log_prob"])
            for name, node in dict[str, Node](model_trace.nodes).items()
            if node["type"] == "sample" and is_drawn(node)
        )
        return [] if site is None else [f"log-density of site '{site}'"]


def support_to_check(site: Node) -> Constraint | None:
    """Return the support of an observed site if checking its value is cheap and can fail, else None."""
    if site["is_observed"] and isinstance(site["value"], Tensor):
        with suppress(NotImplementedError):
            support = leaf(site["fn"]).support
            if getattr(support, "base_constraint", support) is not real and support.event_dim < 2:
                return support
    return None


def check_observations(model: Model, guide: Guide, args: Args, kwargs: Kwargs) -> None:
    """Run the program once and raise a ``ValueError`` that names a site with an observation outside of its support."""
    with pyro.validation_enabled(False), torch.no_grad():
        trace, _ = traces_of(model, guide, *args, **kwargs)
    for name, site in dict[str, Node](trace.nodes).items():
        support = support_to_check(site) if site["type"] == "sample" else None
        if support is None:
            continue
        allowed = support.check(site["value"])[(..., *(None,) * support.event_dim)]
        values, allowed = torch.broadcast_tensors(site["value"], allowed)
        for invalid_value in values[~allowed][:1].tolist():
            raise ValueError(
                f"site {name!r} must have observations within the support {support}, got {invalid_value}"
            )


def not_finite_error(names: Iterable[str], step: int) -> FloatingPointError:
    """Return the error for a step with values that are not finite, which are named in words."""
    return FloatingPointError(
        f"not finite in step {step}: {', '.join(names)}; no step was taken on it; try a smaller learning rate"
    )


def check_parameters(parameters: Iterable[tuple[str, Tensor]], step: int) -> None:
    """Raise a ``FloatingPointError`` that names the first parameter that is not finite.

    :param step: the number of the last step; 0 before the first.
    """
    named = [(name, tensor) for name, tensor in parameters if tensor.is_floating_point()]
    # One read for all parameters, because each read waits for the device.
    flags = [torch.isfinite(tensor).all() for _, tensor in named]
    nonfinite = None if not flags or bool(torch.stack(flags).all()) else first_not_finite(named)
    if nonfinite is not None and step:
        raise not_finite_error([f"parameter {nonfinite}"], step)
    if nonfinite is not None:
        raise FloatingPointError(
            f"not finite before the first step: parameter {nonfinite}; create the model and the guide again, also to "
            "resume from a checkpoint"
        )
