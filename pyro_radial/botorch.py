# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Posteriors over functions as BoTorch models, for Bayesian optimization; needs the extra ``botorch``."""

from typing import Any

import torch
from torch import Tensor

try:
    from botorch.models.deterministic import GenericDeterministicModel
    from botorch.models.ensemble import EnsembleModel
except ImportError as error:
    raise ImportError(
        "Bayesian optimization needs BoTorch: pip install 'pyro-radial[botorch]'"
    ) from error

from pyro_radial._pyro.checks import non_negative_integer, positive_count

__all__ = ["FunctionDraws"]


class FunctionDraws(EnsembleModel):
    """Present a fixed set of functions drawn from a posterior as a BoTorch model.

    The draws stay the same from call to call, so an acquisition function is a smooth function of its points and
    ``optimize_acqf`` can maximize it. The model suits acquisition functions that take samples, such as
    ``qLogExpectedImprovement``, ``qUpperConfidenceBound`` or ``qLowerBoundMaxValueEntropy``. Use a network in float64
    (``net.double()``), because gradients in float32 are too coarse for the optimizer of ``optimize_acqf``.

    :param functions: the draws, such as ``SampledNetwork(model, guide, num_samples=64)``: a function of points
        ``[N, D]`` that returns values ``[S, N, M]``, with the attribute ``num_samples``.
    :param int num_outputs: number M of outputs.
    :raises ValueError: when evaluated, for points that the functions do not take or another number of outputs.

    Example::

        >>> from botorch.acquisition import qLogExpectedImprovement
        >>> from botorch.optim import optimize_acqf
        >>> from torch import nn
        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
        >>> from pyro_radial.infer import SampledNetwork
        >>> from pyro_radial.nn import likelihoods
        >>> net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1)).double()
        >>> model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian())
        >>> guide = AutoRadial(model)
        >>> guide.setup(torch.zeros(2, 2).double(), torch.zeros(2, 1).double())
        >>> draws = FunctionDraws(SampledNetwork(model, guide, num_samples=32))
        >>> unit = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()
        >>> acquisition = qLogExpectedImprovement(draws, best_f=0.0)
        >>> x, value = optimize_acqf(acquisition, unit, q=1, num_restarts=2, raw_samples=8)
        >>> x.shape
        torch.Size([1, 2])
    """

    def __init__(self, functions: Any, num_outputs: int = 1) -> None:
        super().__init__()
        if not callable(functions) or not hasattr(functions, "num_samples"):
            raise ValueError(
                f"functions must be drawn functions, such as a SampledNetwork, got {functions!r}"
            )
        # The tuple keeps a module from becoming a submodule, which would be saved too.
        self._functions = (functions,)
        self._num_outputs = positive_count("num_outputs", num_outputs)

    @property
    def num_draws(self) -> int:
        """Number S of draws."""
        return self._functions[0].num_samples

    @property
    def batch_shape(self) -> torch.Size:
        """Empty, for a single ensemble."""
        return torch.Size()

    def forward(self, X: Tensor) -> Tensor:
        """Return the values ``[*B, S, N, M]`` of all draws at points ``[*B, N, D]``."""
        if X.dim() < 2:
            raise ValueError(f"X must be points of shape [*B, N, D], got {list(X.shape)}")
        points = X.reshape(-1, X.shape[-1])
        try:
            values = self._functions[0](points)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"X must be points that the functions take, got {list(points.shape)}: {error}"
            ) from error
        if values.shape[-1] != self._num_outputs:
            raise ValueError(
                f"num_outputs must be the {values.shape[-1]} outputs of the functions, got {self._num_outputs}"
            )
        return values.unflatten(1, X.shape[:-1]).movedim(0, -3)

    def draw(self, index: int = 0) -> GenericDeterministicModel:
        """Return the draw of this number as a deterministic model; maximizing it is Thompson sampling."""
        if non_negative_integer("index", index) >= self.num_draws:
            raise ValueError(f"index must be below the {self.num_draws} draws, got {index}")
        return GenericDeterministicModel(lambda X: self(X)[..., index, :, :], self._num_outputs)
