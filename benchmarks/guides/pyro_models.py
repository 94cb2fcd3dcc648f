# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare our guides with Pyro's after the same number of steps, on models of Pyro's examples without networks.

python -m benchmarks.guides.pyro_models
"""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro import poutine
from pyro.infer import ELBO, SVI, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from benchmarks.common import Claim, Form, Results, Row, main, markdown_table, with_error
from pyro_radial import AutoMeanField, AutoRadial
from pyro_radial.infer.autoguide import families

__all__ = ["claims", "draw", "report", "run"]

PYROS = "AutoNormal"
GUIDES = {
    PYROS: AutoNormal,
    "AutoRadial": AutoRadial,
    # A start that suits network weights alone.
    "AutoRadial from 0.01": partial(AutoRadial, init_stddev=0.01),
    "AutoRadial, normal sites": partial(AutoRadial, families={".": families.Normal()}),
    "AutoMeanField": AutoMeanField,
}
LEARNING_RATE = 0.05
NUM_EVALUATIONS = 50


class Problem(NamedTuple):
    """A model, its data, and how it is trained."""

    model: Callable[..., Any]
    #: The model without the sites that are summed over.
    guided: Callable[..., Any]
    data: Tensor
    loss: Callable[[], ELBO]
    steps: int


def hidden_markov(seed: int, small: bool) -> Problem:
    """Sequences of chords of twelve tones from six hidden states, which are summed over."""
    torch.manual_seed(100 + seed)
    states, tones, length = 6, 12, 4 if small else 25
    data = dist.Bernoulli(0.2).sample(torch.Size([2 if small else 15, length, tones]))
    # Tones that hold on: a chord is kept with probability 0.7.
    for t in range(1, length):
        kept = (torch.rand(len(data), 1) < 0.7).expand(-1, tones)
        data[:, t] = torch.where(kept, data[:, t - 1], data[:, t])

    def model(sequences: Tensor) -> None:
        moves = pyro.sample("moves", dist.Dirichlet(0.9 * torch.eye(states) + 0.1).to_event(1))
        chords = pyro.sample("chords", dist.Beta(0.1, 0.9).expand([states, tones]).to_event(2))
        tone = pyro.plate("tones", tones, dim=-1)
        with pyro.plate("sequences", len(sequences), dim=-2):
            state: Any = 0
            for t in pyro.markov(range(length)):
                state = pyro.sample(f"state_{t}", dist.Categorical(moves[state]), infer={"enumerate": "parallel"})
                with tone:
                    pyro.sample(f"chord_{t}", dist.Bernoulli(chords[state.squeeze(-1)]), obs=sequences[:, t])

    guided = poutine.block(model, expose=["moves", "chords"])
    return Problem(model, guided, data, lambda: TraceEnum_ELBO(max_plate_nesting=2), 3 if small else 500)


def gamma_def(seed: int, small: bool) -> Problem:
    """A sparse gamma deep exponential family of three layers over counts, with local sites for each row."""
    torch.manual_seed(200 + seed)
    widths, rows = (4, 6, 10), 5 if small else 60
    pixels = 12 if small else 100
    shape = (*widths, pixels)

    def model(counts: Tensor) -> None:
        weights = []
        for layer, (above, below) in enumerate(itertools.pairwise(shape)):
            with pyro.plate(f"weights_{layer}", above * below):
                weights.append(pyro.sample(f"weight_{layer}", dist.Gamma(0.1, 0.3)).reshape(above, below))
        with pyro.plate("rows", len(counts)):
            mean = torch.ones(len(counts), widths[0])
            for layer, width in enumerate(widths):
                local = pyro.sample(f"local_{layer}", dist.Gamma(0.1, 0.1 / mean.expand(-1, width)).to_event(1))
                mean = local @ weights[layer] + 1e-6
            pyro.sample("count", dist.Poisson(mean).to_event(1), obs=counts)

    brightness = dist.Gamma(2.0, 1.0).sample(torch.Size([rows, 1]))
    shapes = dist.Gamma(0.5, 0.2).sample(torch.Size([3, pixels]))
    mixing = dist.Dirichlet(torch.full((3,), 0.3)).sample(torch.Size([rows]))
    counts = dist.Poisson(brightness * (mixing @ shapes)).sample()
    return Problem(model, model, counts, Trace_ELBO, 3 if small else 800)


PROBLEMS = {"hidden Markov model": hidden_markov, "sparse gamma DEF": gamma_def}


def run(output: Path, *, form: Form = "default", seeds: int = 3, threads: int = 1) -> None:
    """Train all guides for the same steps of Adam; the final loss is a mean over 50 draws."""
    torch.set_num_threads(threads)
    setting = {"torch": torch.__version__, "threads": threads, "lr": LEARNING_RATE, "evaluations": NUM_EVALUATIONS}
    results = Results(output, setting)
    for name, seed, guide in itertools.product(PROBLEMS, range(seeds if form == "default" else 1), GUIDES):
        keys = {"model": name, "guide": guide, "seed": seed}
        results.add(keys, partial(final_loss, PROBLEMS[name](seed, form == "small"), guide, seed))


def final_loss(problem: Problem, guide_name: str, seed: int) -> Row:
    """The loss after training."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = GUIDES[guide_name](problem.guided)
    svi = SVI(problem.model, guide, pyro.optim.Adam({"lr": LEARNING_RATE}), problem.loss())
    for _ in range(problem.steps):
        svi.step(problem.data)
    losses = [float(svi.evaluate_loss(problem.data)) for _ in range(NUM_EVALUATIONS)]
    return {"steps": problem.steps, "loss": sum(losses) / len(losses)}


def claims(results: Results) -> list[Claim]:
    """Check whether our guides reach the loss of Pyro's guide."""
    found = []
    for model, guide in itertools.product(results.distinct("model"), ("AutoRadial", "AutoMeanField")):
        ours, pyros = (results.values("loss", model=model, guide=name) for name in (guide, PYROS))
        behind = torch.tensor([a - b for a, b in zip(ours, pyros, strict=True)])
        error = float(behind.std() / len(behind) ** 0.5) if len(behind) > 1 else 0.0
        held = float(behind.mean()) <= error
        text = f"{model[0].upper()}{model[1:]}: `{guide}` reaches the loss of `AutoNormal` in as many steps"
        numbers = f"{with_error(ours, 0)} against {with_error(pyros, 0)}"
        found.append(Claim(text, "", numbers, str(len(ours)), held))
    return found


def report(results: Results) -> str:
    """Report the losses by guide and model."""
    models, guides = results.distinct("model"), results.distinct("guide")
    rows = [
        [guide, *(with_error(results.values("loss", model=model, guide=guide), 1) for model in models)]
        for guide in guides
    ]
    steps = " and ".join(f"{results.where(model=model)[0]['steps']} for the {model}" for model in models)
    return (
        "### Models without networks\n\n"
        "Two models in the style of Pyro's examples, on synthetic data. The table gives the loss in nats after as many "
        f"steps of Adam as Pyro's own guide takes ({steps}; rate {results.setting['lr']}). Numbers are means and "
        "standard errors over seeds of data and guide (`python -m benchmarks.guides.pyro_models`). The losses of a "
        "hidden Markov model sum over its states. In the third row scales start as at sites of a network.\n\n"
        f"{markdown_table(['', *models], rows)}\n\n"
        f"{results.plot('The loss by guide, minus that of AutoNormal')}"
    )


def draw(results: Results) -> None:
    """Differences to Pyro's guide."""
    models = results.distinct("model")
    figure = Figure(figsize=(8, 3), layout="constrained")
    for ax, model in zip(figure.subplots(1, len(models)), models, strict=True):
        pyros = results.values("loss", model=model, guide=PYROS)
        for place, guide in enumerate(name for name in results.distinct("guide") if name != PYROS):
            ours = results.values("loss", model=model, guide=guide)
            ax.plot([a - b for a, b in zip(ours, pyros, strict=True)], [place] * len(ours), "o", color="#0072B2")
        ax.axvline(0.0, color="gray", linewidth=1)
        ax.set_yticks(range(len(results.distinct("guide")) - 1), results.distinct("guide")[1:])
        ax.set(title=model, xlabel="loss less AutoNormal's, nats")
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
