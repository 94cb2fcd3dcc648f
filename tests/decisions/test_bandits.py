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
from pyro_radial.decisions import (
    BanditResult,
    ContextualBandit,
    EnsembleSampling,
    EpsilonGreedy,
    GaussianProcessThompson,
    History,
    LinearModel,
    LinearThompson,
    NeuralLinear,
    Policy,
    PulledArm,
    ThompsonSampling,
    UniformPolicy,
    run_bandit,
)
from pyro_radial.functional import FromData, GaussianProcess, MarginalKL
from pyro_radial.infer.autoguide.families import Delta

WEIGHTS = torch.tensor([[1.0, -0.5], [-1.0, 0.5], [0.2, 1.0]])


def linear_bandit(num_steps=60, seed=0, noise=0.1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_steps, 2, generator=generator)
    expected = x @ WEIGHTS.T
    return ContextualBandit(x, expected + noise * torch.randn(expected.shape, generator=generator), expected, "linear")


def point(model):
    return AutoRadial(model, families={".": Delta()})


def network(guide, policy=ThompsonSampling, seed=0, **options):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 3))
    model = SupervisedModel(BayesianModule(net), PulledArm(scale=0.3))
    return policy(model, guide(model), **{"steps": 10, "batch_size": 16, "compile": False, **options})


def functional():
    prior = GaussianProcess(RBF(input_dim=2))
    points = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))
    loss = FunctionalELBO(
        prior, FromData(points, 8), divergence=MarginalKL(), compare_at="measurement_points", num_functions=1
    )
    return network(AutoRadial, loss=loss)


POLICIES = {
    "uniform": UniformPolicy,
    "linear": LinearThompson,
    "Gaussian process": lambda: GaussianProcessThompson(GaussianProcess(RBF(input_dim=2)), steps=2),
    "radial": lambda: network(AutoRadial),
    "mean field": lambda: network(AutoMeanField),
    "radial-directional": lambda: network(AutoRadialDirectional),
    "functional": functional,
    "greedy": lambda: network(point, EpsilonGreedy, epsilon=0.1),
    "neural-linear": lambda: network(point, NeuralLinear),
    "ensemble": lambda: EnsembleSampling([network(point, seed=seed) for seed in range(2)]),
}


def same(one, other):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("arms", "rewards", "regrets"))


class Stopping(Exception):
    pass


def stopping(make, method, call, stop):
    """A policy of a kind of its own for a run that stops at a call of a method, under the same name and settings."""
    policy = make()
    kind, calls = type(policy), []

    def counted(self, argument):
        calls.append(argument)
        if len(calls) == call:
            stop()
        return getattr(kind, method)(self, argument)

    policy.__class__ = type(kind.__name__, (kind,), {method: counted, "__qualname__": kind.__qualname__})
    policy.__class__.__module__ = kind.__module__
    return policy


def raise_stopping():
    raise Stopping


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_a_run_that_ends_early_ends_where_an_undisturbed_one_does(make, tmp_path):
    bandit = linear_bandit(46)
    undisturbed = run_bandit(bandit, make(), refit_every=10, seed=3, progress=False)
    path = tmp_path / "run.pt"
    # Six first pulls and a refit, then decisions up to the second refit and on; in the second run up to another.
    for call in (14, 16):
        torch.manual_seed(call)
        policy = stopping(make, "choose", call, raise_stopping)
        with pytest.raises(Stopping):
            run_bandit(bandit, policy, refit_every=10, seed=3, checkpoint=path, progress=False)
    resumed = run_bandit(bandit, make(), refit_every=10, seed=3, checkpoint=path, progress=False)
    assert same(resumed, undisturbed)
    assert resumed.gradient_steps == undisturbed.gradient_steps
    # And once more, of a run that is done.
    assert same(run_bandit(bandit, make(), refit_every=10, seed=3, checkpoint=path, progress=False), undisturbed)


def test_a_killed_process_goes_on(tmp_path):
    bandit, path = linear_bandit(60), tmp_path / "run.pt"
    undisturbed = run_bandit(bandit, network(AutoRadial), progress=False)
    child = os.fork()
    if child == 0:
        try:
            policy = stopping(lambda: network(AutoRadial), "refit", 3, lambda: os.kill(os.getpid(), signal.SIGKILL))
            run_bandit(bandit, policy, checkpoint=path, progress=False)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert same(run_bandit(bandit, network(AutoRadial), checkpoint=path, progress=False), undisturbed)


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_an_arm_never_pulled_is_no_error(make):
    policy = make()
    policy.begin(2, 3)
    x = torch.randn(8, 2)
    policy.refit(History(x, torch.zeros(8, dtype=torch.long), x[:, 0]))
    assert {policy.choose(context) for context in torch.randn(30, 2)} <= {0, 1, 2}


def test_linear_thompson_holds_the_conjugate_posterior_of_what_it_saw():
    bandit = linear_bandit(50)
    policy = LinearThompson()
    result = run_bandit(bandit, policy, refit_every=1, progress=False)
    for arm in range(3):
        seen = result.arms == arm
        x = torch.cat([bandit.contexts[seen], torch.ones(int(seen.sum()), 1)], 1).double()
        y = result.rewards[seen].double()
        precision = 0.25 * torch.eye(3).double() + x.T @ x
        mean = torch.linalg.solve(precision, x.T @ y)
        rate = 6.0 + 0.5 * (y @ y - mean @ precision @ mean)
        expected = LinearModel(mean, precision, torch.tensor(6.0 + 0.5 * len(y)).double(), rate)
        for found, known in zip(policy._arms[arm], expected, strict=True):
            assert torch.allclose(found, known, rtol=1e-9)


def test_linear_thompson_finds_linear_rewards():
    # Its regret per decision falls to that of knowing the weights; chance loses all along.
    result = run_bandit(linear_bandit(1500), LinearThompson(), progress=False)
    assert result.relative_simple_regret(500) < 5
    assert result.relative_regret < 20


@pytest.mark.parametrize("name", ["radial", "functional", "neural-linear", "ensemble"])
def test_networks_do_better_than_chance(name):
    policy = POLICIES[name]()
    for refits in [p.refits for p in getattr(policy, "members", [policy])]:
        refits.steps = 60
    result = run_bandit(linear_bandit(160), policy, progress=False)
    assert result.relative_simple_regret(60) < 60


def test_regrets_are_those_by_hand():
    expected = torch.tensor([[1.0, 3.0], [2.0, 0.0], [5.0, 5.5], [0.0, 1.0]])
    bandit = ContextualBandit(torch.zeros(4, 1), expected + 7.0, expected)
    result = run_bandit(bandit, UniformPolicy(), initial_pulls=2, progress=False)
    # All pulls are first ones, in turn.
    assert result.arms.tolist() == [0, 1, 0, 1]
    assert result.rewards.tolist() == [8.0, 7.0, 12.0, 8.0]
    assert result.regrets.tolist() == [2.0, 2.0, 0.5, 0.0]
    assert result.uniform_regrets.tolist() == [1.0, 1.0, 0.25, 0.5]
    assert (result.cumulative_regret, result.simple_regret(2)) == (4.5, 0.25)
    assert result.relative_regret == pytest.approx(100 * 4.5 / 2.75)
    assert result.relative_simple_regret(2) == pytest.approx(100 * 0.5 / 0.75)


def test_chance_has_a_relative_regret_of_100():
    bandit = linear_bandit(4000)
    relative = [run_bandit(bandit, UniformPolicy(), seed=seed, progress=False).relative_regret for seed in range(3)]
    spread = bandit.gaps.std() / bandit.gaps.mean() / math.sqrt(4000)
    assert relative == pytest.approx([100.0] * 3, abs=400 * float(spread))


def test_refits_come_once_all_arms_are_pulled_and_then_every_so_often():
    class Noting(UniformPolicy):
        def refit(self, history):
            seen.append(len(history.arms))

    seen = []
    run_bandit(linear_bandit(30), Noting(), refit_every=10, initial_pulls=2, progress=False)
    assert seen == [6, 16, 26]
    seen = []
    run_bandit(linear_bandit(30), Noting(), refit_every=10, initial_pulls=0, progress=False)
    assert seen == [10, 20, 30]


def test_decisions_do_not_depend_on_other_random_numbers():
    before = torch.get_rng_state()
    results = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        results.append(run_bandit(linear_bandit(), LinearThompson(), progress=False))
    assert same(*results)
    assert not same(results[0], run_bandit(linear_bandit(), LinearThompson(), seed=1, progress=False))
    torch.set_rng_state(before)
    run_bandit(linear_bandit(), LinearThompson(), progress=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_progress_has_the_regret_so_far(capsys):
    result = run_bandit(linear_bandit(46), UniformPolicy(), refit_every=10)
    assert f"regret {result.cumulative_regret:.6g}" in capsys.readouterr().err


def test_bad_arguments_are_named(tmp_path):
    bandit = linear_bandit()
    with pytest.raises(ValueError, match="run_bandit: refit_every must be a positive integer, got 0"):
        run_bandit(bandit, UniformPolicy(), refit_every=0)
    with pytest.raises(ValueError, match="run_bandit: bandit must be a ContextualBandit, got Tensor"):
        run_bandit(bandit.contexts, UniformPolicy())
    with pytest.raises(ValueError, match="run_bandit: policy must be a Policy, got type"):
        run_bandit(bandit, UniformPolicy)
    with pytest.raises(ValueError, match="initial_pulls of 3 arms must be at most the 60 decisions in all, got 63"):
        run_bandit(bandit, UniformPolicy(), initial_pulls=21)

    class Beyond(Policy):
        def choose(self, context):
            return 3

    with pytest.raises(ValueError, match="run_bandit: policy must choose one of 3 arms, got 3"):
        run_bandit(bandit, Beyond(), progress=False)
    with pytest.raises(ValueError, match="last must be at most the 60 decisions, got 500"):
        run_bandit(bandit, UniformPolicy(), progress=False).simple_regret()
    level = ContextualBandit(torch.zeros(4, 1), torch.ones(4, 2))
    with pytest.raises(ValueError, match="bandit must have arms that pay differently"):
        _ = run_bandit(level, UniformPolicy(), progress=False).relative_regret


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_contexts_of_another_width_are_refused(make):
    policy = make()
    policy.begin(2, 3)
    with pytest.raises(
        ValueError, match=r"contexts and arms must be those of the bandit that it was begun with, 2 fea"
    ):
        run_bandit(ContextualBandit(torch.zeros(9, 4), torch.ones(9, 3)), policy)
    with pytest.raises(ValueError, match=r"context must have shape \[2\], got \[4\]"):
        policy.choose(torch.zeros(4))


@pytest.mark.parametrize("name", ["radial", "neural-linear"])
def test_a_network_that_does_not_fit_is_refused(name):
    with pytest.raises(ValueError, match=r"x must be what the network of bnn takes.*got x of shape \[\d+, 4\]"):
        run_bandit(ContextualBandit(torch.zeros(5, 4), torch.ones(5, 2)), POLICIES[name]())
    with pytest.raises(ValueError, match=r"y must have shape \(16, 3\) for site 'y'"):
        run_bandit(ContextualBandit(torch.zeros(5, 2), torch.ones(5, 2)), POLICIES[name]())


def test_a_policy_not_begun_says_so():
    with pytest.raises(ValueError, match="UniformPolicy: begin must come before decisions"):
        UniformPolicy().choose(torch.zeros(2))


def test_another_run_s_checkpoint_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    run_bandit(linear_bandit(), network(AutoRadial), checkpoint=path, progress=False)
    for bandit, policy, options, name in (
        (linear_bandit(seed=1), network(AutoRadial), {}, "bandit"),
        (linear_bandit(), network(AutoRadial, steps=11), {}, "policy.refits.steps"),
        (linear_bandit(), network(AutoMeanField), {}, "policy.refits.guide"),
        (linear_bandit(), network(AutoRadial), {"seed": 1}, "seed"),
        (linear_bandit(), network(AutoRadial), {"refit_every": 5}, "refit_every"),
    ):
        with pytest.raises(ValueError, match=rf"was made with {name}"):
            run_bandit(bandit, policy, checkpoint=path, progress=False, **options)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="damaged or not a checkpoint"):
        run_bandit(linear_bandit(), network(AutoRadial), checkpoint=path, progress=False)


def test_a_gaussian_process_decides_by_its_exact_posterior():
    policy = GaussianProcessThompson(GaussianProcess(RBF(input_dim=2)), steps=0, noise=0.2)
    policy.begin(2, 2)
    x = torch.randn(12, 2)
    arms = torch.arange(12) % 2
    rewards = torch.where(arms == 0, x[:, 0], -x[:, 0])
    policy.refit(History(x, arms, rewards))
    standard = ((rewards.double() - rewards.double().mean()) / rewards.double().std(correction=0)).float()
    at = torch.tensor([0.3, 0.1])
    prior = GaussianProcess(RBF(input_dim=2))
    prior.observation_noise.fill_(0.2)
    moments = [prior.posterior(x[arms == arm], standard[arms == arm], at[None]) for arm in (0, 1)]
    mean = torch.stack([m[0, 0] for m, _ in moments])
    variance = torch.stack([c[0, 0, 0] for _, c in moments])
    torch.manual_seed(0)
    first = sum(policy.choose(at) == 0 for _ in range(1500)) / 1500
    expected = torch.distributions.Normal(0.0, 1.0).cdf((mean[0] - mean[1]) / variance.sum().sqrt())
    assert first == pytest.approx(float(expected), abs=4 * 0.5 / math.sqrt(1500))


def test_an_ensemble_needs_members_of_their_own():
    member = network(point)
    for members in ([], [member, member]):
        with pytest.raises(ValueError, match="EnsembleSampling: members must be policies, one at least and each once"):
            EnsembleSampling(members)
    assert isinstance(BanditResult(*torch.ones(4, 2)).cumulative_regret, float)
