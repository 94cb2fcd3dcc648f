# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loop: against closed forms and chance, killed and resumed, and refused where it does not fit."""

import math
import os
import signal

import pytest
import torch
from pyro.contrib.gp.kernels import RBF
from torch import nn

from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    AutoRadialDirectional,
    BayesianModule,
    FunctionalELBO,
    SupervisedModel,
)
from pyro_radial.decisions import Policy, ThompsonSampling, run_bandit
from pyro_radial.functional import BetweenRows, GaussianProcess, MarginalKL
from pyro_radial.infer.autoguide.families import Delta
from pyro_radial.nn.likelihoods import MaskedGaussian

WEIGHTS = torch.tensor([[1.0, -0.5], [-1.0, 0.5], [0.2, 1.0]])


def linear_bandit(num_steps=60, seed=0, noise=0.1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_steps, 2, generator=generator)
    expected = x @ WEIGHTS.T
    return x, expected + noise * torch.randn(expected.shape, generator=generator), expected


def run(policy, bandit=None, **options):
    contexts, rewards, expected = linear_bandit() if bandit is None else bandit
    return run_bandit(contexts, rewards, policy, expected=expected, **{"progress": False, **options})


class Chance(Policy):
    def choose(self, context):
        self.check_context(context)
        return int(torch.randint(self.num_arms, ()))


def point(model):
    return AutoRadial(model, families={".": Delta()})


def network(guide, seed=0, **options):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 3))
    model = SupervisedModel(BayesianModule(net), MaskedGaussian(scale=0.3))
    return ThompsonSampling(model, guide(model), **{"steps": 10, "batch_size": 16, "compile": False, **options})


def functional():
    prior = GaussianProcess(RBF(input_dim=2))
    points = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))
    loss = FunctionalELBO(
        prior, BetweenRows(points, 8), divergence=MarginalKL(), compare_at="measurement_points", num_functions=1
    )
    return network(AutoRadial, loss=loss)


POLICIES = {
    "chance": Chance,
    "radial": lambda: network(AutoRadial),
    "mean field": lambda: network(AutoMeanField),
    "radial-directional": lambda: network(AutoRadialDirectional),
    "point": lambda: network(point),
    "functional": functional,
}


def same(one, other):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("arms", "rewards", "regrets"))


class Stopping(Exception):
    pass


def stopping(make, method, call, stop):
    """A policy that stops the run at a call of a method, with the same class name and settings."""
    policy = make()
    kind, calls = type(policy), []

    def counted(self, *arguments):
        calls.append(arguments)
        if len(calls) == call:
            stop()
        return getattr(kind, method)(self, *arguments)

    policy.__class__ = type(kind.__name__, (kind,), {method: counted, "__qualname__": kind.__qualname__})
    policy.__class__.__module__ = kind.__module__
    return policy


def raise_stopping():
    raise Stopping


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_a_run_that_ends_early_ends_where_an_undisturbed_one_does(make, tmp_path):
    bandit = linear_bandit(46)
    undisturbed = run(make(), bandit, refit_every=10, seed=3)
    path = tmp_path / "run.pt"
    # Six first pulls and a refit, then decisions up to the second refit and on; in the second run up to another.
    for call in (14, 16):
        torch.manual_seed(call)
        policy = stopping(make, "choose", call, raise_stopping)
        with pytest.raises(Stopping):
            run(policy, bandit, refit_every=10, seed=3, checkpoint=path)
    resumed = run(make(), bandit, refit_every=10, seed=3, checkpoint=path)
    assert same(resumed, undisturbed)
    assert resumed.gradient_steps == undisturbed.gradient_steps
    # And once more, of a run that is done.
    assert same(run(make(), bandit, refit_every=10, seed=3, checkpoint=path), undisturbed)


def test_a_killed_process_goes_on(tmp_path):
    bandit, path = linear_bandit(60), tmp_path / "run.pt"
    undisturbed = run(network(AutoRadial), bandit)
    child = os.fork()
    if child == 0:
        try:
            policy = stopping(lambda: network(AutoRadial), "refit", 3, lambda: os.kill(os.getpid(), signal.SIGKILL))
            run(policy, bandit, checkpoint=path)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert same(run(network(AutoRadial), bandit, checkpoint=path), undisturbed)


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_an_arm_never_pulled_is_no_error(make):
    policy = make()
    policy.begin(2, 3)
    x = torch.randn(8, 2)
    policy.refit(x, torch.zeros(8, dtype=torch.long), x[:, 0])
    assert {policy.choose(context) for context in torch.randn(30, 2)} <= {0, 1, 2}


@pytest.mark.parametrize("name", ["radial", "functional"])
def test_networks_do_better_than_chance(name):
    policy = POLICIES[name]()
    policy.refits.steps = 60
    assert run(policy, linear_bandit(160)).relative_regret(60) < 60


def test_regrets_are_those_by_hand():
    expected = torch.tensor([[1.0, 3.0], [2.0, 0.0], [5.0, 5.5], [0.0, 1.0]])
    result = run(Chance(), (torch.zeros(4, 1), expected + 7.0, expected), initial_pulls=2)
    # All pulls are initial ones, in turn.
    assert result.arms.tolist() == [0, 1, 0, 1]
    assert result.rewards.tolist() == [8.0, 7.0, 12.0, 8.0]
    assert result.regrets.tolist() == [2.0, 2.0, 0.5, 0.0]
    assert result.uniform_regrets.tolist() == [1.0, 1.0, 0.25, 0.5]
    assert result.cumulative_regret == 4.5
    assert result.relative_regret() == pytest.approx(100 * 4.5 / 2.75)
    assert result.relative_regret(2) == pytest.approx(100 * 0.5 / 0.75)


def test_chance_has_a_relative_regret_of_100():
    bandit = linear_bandit(4000)
    relative = [run(Chance(), bandit, seed=seed).relative_regret() for seed in range(3)]
    gaps = bandit[2].amax(1, keepdim=True) - bandit[2]
    spread = gaps.std() / gaps.mean() / math.sqrt(4000)
    assert relative == pytest.approx([100.0] * 3, abs=400 * float(spread))


def test_refits_come_once_all_arms_are_pulled_and_then_every_so_often():
    class Noting(Chance):
        def refit(self, contexts, arms, rewards):
            seen.append((len(contexts), len(arms), len(rewards)))

    seen = []
    run(Noting(), linear_bandit(30), refit_every=10, initial_pulls=2)
    assert seen == [(6, 6, 6), (16, 16, 16), (26, 26, 26)]
    seen = []
    run(Noting(), linear_bandit(30), refit_every=10, initial_pulls=0)
    assert [number for number, *_ in seen] == [10, 20, 30]


def test_decisions_do_not_depend_on_other_random_numbers():
    before = torch.get_rng_state()
    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        results.append(run(Chance()))
    assert same(*results)
    assert not same(results[0], run(Chance(), seed=1))
    torch.set_rng_state(before)
    run(Chance())
    assert torch.equal(torch.get_rng_state(), before)


def test_progress_has_the_regret_so_far(capsys):
    result = run(Chance(), linear_bandit(46), refit_every=10, progress=True)
    assert f"regret {result.cumulative_regret:.6g}" in capsys.readouterr().err


X = torch.arange(12.0).reshape(4, 3)
BAD = {
    "contexts must be a floating-point tensor with two dims, got torch.int64": (X.long(), X),
    "contexts must be a floating-point tensor with two dims, got list": ([[1.0]], X),
    r"rewards must be a floating-point tensor with two dims, got torch.float32 \[4\]": (X, X[:, 0]),
    r"contexts must have rows and columns, got \[4, 0\]": (X[:, :0], X),
    r"rewards must be finite, got nan at \[2, 1\]": (X, X.clone().index_fill(1, torch.tensor(1), math.nan)),
    r"contexts must be finite, got -inf at \[0, 0\]": (X - torch.full_like(X, math.inf), X),
    "rewards must have a row for each of 4 contexts, got 3": (X, X[:3]),
    r"expected must have the shape of rewards, \[4, 3\], got \[4, 2\]": (X, X, X[:, :2]),
}
BAD[r"rewards must be finite, got nan at \[2, 1\]"][1][:2, 1] = 0.0


@pytest.mark.parametrize(("message", "tensors"), BAD.items(), ids=range(len(BAD)))
def test_bad_tensors_are_named(message, tensors):
    contexts, rewards, expected = (*tensors, None)[:3]
    with pytest.raises(ValueError, match=message):
        run_bandit(contexts, rewards, Chance(), expected=expected)


def test_bad_arguments_are_named():
    for options in ({"refit_every": 0}, {"initial_pulls": -1}, {"seed": -1}):
        (name,) = options
        with pytest.raises(ValueError, match=rf"{name} must be a (positive|non-negative) integer, got"):
            run(Chance(), **options)
    with pytest.raises(ValueError, match="policy must be a Policy, got the class"):
        run(Chance)
    with pytest.raises(ValueError, match="initial_pulls of 3 arms must be at most 60 decisions, got 63"):
        run(Chance(), initial_pulls=21)

    class Beyond(Policy):
        def choose(self, context):
            return 3

    with pytest.raises(ValueError, match="policy must choose one of 3 arms, got 3"):
        run(Beyond())
    with pytest.raises(ValueError, match="last must be at most the 60 decisions, got 500"):
        run(Chance()).relative_regret(500)
    with pytest.raises(ValueError, match="last must be a positive integer, got 0"):
        run(Chance()).relative_regret(0)
    with pytest.raises(ValueError, match="arms must differ in expected reward, got 4 decisions"):
        run(Chance(), (torch.zeros(4, 1), torch.ones(4, 2), None)).relative_regret()


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_contexts_of_another_width_are_refused(make):
    policy = make()
    policy.begin(2, 3)
    with pytest.raises(ValueError, match="policy has begun with 2 features and 3 arms, got 4 features and 3 arms"):
        run(policy, (torch.zeros(9, 4), torch.ones(9, 3), None))
    with pytest.raises(ValueError, match=r"context must be 2 finite numbers"):
        policy.choose(torch.zeros(4))


def test_a_network_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"the network of bnn.* given x of shape \[\d+, 4\]"):
        run(network(AutoRadial), (torch.zeros(5, 4), torch.ones(5, 2), None))
    with pytest.raises(ValueError, match=r"y must have shape \(16, 3\) for site 'y'"):
        run(network(AutoRadial), (torch.zeros(5, 2), torch.ones(5, 2), None))


def test_a_policy_not_begun_says_so():
    with pytest.raises(ValueError, match="policy must begin before it decides"):
        Chance().choose(torch.zeros(2))


def test_another_run_s_checkpoint_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    run(network(AutoRadial), checkpoint=path)
    for bandit, policy, options, name in (
        (linear_bandit(seed=1), network(AutoRadial), {}, "bandit"),
        (linear_bandit(), network(AutoRadial, steps=11), {}, "policy.refits.steps"),
        (linear_bandit(), network(AutoMeanField), {}, "policy.refits.guide"),
        (linear_bandit(), network(AutoRadial), {"seed": 1}, "seed"),
        (linear_bandit(), network(AutoRadial), {"refit_every": 5}, "refit_every"),
    ):
        with pytest.raises(ValueError, match=rf"was made with {name}"):
            run(policy, bandit, checkpoint=path, **options)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="damaged or not a checkpoint"):
        run(network(AutoRadial), checkpoint=path)
