# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Hidden Markov models, deep Markov models, epidemics and forecasts."""

from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.contrib.epidemiology.models import SimpleSIRModel
from pyro.contrib.forecast import ForecastingModel
from pyro.contrib.mue.models import ProfileHMM
from pyro.contrib.timeseries import IndependentMaternGP
from pyro.distributions import constraints
from pyro.infer import Trace_ELBO, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal, AutoNormal
from pyro.infer.reparam import HaarReparam, LinearHMMReparam, LocScaleReparam, SplitReparam, StudentTReparam
from torch import Tensor, nn

from benchmarks.guides._examples.program import Program

STATES, TONES, LENGTH, SEQUENCES = 8, 20, 8, 30


def music() -> tuple[Tensor, Tensor]:
    """Sequences of chords, and their lengths."""
    return (torch.rand(SEQUENCES, LENGTH, TONES) < 0.2).float(), torch.randint(3, LENGTH + 1, (SEQUENCES,))


def tables() -> tuple[Tensor, Tensor]:
    """The chances of moves between states, and of tones."""
    moves = pyro.sample("moves", dist.Dirichlet(0.9 * torch.eye(STATES) + 0.1).to_event(1))
    tones = pyro.sample("tones_of", dist.Beta(0.1, 0.9).expand([STATES, TONES]).to_event(2))
    return moves, tones


def hidden_markov(sequences: Tensor, lengths: Tensor) -> None:
    """A subsample of all sequences, each up to its length."""
    moves, chords = tables()
    tones = pyro.plate("tones", TONES, dim=-1)
    with pyro.plate("sequences", len(sequences), 10, dim=-2) as batch:
        state: Any = 0
        for t in pyro.markov(range(LENGTH)):
            with poutine.mask(mask=(t < lengths[batch])[:, None]):
                state = pyro.sample(f"x_{t}", dist.Categorical(moves[state]), infer={"enumerate": "parallel"})
                with tones:
                    pyro.sample(f"y_{t}", dist.Bernoulli(chords[state.squeeze(-1)]), obs=sequences[batch, t])


def hmm() -> Program:
    """States are summed over."""
    guide = AutoDelta(poutine.block(hidden_markov, expose=["moves", "tones_of"]))
    return Program(hidden_markov, guide, TraceEnum_ELBO(max_plate_nesting=2), music())


def loop_over_sequences(sequences: Tensor, lengths: Tensor) -> None:
    """One sequence after the other, each of its own length, which is read."""
    moves, chords = tables()
    tones = pyro.plate("tones", TONES, dim=-1)
    for i in pyro.plate("sequences", len(sequences)):
        state: Any = 0
        for t in pyro.markov(range(int(lengths[i]))):
            state = pyro.sample(f"x_{i}_{t}", dist.Categorical(moves[state]), infer={"enumerate": "parallel"})
            with tones:
                pyro.sample(f"y_{i}_{t}", dist.Bernoulli(chords[state.squeeze(-1)]), obs=sequences[i, t])


def hmm_loop() -> Program:
    """Sequential plates, and lengths that decide what is run."""
    guide = AutoDelta(poutine.block(loop_over_sequences, expose=["moves", "tones_of"]))
    sequences, lengths = music()
    return Program(loop_over_sequences, guide, TraceEnum_ELBO(max_plate_nesting=1), (sequences[:4], lengths[:4]))


class Tones(nn.Module):
    """Tones from a state and the chord before."""

    def __init__(self) -> None:
        super().__init__()
        self.of_state, self.of_tones = nn.Linear(STATES, 16), nn.Linear(TONES, 16)
        self.last = nn.Linear(16, TONES)

    def forward(self, state: Tensor, before: Tensor) -> Tensor:
        """The logits of the tones."""
        one_hot = torch.eye(STATES)[state]
        logits: Tensor = self.last(torch.relu(self.of_state(one_hot) + self.of_tones(before)))
        return logits


def hmm_with_network() -> Program:
    """Tones through a network."""
    net = Tones()

    def model(sequences: Tensor, lengths: Tensor) -> None:
        pyro.module("tones_net", net)
        moves = pyro.sample("moves", dist.Dirichlet(0.9 * torch.eye(STATES) + 0.1).to_event(1))
        tones = pyro.plate("tones", TONES, dim=-1)
        with pyro.plate("sequences", len(sequences), dim=-2):
            state, before = torch.tensor(0), torch.zeros(TONES)
            for t in pyro.markov(range(LENGTH)):
                with poutine.mask(mask=(t < lengths)[:, None]):
                    state = pyro.sample(f"x_{t}", dist.Categorical(moves[state]), infer={"enumerate": "parallel"})
                    logits = net(state.squeeze(-1), before)
                    with tones:
                        pyro.sample(f"y_{t}", dist.Bernoulli(logits=logits), obs=sequences[:, t])
                before = sequences[:, t]

    guide = AutoDelta(poutine.block(model, expose=["moves"]))
    return Program(model, guide, TraceEnum_ELBO(max_plate_nesting=2), music())


def walks() -> Program:
    """Movement of animals in groups: effects of groups and animals on the moves of a hidden chain."""
    groups, animals, steps, states = 3, 5, 6, 3
    lengths, angles = torch.rand(steps, animals, groups) + 0.1, 3.0 * torch.rand(steps, animals, groups)

    @config_enumerate
    def model(lengths: Tensor, angles: Tensor) -> None:
        shape = pyro.param("shape", lambda: 1.0 + torch.rand(states), constraint=constraints.positive)
        rate = pyro.param("rate", lambda: 1.0 + torch.rand(states), constraint=constraints.positive)
        turn = pyro.param("turn", lambda: torch.rand(states))
        sharpness = pyro.param("sharpness", lambda: 1.0 + torch.rand(states), constraint=constraints.positive)
        with pyro.plate("groups", groups, dim=-1):
            effect = pyro.sample("of_group", dist.Normal(0.0, 1.0).expand([states**2]).to_event(1))
            with pyro.plate("animals", animals, dim=-2):
                own = pyro.sample("of_animal", dist.Normal(0.0, 1.0).expand([states**2]).to_event(1))
                moves = (effect + own).reshape((*own.shape[:-1], states, states)).softmax(-1)
                state = torch.tensor(0)
                for t in pyro.markov(range(steps)):
                    at = moves[..., 0, :] if t == 0 else pyro.ops.indexing.Vindex(moves)[..., state, :]
                    state = pyro.sample(f"state_{t}", dist.Categorical(at))
                    pyro.sample(f"length_{t}", dist.Gamma(shape[state], rate[state]), obs=lengths[t])
                    pyro.sample(f"angle_{t}", dist.VonMises(turn[state], sharpness[state]), obs=angles[t])

    guide = AutoNormal(poutine.block(model, expose=["of_group", "of_animal"]))
    return Program(model, guide, TraceEnum_ELBO(max_plate_nesting=2), (lengths, angles))


class DeepMarkov(nn.Module):
    """A chain of normal states with a network for each move, and a guide that reads the rest of the sequence."""

    def __init__(self, flow: bool, latent: int = 6, hidden: int = 20) -> None:
        super().__init__()
        self.move, self.emit = nn.Linear(latent, 2 * latent), nn.Linear(latent, TONES)
        self.rnn = nn.RNN(TONES, hidden, nonlinearity="relu", batch_first=True)
        self.from_state, self.to_state = nn.Linear(latent, hidden), nn.Linear(hidden, 2 * latent)
        self.first, self.guided_first = (nn.Parameter(torch.zeros(latent)) for _ in range(2))
        self.flow = dist.transforms.affine_autoregressive(latent, hidden_dims=[20]) if flow else None

    def model(self, sequences: Tensor, mask: Tensor, annealing: Tensor) -> None:
        """The chain; ``annealing`` scales the terms of the states."""
        pyro.module("markov", self)
        with pyro.plate("sequences", len(sequences)):
            state = self.first.expand(len(sequences), -1)
            for t in pyro.markov(range(LENGTH)):
                loc, log_scale = self.move(state).chunk(2, -1)
                with poutine.scale(scale=annealing), poutine.mask(mask=mask[:, t]):
                    state = pyro.sample(f"z_{t}", dist.Normal(state + loc, log_scale.exp()).to_event(1))
                with poutine.mask(mask=mask[:, t]):
                    chord = dist.Bernoulli(logits=self.emit(state)).to_event(1)
                    pyro.sample(f"x_{t}", chord, obs=sequences[:, t])

    def guide(self, sequences: Tensor, mask: Tensor, annealing: Tensor) -> None:
        """States from the state before and the rest of the sequence."""
        pyro.module("markov", self)
        rest = self.rnn(sequences.flip(1))[0].flip(1)
        with pyro.plate("sequences", len(sequences)):
            state = self.guided_first.expand(len(sequences), -1)
            for t in pyro.markov(range(LENGTH)):
                hidden = 0.5 * (torch.tanh(self.from_state(state)) + rest[:, t])
                loc, log_scale = self.to_state(hidden).chunk(2, -1)
                fn = dist.Normal(loc, log_scale.exp()).to_event(1)
                if self.flow is not None:
                    fn = dist.TransformedDistribution(fn, [self.flow])
                with poutine.scale(scale=annealing), poutine.mask(mask=mask[:, t]):
                    state = pyro.sample(f"z_{t}", fn)


def deep_markov(flow: bool = False) -> Program:
    """Annealing as a tensor; perhaps with a flow in the guide."""
    net = DeepMarkov(flow)
    sequences, lengths = music()
    mask = torch.arange(LENGTH) < lengths[:, None]
    return Program(net.model, net.guide, Trace_ELBO(), (sequences, mask, torch.tensor(0.3)))


def epidemic() -> Program:
    """Daily infections relaxed to real numbers, seen through Haar wavelets."""
    days, population = 16, 1000.0

    def model(reported: Tensor) -> None:
        reproduction, seen = pyro.sample("r0", dist.LogNormal(0.0, 1.0)), pyro.sample("seen", dist.Beta(5.0, 5.0))
        with pyro.plate("days", days, dim=-1):
            log_new = pyro.sample("log_new", dist.Normal(1.0, 2.0).mask(False))
            new = log_new.exp()
            infected = torch.cat([torch.ones(1), 1.0 + new.cumsum(-1)[:-1]])
            mean = reproduction * infected * (1.0 - new.cumsum(-1) / population).clamp(min=0.01) / 7.0
            pyro.sample("moves", dist.Normal(mean, (mean + 0.1).sqrt()), obs=new)
            pyro.sample("reported", dist.Normal(new * seen, (0.1 + new * seen * (1.0 - seen)).sqrt()), obs=reported)

    wavelets = poutine.reparam(model, {"log_new": HaarReparam(dim=-1, flip=True, experimental_allow_batch=True)})
    split = poutine.reparam(wavelets, {"log_new_haar": SplitReparam([4, days - 4], dim=-1)})
    guide = AutoLowRankMultivariateNormal(split, init_scale=0.01, rank=4)
    return Program(split, guide, Trace_ELBO(), (torch.linspace(1.0, 15.0, days).round(),))


class Trend(ForecastingModel):
    """A random walk with a weekly pattern."""

    def model(self, zero_data: Tensor, covariates: Tensor) -> None:
        """The series."""
        duration = len(zero_data)
        weight = pyro.sample("weight", dist.Normal(0.0, 0.1).expand([covariates.shape[-1]]).to_event(1))
        drift_scale = pyro.sample("drift_scale", dist.LogNormal(-3.0, 1.0))
        with self.time_plate:
            drift = pyro.sample("drift", dist.Normal(0.0, drift_scale))
        with pyro.plate("week", 7, dim=-1):
            week = pyro.sample("weekly", dist.Normal(0.0, 1.0))
        mean = drift.cumsum(-1) + week.repeat(1 + duration // 7)[:duration] + covariates @ weight
        scale = pyro.sample("scale", dist.LogNormal(-2.0, 1.0))
        self.predict(dist.Normal(0.0, scale), mean[:, None])


def forecast() -> Program:
    """A model of contrib.forecast."""
    model = Trend()
    model = poutine.reparam(model, {"drift": LocScaleReparam()})
    return Program(model, AutoNormal(model), Trace_ELBO(), (torch.randn(60, 1).cumsum(0), torch.randn(60, 2)))


def heavy_tailed_walk() -> Program:
    """A linear state space with Student-t noise, reparameterized to a Gaussian one."""

    def model(y: Tensor) -> None:
        moves, noise = (pyro.sample(name, dist.LogNormal(-1.0, 0.5)) for name in ("moves", "noise"))
        start = dist.Normal(0.0, 10.0).expand([1]).to_event(1)
        step = dist.StudentT(4.0, 0.0, moves.reshape(1)).to_event(1)
        seen = dist.StudentT(4.0, 0.0, noise.reshape(1)).to_event(1)
        chain = dist.LinearHMM(start, torch.eye(1), step, torch.eye(1), seen, duration=len(y))
        pyro.sample("y", chain, obs=y)

    student = StudentTReparam()
    reparam = poutine.reparam(model, {"y": LinearHMMReparam(None, student, student)})
    return Program(reparam, AutoNormal(reparam), Trace_ELBO(), (torch.randn(40, 1).cumsum(0),))


def compartments() -> Program:
    """A model of contrib.epidemiology as its ``fit_svi`` trains it."""
    model = SimpleSIRModel(1000, 7.0, torch.tensor([1.0, 2.0, 2.0, 4.0, 5.0, 7.0, 8.0, 9.0]))
    model.relaxed, model.num_quant_bins = True, 1
    relaxed = model._relaxed_model
    guide = AutoLowRankMultivariateNormal(relaxed, init_loc_fn=model._heuristic(None), init_scale=0.01)
    loss = Trace_ELBO(max_plate_nesting=model.max_plate_nesting, num_particles=1, vectorize_particles=True)
    return Program(relaxed, guide, loss)


def matern() -> Program:
    """Point estimates of the kernel of contrib.timeseries, in double precision: its filter amplifies rounding."""
    process = IndependentMaternGP(nu=1.5, obs_dim=2).double()

    def model(y: Tensor) -> None:
        pyro.module("process", process)
        pyro.factor("y", process.log_prob(y).sum())

    return Program(model, lambda y: None, Trace_ELBO(), (torch.randn(30, 2).double().cumsum(0),))


def profile() -> Program:
    """Sequences of letters with insertions and deletions."""
    profile = ProfileHMM(6, 4)
    letters = nn.functional.one_hot(torch.randint(4, (10, 6)), 4).double().to(torch.get_default_dtype())
    return Program(profile.model, profile.guide, Trace_ELBO(), (letters, torch.ones(10)))


PROGRAMS = {
    "hmm": hmm,
    "hmm, loop over sequences": hmm_loop,
    "hmm, network": hmm_with_network,
    "mixed_hmm": walks,
    "dmm": deep_markov,
    "dmm, flow": partial(deep_markov, flow=True),
    "sir_hmc, SVI": epidemic,
    "forecast": forecast,
    "LinearHMM, StudentTReparam": heavy_tailed_walk,
    "epidemiology": compartments,
    "timeseries": matern,
    "mue": profile,
}
