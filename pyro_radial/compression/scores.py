# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How much the channels of a network matter under a posterior."""

from collections import defaultdict
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple, cast

import pyro.distributions as dist
import torch
import torch_pruning
from torch import Tensor, nn
from torch.distributions import Distribution, ExpTransform

from pyro_radial.distributions.constraints import is_real
from pyro_radial.distributions.half_cauchy import log_mode, sqrt_product
from pyro_radial.distributions.moments import moments
from pyro_radial.infer.autoguide.per_site import AutoPerSite
from pyro_radial.nn.priors.radial_directional import Side, TensorSites

SIDES: tuple[Side, Side] = ("row", "column")
#: The dim of the weight from which a function of Torch-Pruning removes channels.
DIMS = {
    torch_pruning.prune_linear_out_channels: 0,
    torch_pruning.prune_conv_out_channels: 0,
    torch_pruning.prune_depthwise_conv_out_channels: 0,
    torch_pruning.prune_linear_in_channels: 1,
    torch_pruning.prune_conv_in_channels: 1,
}


class Scores(NamedTuple):
    """How much each row and column of the weight tensors matters, on a logarithmic scale."""

    #: By the name of the layer, scores of dim 0 of its weight, shape ``[num_rows]``.
    rows: dict[str, Tensor]
    #: By the name of the layer, scores of dim 1 of its weight, shape ``[num_columns]``.
    columns: dict[str, Tensor]


class PosteriorImportance(torch_pruning.importance.Importance):
    r"""Score channels by a posterior, for the pruners of `Torch-Pruning <https://github.com/VainF/Torch-Pruning>`_.

    A channel is an output of a linear layer or convolution, with everything that depends on it: the same output of
    layers that are added to it, and the inputs that read it. Its score is the mean of two numbers: the largest score
    among the rows of weights that write it, and the largest among the columns that read it. Where only one kind has
    scores, as under ``RadialDirectionalPrior("row")``, the score is that number.

    A row or column with the sites of a :class:`~pyro_radial.nn.priors.RadialDirectionalPrior` is scored by the log-mode
    of its local radius,

    .. math:: \tfrac12 (\mu_a + \mu_b) - \tfrac14 (\sigma_a^2 + \sigma_b^2)

    for log-normal factors a and b of its square, plus the log of E[mu . x], the length of the mean direction, which
    differs between rows if each has its own concentration. Others are scored by their signal-to-noise ratio: with mean
    :math:`\mu` and standard deviation :math:`\sigma`,

    .. math:: \tfrac12 \log \frac{\sum_i \mu_i^2}{\sum_i \sigma_i^2}.

    Scores within a layer are comparable. Scores of different layers are comparable if all local radii have the same
    prior, or, for signal-to-noise ratios, if all layers are equally noisy.

    Source: Oh, Adamczewski and Park (2019), section 3.3: local radii only, because the global one scales every row.
    Their code takes the mode of one factor twice, and no root.

    :param network: the plain network to prune, such as :func:`mean_network` returns. Torch-Pruning changes it in place.
    :param guide: the trained guide, of this library, whose sites are named as the parameters of the network.
    :raises ValueError: if the guide is of another library, or no site is a weight tensor; on use, if a layer has
        already lost channels.

    Example::

        >>> from pyro_radial import AutoRadial, BayesianModule
        >>> bnn = BayesianModule(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)))
        >>> guide = AutoRadial(bnn)
        >>> x = torch.zeros(1, 3)
        >>> guide.setup(x)
        >>> net = bnn.to_module(guide.median())
        >>> importance = PosteriorImportance(net, guide)
        >>> torch_pruning.BasePruner(net, x, importance, pruning_ratio=0.5, ignored_layers=[net[2]]).step()
        >>> net[0].out_features
        2
    """

    def __init__(self, network: nn.Module, guide: AutoPerSite) -> None:
        self.scores = tensor_scores(guide)
        self._names = {module: name for name, module in network.named_modules()}

    @torch.no_grad()
    def __call__(self, group: Any) -> Tensor | None:
        """Score the channels of a group of dependent layers.

        :param group: a ``Group`` of Torch-Pruning.
        :returns: one score for each channel, larger for those that matter more; None if no layer has scores.
        """
        position = {channel: number for number, channel in enumerate(group[0].idxs)}
        by_dim: dict[int, list[Tensor]] = defaultdict(list)
        for item in group:
            values = self._layer_scores(item.dep.target.module, item.dep.handler)
            if values is None:
                continue
            index = torch.tensor([position[channel] for channel in item.root_idxs], device="cpu")
            source = values.cpu().double()[item.idxs]
            # NaN for a channel that the layer does not touch.
            scores = source.new_full((len(position),), torch.nan)
            # A channel may have several inputs, such as the pixels of a map after a flatten.
            scores.scatter_reduce_(0, index, source, "amax", include_self=False)
            by_dim[DIMS[item.dep.handler]].append(scores)
        if not by_dim:
            return None
        return torch.stack([reduce(torch.fmax, scores) for scores in by_dim.values()]).nanmean(0)

    def _layer_scores(self, layer: Any, handler: Callable[..., Any]) -> Tensor | None:
        """Return the scores of a layer's outputs or inputs, which the handler removes; None if it has none."""
        dim = DIMS.get(handler)
        # The columns of a convolution with groups belong to several inputs.
        if dim is None or (dim == 1 and getattr(layer, "groups", 1) > 1):
            return None
        if getattr(layer, "transposed", False):
            dim = 1 - dim
        values = self.scores[dim].get(self._names[layer])
        if values is not None and len(values) != layer.weight.shape[dim]:
            raise ValueError(
                f"network must have the sizes of the posterior, got {layer.weight.shape[dim]} for {len(values)} in dim "
                f"{dim} of the weight of {self._names[layer]!r}: prune in one step, or train a posterior of the "
                "smaller network"
            )
        return values


@torch.no_grad()
def tensor_scores(guide: AutoPerSite) -> Scores:
    """Score the rows and columns of each weight tensor; arguments and errors are those of PosteriorImportance."""
    check_guide(guide)
    posterior = cast("dict[str, Distribution]", guide.posterior())
    scores = Scores({}, {})
    for site, distribution in posterior.items():
        tensor = TensorSites.with_global_radius(site)
        layer = (tensor.parameter if tensor else site).removesuffix(".weight")
        is_weight = len(distribution.event_shape) >= 2 and is_real(distribution.support)
        for dim, by_layer in enumerate(scores):
            if tensor and tensor.direction(SIDES[dim]) in posterior:
                by_layer[layer] = _directional(posterior, tensor, SIDES[dim])
            elif is_weight:
                by_layer[layer] = _signal_to_noise(distribution, dim)
    if not any(scores):
        raise ValueError(f"guide must have a weight tensor among its sites, got {list(posterior)}")
    return scores


def check_guide(guide: object) -> None:
    """Raise a ValueError unless this is a guide of the library."""
    if not isinstance(guide, AutoPerSite):
        raise ValueError(
            f"guide must be a guide of this library, such as AutoRadial, got {type(guide).__name__}"
        )


def _directional(posterior: dict[str, Distribution], sites: TensorSites, side: Side) -> Tensor:
    """Score the rows or columns of a tensor with radial-directional sites, ``[groups]``."""
    radius = sites.local_radius(side)
    gamma = dist.LogNormal(*moments(posterior[radius.gamma], ExpTransform()))
    inverse_gamma = dist.LogNormal(*moments(posterior[radius.inverse_gamma], ExpTransform()))
    length = torch.linalg.vector_norm(posterior[sites.direction(side)].mean, dim=-1)
    return log_mode(sqrt_product(gamma, inverse_gamma)) + length.log()


def _signal_to_noise(distribution: Distribution, dim: int) -> Tensor:
    """Score the rows or columns of a weight tensor by the logarithm of the signal-to-noise ratio, ``[groups]``."""
    signal = distribution.mean.square().transpose(0, dim).flatten(1).sum(-1)
    noise = distribution.variance.transpose(0, dim).flatten(1).sum(-1)
    return 0.5 * (signal / noise).log()
