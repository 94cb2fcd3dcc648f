# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A trained network outside Pyro, and the linear layer at its end."""

from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from torch import Tensor, nn

from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial.infer.training.data import evaluating
from pyro_radial.nn.likelihood import Likelihood
from pyro_radial.nn.supervised import inputs_of, network_of

__all__ = ["LastLayer", "TrainedNetwork", "find_last_layer"]


class TrainedNetwork:
    """The network of a model in evaluation mode, with all sites at trained values.

    :param model: a :class:`~pyro_radial.SupervisedModel` of a :class:`~pyro_radial.BayesianModule`.
    :param trained: its guide, with the values as medians, or a plain network.
    :raises ValueError: for another model, one without a likelihood, or a site without a value.
    """

    def __init__(self, model: Any, trained: Any) -> None:
        values = _trained_values(trained)
        network = network_of(model)
        if not isinstance(network.likelihood, Likelihood):
            raise ValueError(f"model must have a likelihood, got {type(model).__name__} without one")
        self.likelihood: Likelihood = network.likelihood

        def at_values() -> None:
            for name, value in values.items():
                pyro.sample(name, dist.Delta(value, event_dim=value.dim()))

        with one_at_a_time(), torch.no_grad(), poutine.block(), evaluating(model):
            drawn = network.draw(poutine.trace(at_values).get_trace())
            sites = [name for name, _ in drawn.trace.iter_stochastic_nodes()]
            missing = [name for name in sites if name not in values]
            if missing:
                raise ValueError(f"no value for the sites {missing} of the model, got values for {sorted(values)}")
            self._functional = network.bnn.computation()
            self._parameters: dict[str, Tensor] = {**network.bnn.fixed_tensors(), **drawn.parameters}
        #: The values of the model's sites.
        self.values = {name: values[name] for name in sites}
        #: The arguments of the likelihood's distribution besides the network's output.
        self.noise = drawn.noise

    @property
    def skeleton(self) -> nn.Module:
        """The modules that compute, for hooks."""
        return self._functional.skeleton

    def __call__(self, x: Any) -> Tensor:
        """The network's output at some rows."""
        args, kwargs = inputs_of(x)
        output = self._functional.single(self._parameters, args, kwargs)
        if not isinstance(output, Tensor):
            raise ValueError(f"model must have a network that returns one tensor, got {type(output).__name__}")
        return output


def _trained_values(trained: Any) -> dict[str, Tensor]:
    if hasattr(trained, "median"):
        with torch.no_grad(), poutine.block():
            return {name: value.detach().clone() for name, value in trained.median().items()}
    if isinstance(trained, nn.Module):
        return {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}
    raise ValueError(f"trained must be a guide or a torch network, got {type(trained).__name__}")


class LastLayer(NamedTuple):
    """A linear layer's place in the network, and the sites of its weight and bias (None for a fixed bias)."""

    place: str
    weight: str
    bias: str | None

    def features(self, network: TrainedNetwork, x: Any) -> tuple[Tensor, Tensor]:
        """The layer's inputs ``[N, E]``, with a final one for a random bias, and the outputs ``[N, K]``."""
        seen: list[Tensor] = []
        layer = network.skeleton.get_submodule(self.place)
        handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        try:
            f = network(x)
        finally:
            handle.remove()
        (inputs,) = seen
        return (inputs if self.bias is None else torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)), f

    def matrix(self, values: dict[str, Tensor]) -> Tensor:
        """The random parameters as one matrix ``[K, E]``, with the bias as its last column."""
        weight = values[self.weight]
        return weight if self.bias is None else torch.cat([weight, values[self.bias].unsqueeze(-1)], 1)

    def parts(self, matrix: Tensor) -> dict[str, Tensor]:
        """The values of the sites in such a matrix."""
        if self.bias is None:
            return {self.weight: matrix}
        return {self.weight: matrix[:, :-1], self.bias: matrix[:, -1]}


def find_last_layer(network: TrainedNetwork, x: Any) -> LastLayer:
    """The linear layer that computes the network's output.

    :param TrainedNetwork network: the network.
    :param x: a few inputs to try.
    :raises ValueError: if the network does not end with a linear layer, called once with a vector for each row, or if
        its weight is fixed or shared.
    """
    outputs: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def seen(place: str) -> Any:
        return lambda module, args, output: outputs.setdefault(place, []).append((args[0], output))

    linear = {place: module for place, module in network.skeleton.named_modules() if isinstance(module, nn.Linear)}
    handles = [module.register_forward_hook(seen(place)) for place, module in linear.items()]
    try:
        f = network(x)
    finally:
        for handle in handles:
            handle.remove()
    last = [
        place
        for place, calls in outputs.items()
        if len(calls) == 1 and calls[0][0].dim() == 2 and _is_same(calls[0][1], f)
    ]
    if not last:
        raise ValueError(
            "model must have a network that ends with a linear layer, which it calls once with a vector for each row, "
            f"got {type(network.skeleton).__name__} with the linear layers {sorted(linear)}"
        )
    place = last[0]
    weight, bias = (f"{place}.{leaf}" if place else leaf for leaf in ("weight", "bias"))
    owners = [
        name
        for name, parameter in network.skeleton.named_parameters(remove_duplicate=False)
        if parameter is linear[place].weight
    ]
    if weight not in network.values or len(owners) > 1:
        raise ValueError(
            f"site '{weight}' of the last layer must be random and its own, got a weight of {owners} and the sites "
            f"{sorted(network.values)}"
        )
    return LastLayer(place, weight, bias if bias in network.values else None)


def _is_same(output: Tensor, f: Tensor) -> bool:
    return output.shape == f.shape and output.data_ptr() == f.data_ptr()
