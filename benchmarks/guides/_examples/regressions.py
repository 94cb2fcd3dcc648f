# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Regressions and hierarchical models, and the guides that Pyro's examples put on them."""

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer import RenyiELBO, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoNormalizingFlow,
    AutoStructured,
)
from pyro.infer.reparam import LocScaleReparam, StableReparam
from pyro.nn import PyroModule, PyroSample
from torch import Tensor

from benchmarks.guides._examples.program import Program


class LinearRegression(PyroModule[torch.nn.Module]):
    """Weights with priors, in a module."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.linear = PyroModule[torch.nn.Linear](inputs, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, inputs]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 10.0).expand([1]).to_event(1))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """The mean."""
        sigma = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
        mean: Tensor = self.linear(x).squeeze(-1)
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)
        return mean


def rows(number: int = 100, inputs: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs, and targets of a noisy line."""
    x = torch.randn(number, inputs)
    return x, x.sum(-1) + 0.3 * torch.randn(number)


def bayesian_regression() -> Program:
    """A linear regression in a module."""
    model = LinearRegression(3)
    return Program(model, AutoDiagonalNormal(model), Trace_ELBO(), rows())


def batting(at_bats: Tensor, hits: Tensor) -> None:
    """Chances of success of players that are partly pooled."""
    mean = pyro.sample("mean", dist.Uniform(0.0, 1.0))
    concentration = pyro.sample("concentration", dist.Pareto(1.0, 1.5))
    with pyro.plate("players", len(at_bats)):
        chance = pyro.sample("chance", dist.Beta(mean * concentration, (1.0 - mean) * concentration))
        pyro.sample("hits", dist.Binomial(at_bats, chance), obs=hits)


def baseball() -> Program:
    """Counts of successes."""
    return Program(
        batting, AutoNormal(batting), Trace_ELBO(), (torch.full((18,), 45.0), torch.randint(7, 19, (18,)).float())
    )


EFFECTS = torch.tensor([12.0, 4.0, -3.0, 8.0, -1.0, 2.0, 15.0, 10.0])
ERRORS = torch.tensor([14.0, 9.0, 15.0, 12.0, 8.0, 11.0, 10.0, 17.0])


def schools(effects: Tensor, errors: Tensor) -> None:
    """Effects of schools around a common mean."""
    mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    spread = pyro.sample("spread", dist.HalfCauchy(25.0))
    with pyro.plate("schools", len(effects)):
        own = pyro.sample("own", dist.Normal(0.0, 1.0))
        pyro.sample("effect", dist.Normal(mean + spread * own, errors), obs=effects)


def guide_of_schools(effects: Tensor, errors: Tensor) -> None:
    """Normal and log-normal sites by hand."""
    for name, kind in (("mean", dist.Normal), ("spread", dist.LogNormal)):
        loc = pyro.param(f"loc_{name}", lambda: torch.randn(()))
        pyro.sample(name, kind(loc, pyro.param(f"scale_{name}", torch.tensor(0.1), constraint=constraints.positive)))
    loc = pyro.param("loc_own", lambda: torch.randn(len(effects)))
    scale = pyro.param("scale_own", lambda: torch.full([len(effects)], 0.1), constraint=constraints.positive)
    with pyro.plate("schools", len(effects)):
        pyro.sample("own", dist.Normal(loc, scale))


def eight_schools() -> Program:
    """A guide written by hand."""
    return Program(schools, guide_of_schools, Trace_ELBO(), (EFFECTS, ERRORS))


def schools_renyi() -> Program:
    """Rényi's bound with particles in a plate."""
    loss = RenyiELBO(alpha=0.5, num_particles=8, vectorize_particles=True, max_plate_nesting=1)
    return Program(schools, guide_of_schools, loss, (EFFECTS, ERRORS))


def schools_centered() -> Program:
    """The centered model under a learned parameterization."""

    def centered(effects: Tensor, errors: Tensor) -> None:
        mean, spread = pyro.sample("mean", dist.Normal(0.0, 10.0)), pyro.sample("spread", dist.HalfCauchy(25.0))
        with pyro.plate("schools", len(effects)):
            own = pyro.sample("own", dist.Normal(mean, spread))
            pyro.sample("effect", dist.Normal(own, errors), obs=effects)

    model = poutine.reparam(centered, {"own": LocScaleReparam()})
    return Program(model, AutoNormal(model), TraceMeanField_ELBO(), (EFFECTS, ERRORS))


def horseshoe() -> Program:
    """A sparse regression with many inputs."""

    def model(x: Tensor, y: Tensor) -> None:
        noise = pyro.sample("noise", dist.InverseGamma(3.0, 1.0))
        width = pyro.sample("width", dist.HalfCauchy(0.1))
        with pyro.plate("inputs", x.shape[-1]):
            local = pyro.sample("local", dist.HalfCauchy(1.0))
            w = pyro.sample("w", dist.Normal(0.0, width * local))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(x @ w, noise.sqrt()), obs=y)

    return Program(model, AutoLowRankMultivariateNormal(model), Trace_ELBO(), rows(100, 20))


def correlations() -> Program:
    """A covariance with a prior on its correlations."""

    def model(y: Tensor) -> None:
        scale = pyro.sample("scale", dist.HalfCauchy(torch.ones(5)).to_event(1))
        correlation = pyro.sample("correlation", dist.LKJCholesky(5, 1.0))
        with pyro.plate("rows", len(y)):
            factor = scale[:, None] * correlation
            pyro.sample("y", dist.MultivariateNormal(torch.zeros(5), scale_tril=factor), obs=y)

    return Program(model, AutoMultivariateNormal(model), Trace_ELBO(), (torch.randn(200, 5),))


def two_moons() -> None:
    """A density with two bent modes."""
    z = pyro.sample("z", dist.Normal(torch.zeros(2), torch.ones(2)).to_event(1))
    ring = -0.5 * ((z.norm(dim=-1) - 2.0) / 0.4).square()
    modes = torch.logaddexp(-0.5 * ((z[..., 0] - 2.0) / 0.6).square(), -0.5 * ((z[..., 0] + 2.0) / 0.6).square())
    pyro.factor("moons", ring + modes)


def neutra() -> Program:
    """An inverse autoregressive flow as a guide."""
    return Program(two_moons, AutoIAFNormal(two_moons, hidden_dim=[40], num_transforms=2), Trace_ELBO())


def spline_flow() -> Program:
    """Splines and permutations as a guide."""

    def flows(size: int) -> dist.ComposeTransformModule:
        parts = [dist.transforms.spline_autoregressive(size, hidden_dims=[20], count_bins=8) for _ in range(2)]
        return dist.transforms.ComposeTransformModule(parts)

    return Program(two_moons, AutoNormalizingFlow(two_moons, flows), Trace_ELBO())


def planar_flow() -> Program:
    """A guide by hand with planar transforms in modules."""
    transforms = [dist.transforms.Planar(2) for _ in range(4)]

    def guide() -> None:
        for number, transform in enumerate(transforms):
            pyro.module(f"planar_{number}", transform)
        base = dist.Normal(torch.zeros(2), torch.ones(2)).to_event(1)
        pyro.sample("z", dist.TransformedDistribution(base, transforms))

    return Program(two_moons, guide, Trace_ELBO(num_particles=10, vectorize_particles=True, max_plate_nesting=0))


def structured() -> Program:
    """A guide whose sites depend on each other."""

    def model(y: Tensor) -> None:
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("groups", y.shape[-1]):
            own = pyro.sample("own", dist.Normal(loc, scale))
            with pyro.plate("rows", len(y)):
                pyro.sample("y", dist.StudentT(4.0, own, 1.0), obs=y)

    guide = AutoStructured(
        model,
        conditionals={"loc": "mvn", "scale": "mvn", "own": "normal"},
        dependencies={"own": {"loc": "linear", "scale": "linear"}},
    )
    return Program(model, guide, Trace_ELBO(), (torch.randn(30, 6),))


def parts() -> Program:
    """A list of guides."""
    guide = AutoGuideList(schools)
    guide.append(AutoMultivariateNormal(poutine.block(schools, expose=["mean", "own"])))
    guide.append(AutoDelta(poutine.block(schools, expose=["spread"])))
    return Program(schools, guide, Trace_ELBO(), (EFFECTS, ERRORS))


def log_returns() -> Program:
    """Levy-stable noise, reparameterized."""

    def model(y: Tensor) -> None:
        stability = pyro.sample("stability", dist.Uniform(1.0, 2.0))
        skew = pyro.sample("skew", dist.Uniform(-1.0, 1.0))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("days", len(y)):
            pyro.sample("y", dist.Stable(stability, skew, scale, 0.0), obs=y)

    model = poutine.reparam(model, {"y": StableReparam()})
    return Program(model, AutoNormal(model), Trace_ELBO(), (torch.randn(100),))


def coin(flips: list[Tensor]) -> None:
    """A chance, and a loop over a plate."""
    chance = pyro.sample("chance", dist.Beta(10.0, 10.0))
    for number in pyro.plate("flips", len(flips)):
        pyro.sample(f"flip_{number}", dist.Bernoulli(chance), obs=flips[number])


def guide_of_coin(flips: list[Tensor]) -> None:
    """A beta distribution."""
    a, b = (pyro.param(name, torch.tensor(15.0), constraint=constraints.positive) for name in "ab")
    pyro.sample("chance", dist.Beta(a, b))


def coin_loop() -> Program:
    """A sequential plate."""
    return Program(coin, guide_of_coin, Trace_ELBO(), ([torch.tensor(float(i < 6)) for i in range(10)],))


PROGRAMS = {
    "bayesian_regression": bayesian_regression,
    "baseball": baseball,
    "eight_schools": eight_schools,
    "eight_schools, RenyiELBO": schools_renyi,
    "eight_schools, LocScaleReparam": schools_centered,
    "sparse_regression": horseshoe,
    "lkj": correlations,
    "neutra, AutoIAFNormal": neutra,
    "AutoNormalizingFlow": spline_flow,
    "planar": planar_flow,
    "AutoStructured": structured,
    "AutoGuideList": parts,
    "stable": log_returns,
    "coin": coin_loop,
}
