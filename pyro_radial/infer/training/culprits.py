# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Where in a Pyro program a NaN or infinity comes from, by name."""

from collections.abc import Iterable, Mapping
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_radial.infer.elbo import RadialELBO
from pyro_radial.poutine.local_reparameterization import is_drawn

__all__ = ["culprits", "first_not_finite"]


def first_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor that holds NaN or infinity; a host-device synchronization for each tensor."""
    for name, tensor in named:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    return None


def culprits(
    loss: ELBO, model: Any, guide: Any, args: Any, kwargs: Mapping[str, Any], parameters: Mapping[str, Tensor]
) -> list[str]:
    """What is not finite in a loss, by running model and guide as they are on the present noise.

    :param parameters: what is trained, by name.
    :returns: the first parameter that is not finite, else the first draw of the guide, else the terms; nothing if all
        of it is finite.
    """
    parameter = first_not_finite(parameters.items())
    if parameter is not None:
        return [f"parameter {parameter}"]
    noise = torch.get_rng_state()
    with pyro.validation_enabled(False), torch.no_grad():
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        latent = dict[str, Any](guide_trace.iter_stochastic_nodes())
        draw = first_not_finite((name, site["value"]) for name, site in latent.items() if is_drawn(site))
        if draw is not None:
            return [f"a draw of site '{draw}'"]
        if isinstance(loss, RadialELBO):
            torch.set_rng_state(noise)
            loss.differentiable_loss(model, guide, *args, **kwargs)
            return loss.terms.not_finite()
        model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
        model_trace.compute_log_prob()
        sites = ((name, site) for name, site in model_trace.nodes.items() if site["type"] == "sample")
        site = first_not_finite((name, site["log_prob"]) for name, site in sites if is_drawn(site))
        return [] if site is None else [f"log-density of site '{site}'"]
