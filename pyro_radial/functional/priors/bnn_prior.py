# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A Bayesian network as a prior on functions: before the data, or after other data."""

import copy
from collections.abc import Callable
from typing import Any

import pyro
from pyro import poutine
from pyro.infer.autoguide import AutoGuide, AutoGuideList
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_radial._pyro.checks import check_types
from pyro_radial._pyro.naming import rename_tree, unique_name
from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial.functional.priors.function_prior import FunctionPrior
from pyro_radial.nn.bayesian_module import BayesianModule

__all__ = ["BNNPrior"]


class BNNPrior(FunctionPrior):
    """The functions of a Bayesian network under its prior on weights, or under a trained guide.

    The network and a guide that is a :class:`~pyro.nn.PyroModule`, as all autoguides are, are copied, so this prior
    does not change when they train on. The copies stay in evaluation mode. A guide that is a plain function reads the
    parameter store at every draw.

    :param BayesianModule bnn: the network, such as ``model.bnn`` of a :class:`~pyro_radial.SupervisedModel`.
    :param guide: a guide with parameters that runs on points alone. Weights that it omits, or all without a guide, are
        drawn from the network's prior.
    :raises ValueError: naming the argument that does not fit.

    Example::

        >>> import torch
        >>> from pyro_radial import AutoRadial, BayesianModule
        >>> bnn = BayesianModule(nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)))
        >>> guide = AutoRadial(bnn)
        >>> guide.setup(torch.zeros(2, 1))
        >>> before_data, after_data = BNNPrior(bnn), BNNPrior(bnn, guide)
        >>> after_data.sample(torch.rand(7, 1), num_samples=5).shape
        torch.Size([5, 7, 1])
    """

    def __init__(self, bnn: BayesianModule, guide: Callable[..., Any] | None = None) -> None:
        super().__init__()
        check_types(BayesianModule, bnn=bnn)
        _check_guide(guide)
        self.bnn = copy.deepcopy(bnn)
        self.guide: Any = guide
        if isinstance(guide, PyroModule):
            self.guide = copy.deepcopy(guide)
            # By its old name it would read the original's parameters from the store.
            rename_tree(self.guide, unique_name(type(self)))
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "BNNPrior":
        """Keep the copies in evaluation mode."""
        return super().train(False)

    def _sample(self, x: Tensor, num_samples: int, num_outputs: int) -> Tensor:
        with one_at_a_time(), poutine.block(), pyro.plate("functions", num_samples):
            drawn = None if self.guide is None else poutine.trace(self.guide).get_trace(x)
            values = self.bnn(x) if drawn is None else poutine.replay(self.bnn, trace=drawn)(x)
        if not isinstance(values, Tensor):
            raise ValueError(f"bnn must be of a network that returns one tensor, got {type(values).__name__}")
        # A single draw has no dim of draws.
        return values.unsqueeze(0) if num_samples == 1 else values


def _check_guide(guide: Any) -> None:
    """Raise a ValueError unless the guide is None or can run on points alone."""
    if guide is not None and not callable(guide):
        raise ValueError(f"guide must be a function of points, got {guide!r}")
    if isinstance(guide, nn.Module) and not isinstance(guide, PyroModule):
        raise ValueError(f"guide must be a PyroModule or a function such as guide.forward, got {type(guide).__name__}")
    if isinstance(guide, AutoGuide) and not isinstance(guide, AutoGuideList) and guide.prototype_trace is None:
        raise ValueError("guide must have parameters, got one without: train it, or run it once on inputs and targets")
