# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of functions from a trained guide, or from samples of a posterior."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import pyro.poutine as poutine
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import check_choice, positive_count, warn
from pyro_radial._pyro.compat import handlers_around, is_subsample, tree_leaves, tree_map
from pyro_radial._pyro.random_numbers import one_at_a_time, seeded
from pyro_radial._pyro.types import Batch, Guide, Model
from pyro_radial.infer.data import as_inputs, move, num_rows, take
from pyro_radial.infer.prediction.guide_draws import (
    DrawBlock,
    GuideDraws,
    PosteriorSamples,
    check_global,
    check_sites,
)
from pyro_radial.infer.prediction.linearized import (
    LinearizedGuide,
    draw_normals,
    output_marginals,
    probit_logits,
)
from pyro_radial.infer.prediction.prediction import (
    Prediction,
    are_identical,
    make_prediction,
    warn_if_identical,
)
from pyro_radial.infer.prediction.propagate import calibrated, even_normals, propagated_moments
from pyro_radial.nn.bayesian_module import submodules
from pyro_radial.nn.functional_net import WITHOUT_FASTPATH
from pyro_radial.nn.likelihoods import FUNCTION_SITE, Bernoulli, Categorical
from pyro_radial.nn.modules import device_of, dtype_of, evaluating
from pyro_radial.nn.named_likelihoods import NamedLikelihoods, function_sites
from pyro_radial.nn.supervised import (
    ModelNetwork,
    NetworkCopy,
    find_network,
    likelihood_names,
    read_noise,
)

DEFAULT_NUM_SAMPLES = 64
# Numbers in the inputs of one pass by means and variances, and the rows and draws that calibrate it.
CACHED_INPUTS = 2**18
CALIBRATION_ROWS, CALIBRATION_DRAWS = 16, 32
DROPOUT_LAYERS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
# In these layers the mode changes the dropout and nothing else.
LAYERS_WITH_DROPOUT = (nn.RNNBase, nn.MultiheadAttention)


@torch.no_grad()
def predict(
    model: Callable[..., object],
    guide: Callable[..., object] | Mapping[str, Tensor],
    x: Any,
    num_samples: int | None = None,
    chunk_size: int = 1024,
    *,
    method: Literal["draws", "linearized", "probit", "propagate"] = "draws",
    dropout: bool = False,
    function_site: str = FUNCTION_SITE,
    progress: bool = False,
) -> Any:
    r"""Draw functions from the guide and evaluate them at any number of inputs.

    Draws of normal and radial guides of this library come in pairs around the mean, with radii spread evenly: each has
    the posterior, and together they have a smaller error than independent ones. Where Python would take most of the
    time, at few rows, all draws run in one call. The draws do not depend on ``chunk_size``. Modules run in evaluation
    mode and are left in the mode they were in. Several threads may predict at once. To keep draws and serve them, use
    :class:`~pyro_radial.infer.SampledNetwork`.

    ``method="linearized"`` needs one pass in place of S. It linearizes the function in the weights around their means
    m, with variances :math:`v_i`, and draws the outputs of each input from their joint normal distribution

    .. math:: f(x) \sim \mathcal N\Big(f_m(x), \sum_i v_i J_i(x) J_i(x)^T\Big), \qquad
        J_i = \partial f(x) / \partial w_i.

    It takes guides of this library, and every site of the function needs a mean and a variance in closed form; positive
    sites have none. For classes, ``method="probit"`` draws nothing: with the diagonal v(x) of that covariance it
    returns one sample, the logits :math:`f_m(x) / \sqrt{1 + \pi v(x) / 8}`. ``dropout=True`` is Monte Carlo dropout,
    with own masks for each row of each draw, which depend on ``chunk_size``. With these methods a draw is not one
    function, so use only per-input quantities.

    ``method="propagate"`` needs one pass too, at several times the cost of a plain one, and no derivatives. It
    carries the mean and the variance of every unit from layer to layer; 32 draws at 16 of the rows set one factor for
    the variances of all outputs, and S equally likely values stand for the normal distribution of each row's outputs.
    It takes normal and radial posteriors, and networks of linear layers, convolutions, activations, pooling, norms in
    evaluation mode and sums of branches, in any ``forward``. Units are taken as uncorrelated.

    Source: Immer, Korzepa and Bauer (2021), "Improving Predictions of Bayesian Neural Nets via Local Linearization";
    Gal and Ghahramani (2016), "Dropout as a Bayesian Approximation", eq. 6; for the probit, MacKay (1992), "The
    Evidence Framework Applied to Classification Networks".

    :param model: a Pyro model ``model(x)`` that records the function's values at a site.
    :param guide: its trained guide, or a mapping from latent sites to S samples of each, ``[S, *shape]``, such as
        Pyro's ``mcmc.get_samples()``. Sites without samples are drawn from their priors.
    :param x: inputs ``[N, ...]``, a tuple or a dict of tensors of N rows each, NumPy arrays, a ``Dataset`` or a
        ``DataLoader`` with or without targets, in the dataset's order.
    :param int num_samples: S, the number of functions; 64 by default, and with samples all of them. On LeNet with
        widths found by ``fit``, eight lose 0.0007 nats in the mean; wide posteriors and mutual information need more.
    :param int chunk_size: the number of inputs in one pass.
    :param str method: "draws" of the weights, or "linearized", "probit" or "propagate", for a guide and inputs in one
        tensor.
    :param bool dropout: whether dropout layers stay on; calls of ``torch.nn.functional.dropout`` stay as they are.
    :param str function_site: the name of that site.
    :param bool progress: whether to show a progress bar.
    :returns: a :class:`Prediction` with ``samples`` of shape ``[S, N, ...]``; for a model of named outputs, a dict with
        one for each name, whose ``log_prob`` takes a dict of targets.
    :raises ValueError: for NaN or infinity in x, a number out of range, a guide, samples or a model that do not fit,
        sites in a plate if x needs several chunks, and sites without moments, which other methods than draws need.

    Example::

        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, predict
        >>> from pyro_radial.nn import likelihoods
        >>> model = SupervisedModel(BayesianModule(nn.Linear(4, 3)), likelihoods.Categorical(num_data=100))
        >>> guide = AutoRadial(model)
        >>> guide.setup(torch.randn(2, 4), torch.tensor([0, 2]))
        >>> draws = predict(model, guide, torch.randn(5, 4), num_samples=8)
        >>> draws.samples.shape, draws.mean.shape, draws.mutual_information.shape
        (torch.Size([8, 5, 3]), torch.Size([5, 3]), torch.Size([5]))
    """
    _check_arguments(model, method, dropout, function_site)
    x = as_inputs(x, "x", dtype_of(guide, model))
    positive_count("chunk_size", chunk_size)
    if method != "draws":
        return _predict_in_one_pass(
            model, guide, x, num_samples, chunk_size, function_site, progress, method
        )
    if isinstance(guide, LinearizedGuide) and not guide.weights_can_be_drawn:
        warn(
            "The guide's widths hold for the linearized network alone; predict with method='linearized'."
        )
    return _predict_by_draws(
        model, guide, x, num_samples, chunk_size, function_site, dropout, progress
    )


def _predict_by_draws(
    model: Model,
    guide: Guide | Mapping[str, Tensor],
    x: Batch,
    num_samples: int | None,
    chunk_size: int,
    function_site: str,
    dropout: bool = False,
    progress: bool = False,
) -> Any:
    """Predict by draws of the weights; see :func:`predict` for the parameters."""
    device = device_of(guide, model)
    chunks = [slice(start, start + chunk_size) for start in range(0, num_rows(x), chunk_size)]
    if isinstance(guide, Mapping):
        guide = PosteriorSamples(guide)
        if num_samples not in (None, len(guide)):
            raise ValueError(
                f"num_samples must be left out with samples, which are {len(guide)} for each site, got {num_samples}"
            )
        num_samples = len(guide)
        guide.check(model, move(take(x, chunks[0]), device))
    draws = GuideDraws(guide)
    count = positive_count(
        "num_samples", DEFAULT_NUM_SAMPLES if num_samples is None else num_samples
    )
    run = _choose_run(model, function_site, dropout)
    dropout_layers = _find_dropout(model) if dropout else []
    samples: Any = None
    noise: dict[str, list[Tensor]] = {}

    @contextmanager
    def turn() -> Iterator[None]:
        with one_at_a_time(), nullcontext() if run.is_copy else evaluating(model, guide):
            # These modes are restored with all others.
            for layer in dropout_layers:
                layer.training = True
            yield

    # torch's fast path of transformers reads the weights of layers, and never calls what stands in their place. It also
    # asks for the mode of its outermost layer alone, not for that of dropout layers.
    with (
        tqdm(total=count * len(chunks), desc="predict", unit="pass", disable=not progress) as bar,
        WITHOUT_FASTPATH,
    ):
        num_drawn = 0
        while num_drawn < count:
            with turn():
                first_rows = move(take(x, chunks[0]), device)
                block = draws.block(count - num_drawn, first_rows)
                if len(chunks) > 1:
                    check_global(
                        block.sites, "chunk_size must be all rows", f"{len(chunks)} chunks"
                    )
                drawn_together = run.draws_together(block, first_rows)
            for numbers in drawn_together:
                place = slice(num_drawn + numbers.start, num_drawn + numbers.stop)
                with turn(), seeded(block.seeds[numbers.start], device):
                    run.start(block, numbers)
                    for rows in chunks:
                        values = run.values(move(take(x, rows), device))
                        if samples is None:
                            samples = tree_map(
                                lambda v: v.new_empty(count, num_rows(x), *v.shape[2:]), values
                            )
                        tree_map(lambda sample, v: sample[place, rows].copy_(v), samples, values)  # noqa: B023
                        bar.update(numbers.stop - numbers.start)
                for argument, value in run.noise.items():
                    noise.setdefault(argument, []).append(value)
            num_drawn += len(block.seeds)
    likelihood = getattr(model, "likelihood", None)
    warn_if_identical(samples, lambda: draws.is_point(block.sites, likelihood_names(likelihood)))
    joined = {name: torch.cat(values) for name, values in noise.items()}
    return make_prediction(samples, likelihood, joined)


def _check_arguments(model: object, method: object, dropout: bool, function_site: object) -> None:
    check_choice("method", method, ("draws", "linearized", "probit", "propagate"))
    if method != "draws" and dropout:
        raise ValueError(f"dropout must be False for method={method!r}, got True")
    likelihood = getattr(model, "likelihood", None)
    if method == "probit" and not isinstance(likelihood, Categorical | Bernoulli):
        raise ValueError(
            f"model must have a likelihood of classes for method='probit', got {type(likelihood).__name__}"
        )
    if not isinstance(likelihood, NamedLikelihoods):
        return
    if method != "draws":
        raise ValueError(f"method must be 'draws' for a model of named outputs, got {method!r}")
    if function_site != FUNCTION_SITE:
        raise ValueError(
            f"function_site must be {FUNCTION_SITE!r} for a model of named outputs, got {function_site!r}"
        )


def _predict_in_one_pass(
    model: Model,
    guide: Guide | Mapping[str, Tensor],
    x: Batch,
    num_samples: int | None,
    chunk_size: int,
    site: str,
    progress: bool,
    method: str,
) -> Prediction:
    """Predict by one pass; one row goes through draws, for checks and the noise of the likelihood."""
    if isinstance(guide, Mapping):
        raise ValueError(f"guide must be a guide for method={method!r}, got samples")
    if not isinstance(x, Tensor):
        raise ValueError(
            f"x must be one tensor for method={method!r}, got a {type(x).__name__} of tensors"
        )
    count = positive_count(
        "num_samples", DEFAULT_NUM_SAMPLES if num_samples is None else num_samples
    )
    likelihood = getattr(model, "likelihood", None)
    device = device_of(guide, model)
    row = x[:1].to(device)
    if method == "propagate":
        few = x[:: max(1, len(x) // CALIBRATION_ROWS)][:CALIBRATION_ROWS].to(device)
        draws = _predict_by_draws(model, guide, few, CALIBRATION_DRAWS, len(few), site).samples
        marginals = calibrated(propagated_moments(model, guide, row), few, draws)
    else:
        marginals = output_marginals(model, guide, row, method, site)
    noise = _draw_noise(model, guide, x[:1], count, site)
    samples: list[Tensor] = []
    if method == "propagate" and device.type == "cpu":
        # All units of a few rows stay in a processor's cache.
        chunk_size = min(chunk_size, max(1, CACHED_INPUTS // x[0].numel()))
    for rows in tqdm(x.split(chunk_size), desc="predict", unit="pass", disable=not progress):
        f, covariance = marginals(rows.to(device))
        if method == "probit":
            samples.append(probit_logits(f, covariance).unsqueeze(0))
        else:
            # Jointly for the outputs of one input.
            outputs = f.reshape(len(f), -1)
            even = even_normals(count, outputs.shape[1], f) if method == "propagate" else None
            draws = draw_normals(outputs, covariance, count, even)
            samples.append(draws.transpose(0, 1).reshape(count, *f.shape))
    return Prediction(torch.cat(samples, 1), likelihood, noise)


def _draw_noise(model: Model, guide: Guide, x: Batch, count: int, site: str) -> dict[str, Tensor]:
    """Return the noise of the likelihood, ``[count, 1, ...]``; two draws of the guide tell whether all are the same."""
    num_draws = (
        min(count, 2) if getattr(getattr(model, "likelihood", None), "noise_sites", {}) else 1
    )
    noise = _predict_by_draws(model, guide, x, num_draws, len(x), site).noise
    if not all(map(are_identical, noise.values())):
        return _predict_by_draws(model, guide, x, count, len(x), site).noise
    return {
        argument: values[:1].expand(count, *values.shape[1:]) for argument, values in noise.items()
    }


class _NetworkRun:
    """Compute functions by the network alone, at the parameters in draws of the guide."""

    def __init__(self, network: ModelNetwork) -> None:
        self._network = network
        self._copy: NetworkCopy | None = None
        self._is_checked = False
        # The parameters and noise of all draws of the block, if the guide draws them.
        self._read: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        # Of the n present draws, [n, *shape].
        self._number = 0
        self._parameters: dict[str, Tensor] = {}
        #: The noise of the draws, ``[n, 1, ...]`` by argument of ``observation``.
        self.noise: dict[str, Tensor] = {}

    @property
    def is_copy(self) -> bool:
        """Whether a copy of the network runs for all further draws, and neither the guide nor the model does."""
        return self._copy is not None

    def draws_together(self, block: DrawBlock, inputs: Batch) -> list[slice]:
        """Return the draws of a block that run at once: all at few rows, if the guide draws all that they need."""
        is_checked, self._is_checked = self._is_checked, True
        with seeded(block.seeds[0], self._network.bnn.device):
            drawn = block.trace(0)
            self._read = self._network.read_draws(block.values, len(block.seeds), drawn)
            # Other priors are checked as they are sampled: once is enough.
            if not is_checked and (self._read is None or self._network.wrappers):
                check_sites(drawn, self._network.draw(drawn).trace)
            if self._read is not None and block.is_from_distributions and self._copy is None:
                # The errors of the model's own network name the layer and the inputs.
                self._network(inputs, {name: values[0] for name, values in self._read[0].items()})
                self._copy = self._network.copy_of_function()
        if self._copy is not None and self._copy.runs_draws_together(num_rows(inputs)):
            return [slice(0, len(block.seeds))]
        return _one_by_one(block)

    def start(self, block: DrawBlock, numbers: slice) -> None:
        """Take some draws of the guide."""
        self._number = numbers.stop - numbers.start
        if self._read is None:
            draw = self._network.draw(block.trace(numbers.start))
            self._parameters = _with_draw_dim(draw.parameters)
            self.noise = _with_draw_dim(draw.noise)
            return
        parameters, noise = self._read
        self._parameters = {name: values[numbers] for name, values in parameters.items()}
        self.noise = {argument: values[numbers] for argument, values in noise.items()}

    def values(self, inputs: Batch) -> Any:
        """Compute the functions at some rows, ``[n, rows, ...]`` for n draws."""
        if self._copy is not None and self._number > 1:
            outputs = self._copy.many(inputs, self._parameters)
        else:
            function: Callable[..., object] = self._network if self._copy is None else self._copy
            parameters = {name: values[0] for name, values in self._parameters.items()}
            outputs = _with_draw_dim(function(inputs, parameters))
        return _check_outputs(outputs, FUNCTION_SITE, num_rows(inputs))


class _ModelRun:
    """Compute functions by runs of the whole model, replayed with a draw of the guide."""

    is_copy = False

    def __init__(self, model: Model, function_site: str) -> None:
        likelihood = getattr(model, "likelihood", None)
        self._model = model
        self._sites = function_sites(likelihood, function_site)
        self._noise_sites: dict[str, str] = getattr(likelihood, "noise_sites", {})
        self._drawn = poutine.Trace()
        self._latest = poutine.Trace()
        self._checked = False

    def draws_together(self, block: DrawBlock, inputs: Batch) -> list[slice]:
        return _one_by_one(block)

    def start(self, block: DrawBlock, numbers: slice) -> None:
        self._drawn = block.trace(numbers.start).copy()

    def values(self, inputs: Batch) -> Any:
        try:
            replayed = poutine.replay(self._model, trace=self._drawn)
            self._latest = poutine.trace(replayed).get_trace(inputs)
        except TypeError as error:
            error.add_note(
                "predict calls model(x); unpack several inputs in the model, as in `x, group = inputs`"
            )
            raise
        nodes: Any = self._latest.nodes
        for site in tree_leaves(self._sites):
            if site not in nodes:
                raise ValueError(
                    f"function_site must be a site of the model, got '{site}', which it does not have; record the "
                    f'function\'s values with pyro.deterministic("{site}", values)'
                )
            _check_outputs(_with_draw_dim(nodes[site]["value"]), site, num_rows(inputs))
        if not self._checked:
            check_sites(self._drawn, self._latest)
            self._checked = True
        # What the model samples outside of plates stays for the next rows.
        for name, site in self._latest.iter_stochastic_nodes():
            in_plate = is_subsample(site) or bool(site["cond_indep_stack"])
            if name not in self._drawn and not in_plate:
                self._drawn.add_node(name, **site)
        return _with_draw_dim(tree_map(lambda site: nodes[site]["value"], self._sites))

    @property
    def noise(self) -> dict[str, Tensor]:
        return _with_draw_dim(read_noise(self._noise_sites, self._latest.nodes))


def _one_by_one(block: DrawBlock) -> list[slice]:
    return [slice(number, number + 1) for number in range(len(block.seeds))]


def _with_draw_dim(values: Any) -> Any:
    """Give values of one draw a first dim of one."""
    return tree_map(lambda value: value.unsqueeze(0), values)


def _choose_run(model: Model, function_site: str, dropout: bool) -> _NetworkRun | _ModelRun:
    """Return a run of the network alone if that is known to give the function, else one of the whole model.

    A handler, another function site, and dropout, whose masks depend on chunks, need the whole model.
    """
    if dropout or handlers_around() or function_site != FUNCTION_SITE:
        return _ModelRun(model, function_site)
    network = find_network(model)
    if network is None or network.likelihood is None:
        return _ModelRun(model, function_site)
    return _NetworkRun(network)


def _check_outputs(values: object, function_site: str, number: int) -> Any:
    """Return values ``[n, rows, ...]`` of n draws, or raise a ValueError for another number of rows."""
    for output in tree_leaves(values):
        if output.shape[1:2] != (number,):
            raise ValueError(
                f"site '{function_site}' must have a row for each of {number} inputs, got shape "
                f"{tuple(output.shape[1:])}"
            )
    return values


def _find_dropout(model: object) -> list[nn.Module]:
    """Return the layers whose dropout is on in train mode."""
    layers: list[nn.Module] = []
    for module in submodules(model):
        is_dropout = isinstance(module, DROPOUT_LAYERS) and module.p > 0
        if is_dropout or (isinstance(module, LAYERS_WITH_DROPOUT) and module.dropout > 0):
            layers.append(module)
    if not layers:
        raise ValueError(
            "model must have dropout layers, such as nn.Dropout, with a rate above zero for dropout=True, got "
            f"{getattr(model, '__name__', type(model).__name__)} without any"
        )
    return layers
