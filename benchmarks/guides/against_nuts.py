# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Compare predictive means and standard deviations of guides with the exact posterior, on two tiny networks.

python -m benchmarks.guides.against_nuts
"""

import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pyro
import torch
from matplotlib.figure import Figure
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoLowRankMultivariateNormal, AutoMultivariateNormal
from torch import Tensor, nn

from benchmarks.common import (
    Claim,
    Form,
    Pair,
    Results,
    Row,
    is_below,
    main,
    markdown_table,
    paired,
    perceptron,
    with_error,
)
from benchmarks.guides._ensemble import Ensemble
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, FitOptions, SupervisedModel, TermsELBO, fit, predict
from pyro_radial.infer import last_layer_laplace
from pyro_radial.infer.autoguide import families, init_to_network
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import FanIn

NUTS_CHAIN = "NUTS"
GAIN = 1.5
# A 1-d input: 12 points on either side of a gap.
GRID = torch.linspace(-3.0, 3.0, 49)[:, None]
SIDES = ((-2.0, -0.7), (0.7, 2.0))
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "data": lambda x: (x.abs() >= 0.7) & (x.abs() <= 2.0),
    "gap": lambda x: x.abs() < 0.7,
    "outside": lambda x: x.abs() > 2.0,
}


class Net(NamedTuple):
    """Widths of the hidden layers, the function behind the data, and the noise, which is known."""

    hidden: tuple[int, ...]
    function: Callable[[Tensor], Tensor]
    noise: float


NETS = {
    "1-10-1": Net((10,), lambda x: torch.sin(2 * x), 0.3),
    "1-5-5-1": Net((5, 5), lambda x: x**3 / 4, 0.3),
}


class Size(NamedTuple):
    """Of NUTS and of the training of guides."""

    chains: int = 4
    warmup: int = 300
    draws: int = 700
    tree_depth: int = 6
    steps: int = 2_000
    num_particles: int = 8
    num_samples: int = 500
    ensemble: int = 5


SIZES = {"default": Size(), "small": Size(2, 3, 8, 2, 5, 2, 4, 2)}


def run(output: Path, *, form: Form = "default", seeds: int = 2, threads: int = 1) -> None:
    """Train on 24 points of a smooth function with a gap, with tanh networks and known noise.

    The prior of weights is normal with a standard deviation of 1.5 over the root of the number of inputs of a layer;
    that of biases is standard normal. NUTS is Pyro's, with four chains of 300 steps of warm-up and 700 draws each, on
    the same posterior density. Guides train on all points for 2,000 steps of Adam, at a rate that falls from 0.01 to
    zero, with 8 draws; ensembles have 5 members.

    A seed determines the network and the noise; the data are the same. Predictions are functions without noise, 500
    draws, at 49 inputs from -3 to 3. Radial-directional posteriors are left out: they need another prior, and so have
    another exact posterior.
    """
    torch.set_num_threads(threads)
    size = SIZES[form]
    results = Results(output, {"torch": torch.__version__, "threads": threads, "gain": GAIN, **size._asdict()})
    names = tuple(NETS) if form == "default" else ("1-10-1",)
    for name, chain in itertools.product(names, range(size.chains)):
        results.add({"net": name, "method": NUTS_CHAIN, "seed": chain}, partial(sampled, name, chain, size))
    for seed, name, method in itertools.product(range(seeds if form == "default" else 1), names, METHODS):
        results.add({"net": name, "method": method, "seed": seed}, partial(approximated, name, method, seed, size))


def data_of(net: Net) -> Pair:
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([low + (high - low) * torch.rand(12, 1, generator=generator) for low, high in SIDES])
    return x, net.function(x) + net.noise * torch.randn(len(x), 1, generator=generator)


def make_network(name: str) -> nn.Sequential:
    return perceptron((1, *NETS[name].hidden, 1), nn.Tanh)


def make_model(name: str, seed: int) -> SupervisedModel:
    torch.manual_seed(seed)
    bnn = BayesianModule(make_network(name), FanIn(GAIN))
    return SupervisedModel(bnn, likelihoods.Gaussian(num_data=24, scale=NETS[name].noise))


def energy(name: str, data: Pair) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor], int]:
    """Less the log-density of the posterior of all weights in prior standard deviations, up to a constant.

    :returns: this function; that from weights and inputs to outputs; and the number of weights.
    """
    net = make_network(name)
    prior = FanIn(GAIN)
    scales = [float(prior(own, parameter).scale) for own, parameter in net.named_parameters()]
    shapes = [parameter.shape for parameter in net.parameters()]
    sizes = [shape.numel() for shape in shapes]

    def function(weights: Tensor, x: Tensor) -> Tensor:
        parts = [w.reshape(shape) * s for w, shape, s in zip(weights.split(sizes), shapes, scales, strict=True)]
        *hidden, (last, bias) = zip(parts[::2], parts[1::2], strict=True)
        for weight, own in hidden:
            x = torch.addmm(own, x, weight.T).tanh()
        return torch.addmm(bias, x, last.T)

    def negative_log_density(weights: Tensor) -> Tensor:
        residual = (data[1] - function(weights, data[0])) / NETS[name].noise
        return 0.5 * residual.square().sum() + 0.5 * weights.square().sum()

    return negative_log_density, function, sum(sizes)


def sampled(name: str, chain: int, size: Size) -> Row:
    """A chain of NUTS from a draw of the prior; moments of both its halves too, for the R-hat of function values."""
    x, y = (part.double() for part in data_of(NETS[name]))
    density, function, number = energy(name, (x, y))
    pyro.set_rng_seed(chain)
    start = torch.randn(number, dtype=torch.double)
    # Traced by torch, since the model itself would be run 100 times for each draw.
    traced = torch.jit.trace(density, start)
    began = time.process_time()
    kernel = NUTS(potential_fn=lambda values: traced(values["weights"]), max_tree_depth=size.tree_depth)
    mcmc = MCMC(kernel, size.draws, warmup_steps=size.warmup, initial_params={"weights": start}, disable_progbar=True)
    mcmc.run()
    values = torch.stack([function(w, GRID.double())[:, 0] for w in mcmc.get_samples()["weights"]])
    halves = values.unflatten(0, (2, -1)) if len(values) % 2 == 0 else values[None]
    return moments(values) | {
        "half_means": rounded(halves.mean(1)),
        "half_variances": rounded(halves.var(1)),
        "divergences": len(mcmc.diagnostics()["divergences"]["chain 0"]),
        "seconds": time.process_time() - began,
    }


def moments(values: Tensor) -> Row:
    return {"mean": rounded(values.mean(0)), "stddev": rounded(values.std(0))}


def rounded(values: Tensor) -> Any:
    return [rounded(row) for row in values] if values.dim() > 1 else [round(value, 5) for value in values.tolist()]


def approximated(name: str, method: str, seed: int, size: Size) -> Row:
    began = time.process_time()
    # Pyro's guides would go on from the parameters of an earlier one of their name.
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    draws = METHODS[method](name, seed, size)
    return moments(draws.samples[..., 0].double()) | {"seconds": time.process_time() - began}


def train(model: SupervisedModel, guide: Any, data: Pair, seed: int, size: Size) -> None:
    fit(model, guide, data, seed=seed, progress=False, **settings(size))


def settings(size: Size) -> dict[str, Any]:
    return {
        "epochs": size.steps,
        "batch_size": 24,
        "optim": partial(torch.optim.Adam, lr=0.01, fused=True),
        "scheduler": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=size.steps),
        "loss": TermsELBO(size.num_particles, vectorize_particles=True, max_plate_nesting=1),
        "options": FitOptions(compile=size.steps > 100),
    }


def by_guide(make: Callable[[SupervisedModel], Any]) -> Callable[[str, int, Size], Any]:
    """One guide, trained."""

    def draws(name: str, seed: int, size: Size) -> Any:
        model = make_model(name, seed)
        guide = make(model)
        train(model, guide, data_of(NETS[name]), seed, size)
        return predict(model, guide, GRID, num_samples=size.num_samples)

    return draws


def by_ensemble(make: Callable[[SupervisedModel], Any], num_samples: int) -> Callable[[str, int, Size], Any]:
    """Several guides from starts of their own; of points, one draw each is all there is."""

    def draws(name: str, seed: int, size: Size) -> Any:
        def member(own: int) -> Any:
            model = make_model(name, own)
            return model, make(model)

        ensemble = Ensemble(member, size.ensemble, seed=seed)
        ensemble.fit(data_of(NETS[name]), **settings(size))
        return ensemble.predict(GRID, num_samples=num_samples or size.num_samples // size.ensemble)

    return draws


def laplace(name: str, seed: int, size: Size) -> Any:
    """Laplace's approximation around the mode of the posterior."""
    model = make_model(name, seed)
    guide = AutoMeanField(model, families={".": families.Delta()})
    train(model, guide, data_of(NETS[name]), seed, size)
    network = model.bnn.to_module({site: value.mean for site, value in guide.posterior().items()})
    approximation = last_layer_laplace(model, network, data_of(NETS[name]))
    return predict(model, approximation, GRID, num_samples=size.num_samples)


START: Any = {"init_loc_fn": init_to_network, "init_scale": 0.05}
METHODS: dict[str, Callable[[str, int, Size], Any]] = {
    "mean field": by_guide(AutoMeanField),
    "radial": by_guide(AutoRadial),
    "radial, a radius per row": by_guide(partial(AutoRadial, event_dim=1)),
    "last-layer Laplace": laplace,
    "ensemble of radial": by_ensemble(AutoRadial, 0),
    "ensemble of points": by_ensemble(partial(AutoMeanField, families={".": families.Delta()}), 1),
    "AutoLowRankMultivariateNormal": by_guide(partial(AutoLowRankMultivariateNormal, **START)),
    "AutoMultivariateNormal": by_guide(partial(AutoMultivariateNormal, **START)),
}


def exact(results: Results, net: str) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of all chains."""
    chains = results.where(net=net, method=NUTS_CHAIN)
    means, stddevs = (torch.tensor([row[key] for row in chains], dtype=torch.double) for key in ("mean", "stddev"))
    variance = stddevs.square().mean(0) + means.var(0, correction=0)
    return means.mean(0), variance.sqrt()


def r_hat(results: Results, net: str) -> Tensor:
    """Of the function's value at each input, over the halves of all chains (Gelman et al., 2013, section 11.4)."""
    chains = results.where(net=net, method=NUTS_CHAIN)
    means = torch.tensor([half for row in chains for half in row["half_means"]], dtype=torch.double)
    within = torch.tensor([half for row in chains for half in row["half_variances"]], dtype=torch.double).mean(0)
    number = results.setting["draws"] // 2
    return ((number - 1) / number + means.var(0) / within).sqrt()


def errors(results: Results, net: str, method: str, part: str | None = None) -> tuple[list[float], list[float]]:
    """Root mean squares over inputs of the errors of mean and standard deviation, by seed."""
    inside = torch.ones(len(GRID), dtype=torch.bool) if part is None else PARTS[part](GRID[:, 0])
    found = []
    for key, truth in zip(("mean", "stddev"), exact(results, net), strict=True):
        values = torch.tensor(results.values(key, net=net, method=method), dtype=torch.double)
        found.append((values - truth)[:, inside].square().mean(1).sqrt().tolist())
    return found[0], found[1]


def claims(results: Results) -> list[Claim]:
    """Compare radial posteriors with mean field, alone and as an ensemble."""
    nets, methods = results.distinct("net"), [m for m in results.distinct("method") if m != NUTS_CHAIN]
    seeds = str(len(results.where(net=nets[0], method=methods[0])))
    found = []
    for place, title in enumerate(("mean", "standard deviation")):
        closer, shown = [], []
        for name in ("radial", "radial, a radius per row", "ensemble of radial"):
            pairs = {net: [errors(results, net, m)[place] for m in (name, "mean field")] for net in nets}
            if all(is_below(paired(*pair)) for pair in pairs.values()):
                closer.append(name)
            if name == "radial":
                shown = [
                    f"{mean(ours):.3f} against {mean(theirs):.3f} ({net})" for net, (ours, theirs) in pairs.items()
                ]
        text = (
            f"Two tiny networks: radial, with a radius per row or as an ensemble too, has a predictive {title} that is "
            "closer to NUTS than that of mean field"
        )
        found.append(Claim(text, "", f"{len(closer)} of 3; radial {'; '.join(shown)}", seeds, len(closer) == 3))
    return found


def report(results: Results) -> str:
    """Report errors by network, method and part of the inputs."""
    lines = []
    for net in results.distinct("net"):
        truth = exact(results, net)[1]
        spread = [f"{float(truth[PARTS[part](GRID[:, 0])].mean()):.3f}" for part in PARTS]
        lines.append([f"{net}, NUTS itself", "", *(f"(sd {value})" for value in spread), "", "", "", "", ""])
        for method in results.distinct("method"):
            cells = [errors(results, net, method, part) for part in (None, *PARTS)]
            values = [with_error(own[place], 3) for place in range(2) for own in cells]
            seconds = f"{mean(results.values('seconds', net=net, method=method)):.0f}"
            label = "one chain of NUTS" if method == NUTS_CHAIN else method
            lines.append([f"{net}, {label}", *values, seconds])
    parts = ["all", *PARTS]
    headings = ["", *(f"mean, {p}" for p in parts), *(f"standard deviation, {p}" for p in parts), "seconds"]
    size = results.setting
    largest = ", ".join(f"{float(r_hat(results, net).max()):.3f}" for net in results.distinct("net"))
    return f"""### Guides compared with NUTS

The table shows how far predictive means and standard deviations are from those of the exact posterior. Errors are \
root mean squares over 49 inputs, and over the inputs where data are, between them, and outside. Both networks have \
tanh units, 24 points and known noise (`python -m benchmarks.guides.against_nuts`). NUTS is Pyro's, with \
{size["chains"]} chains of {size["draws"]:,} draws after {size["warmup"]} steps of warm-up; the largest R-hat of a \
function value in each network is {largest}. The line "one chain of NUTS" compares a single chain with all chains, and \
so shows the error of NUTS itself. Guides train for {size["steps"]:,} steps; numbers are means over seeds with \
standard errors. Seconds are on one core and include compilation.

{markdown_table(headings, lines)}

{results.plot("Predictive mean and two standard deviations by method")}"""


def draw(results: Results) -> None:
    """Each method's band on that of NUTS, with the first seed."""
    nets, methods = results.distinct("net"), [m for m in results.distinct("method") if m != NUTS_CHAIN]
    figure = Figure(figsize=(2.1 * len(methods), 2.4 * len(nets) + 0.4), layout="constrained", dpi=80)
    x = GRID[:, 0].numpy()
    for line, net in zip(figure.subplots(len(nets), len(methods), sharey="row", squeeze=False), nets, strict=True):
        center, stddev = exact(results, net)
        for ax, method in zip(line, methods, strict=True):
            row = results.where(net=net, method=method)[0]
            own, width = (torch.tensor(row[key], dtype=torch.double) for key in ("mean", "stddev"))
            ax.fill_between(x, center - 2 * stddev, center + 2 * stddev, color="0.85", label="NUTS")
            ax.plot(x, center, color="0.5", lw=1)
            for edge in (own - 2 * width, own, own + 2 * width):
                ax.plot(x, edge, color="#0072B2", lw=1.2 if edge is own else 0.8)
            ax.plot(*(part[:, 0] for part in data_of(NETS[net])), "k.", ms=3)
            label = method.replace("MultivariateNormal", "\nMultivariateNormal").replace(", ", ",\n")
            ax.set_title(f"{label}\n{net}", fontsize=8)
    results.save_plot(figure)


if __name__ == "__main__":
    main(run, report, draw)
