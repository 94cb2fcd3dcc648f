# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Which units of a network to keep, and how much each matters under a posterior."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Distribution, ExpTransform

from pyro_radial._pyro.checks import check_types
from pyro_radial.distributions.constraints import is_real
from pyro_radial.distributions.half_cauchy import log_mode, sqrt_product
from pyro_radial.distributions.moments import moments
from pyro_radial.infer.autoguide.per_site import AutoPerSite
from pyro_radial.nn.priors.radial_directional import Side, TensorSites

_SIDES: dict[str, Side] = {"outputs": "row", "inputs": "column"}


@dataclass(frozen=True, eq=False)
class Cut:
    """The units of a network to keep.

    A unit is an output of a linear layer or an output channel of a convolution. The inputs of a layer are the units of
    the layer before, or the network's own inputs. After an :class:`~torch.nn.Flatten` they are the positions of the
    channels before it, which can be cut one by one.

    :param outputs: boolean masks over the outputs of layers, shape ``[num_outputs]``, by the name of the layer as in
        ``net.named_modules()``; True is kept. A layer without a mask keeps all.
    :param inputs: boolean masks over the inputs of layers, shape ``[num_inputs]``.
    :raises ValueError: naming the mask, if it is not a boolean vector.
    """

    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, mask in _named_vectors(self.outputs, self.inputs):
            if mask.dtype != torch.bool or mask.ndim != 1:
                raise ValueError(
                    f"{name} must be a boolean vector, got {mask.dtype}, {[*mask.shape]}"
                )

    def __repr__(self) -> str:
        return f"Cut(outputs={_counts(self.outputs)}, inputs={_counts(self.inputs)})"


@dataclass(frozen=True, eq=False)
class Scores:
    """How much each unit matters, on a logarithmic scale.

    :param outputs: scores of the outputs of layers, shape ``[num_outputs]``, by the name of the layer. Leave out the
        last layer: the network's outputs are never cut.
    :param inputs: scores of the inputs of layers, shape ``[num_inputs]``.
    :raises ValueError: naming the scores, if they are not a vector of numbers, or if there are none. Minus infinity,
        the logarithm of zero, is allowed.
    """

    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in _named_vectors(self.outputs, self.inputs):
            if not values.is_floating_point() or values.ndim != 1 or values.numel() == 0:
                raise ValueError(
                    f"{name} must be a vector of one floating point number per unit, got {values.dtype}, "
                    f"{[*values.shape]}"
                )
            if not (values < torch.inf).all():
                raise ValueError(
                    f"{name} must be less than infinity, and not NaN, got {float(values.max())}"
                )
        if not (self.outputs or self.inputs):
            raise ValueError("outputs or inputs must hold scores, got none")


def _named_vectors(
    outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each vector with its name in errors; raise a ValueError for anything but mappings to tensors."""
    for side, vectors in (("outputs", outputs), ("inputs", inputs)):
        check_types(Mapping, **{side: vectors})
        for layer, vector in vectors.items():
            name = f"{side}[{layer!r}]"
            check_types(Tensor, **{name: vector})
            yield name, vector


def check_guide(guide: object) -> None:
    """Raise a ValueError unless this is a guide of the library."""
    if not isinstance(guide, AutoPerSite):
        raise ValueError(
            f"guide must be a guide of this library, such as AutoRadial, got {type(guide).__name__}"
        )


@torch.no_grad()
def unit_scores(guide: AutoPerSite) -> Scores:
    r"""Score every row and column of each weight tensor by how much it matters under the guide's posterior.

    A tensor with the sites of a :class:`~pyro_radial.nn.priors.RadialDirectionalPrior` is scored by the log-mode of
    the group's local radius,

    .. math:: \tfrac12 (\mu_a + \mu_b) - \tfrac14 (\sigma_a^2 + \sigma_b^2)

    for log-normal factors a and b of its square, plus the log of E[mu . x], the length of the mean direction, which
    differs between groups if each has its own concentration. Other tensors are scored by the signal-to-noise ratio of
    the row or column with mean :math:`\mu` and standard deviation :math:`\sigma`,

    .. math:: \tfrac12 \log \frac{\sum_i \mu_i^2}{\sum_i \sigma_i^2}.

    Scores within a tensor are comparable. Scores of different tensors are comparable if all local radii have the same
    prior, or, for signal-to-noise ratios, if all tensors are equally noisy.

    Source: Oh, Adamczewski and Park (2019), section 3.3: local radii only, because the global one scales every group.
    Their code takes the mode of one factor twice, and no root.

    :param guide: a trained guide of the library whose sites are named as the parameters of a network.
    :returns: scores of outputs (rows) and inputs (columns) by layer. The rows of the last tensor have none: they are
        the network's own outputs.
    :raises ValueError: if the guide is of another library, or no site is a weight tensor.

    Example::

        >>> from torch import nn
        >>> from pyro_radial import AutoRadial, BayesianModule
        >>> guide = AutoRadial(BayesianModule(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))))
        >>> guide.setup(torch.zeros(1, 3))
        >>> unit_scores(guide).outputs.keys(), unit_scores(guide).inputs.keys()
        (dict_keys(['0']), dict_keys(['0', '2']))
    """
    check_guide(guide)
    posterior = cast("dict[str, Distribution]", guide.posterior())
    scores: dict[str, dict[str, Tensor]] = {units: {} for units in _SIDES}
    names = list(_weight_tensors(posterior))
    if not names:
        raise ValueError(f"guide must have a weight tensor among its sites, got {list(posterior)}")
    for name in names:
        sites = TensorSites(name)
        directional = sites.global_radius.gamma in posterior
        for units, side in _SIDES.items():
            values = (
                _directional(posterior, sites, side)
                if directional
                else _ratio(posterior[name], side)
            )
            if values is not None:
                scores[units][name.removesuffix(".weight")] = values
    scores["outputs"].pop(names[-1].removesuffix(".weight"), None)
    return Scores(**scores)


def _counts(masks: Mapping[str, Tensor]) -> str:
    """Return how many units of each layer are kept, as text."""
    counts = [f"{name!r}: {int(mask.sum())} of {len(mask)}" for name, mask in masks.items()]
    return "{" + ", ".join(counts) + "}"


def _weight_tensors(posterior: dict[str, Distribution]) -> Iterator[str]:
    """Yield the names of parameters of two or more dims, in the order of the network."""
    for site, distribution in posterior.items():
        if tensor := TensorSites.with_global_radius(site):
            yield tensor.parameter
        elif len(distribution.event_shape) >= 2 and is_real(distribution.support):
            yield site


def _directional(
    posterior: dict[str, Distribution], sites: TensorSites, side: Side
) -> Tensor | None:
    """Score the groups of one side of a tensor with radial-directional sites, or return None if it has none there."""
    if sites.direction(side) not in posterior:
        return None
    radius = sites.local_radius(side)
    gamma = dist.LogNormal(*moments(posterior[radius.gamma], ExpTransform()))
    inverse_gamma = dist.LogNormal(*moments(posterior[radius.inverse_gamma], ExpTransform()))
    length = torch.linalg.vector_norm(posterior[sites.direction(side)].mean, dim=-1)
    return log_mode(sqrt_product(gamma, inverse_gamma)) + length.log()


def _ratio(distribution: Distribution, side: Side) -> Tensor:
    """Score the rows or columns of a weight tensor by the logarithm of the signal-to-noise ratio, ``[groups]``."""
    squares = distribution.mean.square()
    variance = distribution.variance
    if side == "column":
        squares = squares.transpose(0, 1)
        variance = variance.transpose(0, 1)
    return 0.5 * (squares.flatten(1).sum(-1) / variance.flatten(1).sum(-1)).log()
