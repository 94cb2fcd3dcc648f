# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A network and a likelihood as one Pyro model."""

from collections.abc import Mapping
from typing import Any

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_radial.nn.bayesian_module import BayesianModule
from pyro_radial.nn.likelihood import FUNCTION_SITE
from pyro_radial.nn.likelihoods import Likelihood
from pyro_radial.nn.local.local_layers import AskForLocalReparameterization

__all__ = ["SupervisedModel", "inputs_of"]


class SupervisedModel(nn.Module):
    """
    The Pyro model ``y ~ likelihood(bnn(x))``, for any guide, :class:`~pyro.infer.SVI` and
    :class:`~pyro.infer.Predictive`.

    Its sites are those of ``bnn``, by the same names, and ``"f"`` and ``"y"`` of the likelihood.

    :param PyroModule bnn: a :class:`~pyro_radial.nn.BayesianModule`, or another model that returns the output of a
        network as a tensor ``[*draws, B, *outputs]``.
    :param Likelihood likelihood: one of :mod:`pyro_radial.nn.likelihoods`.
    :param bool local_reparameterization: whether guides of this library leave the weights undrawn, and the network
        draws the outputs of its layers for each row instead. This applies to calls with targets, that is to losses and
        training; predictions use drawn weights. See :func:`~pyro_radial.poutine.local_reparameterization`.
    :raises ValueError: naming the argument of another type, or sites of ``bnn`` with names of the likelihood's sites.

    Example::

        >>> import torch
        >>> from pyro_radial.nn import BayesianModule, likelihoods
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=60_000))
        >>> model(torch.zeros(7, 4)).shape
        torch.Size([7])
    """

    # A plain module: a PyroModule would put its own name before every site.

    def __init__(self, bnn: PyroModule, likelihood: Likelihood, *, local_reparameterization: bool = False) -> None:
        super().__init__()
        if not isinstance(bnn, PyroModule):
            raise ValueError(
                f"bnn must be a BayesianModule, got {type(bnn).__name__}: wrap a plain network as BayesianModule(net)"
            )
        if not isinstance(likelihood, Likelihood):
            raise ValueError(f"likelihood must be a Likelihood, got {type(likelihood).__name__}")
        taken = set(getattr(bnn, "sites", ())) & _own_names(likelihood)
        if taken:
            raise ValueError(
                f"bnn must not have sites with names of the likelihood's sites, got {sorted(taken)}: rename these "
                "parameters, or wrap the network as torch.nn.Sequential(net), which prefixes all names"
            )
        if not isinstance(local_reparameterization, bool):
            raise ValueError(f"local_reparameterization must be True or False, got {local_reparameterization!r}")
        if local_reparameterization and not isinstance(bnn, BayesianModule):
            raise ValueError(
                f"bnn must be a BayesianModule for local_reparameterization=True, got {type(bnn).__name__}"
            )
        self.bnn = bnn
        self.likelihood = likelihood
        self.local_reparameterization = local_reparameterization

    def forward(self, x: Any, y: Tensor | None = None) -> Tensor:
        """
        Run the model.

        :param x: the network's input, or a tuple or a dict of its inputs.
        :param torch.Tensor y: the targets, or None to sample them.
        :returns: the targets, given or sampled.
        :raises ValueError: if the network cannot take x, or its output is not one tensor.
        """
        if self.local_reparameterization:
            with AskForLocalReparameterization(_has_targets, _has_targets(x, y)) as asked:
                f = self.output(x)
            asked.check(self.bnn.sites_in_use)
        else:
            f = self.output(x)
        return self.likelihood(f, y)

    def output(self, x: Any, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """
        Call the network.

        :param x: as of :meth:`forward`.
        :param Mapping parameters: values of the random parameters by name; None to sample them.
        :returns: a tensor ``[*draws, B, *outputs]``.
        :raises ValueError: if the network cannot take x, or its output is not one tensor.
        """
        args, kwargs = inputs_of(x)
        try:
            f = self.bnn(*args, **kwargs) if parameters is None else self.bnn.at(parameters, *args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(
                f"x must be what the network of bnn takes{self._dtype()}, got {_described(x)}: {error}"
            ) from error
        if not isinstance(f, Tensor):
            raise ValueError(
                f"the network of bnn must return one tensor, got {type(f).__name__}: "
                "wrap it in a module that picks the output"
            )
        return f

    def _dtype(self) -> str:
        return f", in {self.bnn.dtype} on {self.bnn.device}" if isinstance(self.bnn, BayesianModule) else ""


def inputs_of(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a network for these inputs: a tuple in order, a dict by name."""
    if isinstance(x, dict):
        return (), x
    return (x if isinstance(x, tuple) else (x,)), {}


def _has_targets(x: Any, y: Tensor | None = None) -> bool:
    """Whether a call has targets, as that of a loss does."""
    return y is not None


def _own_names(likelihood: Likelihood) -> set[str]:
    """The names that a likelihood gives to sites and its plate."""
    precision = {"precision"} if getattr(likelihood, "precision_prior", None) is not None else set()
    return {FUNCTION_SITE, "y", "data", *getattr(likelihood, "noise_sites", {}).values()} | precision


def _described(x: Any) -> str:
    """Shapes and dtypes of the inputs."""
    named = x.items() if isinstance(x, dict) else (("x", part) for part in (x if isinstance(x, tuple) else (x,)))
    return ", ".join(
        f"{name} of shape {list(part.shape)}, {part.dtype} on {part.device}"
        if isinstance(part, Tensor)
        else f"{name} of type {type(part).__name__}"
        for name, part in named
    )
