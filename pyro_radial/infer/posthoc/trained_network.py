# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The network of a model with trained weights, apart from Pyro."""

from collections.abc import Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial.infer.training.data import evaluating
from pyro_radial.nn.bayesian_module import BayesianModule
from pyro_radial.nn.likelihood import Likelihood
from pyro_radial.nn.supervised import inputs_of, network_of

__all__ = ["TrainedNetwork", "trained_values"]


class TrainedNetwork:
    """The network of a model in evaluation mode, its random parameters at given values.

    :param model: a :class:`~pyro_radial.SupervisedModel` of a :class:`~pyro_radial.BayesianModule`.
    :param values: of the sites of the model.
    :param str who: what errors call the caller.
    :raises ValueError: for another model, one without a likelihood, or a site without a value.
    """

    def __init__(self, model: Any, values: Mapping[str, Tensor], who: str) -> None:
        network = network_of(model)
        if not isinstance(network.likelihood, Likelihood):
            raise ValueError(f"{who}: model must have a likelihood, got {type(model).__name__} without one")
        self.bnn: BayesianModule = network.bnn
        self.likelihood: Likelihood = network.likelihood
        self.values = {name: value.detach() for name, value in values.items()}
        with one_at_a_time(), torch.no_grad(), poutine.block(), evaluating(model):
            drawn = network.draw(poutine.trace(self.sample).get_trace())
            sites = [name for name, _ in drawn.trace.iter_stochastic_nodes()]
            missing = [name for name in sites if name not in values]
            if missing:
                raise ValueError(f"{who}: no value for the sites {missing} of the model, got them for {sorted(values)}")
            self._functional, self._fixed = self.bnn.computation(), self.bnn.fixed_tensors()
        #: The values of the sites that the model has in use.
        self.values = {name: self.values[name] for name in sites}
        #: What the likelihood's distribution needs besides the network's output.
        self.noise = drawn.noise
        #: The random parameters by name.
        self.parameters = drawn.parameters

    @property
    def skeleton(self) -> nn.Module:
        """The modules that compute, for hooks."""
        return self._functional.skeleton

    def sample(self) -> None:
        """A Pyro program that puts every site at its value."""
        for name, value in self.values.items():
            pyro.sample(name, dist.Delta(value, event_dim=value.dim()))

    def __call__(self, x: Any, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """The network's output at some rows, at other random parameters where they are given."""
        args, kwargs = inputs_of(x)
        output = self._functional.single({**self._fixed, **self.parameters, **(parameters or {})}, args, kwargs)
        if not isinstance(output, Tensor):
            raise ValueError(f"model must have a network that returns one tensor, got {type(output).__name__}")
        return output


def trained_values(trained: Any, who: str) -> dict[str, Tensor]:
    """The values of all sites: the medians of a guide with its parameters, or the parameters of a plain network.

    :raises ValueError: for what is neither.
    """
    if hasattr(trained, "median"):
        with torch.no_grad(), poutine.block():
            return {name: value.detach().clone() for name, value in trained.median().items()}
    if isinstance(trained, nn.Module):
        return {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}
    raise ValueError(f"{who}: trained must be a guide or a torch network, got {type(trained).__name__}")
