# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Descriptions tell settings apart, and are the same for the same ones, also in another process or after training."""

import os
import subprocess
import sys
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.gp.kernels import RBF
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, FunctionalELBO
from pyro_radial.functional import AdversarialPoints, GaussianProcess, UniformBox
from pyro_radial.infer.training.fingerprint import described
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import FanIn, LearnedScale, RadialDirectionalPrior
from tests.helpers.runs import data, problem, trained


def squared(x):
    return x**2


def cubed(x):
    return x**3


def kernel(length):
    return lambda a, b: torch.exp(-((a - b.T) ** 2) / length)


class Own(nn.Module):
    """A network with an activation of its own in its forward function."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return torch.tanh(self.inner(x))


class Other(Own):
    def forward(self, x):
        return torch.relu(self.inner(x))


Other.__qualname__ = "Own"


def net(activation, **kwargs):
    return BayesianModule(nn.Sequential(nn.Linear(2, 2), activation), **kwargs)


PAIRS = {
    "numbers": (1.0, 2.0),
    "types": (1, "1"),
    "tensors": (torch.zeros(9), torch.zeros(9).index_fill(0, torch.tensor([8]), 1e-30)),
    "dtypes": (torch.zeros(9), torch.zeros(9, dtype=torch.float64)),
    "shapes": (torch.zeros(9), torch.zeros(3, 3)),
    "names": (squared, cubed),
    "code": (lambda x: x + 1, lambda x: x - 1),
    "constants": (lambda x: x + 1, lambda x: x + 2),
    "globals": (lambda x: squared(x), lambda x: cubed(x)),
    "classes": (lambda c: c.guide(AutoRadial), lambda c: c.guide(AutoMeanField)),
    "closures": (kernel(0.5), kernel(0.6)),
    "tensors in closures": (kernel(torch.tensor(0.5)), kernel(torch.tensor(0.6))),
    "defaults": (eval("lambda a=1: a"), eval("lambda a=2: a")),
    "partial": (partial(squared, x=1), partial(squared, x=2)),
    "nested": ({"a": [1, (2, 3)]}, {"a": [1, (2, 4)]}),
    "activation": (net(nn.Tanh()), net(nn.ReLU())),
    "slope": (net(nn.LeakyReLU(0.1)), net(nn.LeakyReLU(0.2))),
    "forward": (BayesianModule(Own()), BayesianModule(Other())),
    "prior scale": (net(nn.Tanh(), prior=dist.Normal(0.0, 1.0)), net(nn.Tanh(), prior=dist.Normal(0.0, 2.0))),
    "prior function": (net(nn.Tanh(), prior=FanIn(1.0)), net(nn.Tanh(), prior=FanIn(2.0))),
    "prior mapping": tuple(
        net(nn.Tanh(), prior={"0.weight": dist.Normal(0.0, 1.0), "0.bias": dist.Normal(0.0, scale)}) for scale in (1, 2)
    ),
    "prior module": (net(nn.Tanh(), prior=LearnedScale(1.0)), net(nn.Tanh(), prior=LearnedScale(2.0))),
    "directional prior": tuple(RadialDirectionalPrior("row", bias_scale=scale) for scale in (1.0, 2.0)),
    "likelihood scale": tuple(likelihoods.Gaussian(num_data=5, scale=scale) for scale in (1.0, 2.0)),
    "noise prior": tuple(likelihoods.Gaussian(num_data=5, precision_prior=dist.Gamma(1.0, b)) for b in (1.0, 2.0)),
    "transformed": tuple(dist.TransformedDistribution(dist.Normal(0.0, s), []) for s in (1.0, 2.0)),
    "lengthscale": tuple(GaussianProcess(RBF(1, lengthscale=torch.tensor(s))) for s in (1.0, 2.0)),
    "box": tuple(AdversarialPoints(UniformBox(-s, s, num_points=3)) for s in (1.0, 2.0)),
    "function prior": tuple(FunctionalELBO(GaussianProcess(kernel(0.5), noise=s)) for s in (0.1, 0.2)),
    "pyro optimizer": tuple(pyro.optim.Adam({"lr": lr}) for lr in (0.1, 0.2)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_things_that_differ_are_described_otherwise(pair):
    one, other = PAIRS[pair]
    assert described(one) == described(one)
    assert described(one) != described(other)


def test_what_training_and_use_change_is_no_part_of_a_description():
    model, guide = problem("batch norm")
    point = AdversarialPoints(UniformBox(-1.0, 1.0, num_points=3))
    normal = dist.MultivariateNormal(torch.zeros(2), torch.eye(2))
    before = described(model), described(point), described(normal)
    trained(model, guide, epochs=1)
    point(torch.zeros(2, 1))
    point.ascend(lambda x: x.sum())
    assert normal.precision_matrix.shape == (2, 2)
    assert (described(model), described(point), described(normal)) == before


def test_the_same_problem_made_again_is_described_alike():
    assert described(problem()[0]) == described(problem()[0])


def test_a_description_is_the_same_in_another_process():
    code = "from tests.infer.training.test_fingerprint import *; print([described(p[0]) for p in PAIRS.values()])"
    shown = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-W", "ignore", "-c", code]
        shown.add(subprocess.run(command, env=environment, capture_output=True, check=True, timeout=120).stdout)
    assert len(shown) == 1


def test_a_cycle_ends():
    things = {"data": data()}
    things["itself"] = things
    assert described(things)["itself"] == "..."
