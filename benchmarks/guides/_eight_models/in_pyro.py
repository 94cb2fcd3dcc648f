# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The eight models in Pyro."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import (
    ELBO,
    SVI,
    JitTrace_ELBO,
    JitTraceEnum_ELBO,
    JitTraceMeanField_ELBO,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceMeanField_ELBO,
)
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal, init_to_uniform, init_to_value
from torch import Tensor, nn

from benchmarks.guides._eight_models import models
from benchmarks.guides._eight_models.data import NUM_DATA, Arrays, arrays
from pyro_radial import CompiledSVI

Tensors = dict[str, Tensor]
JIT: dict[type[ELBO], type[ELBO]] = {
    Trace_ELBO: JitTrace_ELBO,
    TraceEnum_ELBO: JitTraceEnum_ELBO,
    TraceMeanField_ELBO: JitTraceMeanField_ELBO,
}


def states(y: Tensor) -> None:
    """A chain by the noise of its steps."""
    keep = pyro.sample("keep", dist.Beta(5.0, 1.0))
    move, noise = (pyro.sample(name, dist.LogNormal(-1.0, 1.0)) for name in ("move", "noise"))
    with pyro.plate("steps", len(y)):
        step = pyro.sample("step", dist.Normal(0.0, 1.0))
    state, found = torch.zeros(()), []
    for t in range(len(y)):
        state = keep * state + move * step[t]
        found.append(state)
    with pyro.plate("seen", len(y)):
        pyro.sample("y", dist.Normal(torch.stack(found), noise), obs=y)


class Autoencoder(nn.Module):
    """The networks of images, with softplus units."""

    def __init__(self, start: Tensors) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: value.clone() for name, value in start.items()})

    def net(self, part: str, x: Tensor) -> Tensor:
        """Two layers."""
        w = self.weights
        hidden = nn.functional.softplus(x @ w[f"{part}_weight_0"] + w[f"{part}_bias_0"])
        return hidden @ w[f"{part}_weight_1"] + w[f"{part}_bias_1"]

    def model(self, y: Tensor) -> None:
        """Images from codes."""
        pyro.module("autoencoder", self)
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(y.new_zeros(len(self.weights["d_weight_0"])), 1.0).to_event(1))
            pyro.sample("y", dist.Bernoulli(logits=self.net("d", z)).to_event(1), obs=y)

    def guide(self, y: Tensor) -> None:
        """Codes from images."""
        pyro.module("autoencoder", self)
        loc, log_scale = self.net("e", y).chunk(2, -1)
        with pyro.plate("rows", len(y)):
            pyro.sample("z", dist.Normal(loc, log_scale.exp()).to_event(1))


def network(x: Tensor, y: Tensor, sizes: tuple[tuple[int, int], ...]) -> None:
    """Normal weights of a rectifier network."""
    for number, (inputs, outputs) in enumerate(sizes):
        weight = pyro.sample(f"weight_{number}", dist.Normal(0.0, 1.0).expand([inputs, outputs]).to_event(2))
        bias = pyro.sample(f"bias_{number}", dist.Normal(0.0, 1.0).expand([outputs]).to_event(1))
        x = (torch.relu(x) if number else x) @ weight + bias
    with poutine.scale(scale=NUM_DATA / len(y)), pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Categorical(logits=x), obs=y)


def process(x: Tensor, y: Tensor, inducing: Tensor) -> None:
    """A Gaussian process through whitened values at inducing points."""
    length, variance, noise = (pyro.sample(name, dist.LogNormal(-1.0, 1.0)) for name in ("length", "variance", "noise"))
    values = pyro.sample("values", dist.Normal(0.0, 1.0).expand([len(inducing)]).to_event(1))

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return variance * torch.exp(-0.5 * ((a[:, None] - b) / length).square())

    factor = torch.linalg.cholesky(kernel(inducing, inducing) + 1e-3 * torch.eye(len(inducing)))
    with pyro.plate("rows", len(y), subsample_size=len(y) // 10) as rows:
        at_rows = torch.linalg.solve_triangular(factor, kernel(inducing, x[rows]), upper=False)
        left = (variance - at_rows.square().sum(0)).clamp(min=0.0)
        pyro.sample("y", dist.Normal(values @ at_rows, (left + noise.square()).sqrt()), obs=y[rows])


Made = tuple[Callable[..., Any], Callable[..., Any], type[ELBO], tuple[Tensor, ...]]


def made(name: str, data: Tensors) -> Made:
    """The model, guide, loss and arguments."""
    if name == "VAE":
        y = data.pop("y")
        net = Autoencoder(data)
        return net.model, net.guide, TraceMeanField_ELBO, (y,)
    if name.startswith("784"):
        x, y = data.pop("x"), data.pop("y")
        sizes = tuple(tuple(value.shape) for key, value in data.items() if key.startswith("weight"))
        model = partial(network, sizes=sizes)
        guide = AutoNormal(model, init_loc_fn=init_to_value(values=data), init_scale=0.01)
        return model, guide, TraceMeanField_ELBO, (x, y)
    model, args, start = SIMPLE[name], tuple(data.values()), init_to_uniform(radius=0.0)
    if name == "mixture, enumerated":
        continuous = poutine.block(model, hide=["which"])
        return model, AutoNormal(continuous, init_loc_fn=start), TraceEnum_ELBO, args
    make = AutoMultivariateNormal if name == "sparse GP" else AutoNormal
    return model, make(model, init_loc_fn=start), Trace_ELBO, args


SIMPLE: dict[str, Callable[..., None]] = {
    "hierarchical regression": partial(models.hierarchical, pyro),
    "cell counts": partial(models.counts, pyro),
    "eight schools": partial(models.schools, pyro),
    "mixture, enumerated": partial(models.mixture, pyro, ones=torch.ones(3)),
    "state space": states,
    "sparse GP": process,
}


def tensors(data: Arrays) -> Tensors:
    """Arrays as torch has them."""
    found = {name: torch.from_numpy(value) for name, value in data.items()}
    return {name: value if value.is_floating_point() else value.long() for name, value in found.items()}


class Training:
    """Steps of one contender."""

    def __init__(self, name: str, small: bool, kind: str, lr: float) -> None:
        torch.set_num_threads(1)
        pyro.set_rng_seed(0)
        self.model, self.guide, loss, self.args = made(name, tensors(arrays(name, small)))
        # Mini-batches and mixtures have a plate each.
        nesting = {"max_plate_nesting": 2 if name == "cell counts" else 1}
        self.loss = loss(**nesting)
        optim = pyro.optim.Adam({"lr": lr})
        if kind == "CompiledSVI":
            self.svi: Any = CompiledSVI(self.model, self.guide, optim, self.loss, compile=not small)
        else:
            used = JIT[loss](**nesting, ignore_jit_warnings=True) if kind == "JitTrace_ELBO" else self.loss
            self.svi = SVI(self.model, self.guide, optim, used)

    def steps(self, number: int) -> None:
        """Take steps."""
        for _ in range(number):
            self.svi.step(*self.args)

    def compile(self) -> None:
        """Compile graphs at their next use."""
        if isinstance(self.svi, CompiledSVI):
            self.svi.graphs.compile_now = True

    def final(self, draws: int) -> float:
        """The mean loss over draws."""
        with torch.no_grad():
            return sum(float(self.loss.loss(self.model, self.guide, *self.args)) for _ in range(draws)) / draws

    def eager_reasons(self) -> list[str]:
        """Why compiled steps are none."""
        return self.svi.graphs.eager_reasons if isinstance(self.svi, CompiledSVI) else []
