# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare ways to find widths by predictions, on a table and on images.

python -m benchmarks.guides._width_rules --data-dir DIR
"""

import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.optim import Adam

from benchmarks.common import FIRST_SEED, Form, Job, Results, Row, compute_all, main, markdown_table, paired, with_error
from benchmarks.guides._sets import FEW_IMAGES, SOME_IMAGES, data_of, network_of
from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, TermsELBO, fit, predict
from pyro_radial.infer.data import move
from pyro_radial.infer.training import fit as fit_module
from pyro_radial.infer.training import predictive_widths, training_run
from pyro_radial.infer.training.predictive_widths import PredictiveWidths
from pyro_radial.nn import likelihoods

DEFAULT, TRAINING, COMMON = "a share for each tensor, held-out rows", "the same, training rows", "one factor for all"
SEARCH, WEIGHT = "one factor, by a search at each tenth", "ELBO widths, KL weight by held-out rows"
RULES = (DEFAULT, TRAINING, COMMON, SEARCH, WEIGHT)
FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)
WEIGHTS = (0.03, 0.1, 0.3, 1.0)
RATE = {"concrete": 0.01}


class Size(NamedTuple):
    """Sets, test rows, steps, seeds."""

    sets: tuple[str, ...] = ("concrete", FEW_IMAGES, SOME_IMAGES)
    test: int = 5_000
    steps: int = 2_000
    seeds: int = 3


SIZES = {"default": Size(), "small": Size(("yacht",), 40, 40, 1)}


class CommonFactor(PredictiveWidths):
    """All shares take the same steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._optimizer.register_step_pre_hook(self._sum_gradients)

    def _sum_gradients(self, *_: object) -> None:
        total = sum(share.grad.sum() for share in self._log_shares)
        for share in self._log_shares:
            share.grad = torch.full_like(share, float(total))


class Search(PredictiveWidths):
    """At the end of each tenth of the steps, the best of five factors for all widths, by 64 times 8 draws."""

    def step(self, number: int) -> None:
        """Search if a tenth of the steps is done."""
        if number % max(1, self._steps // 10) == 0 and number < self._steps:
            start = [share.clone() for share in self._log_shares]
            scores: dict[float, float] = {}
            for factor in FACTORS:
                self._set(start, factor)
                scores[factor] = float(self._score_of_rows())
            self._set(start, max(scores, key=scores.__getitem__))
        elif number % 20 == 0:
            self._set_scales()

    def _set(self, start: list[Tensor], factor: float) -> None:
        for share, before in zip(self._log_shares, start, strict=True):
            share.copy_(before + torch.tensor(factor).log())
        self._set_scales()

    @torch.no_grad()
    def _score_of_rows(self) -> Tensor:
        index = torch.randperm(len(self._rows))[: max(self._num_rows, 1)]
        x, y = self._rows.take(index)
        return torch.stack([self.score(move(x, self._device), move(y, self._device)) for _ in range(8)]).mean()


def run(output: Path, *, data_dir: Path, form: Form = "default", workers: int = 2, threads: int = 1) -> None:
    """Train each network by each rule, with the optimizer of ``fit`` for predictive widths, and score test rows."""
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, **size._asdict()})
    jobs = [
        Job({"data": name, "rule": rule, "seed": seed}, one, (name, rule, seed, size, data_dir))
        for name in size.sets
        for seed in range(FIRST_SEED, FIRST_SEED + size.seeds)
        for rule in RULES
    ]
    compute_all(results, jobs, workers, threads)


def one(name: str, rule: str, seed: int, size: Size, data_dir: Path) -> Row:
    """Train one network, and score its predictions."""
    torch.manual_seed(seed)
    data, (x, y) = data_of(name, size.test, data_dir, split=seed)
    start = time.process_time()
    if rule == WEIGHT:
        number = len(data[0]) // 10
        held_out, rest = (data[0][:number], data[1][:number]), (data[0][number:], data[1][number:])
        fits = [trained(name, rule, seed, size, rest, weight) for weight in WEIGHTS]
        model, guide = max(fits, key=lambda own: float(predict(*own, held_out[0]).log_prob(held_out[1]).mean()))
    else:
        model, guide = trained(name, rule, seed, size, data)
    seconds = time.process_time() - start
    torch.manual_seed(seed)
    return {"nll": -float(predict(model, guide, x, 64).log_prob(y).mean()), "seconds": seconds}


def trained(name: str, rule: str, seed: int, size: Size, data: Any, weight: float = 1.0) -> tuple[Any, Any]:
    """Train one network by a rule."""
    torch.manual_seed(seed)
    likelihood: Any = (
        likelihoods.Categorical() if data[1].dtype == torch.long else likelihoods.Gaussian(learn_scale=True)
    )
    model = SupervisedModel(BayesianModule(network_of(name, data[0].shape[-1])), likelihood)
    guide = AutoRadial(model) if rule == WEIGHT else AutoRadial(model, widths="predictive")
    settings: dict[str, Any] = {"epochs": max(1, round(size.steps * 128 / len(data[0]))), "batch_size": 128}
    if rule == WEIGHT:
        optim = partial(Adam, lr=RATE.get(name, 0.003))
        settings |= {"loss": TermsELBO(kl_weight=weight), "optim": optim, "scheduler": "cosine"}
    cls = {COMMON: CommonFactor, SEARCH: Search}.get(rule, PredictiveWidths)
    hold_out = predictive_widths.hold_out
    if rule == TRAINING:

        def hold_out(rows: Any, validation: Any, seed: int) -> Any:
            rest, _ = predictive_widths.hold_out(rows, validation, seed)
            return rest, rest

    with mock.patch.object(training_run, "PredictiveWidths", cls), mock.patch.object(fit_module, "hold_out", hold_out):
        fit(model, guide, data, seed=seed, progress=False, **settings)
    return model, guide


def report(results: Results) -> str:
    """Report the NLL by set and rule, and the paired difference to the default."""
    lines = []
    for rule in RULES:
        cells = []
        for name in results.setting["sets"]:
            values = results.values("nll", data=name, rule=rule)
            cells += [
                with_error(values, 3),
                with_error(paired(values, results.values("nll", data=name, rule=DEFAULT)), 3),
            ]
        cells.append(f"{sum(results.values('seconds', rule=rule)) / len(results.values('seconds', rule=rule)):.0f}")
        lines.append([rule, *cells])
    headings = [heading for name in results.setting["sets"] for heading in (name, "minus the first")]
    return f"""### Rules for predictive widths

{results.setting["seeds"]} seeds, test NLL (`python -m benchmarks.guides._width_rules --data-dir DIR`).

{markdown_table(["", *headings, "seconds"], lines)}"""


if __name__ == "__main__":
    main(run, report)
