# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A trained Bayesian network, pruned to a smaller plain network by the loss of nested cuts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim.swa_utils import update_bn

from pyro_radial._pyro.checks import check_types, non_negative_float, positive_count
from pyro_radial._pyro.random_numbers import seeded
from pyro_radial.compression.graph import count_flops, count_weights, read_chain
from pyro_radial.compression.scores import Cut, Scores, check_guide, unit_scores
from pyro_radial.compression.surgery import complete_cut, cut_network
from pyro_radial.distributions.constraints import is_on_sphere
from pyro_radial.infer.autoguide.per_site import AutoPerSite
from pyro_radial.infer.data import Rows, move
from pyro_radial.nn.bayesian_module import BayesianModule
from pyro_radial.nn.likelihoods import Categorical, Likelihood
from pyro_radial.nn.modules import device_of
from pyro_radial.nn.supervised import SupervisedModel

ROWS_AT_ONCE = 1_000  # evaluated at a time


class CutRecord(NamedTuple):
    """A cut, and the loss and the size of the network that it leaves."""

    cut: Cut
    loss: float
    weights: int
    flops: int


@dataclass(frozen=True, eq=False)
class Pruned:
    """A pruned network, from :func:`prune`.

    :param network: the smaller plain network.
    :param record: its ``cut``, its validation error in percent (``loss``), its number of ``weights`` without biases,
        and its ``flops``: for each output of a layer a multiply-add for each weight that enters it, and one more.
    :param path: the same of all networks that were tried; the first is the whole network.
    """

    network: nn.Sequential
    record: CutRecord
    path: list[CutRecord]

    def __repr__(self) -> str:
        whole = self.path[0]
        return (
            f"Pruned({self.record.weights:,} of {whole.weights:,} weights, {self.record.flops:,} of {whole.flops:,} "
            f"FLOPs, validation error {self.record.loss:.2f} % after {whole.loss:.2f} %)"
        )


@torch.no_grad()
def prune(
    model: SupervisedModel, guide: AutoPerSite, data: Any, tolerance: float, *, num_cuts: int = 50
) -> Pruned:
    """Remove the units that matter least under the posterior, as long as the validation error allows it.

    This starts from :func:`mean_network` and cuts units in the order of :func:`unit_scores`, once by the scores
    themselves and once by their ranks within each layer. It returns the smallest network whose error is at most that of
    the whole network plus the tolerance; fine-tune it like any plain network. Running statistics of batch norms are
    those of noisy networks, so all networks get new ones, from the inputs of the data.

    :param SupervisedModel model: a classifier with the likelihood :class:`~pyro_radial.nn.likelihoods.Categorical`,
        around a chain of layers, as for :func:`~pyro_radial.compression.cut_network`.
    :param guide: its trained guide, of this library.
    :param data: validation rows, as for :func:`~pyro_radial.fit`.
    :param float tolerance: the largest allowed rise of the validation error, in percentage points.
    :param int num_cuts: the largest number of cuts in each of the two orders.
    :returns: a result with ``network``, the smaller network; ``record``, its error and size; and ``path``, the record
        of every network tried.
    :raises ValueError: naming the argument: for a network with branches, another likelihood, a guide without
        scores, data that do not fit, or a tolerance that is negative or not finite.

    Example::

        >>> from pyro_radial import AutoRadial
        >>> x, y = torch.randn(40, 4), torch.arange(40) % 2
        >>> model = SupervisedModel(BayesianModule(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))), Categorical())
        >>> guide = AutoRadial(model)
        >>> guide.setup(x, y)
        >>> result = prune(model, guide, (x, y), tolerance=100.0)
        >>> result.record.weights, result.path[0].weights
        (3, 48)
    """
    non_negative_float("tolerance", tolerance)
    if positive_count("num_cuts", num_cuts) < 2:
        raise ValueError(f"num_cuts must be at least 2, got {num_cuts}")
    bnn = _network_of(model)
    rows = Rows(data, "data")
    example, _ = rows.take(torch.arange(min(2, len(rows)), device="cpu"))
    if not isinstance(example, Tensor):
        raise ValueError(f"data: x must be one tensor, got {type(example).__name__}")
    scores = unit_scores(guide)
    net = _chain(mean_network(bnn, guide))
    # Both orders start with the whole network.
    cuts = (
        nested_cuts(scores, num_cuts, per_layer=False)
        + nested_cuts(scores, num_cuts, per_layer=True)[1:]
    )
    with warnings.catch_warnings():
        # At the end of a path, layers that would be left without units keep one.
        warnings.filterwarnings("ignore", message=".* would be cut", category=UserWarning)
        measure = partial(_percent_wrong, rows=rows, likelihood=model.likelihood)
        path = [evaluate_cut(net, cut, measure, example.shape[1:], scores) for cut in cuts]
    allowed = path[0].loss + tolerance + 1e-9
    best = min(
        (record for record in path if record.loss <= allowed),
        key=lambda record: (record.weights, record.flops),
    )
    small = cut_network(net, best.cut)
    measure(small)  # for its batch norms
    return Pruned(small.train(model.training), best, path)


@torch.no_grad()
def mean_network(bnn: BayesianModule, guide: AutoPerSite) -> nn.Module:
    r"""Build the plain network at the center of a posterior: directions at their means, other sites at their medians.

    A mean direction :math:`A(\kappa) \mu` is shorter than one: a group whose direction is unknown becomes zero, as in
    the mean of the weights. ``bnn.to_module(guide.median())`` would give it its full radius.

    :param BayesianModule bnn: the Bayesian network.
    :param guide: its trained guide, of this library.
    :returns: a plain network with copies of everything.

    Example::

        >>> from pyro_radial import AutoRadialDirectional
        >>> from pyro_radial.nn.priors import RadialDirectionalPrior
        >>> net = nn.Linear(3, 2)
        >>> bnn = BayesianModule(net, RadialDirectionalPrior())
        >>> guide = AutoRadialDirectional(bnn, init_mean_cosine=0.999)
        >>> guide.setup(torch.zeros(1, 3))
        >>> ratio = mean_network(bnn, guide).weight / net.weight
        >>> bool(((ratio > 0.998) & (ratio < 1.0)).all())
        True
    """
    check_types(BayesianModule, bnn=bnn)
    check_guide(guide)
    values = guide.median()
    for site, distribution in cast("dict[str, Distribution]", guide.posterior()).items():
        if is_on_sphere(distribution.support):
            values[site] = distribution.mean
    return bnn.to_module(values)


def nested_cuts(scores: Scores, num_cuts: int, *, per_layer: bool) -> list[Cut]:
    """List nested cuts, from one that keeps everything to one that keeps a single unit of each layer.

    Each cut removes the units below a threshold, except the best unit of each layer (of its outputs and of its inputs).
    Scores of all layers, outputs and inputs are compared with each other, so they must be on a common scale. With
    ``per_layer`` their ranks within their own layer are compared: each cut then removes the same share of every layer.
    There are at most ``num_cuts``, spread evenly over the distinct scores.
    """
    everything = None
    if not per_layer:
        everything = torch.cat([*scores.outputs.values(), *scores.inputs.values()])
    outputs = {layer: _ranks(values, everything) for layer, values in scores.outputs.items()}
    inputs = {layer: _ranks(values, everything) for layer, values in scores.inputs.items()}
    ranks = torch.cat([*outputs.values(), *inputs.values()])
    levels = torch.cat([ranks.new_tensor([-1.0]), ranks[ranks < math.inf].unique()])
    chosen = (
        torch.linspace(0, len(levels) - 1, min(num_cuts, len(levels)), device="cpu").round().long()
    )
    cuts = []
    for level in levels[chosen]:
        kept_outputs = {layer: values > level for layer, values in outputs.items()}
        kept_inputs = {layer: values > level for layer, values in inputs.items()}
        cuts.append(Cut(kept_outputs, kept_inputs))
    return cuts


def evaluate_cut(
    net: nn.Sequential,
    cut: Cut,
    loss: Callable[[nn.Sequential], float],
    input_shape: Sequence[int],
    scores: Scores | None = None,
) -> CutRecord:
    """Cut a network, and measure the loss and the size of what is left; the arguments are those of ``cut_network``."""
    whole = complete_cut(net, cut, scores)
    small = cut_network(net, whole)
    flops = count_flops(small, input_shape)
    return CutRecord(whole, loss(small), count_weights(small), flops)


def _network_of(model: object) -> BayesianModule:
    """Return the network of a classifier, or raise a ValueError."""
    bnn = getattr(model, "bnn", None)
    likelihood = getattr(model, "likelihood", None)
    is_classifier = isinstance(likelihood, Categorical) and likelihood.event_dim == 1
    if (
        not isinstance(model, SupervisedModel)
        or not isinstance(bnn, BayesianModule)
        or not is_classifier
    ):
        raise ValueError(
            "model must be a SupervisedModel around a BayesianModule, with the likelihood Categorical for one label "
            f"for each row, got {type(model).__name__} with {type(likelihood).__name__}"
        )
    return bnn


def _chain(net: nn.Module) -> nn.Sequential:
    """Return the network, or raise a ValueError if it is not a chain of layers."""
    try:
        read_chain(net)
    except ValueError as error:
        raise ValueError(f"model must hold a chain of layers: {error}") from error
    return cast("nn.Sequential", net)


def _percent_wrong(net: nn.Module, rows: Rows, likelihood: Likelihood) -> float:
    """Return the share of rows with another label than the most probable class, in percent."""
    device = device_of(net)
    wrong = 0
    parts = torch.arange(len(rows), device="cpu").tensor_split(math.ceil(len(rows) / ROWS_AT_ONCE))
    try:
        with seeded(0, device):  # Dropouts draw.
            update_bn((move(rows.take(index)[0], device) for index in parts), net)
        net.eval()
        for index in parts:
            x, y = (move(part, device) for part in rows.take(index))
            logits = net(x)
            wrong += int((logits.argmax(-1) != likelihood.check_target(logits, y)).sum())
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"data: {error}") from error
    return 100.0 * wrong / len(rows)


def _ranks(scores: Tensor, among: Tensor | None) -> Tensor:
    """Return the share of scores below each, by default within its layer; infinite for the best, which is never cut."""
    own = scores.detach().cpu().double()
    others = own if among is None else among.detach().cpu().double()
    ranks = torch.searchsorted(others.sort().values, own).double() / len(others)
    ranks[int(own.argmax())] = math.inf
    return ranks
