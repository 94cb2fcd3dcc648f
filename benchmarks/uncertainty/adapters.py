# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train LoRA adapters of a small BERT on a few hundred texts, with four posteriors and as a point estimate.

python -m benchmarks.uncertainty.adapters
"""

import importlib
import inspect
import math
import pkgutil
import platform
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro.distributions import TorchDistribution, constraints
from pyro.nn.module import PyroParam
from torch import Tensor, nn
from torch.distributions import Independent, register_kl

from benchmarks.common import (
    FIRST_SEED,
    Claim,
    Form,
    Job,
    Results,
    Row,
    compute_all,
    is_below,
    main,
    markdown_table,
    paired,
    with_error,
)
from pyro_radial import AutoRadial, BayesianModule, RadialELBO, SupervisedModel, fit, predict
from pyro_radial.distributions.special import MEAN_LOG_HALF_NORMAL, log_sphere_area
from pyro_radial.infer.autoguide import families
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import accuracy, expected_calibration_error, negative_log_likelihood

__all__ = ["LowRankRadial", "LowRankRadialNormal", "claims", "draw", "report", "run"]

#: What the experiment needs besides the library and its data.
NEEDS = "peft and transformers"

FIRST_TASK = ("asyncio", "decimal", "email", "http", "inspect", "logging", "socket", "statistics", "typing", "unittest")
SECOND_TASK = ("argparse", "configparser", "enum", "ipaddress", "pathlib", "sqlite3", "tarfile", "threading")
LENGTH, PADDING, UNKNOWN, START = 32, 0, 1, 2
#: The most pieces of one object; otherwise a long text could be a third of the validation pieces.
MOST = 4
RANK = 4

POINT, MEAN_FIELD, RADIAL, ON_A, LOW_RANK = "point", "mean field", "radial", "radial on A alone", "low-rank radial"
METHODS = (POINT, MEAN_FIELD, RADIAL, ON_A, LOW_RANK)
SETTING = ("method", "prior_scale", "kl_weight")
SCORES = {"accuracy": "test accuracy", "nll": "NLL", "calibration_error": "ECE"}


class Size(NamedTuple):
    """How much is trained, searched and tested."""

    seeds: int = 5
    train: int = 240
    validation: int = 120
    test: int | None = None
    hidden: int = 64
    first_epochs: int = 9
    epochs: int = 20
    num_samples: int = 64
    prior_scales: tuple[float, ...] = (0.4, 0.8)
    kl_weights: tuple[float, ...] = (0.1, 1.0)


SIZES = {"default": Size(), "small": Size(2, 24, 24, 24, 8, 1, 1, 2, (0.1,), (1.0,))}


class LowRankRadialNormal(TorchDistribution):
    r"""One radius, and directions with a covariance of low rank plus a diagonal.

    .. math:: w = \mu + \rho\, \frac{g}{\sqrt{g^T \Sigma^{-1} g}}, \qquad g = \sigma \odot \epsilon + U z,
        \quad \Sigma = \mathrm{diag}(\sigma^2) + U U^T, \quad \rho = |r|

    with standard normal r and elements of z and epsilon. In the space where Sigma is one, it is a RadialNormal, so its
    density and its KL to a factorized normal have a closed form. Without the diagonal the KL would be infinite.

    :param loc: ``[*event]``.
    :param scale: sigma, ``[*event]``.
    :param factor: U, ``[r, *event]``.
    """

    arg_constraints = {}
    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, factor: Tensor, validate_args: bool | None = None) -> None:
        self.loc, self.scale, self.factor = loc, scale, factor
        super().__init__((), loc.shape, validate_args=validate_args)

    @property
    def support(self) -> Any:
        """All real tensors of this shape."""
        return constraints.independent(constraints.real, len(self.event_shape))

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> Any:
        """The same, for no batch."""
        if tuple(batch_shape):
            raise NotImplementedError("expand: weights outside of plates only")
        return self

    @property
    def mean(self) -> Tensor:
        """The location."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """The diagonal of Sigma, divided by the number of elements."""
        return (self.scale.square() + self.factor.square().sum(0)) / self.loc.numel()

    def _inner(self) -> Tensor:
        """The Cholesky factor of I + U^T diag(sigma^-2) U."""
        unit = (self.factor / self.scale).flatten(1)
        return torch.linalg.cholesky(torch.eye(len(unit), dtype=unit.dtype, device=unit.device) + unit @ unit.T)

    def squared_distance(self, difference: Tensor) -> Tensor:
        """The quadratic form of differences ``[*sample, *event]`` with the inverse of Sigma."""
        dims = len(self.event_shape)
        unit = (difference / self.scale).flatten(-dims)
        along = unit @ (self.factor / self.scale).flatten(1).T
        across = torch.linalg.solve_triangular(self._inner(), along.unsqueeze(-1), upper=False).squeeze(-1)
        return (unit.square().sum(-1) - across.square().sum(-1)).clamp_min(torch.finfo(unit.dtype).tiny)

    def log_volume(self) -> Tensor:
        """Half the log-determinant of Sigma."""
        return self.scale.log().sum() + self._inner().diagonal().log().sum()

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw ``[*sample_shape, *event]``."""
        shape, loc = torch.Size(sample_shape), self.loc
        own, along = (loc.new_empty(shape + end).normal_() for end in (loc.shape, self.factor.shape[:1]))
        g = self.scale * own + torch.tensordot(along, self.factor, 1)
        radius = loc.new_empty(shape).normal_().abs() / self.squared_distance(g).sqrt()
        return loc + radius.reshape(shape + (1,) * loc.dim()) * g

    def log_prob(self, value: Tensor) -> Tensor:
        """The normalized log-density."""
        squared, size = self.squared_distance(value - self.loc), self.loc.numel()
        constant = 0.5 * math.log(2 / math.pi) - log_sphere_area(size)
        return constant - 0.5 * squared - 0.5 * (size - 1) * squared.log() - self.log_volume()

    def entropy(self) -> Tensor:
        """In closed form."""
        size = self.loc.numel()
        constant = 0.5 - 0.5 * math.log(2 / math.pi) + log_sphere_area(size) + (size - 1) * MEAN_LOG_HALF_NORMAL
        return constant + self.log_volume()


@register_kl(LowRankRadialNormal, Independent)
def kl_to_normal(q: LowRankRadialNormal, p: Independent) -> Tensor:
    """In closed form, as p is a factorized normal: only the first two moments of q enter its cross-entropy."""
    normal: Any = p.base_dist
    squares = (q.variance + (q.loc - normal.mean).square()) / normal.variance
    cross = 0.5 * (squares + (2 * math.pi * normal.variance).log()).sum()
    return cross - q.entropy()


class LowRankRadial(families.Radial):
    """The family of :class:`LowRankRadialNormal`, with two directions at first a third as wide as the diagonal."""

    rank = 2

    def initial(self, site: families.Site, value: Tensor) -> dict[str, PyroParam]:
        """Those of a radial family, and the factor."""
        start = super().initial(site, value)
        factor = torch.randn(self.rank, *value.shape, dtype=value.dtype) * self.initial_scale(site) / 3
        return start | {"factor": PyroParam(factor, constraints.real, site.event_dim + 1)}

    def distribution(  # type: ignore[override]
        self, site: families.Site, *, loc: Tensor, scale: Tensor, factor: Tensor
    ) -> Any:
        """One distribution for the whole site."""
        return LowRankRadialNormal(loc, scale, factor, validate_args=False)

    guide_distribution = distribution

    def center(self, site: families.Site, *, loc: Tensor, **others: Tensor) -> Tensor:  # type: ignore[override]
        """The location."""
        return loc


def families_of(method: str) -> Any:
    """The families of the adapters' sites and of the head's."""
    return {
        POINT: {".": families.Delta()},
        MEAN_FIELD: {".": families.Normal()},
        RADIAL: None,
        ON_A: {r"lora_B|modules_to_save": families.Delta()},
        LOW_RANK: {".": LowRankRadial()},
    }[method]


def run(output: Path, *, form: Form = "default", workers: int = 1, threads: int = 1) -> None:
    """Choose the prior, the weight of the KL and the epochs by validation rows of seed 0; test on other seeds."""
    size, python = SIZES[form], platform.python_version()
    results = Results(
        output, {"torch": torch.__version__, "python": python, "threads": threads, "rank": RANK, **size._asdict()}
    )
    search = [
        Job({"part": "search", **dict(zip(SETTING, setting, strict=True))}, searched, (size, *setting))
        for setting in product(METHODS, size.prior_scales, size.kl_weights)
    ]
    compute_all(results, search, workers, threads)
    test = [
        Job({"part": "test", "seed": seed, "method": method}, tested, (seed, size, chosen(results, method)))
        for seed, method in product(range(FIRST_SEED, FIRST_SEED + size.seeds), METHODS)
    ]
    compute_all(results, test, workers, threads)


def chosen(results: Results, method: str) -> Row:
    """The setting with the lowest validation NLL."""
    return min(results.where(part="search", method=method), key=lambda row: row["nll"])


def searched(size: Size, method: str, prior_scale: float, kl_weight: float) -> Row:
    """Find the best epoch for a setting."""
    model, guide = network(0, size, method, prior_scale)
    train, validation, _ = parts(0, size)
    result = trained(model, guide, train, method, kl_weight, size.epochs, 0, validation)
    return {"epochs": result.best_epoch + 1, **scores(model, guide, validation, method, size)}


def tested(seed: int, size: Size, setting: Row) -> Row:
    """Train with a chosen setting, and score the test pieces."""
    method = setting["method"]
    model, guide = network(seed, size, method, setting["prior_scale"])
    train, _, test = parts(seed, size)
    trained(model, guide, train, method, setting["kl_weight"], setting["epochs"], seed)
    return scores(model, guide, test, method, size)


def network(seed: int, size: Size, method: str, prior_scale: float) -> tuple[SupervisedModel, AutoRadial]:
    """A model with adapters, and its guide."""
    net = with_adapters(first_network(seed, size)[0], seed)
    bnn = BayesianModule(net, dist.Normal(0.0, prior_scale), select="lora_|modules_to_save")
    model = SupervisedModel(bnn, likelihoods.Categorical())
    return model, AutoRadial(model, families=families_of(method), init_stddev=prior_scale / 10)


def parts(seed: int, size: Size) -> list[Any]:
    """Pieces to train on, to choose by and to test, as inputs and labels."""
    return [encode(rows, first_network(seed, size)[1]) for rows in second_task(seed, size)]


def trained(
    model: SupervisedModel,
    guide: AutoRadial,
    data: Any,
    method: str,
    kl_weight: float,
    epochs: int,
    seed: int,
    validation: Any = None,
) -> Any:
    """Train adapters."""
    return fit(
        model,
        guide,
        data,
        epochs=epochs,
        batch_size=32,
        optim=pyro.optim.Adam({"lr": 3e-3}),
        loss=RadialELBO(kl_weight=kl_weight, strict_kl=method not in (POINT, ON_A)),
        validation=validation,
        seed=seed,
        progress=False,
    )


def scores(model: SupervisedModel, guide: AutoRadial, data: Any, method: str, size: Size) -> Row:
    """Score predictions; a point needs one draw."""
    x, y = data
    probabilities = predict(model, guide, x, 1 if method == POINT else size.num_samples).mean
    measures = zip(SCORES, (accuracy, negative_log_likelihood, expected_calibration_error), strict=True)
    return {name: float(measure(probabilities, y)) for name, measure in measures}


def bert(num_tokens: int, num_classes: int, hidden: int) -> nn.Module:
    """A BERT of two layers with random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=num_tokens,
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * hidden,
        max_position_embeddings=LENGTH + 1,
        num_labels=num_classes,
    )
    net: nn.Module = BertForSequenceClassification(config)
    return net


@cache
def first_network(seed: int, size: Size) -> tuple[nn.Module, dict[str, int]]:
    """A network trained on the first task as a plain network, and the numbers of its tokens."""
    torch.manual_seed(seed)
    rows = [row for row in pieces(FIRST_TASK) if size.test is None or row.place < 0.05]
    counts = Counter(token for row in rows for token in set(row.tokens))
    tokens = {token: i for i, token in enumerate((t for t, n in sorted(counts.items()) if n >= 3), start=START + 1)}
    x, y = encode(rows, tokens)
    net = bert(len(tokens) + START + 1, len(FIRST_TASK), size.hidden)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05)
    for _ in range(size.first_epochs):
        for batch in torch.randperm(len(y)).split(64):
            optimizer.zero_grad()
            inputs = {name: part[batch] for name, part in x.items()}
            nn.functional.cross_entropy(net(**inputs).logits, y[batch]).backward()
            optimizer.step()
    return net.eval(), tokens


def with_adapters(first: nn.Module, seed: int) -> nn.Module:
    """The network with a new head for the second task, and adapters of its linear layers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config: Any = first.config
    net = bert(config.vocab_size, len(SECOND_TASK), config.hidden_size)
    body = {name: value for name, value in first.state_dict().items() if not name.startswith("classifier")}
    net.load_state_dict(body, strict=False)
    targets = ["query", "value", "intermediate.dense", "output.dense"]
    with warnings.catch_warnings():
        # transformers deprecates a name that peft reads.
        warnings.simplefilter("ignore", FutureWarning)
        lora = LoraConfig(task_type="SEQ_CLS", r=RANK, lora_alpha=RANK, target_modules=targets)
        adapted: nn.Module = get_peft_model(net, lora)  # type: ignore[arg-type]
    return adapted.eval()


class Piece(NamedTuple):
    """Words of a docstring, its module, the object that has it, and a number in [0, 1) that the object decides."""

    tokens: list[str]
    label: int
    owner: str
    place: float


def second_task(seed: int, size: Size) -> list[list[Piece]]:
    """Rows to train on and to choose by, which the seed decides, and to test, which are the same for all seeds."""
    rows = pieces(SECOND_TASK)
    owners = sorted({row.owner for row in rows if row.place < 0.5})
    random.Random(seed).shuffle(owners)
    order = {owner: place for place, owner in enumerate(owners)}
    rest = sorted((row for row in rows if row.owner in order), key=lambda row: order[row.owner])
    train = rest[: size.train]
    validation = [row for row in rest[size.train :] if row.owner != train[-1].owner]
    test = [row for row in rows if row.owner not in order]
    return [train, validation[: size.validation], test[: size.test]]


def encode(rows: list[Piece], tokens: dict[str, int]) -> tuple[dict[str, Tensor], Tensor]:
    """The inputs of the network, with a mask, and the labels."""
    x = torch.full((len(rows), LENGTH + 1), PADDING)
    for i, row in enumerate(rows):
        x[i, : len(row.tokens) + 1] = torch.tensor([START, *(tokens.get(token, UNKNOWN) for token in row.tokens)])
    return {"input_ids": x, "attention_mask": (x != PADDING).long()}, torch.tensor([row.label for row in rows])


@cache
def pieces(modules: tuple[str, ...]) -> list[Piece]:
    """The docstrings of these modules, in pieces of 32 words, without the names of the modules."""
    found, seen = [], set()
    for label, module in enumerate(modules):
        for owner, text in docstrings(module):
            plain = " ".join(text.lower().split())
            if plain in seen:
                continue
            seen.add(plain)
            words = [word for word in re.findall(r"[a-z]+|[^a-z\s]", plain) if word != module]
            for start in range(0, min(len(words), MOST * LENGTH), LENGTH):
                if len(words) - start >= 8:
                    place = random.Random(owner).random()
                    found.append(Piece(words[start : start + LENGTH], label, owner, place))
    return found


def docstrings(module: str) -> Iterator[tuple[str, str]]:
    """Names of the objects of a module and its submodules, and their docstrings."""

    def of(thing: Any, name: str, depth: int) -> Iterator[tuple[str, str]]:
        text = getattr(thing, "__doc__", None)
        if isinstance(text, str):
            yield name, inspect.cleandoc(text)
        if inspect.isclass(thing) and depth < 2:
            for key, value in vars(thing).items():
                if inspect.isroutine(value) or inspect.isclass(value) or isinstance(value, property):
                    yield from of(getattr(value, "__func__", value), f"{name}.{key}", depth + 1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        parts = [importlib.import_module(module)]
        for info in pkgutil.iter_modules(getattr(parts[0], "__path__", ()), f"{module}."):
            if not re.search(r"__main__|windows|test", info.name):  # what runs, and what is for another system
                parts.append(importlib.import_module(info.name))
        for part in parts:
            yield from of(part, part.__name__, 0)
            for key, value in vars(part).items():
                home = str(getattr(value, "__module__", "")).lstrip("_").split(".")[0]
                if home == module and (inspect.isclass(value) or inspect.isroutine(value)):
                    yield from of(value, f"{part.__name__}.{key}", 0)


# What is claimed: the NLL of one method lower than that of another.
CLAIMS = (
    ("radial adapters have a lower NLL than point estimates", RADIAL, POINT),
    ("radial adapters have a lower NLL than mean-field ones", RADIAL, MEAN_FIELD),
    ("a radial posterior on A alone has a lower NLL than point estimates", ON_A, POINT),
    ("two learned directions lower the NLL of radial adapters", LOW_RANK, RADIAL),
)


def claims(results: Results) -> list[Claim]:
    """Compare methods seed by seed."""
    found = []
    for text, lower, higher in CLAIMS:
        ours, theirs = (results.values("nll", part="test", method=method) for method in (lower, higher))
        difference = paired(ours, theirs)
        numbers = f"{with_error(ours, 3)} against {with_error(theirs, 3)}, difference {with_error(difference, 4)}"
        found.append(Claim(f"LoRA on few texts: {text}", "", numbers, str(len(ours)), is_below(difference)))
    return found


def report(results: Results) -> str:
    """Report scores and settings by method."""
    lines = []
    for method in METHODS:
        values = {name: results.values(name, part="test", method=method) for name in SCORES}
        setting = chosen(results, method)
        cells = [with_error(values[name], 3) for name in SCORES]
        lines.append([method, *cells, *(f"{setting[name]:g}" for name in ("prior_scale", "kl_weight", "epochs"))])
    setting = results.setting
    scales, weights = (", ".join(map(str, setting[name])) for name in ("prior_scales", "kl_weights"))
    seeds = len(results.where(part="test", method=POINT))
    gain = claims(results)[-1].held
    verdict = "lowers the NLL of radial adapters" if gain else "brings nothing here, so it is not part of the package"
    return f"""### Adapters of a transformer

A BERT of `transformers` with two layers of {setting["hidden"]} learns, as a plain network, to say which of ten \
modules of Python's library a piece of 32 words of a docstring is from. Then its weights are frozen, and LoRA \
adapters of rank {setting["rank"]} by `peft` and a new head learn eight other modules from {setting["train"]} pieces. \
A docstring gives at most {MOST} pieces, all to one of the parts. The prior's scale ({scales}), the KL weight \
({weights}; for points, of the weight decay) and the number of epochs, up to {setting["epochs"]}, are those with the \
lowest NLL of {setting["validation"]} other pieces with seed 0. Numbers are means and standard errors over {seeds} \
other seeds, each with its own pretraining, pieces and start (`python -m benchmarks.uncertainty.adapters`, with the \
docstrings of Python {setting["python"]}). A posterior on A alone leaves B and the head points. The low-rank family \
has one radius and a covariance of two learned directions and a diagonal, with its KL in closed form. It {verdict}.

{markdown_table(["", *SCORES.values(), "prior scale", "KL weight", "epochs"], lines)}

{results.plot("Test NLL, calibration error and accuracy of each seed by method")}
"""


def draw(results: Results) -> None:
    """Scores of every seed."""
    figure = Figure(figsize=(9, 2.6), layout="constrained", dpi=110)
    names = {"nll": "NLL (nats per piece)", "calibration_error": "calibration error", "accuracy": "accuracy"}
    for ax, (name, title) in zip(figure.subplots(1, 3, sharey=True), names.items(), strict=True):
        for place, method in enumerate(reversed(METHODS)):
            values = results.values(name, part="test", method=method)
            ax.plot(values, [place] * len(values), "o", color="#0072B2", alpha=0.6, markersize=4)
        ax.set(yticks=range(len(METHODS)), yticklabels=list(reversed(METHODS)), title=f"Test {title}")
        ax.spines[["top", "right"]].set_visible(False)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
