# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The function that belongs to a draw of a guide, by runs of the model or of its network alone."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.poutine import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_radial._pyro.compat import handlers_around
from pyro_radial._pyro.random_state import seeded
from pyro_radial.infer.prediction.guide_draws import GuideDraws, check_sites
from pyro_radial.infer.prediction.model_network import ModelNetwork
from pyro_radial.infer.training.data import device_of, evaluating, num_rows
from pyro_radial.nn.likelihood import FUNCTION_SITE

__all__ = ["ModelRuns", "NetworkRuns", "inputs_of", "network_runs"]


class ModelRuns:
    """By runs of the model, replayed with the draw.

    :param model: a Pyro model.
    :param guide: its guide.
    :param str function_site: the deterministic site of the function's values.
    """

    def __init__(self, model: Callable[..., Any], guide: Callable[..., Any], function_site: str) -> None:
        self.model, self.guide, self.function_site = model, guide, function_site
        self._noise_sites: dict[str, str] = getattr(getattr(model, "likelihood", None), "noise_sites", {})
        self._drawn = Trace()
        self._latest = Trace()
        self._checked = False

    def mode(self) -> AbstractContextManager[None]:
        """What the guide and the function are to run in."""
        return evaluating(self.model, self.guide)

    def start(self, drawn: Trace) -> None:
        """Take another draw of the guide."""
        self._drawn = drawn.copy()

    def values(self, inputs: Any) -> Tensor:
        """The function at some rows; what the model samples outside of plates stays for the next rows."""
        self._latest = poutine.trace(poutine.replay(self.model, trace=self._drawn)).get_trace(inputs)
        values = _function_values(self._latest, self.function_site, num_rows(inputs))
        if not self._checked:
            check_sites(self._drawn, self._latest, "predict")
            self._checked = True
        for name, site in self._latest.iter_stochastic_nodes():
            if name not in self._drawn and not site["cond_indep_stack"] and not site_is_subsample(site):
                self._drawn.add_node(name, **site)
        return values

    def noise(self) -> dict[str, Tensor]:
        """The noise that belongs to the latest values, ``[1]`` by argument of the likelihood's ``observation``."""
        return {argument: _value(self._latest, site).reshape(1) for argument, site in self._noise_sites.items()}


class NetworkRuns:
    """By runs of the model's network, with the parameters of the draw.

    :param ModelNetwork network: of the model.
    :param runs: of the model.
    :param draws: of the guide.
    :param Trace drawn: one of these.
    """

    def __init__(self, network: ModelNetwork, runs: ModelRuns, draws: GuideDraws, drawn: Trace) -> None:
        self._network, self._runs = network, runs
        self._functional, self._fixed = network.bnn.computation(), network.bnn.fixed_tensors()
        self._parameters = dict(network.draw(drawn).parameters)
        self._noise: dict[str, Tensor] = {}
        in_use = network.bnn.sites_in_use
        # A draw then holds all that differs, and neither guide nor model has to run.
        self._direct = not network.noise_sites and all(
            name in drawn and _value(drawn, name).shape == self._parameters[name].shape for name in in_use
        )
        self._in_use = in_use
        self._runs_nothing = self._direct and draws.from_distributions

    def mode(self) -> AbstractContextManager[None]:
        """What the guide and the function are to run in."""
        return nullcontext() if self._runs_nothing else self._runs.mode()

    def start(self, drawn: Trace) -> None:
        """Take another draw of the guide."""
        if self._direct:
            self._parameters.update({name: _value(drawn, name) for name in self._in_use})
        else:
            draw = self._network.draw(drawn)
            self._parameters, self._noise = draw.parameters, draw.noise

    def values(self, inputs: Any) -> Tensor:
        """The function at some rows."""
        args, kwargs = inputs_of(inputs)
        values = self._functional.single({**self._fixed, **self._parameters}, args, kwargs)
        assert isinstance(values, Tensor)
        return values

    def noise(self) -> dict[str, Tensor]:
        """The noise that belongs to the latest values."""
        return self._noise


def network_runs(runs: ModelRuns, draws: GuideDraws, drawn: Trace, inputs: Any, seed: int) -> NetworkRuns | None:
    """The same by the network alone, where that gives the same.

    :param runs: of the model.
    :param draws: of the guide.
    :param Trace drawn: one of these.
    :param inputs: some rows.
    :param int seed: of what the model samples.
    :returns: None where the network alone gives other values, or cannot be told from the model.
    """
    if handlers_around() or runs.function_site != FUNCTION_SITE:
        return None
    device = device_of(runs.guide, runs.model)
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    with runs.mode():
        try:
            with seeded(seed, device):
                faster = NetworkRuns(ModelNetwork(runs.model), runs, draws, drawn)
        except ValueError:
            return None
        for candidate in (runs, faster):
            with seeded(seed, device):
                candidate.start(drawn)
                found.append((candidate.values(inputs), candidate.noise()))
    (values, noise), (other_values, other_noise) = found
    same = values.dtype == other_values.dtype and torch.equal(values, other_values)
    same = same and noise.keys() == other_noise.keys()
    return faster if same and all(torch.equal(noise[name], other_noise[name]) for name in noise) else None


def inputs_of(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a network is called with inputs: a tuple in order, a dict by name."""
    if isinstance(x, dict):
        return (), x
    return (x if isinstance(x, tuple) else (x,)), {}


def _function_values(trace: Trace, function_site: str, num_points: int) -> Tensor:
    if function_site not in trace.nodes:
        raise ValueError(
            f"predict: function_site must be a site of the model, got '{function_site}', which it has not; record the "
            f'function\'s values with pyro.deterministic("{function_site}", values)'
        )
    values = _value(trace, function_site)
    if values.shape[:1] != (num_points,):
        raise ValueError(
            f"predict: site '{function_site}' must have a row for each of {num_points} inputs, got shape "
            f"{tuple(values.shape)}"
        )
    return values


def _value(trace: Trace, name: str) -> Tensor:
    value = trace.nodes[name]["value"]
    assert isinstance(value, Tensor)
    return value
