# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The posterior of a last layer as one plain module, to serve it in one pass."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pyro_radial._pyro.checks import check_choice
from pyro_radial.infer.posthoc.laplace import LastLayerLaplace, TrainedNetwork
from pyro_radial.infer.prediction.linearized import probit_logits
from pyro_radial.nn.likelihoods import Bernoulli, Categorical
from pyro_radial.nn.supervised import describe_inputs, for_likelihood, network_of


class LinearizedNetwork(nn.Module):
    """Make a plain module that predicts in one pass with the posterior of a last layer.

    A call returns what :func:`~pyro_radial.predict` computes with the same method, without its random numbers. With
    "linearized" it returns the mean ``[N, K]`` and the covariance ``[N, K, K]`` of the network's outputs, without the
    noise of the likelihood; with "probit" the probabilities of classes.

    No Pyro runs in a call. Any number of threads may call the module at once, and it goes through
    :func:`torch.compile` and :func:`torch.export.export`, with an open number of rows too; the exported program needs
    neither this library nor Pyro. All tensors are copies. The module is in evaluation mode; leave it there.

    :param model: the model given to :func:`~pyro_radial.infer.last_layer_laplace`.
    :param guide: the guide that it returned.
    :param str method: "linearized" or "probit".
    :raises ValueError: for another guide, whose linearization needs derivatives that ``torch.export`` cannot follow, a
        model without this network, or "probit" without classes; in a call that is not compiled, naming ``x``, for
        inputs that the network cannot take, such as one image without a dim for the rows.

    Example::

        >>> from pyro_radial import BayesianModule, SupervisedModel
        >>> from pyro_radial.infer import last_layer_laplace
        >>> from pyro_radial.nn import likelihoods
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = SupervisedModel(BayesianModule(network), likelihoods.Categorical())
        >>> x, y = torch.randn(50, 4), torch.randint(3, (50,))
        >>> guide = last_layer_laplace(model, network, (x, y), prior_precision=1.0)
        >>> served = LinearizedNetwork(model, guide, "probit")
        >>> rows = torch.export.Dim("rows", min=2)
        >>> exported = torch.export.export(served, (x,), dynamic_shapes={"args": ({0: rows},)})
        >>> torch.allclose(exported.module()(x[:2]), served(x[:2]), atol=1e-6)
        True
    """

    @torch.no_grad()
    def __init__(
        self,
        model: Callable[..., object],
        guide: Callable[..., object],
        method: Literal["linearized", "probit"] = "linearized",
    ) -> None:
        super().__init__()
        check_choice("method", method, ("linearized", "probit"))
        if not isinstance(guide, LastLayerLaplace):
            raise ValueError(
                f"guide must be one that last_layer_laplace returned, got {type(guide).__name__}: torch.export cannot "
                "follow the derivatives in all layers that others need. Serve their draws by SampledNetwork, or call "
                f"predict(model, guide, x, method={method!r})"
            )
        likelihood = TrainedNetwork(model, guide).likelihood
        if method == "probit" and not isinstance(likelihood, Categorical | Bernoulli):
            raise ValueError(
                f"model must have a likelihood of classes for method='probit', got {type(likelihood).__name__}"
            )
        self.method = method
        # In a tuple, so that it is not a submodule with parameters.
        self._likelihood_and_layer = (likelihood, guide.layer)
        net = network_of(model).bnn.to_module(guide.median())
        self.layer = net.get_submodule(guide.layer.module_name)
        # Without its last layer, the network returns the inputs of that layer.
        if guide.layer.module_name:
            net.set_submodule(guide.layer.module_name, nn.Identity())
        else:
            net = nn.Identity()
        self.features = net
        self.covariance = guide.output_covariance()
        self.requires_grad_(False)
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute mean and covariance of the outputs, or probabilities.

        :param args: the network's inputs.
        :param kwargs: inputs by name.
        """
        likelihood, layer = self._likelihood_and_layer
        if torch.compiler.is_compiling():
            features = for_likelihood(self.features(*args, **kwargs), likelihood)
        else:
            features = self._checked_features(*args, **kwargs)
        f = self.layer(features)
        covariance = self.covariance(layer.with_ones(features))
        if self.method == "linearized":
            return f, covariance
        return likelihood.inverse_link(probit_logits(f, covariance))

    def _checked_features(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the inputs of the last layer, or raise a ValueError that says what the network was given."""
        requirement = "x must be what the network takes, with a dim for the rows"
        description = describe_inputs(kwargs or args)
        try:
            features: Tensor = for_likelihood(
                self.features(*args, **kwargs), self._likelihood_and_layer[0]
            )
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, IndexError) as error:
            raise ValueError(f"{requirement}, got {description}: {error}") from error
        if features.dim() != 2 or features.shape[1] != self.layer.in_features:
            raise ValueError(
                f"{requirement}, so that its last layer gets [N, {self.layer.in_features}], got "
                f"{list(features.shape)} from {description}"
            )
        return features
