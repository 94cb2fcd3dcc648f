# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A trained Bayesian network, pruned to a smaller plain network by the errors of nested cuts."""

import copy
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch_pruning
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim.swa_utils import update_bn

from pyro_radial._pyro.checks import check_integer, non_negative_float
from pyro_radial._pyro.random_numbers import seeded
from pyro_radial.compression.scores import PosteriorImportance, check_guide
from pyro_radial.distributions.constraints import is_on_sphere
from pyro_radial.infer.autoguide.per_site import AutoPerSite
from pyro_radial.infer.data import Rows, move
from pyro_radial.nn.bayesian_module import BayesianModule
from pyro_radial.nn.last_layer import hooked
from pyro_radial.nn.likelihoods import Categorical, Likelihood
from pyro_radial.nn.modules import device_of
from pyro_radial.nn.supervised import SupervisedModel, for_likelihood

ROWS_AT_ONCE = 1_000  # evaluated at a time
COUNTED_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
#: The output channels to remove, by the name of a layer. Layers that depend on it lose the same ones.
Removed = dict[str, list[int]]


class PrunedSize(NamedTuple):
    """The channels that were removed, and the error and the size of the network that is left."""

    removed: Removed
    error: float
    weights: int
    flops: int


@dataclass(frozen=True, eq=False)
class Pruned:
    """A pruned network, from :func:`prune`.

    :param network: the smaller plain network.
    :param record: the channels ``removed``, by the name of the layer that writes them; its validation ``error`` in
        percent; its number of ``weights``, in parameters of two or more dims; and its ``flops`` for one row: for each
        output of a linear layer or convolution a multiply-add for each weight that enters it, and one more.
    :param path: the same of all networks that were tried; the first is the whole network.
    """

    network: nn.Module
    record: PrunedSize
    path: list[PrunedSize]

    def __repr__(self) -> str:
        whole = self.path[0]
        return (
            f"Pruned({self.record.weights:,} of {whole.weights:,} weights, {self.record.flops:,} of {whole.flops:,} "
            f"FLOPs, validation error {self.record.error:.2f} % after {whole.error:.2f} %)"
        )


@torch.no_grad()
def prune(
    model: SupervisedModel, guide: AutoPerSite, data: Any, tolerance: float, *, num_cuts: int = 50
) -> Pruned:
    """Remove the channels that matter least under the posterior, as long as the validation error allows it.

    This starts from :func:`mean_network` and removes channels in the order of :class:`PosteriorImportance`, once by the
    scores themselves and once by their ranks within each layer. It returns the smallest network whose error is at most
    that of the whole network plus the tolerance; fine-tune it like any plain network. Running statistics of batch norms
    are those of noisy networks, so all networks get new ones, from the inputs of the data.

    Torch-Pruning finds out which layers depend on each other, and removes the channels. Channels that are added by a
    skip connection go together, and each head of an :class:`~torch.nn.MultiheadAttention` loses as many. A layer stays
    whole if the network does not run with fewer of its channels: those that write the network's outputs, are added to
    its inputs, or are split by a fixed number, such as queries and keys of an attention of your own.

    :param SupervisedModel model: a classifier with the likelihood :class:`~pyro_radial.nn.likelihoods.Categorical`,
        around any network that takes one tensor. Not changed.
    :param guide: its trained guide, of this library.
    :param data: validation rows, as for :func:`~pyro_radial.fit`.
    :param float tolerance: the largest allowed rise of the validation error, in percentage points.
    :param int num_cuts: the largest number of networks tried in each of the two orders.
    :returns: a result with ``network``, the smaller network; ``record``, its error and size; and ``path``, the record
        of every network tried.
    :raises ValueError: naming the argument: for a network without channels to remove, another likelihood, a guide
        without scores, data that do not fit, or a tolerance that is negative or not finite.

    Example::

        >>> from pyro_radial import AutoRadial
        >>> x, y = torch.randn(40, 4), torch.arange(40) % 2
        >>> model = SupervisedModel(BayesianModule(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))), Categorical())
        >>> guide = AutoRadial(model)
        >>> guide.setup(x, y)
        >>> result = prune(model, guide, (x, y), tolerance=100.0)
        >>> result.record.weights, result.path[0].weights
        (6, 48)
    """
    non_negative_float("tolerance", tolerance)
    check_integer("num_cuts", num_cuts, 2, "an integer of at least 2")
    bnn: Any = getattr(model, "bnn", None)
    likelihood = getattr(model, "likelihood", None)
    is_classifier = isinstance(likelihood, Categorical) and likelihood.event_dim == 1
    is_supervised = isinstance(model, SupervisedModel) and isinstance(bnn, BayesianModule)
    if not (is_supervised and is_classifier):
        raise ValueError(
            "model must be a SupervisedModel around a BayesianModule, with the likelihood Categorical for one label "
            f"for each row, got {type(model).__name__} with {type(likelihood).__name__}"
        )
    rows = Rows(data, "data")
    example, _ = rows.take(torch.arange(min(2, len(rows)), device="cpu"))
    if not isinstance(example, Tensor):
        raise ValueError(f"data: x must be one tensor, got {type(example).__name__}")
    whole = mean_network(bnn, guide)
    example = move(example, device_of(whole))
    error_of = partial(_percent_wrong, rows=rows, likelihood=model.likelihood)
    path = [
        PrunedSize({}, error_of(copy.deepcopy(whole)), *count_weights_and_flops(whole, example))
    ]
    groups = removable_groups(whole, example, PosteriorImportance(whole, guide))
    if not groups:
        raise ValueError(
            "model must hold a network with channels that can be removed, got none that has scores in "
            f"{type(whole).__name__}"
        )
    for per_layer in (False, True):
        for removed in nested_cuts(groups, num_cuts, per_layer=per_layer):
            smaller = remove_channels(whole, example, removed)
            path.append(
                PrunedSize(removed, error_of(smaller), *count_weights_and_flops(smaller, example))
            )
    allowed = path[0].error + tolerance + 1e-9
    best = min(
        (record for record in path if record.error <= allowed),
        key=lambda record: (record.weights, record.flops),
    )
    network = remove_channels(whole, example, best.removed)
    error_of(network)  # for its batch norms
    return Pruned(network.train(model.training), best, path)


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
    check_guide(guide)
    values = guide.median()
    for site, distribution in cast("dict[str, Distribution]", guide.posterior()).items():
        if is_on_sphere(distribution.support):
            values[site] = distribution.mean
    return bnn.to_module(values)


class ChannelGroup(NamedTuple):
    """The channels of one layer, each of which goes together with what depends on it."""

    layer: str
    #: One score for each channel of a section, ``[channels / sections]``.
    scores: Tensor
    #: Equal parts that must keep equal sizes, such as the heads of an attention.
    sections: int

    def channels(self, index: Tensor) -> list[int]:
        """Return the channels of all sections at these places within a section."""
        starts = len(self.scores) * torch.arange(self.sections, device="cpu")
        return sorted((starts[:, None] + index).flatten().tolist())


def removable_groups(
    network: nn.Module, example: Tensor, importance: PosteriorImportance
) -> list[ChannelGroup]:
    """List the groups of channels that have scores, and without some of which the network runs."""
    groups = []
    names = {module: name for name, module in network.named_modules()}
    for dependent in _trace(network, example).get_all_groups():
        scores = importance(dependent)
        sections = max(_sections(item.dep.target.module) for item in dependent)
        if scores is None or len(scores) % sections:
            continue
        by_section = scores.reshape(sections, -1).mean(0)
        group = ChannelGroup(names[dependent[0].dep.target.module], by_section, sections)
        if len(by_section) > 1 and _runs_without(network, example, group):
            groups.append(group)
    return groups


def nested_cuts(groups: list[ChannelGroup], num_cuts: int, *, per_layer: bool) -> list[Removed]:
    """List the channels to remove in nested cuts, up to one that keeps a single channel of each group and section.

    Each cut removes the channels up to a quantile of all scores, except the best one of each group. Scores of different
    groups are compared, so they must be on a common scale. With ``per_layer`` the quantile is that of the group's own
    scores: each cut then removes the same share of every group. There are at most ``num_cuts``.
    """
    all_scores = torch.cat([group.scores for group in groups])
    cuts: list[Removed] = []
    for quantile in torch.linspace(0.0, 1.0, num_cuts, device="cpu").tolist():
        removed = {}
        for group in groups:
            reference = group.scores if per_layer else all_scores
            is_low = group.scores <= reference.quantile(quantile, interpolation="lower")
            is_low[group.scores.argmax()] = False
            if is_low.any():
                removed[group.layer] = group.channels(is_low.nonzero().squeeze(1))
        if removed and removed not in cuts:
            cuts.append(removed)
    return cuts


def remove_channels(network: nn.Module, example: Tensor, removed: Removed) -> nn.Module:
    """Build a copy of the network without some output channels of layers, and without what depends on them."""
    smaller = copy.deepcopy(network)
    graph = _trace(smaller, example)
    for name, channels in removed.items():
        layer = smaller.get_submodule(name)
        handler = graph.get_pruner_of_module(layer).prune_out_channels
        graph.get_pruning_group(layer, handler, channels).prune()
    for name, parameter in smaller.named_parameters():
        parameter.requires_grad_(network.get_parameter(name).requires_grad)
    return smaller


def _trace(network: nn.Module, example: Tensor) -> torch_pruning.DependencyGraph:
    """Trace, by gradients, which layers depend on each other; the network is put in evaluation mode."""
    with torch.enable_grad():
        return torch_pruning.DependencyGraph().build_dependency(network, (example,), verbose=False)


def _sections(module: nn.Module) -> int:
    """Return the number of parts of a module that must keep equal sizes."""
    if isinstance(module, nn.MultiheadAttention):
        return module.num_heads
    if getattr(module, "groups", 1) == getattr(module, "out_channels", 0):
        return 1  # A depthwise convolution has as many groups as channels, also when it is pruned.
    return getattr(module, "groups", getattr(module, "num_groups", 1))


def _runs_without(network: nn.Module, example: Tensor, group: ChannelGroup) -> bool:
    """Return whether the network runs, with outputs as before, without the first channel of each section."""
    channels = group.channels(torch.zeros(1, dtype=torch.long, device="cpu"))
    try:
        smaller = remove_channels(network, example, {group.layer: channels})
        return _output_shapes(smaller(example)) == _output_shapes(network(example))
    except Exception:  # Networks and Torch-Pruning raise errors of many types.
        return False


def _output_shapes(outputs: object) -> list[torch.Size]:
    return [output.shape for output in torch_pruning.utils.flatten_as_list(outputs)]


def count_weights_and_flops(network: nn.Module, example: Tensor) -> tuple[int, int]:
    r"""Count the weights, and the operations of linear layers and convolutions for one row.

    Each output takes one multiply-add for each weight that enters it, and one for the bias, with or without a bias: a
    convolution :math:`(K_h K_w C_{in} + 1) \, H_{out} W_{out} C_{out}`.

    Source: Oh, Adamczewski and Park (2019), section 5.2. The numbers in its table 2 do not follow its formula: they
    count a layer that no network of the table has, with 16 inputs per channel of the last convolution, and leave out
    the last layer.
    """
    weights = sum(tensor.numel() for tensor in network.parameters() if tensor.ndim >= 2)
    counts: list[int] = []
    layers: dict[str, Any] = {
        name: m for name, m in network.named_modules() if isinstance(m, COUNTED_LAYERS)
    }

    def count(name: str, inputs: Tensor, output: Tensor) -> None:
        counts.append((layers[name].weight[0].numel() + 1) * output.numel())

    with hooked(layers, count):
        network.eval()(example[:1])
    return weights, sum(counts)


def _percent_wrong(network: nn.Module, rows: Rows, likelihood: Likelihood) -> float:
    """Return the share of rows with another label than the most probable class, in percent."""
    device = device_of(network)
    num_wrong = 0
    batches = torch.arange(len(rows), device="cpu").tensor_split(
        math.ceil(len(rows) / ROWS_AT_ONCE)
    )
    try:
        with seeded(0, device):  # Dropouts draw.
            update_bn((move(rows.take(index)[0], device) for index in batches), network)
        network.eval()
        for index in batches:
            x, y = (move(tensor, device) for tensor in rows.take(index))
            logits = for_likelihood(network(x), likelihood)
            num_wrong += int((logits.argmax(-1) != likelihood.check_target(logits, y)).sum())
    except (RuntimeError, ValueError, IndexError) as error:
        raise ValueError(f"data: {error}") from error
    return 100.0 * num_wrong / len(rows)
