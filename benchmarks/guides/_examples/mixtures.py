# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Mixtures and other models with discrete variables."""

from collections.abc import Callable
from functools import partial

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer import ReweightedWakeSleep, Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDelta, AutoNormal
from pyro.ops.indexing import Vindex
from torch import Tensor, nn

from benchmarks.guides._examples.program import Program


def blobs(number: int = 200) -> Tensor:
    """Points on a line around three centers."""
    return torch.randint(3, (number,)).sub(1.0) * 4.0 + torch.randn(number)


@config_enumerate
def mixture_model(points: Tensor) -> None:
    """Three normal components that share a scale."""
    weights = pyro.sample("weights", dist.Dirichlet(0.5 * torch.ones(3)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 2.0))
    with pyro.plate("components", 3):
        centers = pyro.sample("centers", dist.Normal(0.0, 10.0))
    with pyro.plate("points", len(points)):
        which = pyro.sample("which", dist.Categorical(weights))
        pyro.sample("point", dist.Normal(centers[which], scale), obs=points)


def mixture(guide: type = AutoNormal) -> Program:
    """The components of the points are summed over."""
    continuous = poutine.block(mixture_model, hide=["which"])
    return Program(mixture_model, guide(continuous), TraceEnum_ELBO(max_plate_nesting=1), (blobs(),))


def chain_of_coins() -> Program:
    """Three binary variables in a chain, the middle one unseen."""

    @config_enumerate
    def model(a: Tensor, c: Tensor) -> None:
        first = pyro.sample("first", dist.Beta(1.0, 1.0))
        second, third = (
            pyro.sample(name, dist.Beta(torch.ones(2), torch.ones(2)).to_event(1)) for name in ("second", "third")
        )
        with pyro.plate("rows", len(a)):
            a = pyro.sample("a", dist.Bernoulli(first.expand(len(a))), obs=a)
            b = pyro.sample("b", dist.Bernoulli(Vindex(second)[a.long()]))
            pyro.sample("c", dist.Bernoulli(Vindex(third)[b.long()]), obs=c)

    def guide(a: Tensor, c: Tensor) -> None:
        one = pyro.param("one", torch.tensor([1.0, 10.0]), constraint=constraints.positive)
        pyro.sample("first", dist.Beta(one[0], one[1]))
        for name in ("second", "third"):
            own = pyro.param(f"of_{name}", torch.tensor([[10.0, 1.0], [1.0, 10.0]]), constraint=constraints.positive)
            pyro.sample(name, dist.Beta(own[:, 0], own[:, 1]).to_event(1))

    rows = torch.rand(500) < 0.3
    return Program(model, guide, TraceEnum_ELBO(max_plate_nesting=1), (rows.float(), (~rows).float()))


def topics() -> Program:
    """Latent Dirichlet allocation over a subsample of documents, with an amortized guide."""
    num_topics, num_words, length, documents, batch = 4, 64, 16, 200, 32
    net = nn.Sequential(nn.Linear(num_words, 20), nn.Sigmoid(), nn.Linear(20, num_topics), nn.Softmax(-1))

    def model(words: Tensor) -> None:
        with pyro.plate("topics", num_topics):
            weights = pyro.sample("weights", dist.Gamma(1.0 / num_topics, 1.0))
            tables = pyro.sample("tables", dist.Dirichlet(torch.ones(num_words) / num_words))
        with pyro.plate("documents", documents, batch) as rows:
            own = pyro.sample("own", dist.Dirichlet(weights))
            with pyro.plate("places", length):
                topic = pyro.sample("topic", dist.Categorical(own), infer={"enumerate": "parallel"})
                pyro.sample("word", dist.Categorical(tables[topic]), obs=words[:, rows])

    def guide(words: Tensor) -> None:
        pyro.module("net", net)
        weights = pyro.param("q_weights", torch.ones(num_topics), constraint=constraints.positive)
        tables = pyro.param("q_tables", torch.ones(num_topics, num_words), constraint=constraints.greater_than(0.5))
        with pyro.plate("topics", num_topics):
            pyro.sample("weights", dist.Gamma(weights, 1.0))
            pyro.sample("tables", dist.Dirichlet(tables))
        with pyro.plate("documents", documents, batch) as rows:
            counts = torch.zeros(num_words, batch).scatter_add(0, words[:, rows], torch.ones(length, batch))
            pyro.sample("own", dist.Delta(net(counts.T), event_dim=1))

    return Program(model, guide, TraceEnum_ELBO(max_plate_nesting=2), (torch.randint(num_words, (length, documents)),))


def captures() -> Program:
    """Animals that are caught, survive, and are caught again."""
    animals, seasons = 50, 6
    seen = (torch.rand(animals, seasons) < 0.4).float()

    def model(history: Tensor) -> None:
        again = pyro.sample("again", dist.Uniform(0.0, 1.0))
        alive, known = torch.ones(animals), torch.zeros(animals).bool()
        plate = pyro.plate("animals", animals, dim=-1)
        for t in pyro.markov(range(seasons)):
            survives = pyro.sample(f"survives_{t}", dist.Uniform(0.0, 1.0)) if t > 0 else 1.0
            with plate, poutine.mask(mask=known):
                chance = known.float() * survives * alive + (1.0 - known.float())
                alive = pyro.sample(f"alive_{t}", dist.Bernoulli(chance), infer={"enumerate": "parallel"})
                pyro.sample(f"seen_{t}", dist.Bernoulli(again * alive), obs=history[:, t])
            known = known | history[:, t].bool()

    names = ["again", *(f"survives_{t}" for t in range(1, seasons))]
    guide = AutoNormal(poutine.block(model, expose=names))
    return Program(model, guide, TraceEnum_ELBO(max_plate_nesting=1), (seen,))


def sticks() -> Program:
    """A Dirichlet process mixture with a truncated guide, whose components are drawn."""
    most = 6

    def weights(sticks: Tensor) -> Tensor:
        rest = (1.0 - sticks).cumprod(-1)
        return nn.functional.pad(sticks, (0, 1), value=1.0) * nn.functional.pad(rest, (1, 0), value=1.0)

    def model(points: Tensor) -> None:
        with pyro.plate("sticks", most - 1):
            broken = pyro.sample("broken", dist.Beta(1.0, 0.7))
        with pyro.plate("components", most):
            centers = pyro.sample("centers", dist.Normal(0.0, 5.0))
        with pyro.plate("points", len(points)):
            which = pyro.sample("which", dist.Categorical(weights(broken)))
            pyro.sample("point", dist.Normal(centers[which], 1.0), obs=points)

    def guide(points: Tensor) -> None:
        shape = pyro.param("shape", lambda: torch.full([most - 1], 2.0), constraint=constraints.positive)
        loc = pyro.param("loc", lambda: 3.0 * torch.randn(most))
        phi = pyro.param("phi", lambda: torch.ones(len(points), most) / most, constraint=constraints.simplex)
        with pyro.plate("sticks", most - 1):
            pyro.sample("broken", dist.Beta(torch.ones(most - 1), shape))
        with pyro.plate("components", most):
            pyro.sample("centers", dist.Normal(loc, 0.1))
        with pyro.plate("points", len(points)):
            pyro.sample("which", dist.Categorical(phi))

    return Program(model, guide, Trace_ELBO(), (blobs(60),))


def picks(points: Tensor) -> None:
    """A mixture with learned centers."""
    centers = pyro.param("centers", torch.tensor([-3.0, 0.5, 3.0]))
    with pyro.plate("points", len(points)):
        which = pyro.sample("which", dist.Categorical(torch.ones(3) / 3.0))
        pyro.sample("point", dist.Normal(centers[which], 1.0), obs=points)


def amortized_picks(baseline: bool) -> Callable[[Tensor], None]:
    """A guide whose network picks a component for each point, with a baseline or without."""
    net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 3))
    options = {"use_decaying_avg_baseline": True, "baseline_beta": 0.9} if baseline else {}

    def guide(points: Tensor) -> None:
        pyro.module("net", net)
        with pyro.plate("points", len(points)):
            pyro.sample("which", dist.Categorical(logits=net(points[:, None])), infer={"baseline": options})

    return guide


def baseline() -> Program:
    """Gradients of a score function with a running baseline."""
    return Program(picks, amortized_picks(True), TraceGraph_ELBO(), (blobs(60),))


def wake_sleep() -> Program:
    """Reweighted wake-sleep."""
    loss = ReweightedWakeSleep(num_particles=4, vectorize_particles=False, max_plate_nesting=1)
    return Program(picks, amortized_picks(False), loss, (blobs(60),))


PROGRAMS = {
    "gmm": mixture,
    "gmm, AutoDelta": partial(mixture, AutoDelta),
    "toy_mixture": chain_of_coins,
    "lda": topics,
    "capture_recapture": captures,
    "dirichlet process": sticks,
    "decaying average baseline": baseline,
    "wake-sleep": wake_sleep,
}
