# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Monte Carlo dropout: predictions with the dropout layers of a network left on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pyro_radial.infer.prediction.function_runs import ModelRuns
from pyro_radial.infer.prediction.predict import draw_functions
from pyro_radial.infer.prediction.prediction import Prediction
from pyro_radial.nn.bayesian_module import submodules
from pyro_radial.nn.functional_net import WITHOUT_FASTPATH
from pyro_radial.nn.likelihood import FUNCTION_SITE

__all__ = ["predict_with_dropout"]

NAME = "predict_with_dropout"
DROPOUT_LAYERS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
# Their mode changes nothing but their own dropout.
LAYERS_WITH_DROPOUT = (nn.RNNBase, nn.MultiheadAttention)


def predict_with_dropout(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    x: Any,
    num_samples: int = 64,
    chunk_size: int = 1024,
    *,
    function_site: str = FUNCTION_SITE,
    progress: bool = False,
) -> Prediction:
    """Draws as :func:`~pyro_radial.predict` makes them, with dropout on: by Monte Carlo dropout.

    Train a network with dropout layers by :func:`~pyro_radial.fit`, usually as a point estimate
    (:class:`~pyro_radial.infer.autoguide.families.Delta` for all sites), then ask for draws here, where only the
    dropout layers are in train mode: running statistics of norm layers are used and stay as they are.

    As is usual, each row of each draw has masks of its own, as torch's layers draw them. So all that is said of one
    input at a time holds, mean, variance, entropy, mutual information and log density; but a draw here is no single
    function, and tells nothing of how values at two inputs depend on each other. The masks depend on ``chunk_size``.

    Source: Gal and Ghahramani (2016), "Dropout as a Bayesian Approximation", eq. 6. Their prior, and so their KL, is
    the one of the model here.

    :param model: a Pyro model with dropout layers, as for :func:`~pyro_radial.predict`. Found are ``nn.Dropout`` and
        its like, and the dropout of ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and ``nn.MultiheadAttention``, of rates above
        zero; what a forward method drops by itself stays off.
    :param guide: its trained guide.
    :param x: inputs ``[N, ...]``, as for :func:`~pyro_radial.predict`.
    :param int num_samples: S, the number of draws.
    :param int chunk_size: inputs in one pass, which bounds the memory of a pass.
    :param str function_site: the name of the deterministic site of the network's output.
    :param bool progress: whether to show a progress bar.
    :returns: a :class:`~pyro_radial.infer.Prediction` with samples ``[S, N, ...]``.
    :raises ValueError: for a model without dropout, and as :func:`~pyro_radial.predict` does.
    :raises MemoryError: with the estimate, if the draws would not fit into free memory.

    Example::

        >>> import torch
        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, fit
        >>> from pyro_radial.infer.autoguide import families
        >>> from pyro_radial.nn import likelihoods
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        >>> model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian())
        >>> guide = AutoRadial(model, families={".": families.Delta()})
        >>> x = torch.randn(32, 2)
        >>> result = fit(model, guide, (x, x.sum(-1, keepdim=True)), epochs=2, progress=False)
        >>> prediction = predict_with_dropout(model, guide, x, num_samples=8)
        >>> prediction.samples.shape, bool((prediction.variance > 1.0).all())
        (torch.Size([8, 32, 1]), True)
    """
    runs = _DropoutRuns(model, guide, function_site)
    return draw_functions(NAME, runs, x, num_samples, chunk_size, by_network=False, progress=progress)


class _DropoutRuns(ModelRuns):
    """Runs of a model in evaluation mode but for its dropout."""

    def __init__(self, model: Callable[..., Any], guide: Callable[..., Any], function_site: str) -> None:
        super().__init__(model, guide, function_site)
        self._dropout = [module for module in submodules(model) if _drops(module)]
        if not self._dropout:
            raise ValueError(
                f"{NAME}: model must have dropout layers, such as nn.Dropout, of a rate above zero, got "
                f"{getattr(model, '__name__', type(model).__name__)} without any"
            )

    @contextmanager
    def mode(self) -> Iterator[None]:
        """Evaluation mode with dropout; all modes are restored afterwards."""
        # The fast path of a transformer asks for the mode of its outermost layer alone.
        with super().mode(), WITHOUT_FASTPATH:
            for module in self._dropout:
                module.training = True
            yield


def _drops(module: nn.Module) -> bool:
    if isinstance(module, DROPOUT_LAYERS):
        return module.p > 0
    return isinstance(module, LAYERS_WITH_DROPOUT) and module.dropout > 0
