# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A loss that integrates over the weights of the last layer in closed form, instead of drawing them."""

from collections.abc import Callable
from typing import Any

import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine import Trace, unwrap
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal, Normal, kl_divergence
from torch.nn.functional import softplus

from pyro_radial.distributions.wrappers import leaf
from pyro_radial.infer.autoguide.correlated import AutoCorrelated
from pyro_radial.infer.elbo import RadialELBO, Run, is_auxiliary
from pyro_radial.nn import likelihoods
from pyro_radial.nn.supervised import network_of

__all__ = ["LastLayerELBO"]


def _of_normal(f: Tensor, variance: Tensor, site: Any) -> Tensor:
    # Targets that are NaN are not observed.
    return 0.5 * variance / leaf(site["fn"]).scale.square() * ~site["value"].isnan()


#: How much variances of outputs f lower the expected log-density of targets, or at most lower it. A subclass may have
#: another density, so types are compared.
COSTS: dict[type, Callable[[Tensor, Tensor, Any], Tensor]] = {
    likelihoods.Bernoulli: lambda f, variance, _: softplus(f + 0.5 * variance) - softplus(f),
    likelihoods.Categorical: lambda f, variance, _: (f + 0.5 * variance).logsumexp(-1) - f.logsumexp(-1),
    likelihoods.Gaussian: _of_normal,
    likelihoods.MaskedGaussian: _of_normal,
    likelihoods.Poisson: lambda f, variance, _: (f + 0.5 * variance).exp() - f.exp(),
}


class LastLayerELBO(RadialELBO):
    r"""Train an :class:`~pyro_radial.infer.autoguide.AutoCorrelated` of the last layer without draws of its weights.

    Given the inputs a of the last layer, its outputs under the guide are normal with means :math:`f_k` and variances
    :math:`v_k = a^T S_k a`. In closed form the loss has the KL to a normal prior, and

    .. math:: E_q[\log N(y \mid f, \sigma^2)] = \log N(y \mid f, \sigma^2) - v / (2 \sigma^2), \qquad
        E_q[\log \mathrm{softmax}_y] \ge f_y - \log \sum_k e^{f_k + v_k / 2}.

    The ELBO is exact for Gaussian, masked Gaussian and Poisson likelihoods; for categorical and Bernoulli ones the loss
    is a bound of it. To train the other layers as points, make only the last one random with ``BayesianModule(net,
    select=...)``; otherwise their weights are drawn. Predict with ``method="linearized"``, which is exact if only the
    last layer is random.

    Source: Harrison, Willes and Snoek (2024), "Variational Bayesian Last Layers", theorems 1 and 2. There the weights
    of different outputs are independent; here they may be correlated.

    The arguments are those of :class:`~pyro_radial.RadialELBO`, without ``vectorize_particles``.

    :raises ValueError: when evaluated, naming ``vectorize_particles``, a guide or a likelihood of another kind, a
        network that calls its last layer twice, or the site of a prior that is not normal.

    Example::

        >>> from torch import nn
        >>> from pyro_radial import BayesianModule, SupervisedModel, fit, predict
        >>> net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
        >>> model = SupervisedModel(BayesianModule(net, select=r"^2\."), likelihoods.Gaussian(scale=0.1))
        >>> guide, x = AutoCorrelated(model), torch.linspace(-1, 1, 50)[:, None]
        >>> result = fit(model, guide, (x, x.sin()), epochs=2, batch_size=25, loss=LastLayerELBO(), progress=False)
        >>> predict(model, guide, x, method="linearized").samples.shape
        torch.Size([64, 50, 1])
    """

    def _get_trace(self, model: Any, guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Trace, Trace]:
        if self.vectorize_particles:
            raise ValueError("vectorize_particles must be False for LastLayerELBO, got True")
        if not isinstance(guide, AutoCorrelated):
            got = getattr(guide, "__name__", type(guide).__name__)
            raise ValueError(f"guide must be an AutoCorrelated for LastLayerELBO, got {got}")
        guide.setup(*args, **kwargs)
        if guide.last_layer is None:
            raise ValueError(f"guide must correlate the last layer for LastLayerELBO, got sites {guide.correlated}")
        network = network_of(unwrap(guide.model))
        cost = COSTS.get(type(network.likelihood))
        if cost is None:
            known, name = ", ".join(kind.__name__ for kind in COSTS), type(network.likelihood).__name__
            raise ValueError(f"model must have one likelihood of {known} for LastLayerELBO, got {name}")
        inputs: list[Tensor] = []
        layer = network.bnn.skeleton.get_submodule(guide.last_layer)
        hook = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        try:
            with _AtMean() as at_mean:
                model_trace, guide_trace = super()._get_trace(model, guide, args, kwargs)
        finally:
            hook.remove()
        if len(inputs) != 1:
            raise ValueError(f"model must call its last layer once for LastLayerELBO, got {len(inputs)} calls")
        if at_mean.vector is not None:  # Under ``mean_only`` there are no variances.
            nodes: Any = model_trace.nodes
            site, f = nodes["y"], nodes[likelihoods.FUNCTION_SITE]["value"]
            shapes = [nodes[name]["value"].shape for name in guide.correlated]
            costs = cost(f, _output_variances(inputs[0].to(f), at_mean.vector, shapes), site)
            costs = costs.reshape(*site["fn"].batch_shape, -1).sum(-1)
            site["log_prob_sum"] = site["log_prob_sum"] - scale_and_mask(costs, site["scale"], site["mask"]).sum()
            for name in guide.correlated:
                guide_trace.remove_node(name)  # Its KL is in that of the vector.
        return model_trace, guide_trace

    def _site_kl(self, name: str, guide_site: Any, run: Run) -> Tensor:
        if not _is_vector(guide_site):
            return super()._site_kl(name, guide_site, run)
        priors: dict[str, Any] = {own: run.model_trace.nodes[own] for own in run.guide.correlated}
        for own, site in priors.items():
            kind = type(leaf(site["fn"]))
            if not issubclass(kind, Normal) or site["mask"] is not None or site["scale"] != 1.0:
                raise ValueError(f"prior must be normal at site '{own}', without scale or mask, got {kind.__name__}")
        of_parts = [(site["fn"].mean.flatten(), site["fn"].variance.flatten()) for site in priors.values()]
        loc, variance = (torch.cat(moments).double() for moments in zip(*of_parts, strict=True))
        p = LowRankMultivariateNormal(loc, torch.zeros_like(loc)[:, None], variance)
        return kl_divergence(guide_site["fn"], p).to(of_parts[0][0])


class _AtMean(Messenger):
    """Puts the vector of correlated weights at its mean, and keeps its distribution."""

    vector: Any = None

    def _pyro_sample(self, msg: Any) -> None:
        if _is_vector(msg) and not msg["done"]:
            self.vector = msg["fn"]
            msg["value"], msg["done"] = self.vector.loc, True


def _is_vector(site: Any) -> bool:
    return is_auxiliary(site) and isinstance(site["fn"], LowRankMultivariateNormal)


def _output_variances(a: Tensor, vector: LowRankMultivariateNormal, shapes: list[torch.Size]) -> Tensor:
    """The variances ``[*rows, O]`` of the outputs of a linear layer for inputs ``[*rows, I]``."""
    features = torch.cat([a if len(shape) == 2 else torch.ones_like(a[..., :1]) for shape in shapes], -1)

    def by_output(moment: Tensor) -> Tensor:
        parts = zip(moment.to(a).split([shape.numel() for shape in shapes]), shapes, strict=True)
        return torch.cat([part.unflatten(0, (shape[0], -1)) for part, shape in parts], 1)

    drawn = torch.einsum("...i,oir->...or", features, by_output(vector.cov_factor))
    return drawn.square().sum(-1) + features.square() @ by_output(vector.cov_diag).mT
