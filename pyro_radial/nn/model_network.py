# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The network in a model: where it is, which parameters a draw of the guide gives it, and its output for these."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pyro.poutine as poutine
import torch
from pyro.poutine import Trace
from torch import Tensor, nn

from pyro_radial._pyro.compat import has_hooks
from pyro_radial.nn.bayesian_module import BayesianModule
from pyro_radial.nn.likelihood import Likelihood
from pyro_radial.nn.supervised import SupervisedModel, inputs_of
from pyro_radial.poutine.swap_prior import UnderPriors

__all__ = ["ModelNetwork", "NetworkDraw", "find_network", "network_of"]

# What a forward method of ours calls.
METHODS: dict[type[nn.Module], tuple[str, ...]] = {SupervisedModel: ("output",), Likelihood: ("function_values",)}


class NetworkDraw(NamedTuple):
    """One draw as a network knows it."""

    #: The values of the random parameters, by name, each of its parameter's shape.
    parameters: dict[str, Tensor]
    #: The noise of the likelihood, by argument of ``observation``, each of shape ``[1]``.
    noise: dict[str, Tensor]
    #: The sites of the model that were sampled or replayed.
    trace: Trace


class ModelNetwork:
    """The network of a model whose function is the network's output, so that neither Pyro nor the model has to run.

    :param entry: the :class:`~pyro_radial.SupervisedModel` that calls the network, or the network itself.
    :param wrappers: the models around it that change its priors, outermost first.
    """

    def __init__(self, entry: SupervisedModel | BayesianModule, wrappers: list[UnderPriors]) -> None:
        self._entry, self._wrappers = entry, wrappers
        self.bnn: BayesianModule = entry if isinstance(entry, BayesianModule) else entry.bnn  # type: ignore[assignment]
        #: The distribution of the targets, or None.
        self.likelihood: Any = getattr(entry, "likelihood", None)

    @property
    def noise_sites(self) -> dict[str, str]:
        """For each argument of the likelihood's ``observation`` besides ``f``, the site that records it."""
        return getattr(self.likelihood, "noise_sites", {})

    def sample_parameters(self) -> dict[str, Tensor]:
        """Sample the parameters as a run of the model does, and not the noise."""
        with self._priors():
            return self.bnn.sample_parameters()

    def draw(self, drawn: Trace) -> NetworkDraw:
        """The parameters and the noise for a draw of the guide; what it leaves out is drawn from the model's priors.

        :param Trace drawn: of the guide.
        :raises ValueError: naming the site, for several values of one parameter.
        """
        for module in (self.bnn, self.likelihood):
            if module is not None:
                module.check_store()
        with poutine.trace() as capture, poutine.replay(trace=drawn), self._priors():
            parameters = self.bnn.sample_parameters()
            if self.noise_sites:
                self.likelihood.noise(torch.zeros(1, dtype=self.bnn.dtype, device=self.bnn.device))
        nodes: Any = capture.trace.nodes
        noise = {argument: nodes[site]["value"].reshape(1) for argument, site in self.noise_sites.items()}
        return NetworkDraw(self.bnn.one_value_each(parameters), noise, capture.trace)

    def drawn_parameters(self, drawn: Trace) -> dict[str, Tensor] | None:
        """The parameters for a draw of the guide that holds all there is to know of it, or None for another draw."""
        if self.noise_sites or not self.bnn.has_plain_sites:
            return None
        values: dict[str, Any] = {name: drawn.nodes[name]["value"] for name in self.bnn.sites_in_use if name in drawn}
        return self.bnn.one_value_each(values) if len(values) == len(self.bnn.sites_in_use) else None

    def __call__(self, x: Any, parameters: Mapping[str, Tensor]) -> Any:
        """The network's output at given values of the random parameters, in the precision of the model's function."""
        if isinstance(self._entry, SupervisedModel):
            return self._entry.likelihood.function_values(self._entry.output(x, parameters))
        args, kwargs = inputs_of(x)
        return self.bnn.at(parameters, *args, **kwargs)

    @contextmanager
    def _priors(self) -> Iterator[None]:
        with ExitStack() as stack:
            for wrapper in self._wrappers:
                stack.enter_context(wrapper.priors())
            yield


def find_network(model: Any) -> ModelNetwork | None:
    """The network of a model, from the types of its parts alone; None if only a run of the model tells its function.

    :param model: any model. It has a network if it is a :class:`~pyro_radial.SupervisedModel` of a
        :class:`~pyro_radial.BayesianModule`, also under a :class:`~pyro_radial.PriorChain` or
        :func:`~pyro_radial.poutine.swap_prior`, or a ``BayesianModule``, with no overridden ``forward`` and no hooks.
    """
    wrappers: list[UnderPriors] = []
    while isinstance(model, UnderPriors):
        if not _runs_as(model, UnderPriors):
            return None
        wrappers.append(model)
        model = model.model
    if isinstance(model, SupervisedModel):
        plain = _runs_as(model, SupervisedModel) and _runs_as(model.likelihood, Likelihood)
        return ModelNetwork(model, wrappers) if plain and _runs_as(model.bnn, BayesianModule) else None
    return ModelNetwork(model, wrappers) if _runs_as(model, BayesianModule) else None


def network_of(model: Any) -> ModelNetwork:
    """The same, where there must be one.

    :raises ValueError: for another model.
    """
    network = find_network(model)
    if network is None:
        raise ValueError(
            "model must be a SupervisedModel of a BayesianModule, also under a PriorChain or swap_prior, or a "
            "BayesianModule, with the library's own forward methods and without hooks, got "
            f"{getattr(model, '__name__', type(model).__name__)}; predict(model, guide, x) takes any model, and for a "
            "model written by hand you can pass its BayesianModule here"
        )
    return network


def _runs_as(module: Any, cls: type[nn.Module]) -> bool:
    """Whether calling a module does what the class does: nothing is overridden, and there are no hooks."""
    if not isinstance(module, cls) or "forward" in vars(module) or has_hooks(module):
        return False
    methods = ("__call__", "forward", *METHODS.get(cls, ()))
    return all(getattr(type(module), name) is getattr(cls, name) for name in methods)
