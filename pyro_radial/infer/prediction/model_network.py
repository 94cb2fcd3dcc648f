# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The network within a model: its parameters for a draw of the guide, without running it."""

from dataclasses import dataclass
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.poutine import Trace
from torch import Tensor, nn

from pyro_radial._pyro.compat import has_hooks
from pyro_radial.nn.bayesian_module import BayesianModule
from pyro_radial.nn.likelihood import Likelihood
from pyro_radial.nn.supervised import SupervisedModel

__all__ = ["ModelNetwork", "NetworkDraw"]


@dataclass(frozen=True)
class NetworkDraw:
    """One draw as a network knows it.

    :param Trace trace: the sites that the model ran for it.
    :param parameters: the values of the random parameters, by name, each of its parameter's shape.
    :param noise: the noise of the likelihood, by argument of ``observation``, each of shape ``[1]``.
    """

    trace: Trace
    parameters: dict[str, Tensor]
    noise: dict[str, Tensor]


class ModelNetwork:
    """The network of a model whose function is the network's output: what it computes, apart from Pyro.

    :param model: a :class:`~pyro_radial.SupervisedModel` of a :class:`~pyro_radial.BayesianModule`, or a module that
        calls one with its own inputs, as :class:`~pyro_radial.PriorChain` and :func:`~pyro_radial.poutine.swap_prior`
        do; or a :class:`~pyro_radial.BayesianModule`.
    :raises ValueError: for another model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._entry, self.bnn = _find(model)
        #: What describes the observations, or None.
        self.likelihood: Any = getattr(self._entry, "likelihood", None)
        self._shapes = {name: parameter.shape for name, parameter in self.bnn.skeleton.named_parameters()}

    @property
    def noise_sites(self) -> dict[str, str]:
        """For each argument of the likelihood's ``observation`` besides ``f``, the site that records it."""
        return getattr(self.likelihood, "noise_sites", {})

    def draw(self, drawn: Trace) -> NetworkDraw:
        """The parameters and the noise for a draw of the guide; what it leaves out is drawn from the model's priors.

        The model runs up to its network, so that handlers within it act as they do when it predicts.

        :param Trace drawn: of the guide.
        :raises ValueError: for a model that calls the network with other than its own inputs.
        """
        inputs = object()
        parameters: dict[str, Tensor] = {}
        reached: list[bool] = []

        def stop(module: nn.Module, args: Any) -> None:
            if args != (inputs,):
                raise ValueError(f"model must call its network with its own inputs, got {args}")
            reached.append(True)
            parameters.update(self.bnn.sample_parameters())
            if self.noise_sites:
                self.likelihood.noise(torch.zeros(1, dtype=self.bnn.dtype, device=self.bnn.device))
            raise _ReachedError

        handle = self._entry.register_forward_pre_hook(stop)
        try:
            with poutine.trace() as capture, poutine.replay(trace=drawn):
                self._model(inputs)
        except _ReachedError:
            pass
        except Exception as error:
            if reached:
                raise
            raise ValueError(f"model must call its network with its own inputs, got {_name(self._model)}") from error
        finally:
            handle.remove()
        nodes: Any = capture.trace.nodes
        noise = {argument: nodes[site]["value"].reshape(1) for argument, site in self.noise_sites.items()}
        reshaped = {name: value.reshape(self._shapes[name]) for name, value in parameters.items()}
        return NetworkDraw(capture.trace, reshaped, noise)


class _ReachedError(Exception):
    """The model is at its network, and need not go on."""


def _find(model: Any) -> tuple[nn.Module, BayesianModule]:
    """What calls the network, and the network."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    entries = [module for module in modules if isinstance(module, SupervisedModel)]
    if len(entries) == 1 and _is_plain(entries[0]):
        bnn = entries[0].bnn
        assert isinstance(bnn, BayesianModule)
        return entries[0], bnn
    if isinstance(model, BayesianModule) and _is_network(model):
        return model, model
    raise ValueError(
        "model must be a SupervisedModel of a BayesianModule, also under a PriorChain or swap_prior, or a "
        f"BayesianModule, and run as these do, without hooks, got {_name(model)}; predict(model, guide, x) takes any "
        "model, and of one written by hand its BayesianModule will do here"
    )


def _is_plain(entry: SupervisedModel) -> bool:
    """Whether the function that the model records is the output of its network."""
    return (
        type(entry).forward is SupervisedModel.forward
        and type(entry)._output is SupervisedModel._output
        and type(entry.likelihood).forward is Likelihood.forward
        and not has_hooks(entry)
        and not has_hooks(entry.likelihood)
        and _is_network(entry.bnn)
    )


def _is_network(bnn: nn.Module) -> bool:
    """Whether calling it is sampling its parameters and calling its network."""
    return isinstance(bnn, BayesianModule) and type(bnn).forward is BayesianModule.forward and not has_hooks(bnn)


def _name(model: Any) -> str:
    return getattr(model, "__name__", type(model).__name__)
