# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A trained Bayesian network, pruned to a smaller plain network: in one call, or by the loss of nested cuts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import (
    check_flag,
    check_items,
    check_number,
    check_types,
    non_negative_float,
    positive_count,
)
from pyro_radial._pyro.random_numbers import seeded
from pyro_radial.compression.graph import count_flops, count_weights, read_chain
from pyro_radial.compression.scores import Cut, Scores, check_guide, unit_scores
from pyro_radial.compression.surgery import complete_cut, cut_network
from pyro_radial.distributions.constraints import is_on_sphere
from pyro_radial.infer.autoguide.base import AutoPerSite
from pyro_radial.infer.training.data import Rows, device_of, move
from pyro_radial.nn.bayesian_module import BayesianModule
from pyro_radial.nn.likelihoods import Categorical, Likelihood
from pyro_radial.nn.supervised import SupervisedModel

__all__ = ["CutRecord", "Pruned", "cut_path", "evaluate_path", "mean_network", "prune"]

ROWS = 1_000  # evaluated at a time


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
    :param record: its ``cut``, its validation error in percent (``loss``), and its numbers of ``weights`` and
        ``flops``.
    :param path: the same of all networks that were tried; the first is the whole network.
    """

    network: nn.Module
    record: CutRecord
    path: list[CutRecord]

    def __repr__(self) -> str:
        whole, left = self.path[0], self.record
        return (
            f"Pruned({left.weights:,} of {whole.weights:,} weights, {left.flops:,} of {whole.flops:,} FLOPs, "
            f"validation error {left.loss:.2f} % after {whole.loss:.2f} %)"
        )


@torch.no_grad()
def prune(model: SupervisedModel, guide: AutoPerSite, data: Any, tolerance: float, *, num_cuts: int = 50) -> Pruned:
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
    :raises ValueError: naming the argument: for a network that is no such chain, another likelihood, a guide without
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
    bnn = _network_of(model)
    rows = Rows(data, "data")
    example, _ = rows.take(torch.arange(min(2, len(rows))))
    if not isinstance(example, Tensor):
        raise ValueError(f"data: x must be one tensor, got {type(example).__name__}")
    scores = unit_scores(guide)
    net = _chain(mean_network(bnn, guide))
    cuts = cut_path(scores, num_cuts=num_cuts) + cut_path(scores, num_cuts=num_cuts, per_layer=True)[1:]
    with warnings.catch_warnings():
        # At the end of a path, layers that would be left without units keep one.
        warnings.filterwarnings("ignore", message=".* would be cut", category=UserWarning)
        measure = partial(_percent_wrong, rows=rows, likelihood=model.likelihood)
        path = evaluate_path(net, cuts, measure, example.shape[1:], scores, progress=False)
    allowed = path[0].loss + tolerance + 1e-9
    best = min((record for record in path if record.loss <= allowed), key=lambda record: (record.weights, record.flops))
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
    draw, posterior = guide.median(), dict[str, Any](guide.posterior())
    means = {site: distribution.mean for site, distribution in posterior.items() if is_on_sphere(distribution.support)}
    return bnn.to_module({**draw, **means})


def cut_path(scores: Scores, *, num_cuts: int = 50, per_layer: bool = False) -> list[Cut]:
    """List nested cuts, from one that keeps everything to one that keeps a single unit of each layer.

    Each cut removes the units below a threshold, except the best unit of each layer (of its outputs and of its inputs).

    :param scores: how much the units matter. Scores of different layers, and of outputs and inputs, are compared with
        each other, so they must be on a common scale.
    :param num_cuts: the largest number of cuts, at least 2, spread evenly over the distinct scores.
    :param per_layer: compare ranks of the scores within their own layer: each cut then removes the same share of every
        layer, and no common scale is needed.
    :returns: the cuts, starting with the one that keeps everything.
    :raises ValueError: if ``num_cuts`` is below two.

    Example::

        >>> scores = Scores(outputs={"0": torch.tensor([-1.0, -9.0, 0.0]), "2": torch.tensor([-3.0, -2.0])})
        >>> cut_path(scores, num_cuts=3)
        [Cut(outputs={'0': 3 of 3, '2': 2 of 2}, inputs={}), Cut(outputs={'0': 2 of 3, '2': 1 of 2}, inputs={}),
         Cut(outputs={'0': 1 of 3, '2': 1 of 2}, inputs={})]
    """
    check_types(Scores, scores=scores)
    check_flag("per_layer", per_layer)
    if positive_count("num_cuts", num_cuts) < 2:
        raise ValueError(f"num_cuts must be at least 2, got {num_cuts}")
    plain = [{layer: v.detach().cpu().double() for layer, v in side.items()} for _, side in scores.sides()]
    everything = torch.cat([values for side in plain for values in side.values()]).sort().values
    outputs, inputs = (
        {layer: _ranks(values, None if per_layer else everything) for layer, values in side.items()} for side in plain
    )
    ranks = torch.cat([*outputs.values(), *inputs.values()])
    levels = torch.cat([torch.tensor([-1.0], dtype=ranks.dtype), ranks[ranks < math.inf].unique()])
    chosen = torch.linspace(0, len(levels) - 1, min(num_cuts, len(levels))).round().long()

    def above(level: Tensor) -> Cut:
        return Cut(*({layer: values > level for layer, values in side.items()} for side in (outputs, inputs)))

    return [above(level) for level in levels[chosen]]


def evaluate_path(
    net: nn.Sequential,
    path: Iterable[Cut],
    loss: Callable[[Any], float],
    input_shape: Sequence[int],
    scores: Scores | None = None,
    *,
    progress: bool = True,
) -> list[CutRecord]:
    """Cut a network by each cut of a path, and measure the loss and the size of what is left.

    :param net: a chain, as for :func:`~pyro_radial.compression.cut_network`; not changed.
    :param path: the cuts, such as those of :func:`cut_path`.
    :param loss: a function from a network to its loss, such as its error on validation data.
    :param input_shape: shape of one input without the batch, to count operations.
    :param scores: how much the units matter, to choose the unit that a layer keeps if the cut would leave none.
    :param progress: whether to show progress.
    :returns: for each cut its completed form (:func:`~pyro_radial.compression.surgery.complete_cut`), the ``loss``,
        and the number of ``weights`` and ``flops``.

    Example::

        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> path = cut_path(Scores(outputs={"0": torch.tensor([0.0, 2.0, 1.0])}))
        >>> records = evaluate_path(net, path, lambda net: 0.1 * net[0].in_features, (2,), progress=False)
        >>> [(record.weights, record.flops, record.loss) for record in records]
        [(9, 13, 0.2), (6, 9, 0.2), (3, 5, 0.2)]
    """
    check_types(Callable, loss=loss)
    records = []
    with tqdm(check_items(Cut, "path", path), desc="cuts", disable=not check_flag("progress", progress)) as bar:
        for cut in bar:
            whole = complete_cut(net, cut, scores)
            small = cut_network(net, whole)
            weights, flops = count_weights(small).total, count_flops(small, input_shape).total
            value = check_number("loss(net)", loss(small), lambda number: True, "a number")
            bar.set_postfix(weights=weights, loss=f"{value:.4g}")
            records.append(CutRecord(whole, value, weights, flops))
    return records


def _network_of(model: Any) -> BayesianModule:
    """The network of a classifier, or a ValueError."""
    bnn, likelihood = getattr(model, "bnn", None), getattr(model, "likelihood", None)
    is_classifier = isinstance(likelihood, Categorical) and likelihood.event_dim == 1
    if not isinstance(model, SupervisedModel) or not isinstance(bnn, BayesianModule) or not is_classifier:
        raise ValueError(
            "model must be a SupervisedModel around a BayesianModule, with the likelihood Categorical for one label "
            f"for each row, got {type(model).__name__} with {type(likelihood).__name__}"
        )
    return bnn


def _chain(net: nn.Module) -> nn.Sequential:
    """The network, or a ValueError if it is no chain of layers."""
    try:
        read_chain(net)
    except ValueError as error:
        raise ValueError(f"model must hold a chain of layers: {error}") from error
    return cast("nn.Sequential", net)


def _percent_wrong(net: nn.Module, rows: Rows, likelihood: Likelihood) -> float:
    """The share of rows with another label than the most probable class, in percent."""
    device, wrong = device_of(net), 0
    parts = torch.arange(len(rows)).tensor_split(math.ceil(len(rows) / ROWS))
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
    """The share of scores below each, by default within its layer; infinite for the best, which is never cut."""
    among = scores.sort().values if among is None else among
    ranks = torch.searchsorted(among, scores).double() / len(among)
    ranks[int(scores.argmax())] = math.inf
    return ranks
