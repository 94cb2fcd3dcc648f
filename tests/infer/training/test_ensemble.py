# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Ensembles: each member its own start, one mixture of them all, and nothing lost when a run is killed or fails."""

import os
import random
import signal
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.optim import Adam

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, FitOptions, SupervisedModel, TermsELBO, predict
from pyro_radial.infer import Ensemble
from pyro_radial.infer.autoguide import families
from pyro_radial.nn import likelihoods

X = torch.randn(20, 2, generator=torch.Generator().manual_seed(1))
Y = (X.sum(-1) > 0).long()
FIT = {"epochs": 2, "batch_size": 8, "progress": False}


def network(outputs=3, likelihood=None):
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs))
    return SupervisedModel(BayesianModule(net), likelihood or likelihoods.Categorical())


def radial(seed):
    model = network()
    return model, AutoRadial(model, init_stddev=0.3)


def plain(seed):
    model = network()
    return model, AutoMeanField(model, families={".": families.Delta()})


def either(seed):
    model = network()
    return model, (AutoRadial if seed % 2 else AutoMeanField)(model)


def by_hand(x, y=None):
    """A stranger's model: a function, with a parameter in Pyro's store."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    bias = pyro.param("bias", lambda: torch.randn(()))
    with pyro.plate("data", len(X), subsample=torch.arange(len(x))):
        pyro.sample("y", dist.Bernoulli(logits=pyro.deterministic("f", x @ w + bias)), obs=y)


def strange(seed):
    """Pyro's own guide, whose class's name in the store is the same for each."""
    return by_hand, AutoNormal(by_hand)


def trained(make=radial, size=3, **settings):
    ensemble = Ensemble(make, size, seed=settings.pop("ensemble_seed", 0))
    ensemble.fit((X, Y.float() if make is strange else Y), **{**FIT, **settings})
    return ensemble


def values(ensemble):
    """Every number that training made."""
    return [value for pair in ensemble.members for part in pair for value in part.state_dict().values()]


def same(one, other):
    return len(values(one)) == len(values(other)) > 0 and all(map(torch.equal, values(one), values(other)))


# -------------------------------------------------------------------------------------------------------- the mixture


@pytest.mark.parametrize("make", [radial, plain, either])
def test_the_prediction_is_the_equal_mixture_of_the_members(make):
    ensemble = trained(make)
    pyro.set_rng_seed(7)
    prediction = ensemble.predict(X, num_samples=4)
    pyro.set_rng_seed(7)
    alone = [predict(model, guide, X, 4) for model, guide in ensemble.members]
    assert prediction.samples.shape == (12, 20, 3)
    assert torch.equal(prediction.samples, torch.cat([one.samples for one in alone]))
    torch.testing.assert_close(prediction.mean, torch.stack([one.mean for one in alone]).mean(0))
    density = torch.stack([one.log_prob(Y) for one in alone]).logsumexp(0) - np.log(3)
    torch.testing.assert_close(prediction.log_prob(Y), density)


def test_of_plain_networks_it_is_a_deep_ensemble_in_which_one_draw_of_each_is_all():
    ensemble = trained(plain, size=4)
    one, many = ensemble.predict(X, 1), ensemble.predict(X, 3)
    assert len(one.samples) == 4
    torch.testing.assert_close(one.mean, many.mean)
    assert bool((one.mutual_information > 1e-6).all())


def test_the_noise_of_each_member_goes_with_its_draws():
    def make(seed):
        model = network(1, likelihoods.Gaussian(scale=0.1 + seed % 97, learn_scale=bool(seed % 2)))
        return model, AutoRadial(model)

    ensemble = Ensemble(make, 3)
    ensemble.fit((X, X.sum(-1)), **FIT)
    prediction = ensemble.predict(X, 2)
    noise = [predict(*member, X, 2).noise["scale"] for member in ensemble.members]
    assert torch.equal(prediction.noise["scale"], torch.cat(noise))
    assert len(prediction.noise["scale"].unique()) == 3


# ------------------------------------------------------------------------------------------------------ seeds, starts


def test_each_member_has_a_start_of_its_own_and_a_seed_gives_all_of_them_again():
    first, again, other = trained(), trained(), trained(ensemble_seed=1)
    weights = [guide.median()["0.weight"] for _, guide in (*first.members, *other.members)]
    assert same(first, again)
    assert not any(torch.allclose(weights[i], weights[j], atol=0.01) for i in range(6) for j in range(i))


def test_make_gets_the_seed_and_random_numbers_from_it_and_those_around_stay():
    seen = []

    def make(seed):
        seen.append((seed, float(torch.rand(())), random.random(), float(np.random.rand())))  # noqa: NPY002
        return radial(seed)

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    trained(make, size=2)
    assert len({*seen}) == 2
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]  # noqa: NPY002


ONE = radial(0)
NET = nn.Linear(2, 3)


@pytest.mark.parametrize("make", [lambda seed: ONE, lambda seed: (ONE[0], AutoRadial(ONE[0]))], ids=["pair", "model"])
def test_one_model_or_guide_for_all_seeds_is_refused(make):
    with pytest.raises(ValueError, match="make must return a new model and a new guide for each seed, got the same"):
        trained(make)


def always_seeded(seed):
    torch.manual_seed(0)
    return radial(seed)


def around_one_network(seed):
    model = SupervisedModel(BayesianModule(NET), likelihoods.Categorical())
    return model, AutoRadial(model)


@pytest.mark.parametrize("make", [always_seeded, around_one_network])
def test_a_start_that_ignores_the_seed_raises_a_warning(make):
    with pytest.warns(UserWarning, match="make returned equal networks for two seeds"):
        trained(make)


def test_a_larger_ensemble_of_the_same_seed_begins_with_the_smaller_one():
    small, large = trained(size=2), trained(size=3)
    assert all(map(torch.equal, values(small), values(large)))


# -------------------------------------------------------------------------------------------------- a stranger's parts


def test_members_of_pyros_own_guides_and_functions_share_no_parameters():
    kept = pyro.param("bias", torch.tensor(5.0))
    ensemble = trained(strange)
    locs = [guide.median()["w"] for _, guide in ensemble.members]
    assert len({float(loc[0]) for loc in locs}) == 3
    assert [*pyro.get_param_store()] == ["bias"]
    assert torch.equal(pyro.param("bias"), kept)
    samples = ensemble.predict(X, 50).samples.reshape(3, 50, 20)
    biases = [float((samples[index].mean(0) - X @ loc).mean()) for index, loc in enumerate(locs)]
    for index, (loc, bias) in enumerate(zip(locs, biases, strict=True)):
        torch.testing.assert_close(samples[index].mean(0), X @ loc + bias, rtol=0.0, atol=4.5 * 0.15 * 3 / 50**0.5)
    # The bias of each member starts at another number, and none at what the store has outside.
    assert len({round(bias, 2) for bias in biases}) == 3
    assert max(map(abs, biases)) < 4.0


def test_the_likelihoods_know_the_number_of_rows_afterwards():
    assert [model.likelihood.num_data for model, _ in trained().members] == [20, 20, 20]
    assert [model.likelihood.num_data for model, _ in trained(options=FitOptions(num_data=60)).members] == [60, 60, 60]


# --------------------------------------------------------------------------------------------------- killed, resumed


@pytest.mark.parametrize("epochs_done", [1, 2, 3])
def test_killed_half_way_it_resumes_with_the_members_that_are_done(tmp_path, epochs_done):
    left = [epochs_done]
    ended = []

    def kill(record):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        trained(checkpoint=tmp_path, callback=kill)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    resumed = trained(checkpoint=tmp_path, callback=lambda record: ended.append(record["epoch"]))
    # Three members of two epochs: what was done is not done again; the epoch that was cut off is.
    assert len(ended) == 6 - epochs_done
    assert same(resumed, trained())


def failing(calls):
    """An optimizer that cannot be made at some of the calls."""
    count = iter(range(100))

    def optim(parameters):
        if next(count) in calls:
            raise OSError("no space left")
        return Adam(parameters, lr=1e-3)

    return optim


def test_a_member_that_fails_is_named_and_those_before_it_are_kept(tmp_path):
    ensemble = Ensemble(radial, 3)
    with pytest.raises(OSError, match="no space left") as error:
        ensemble.fit((X, Y), **FIT, optim=failing({1}), checkpoint=tmp_path)
    assert error.value.__notes__[0].startswith("raised while training member 1 of 3 (seed ")
    assert ensemble.predict(X, 2).samples.shape == (2, 20, 3)
    # Called again, it trains what is missing.
    ensemble.fit((X, Y), **FIT, optim=partial(Adam, lr=1e-3), checkpoint=tmp_path)
    assert len(ensemble.members) == 3


def test_each_member_has_a_loss_of_its_own():
    steps = []
    loss = TermsELBO(kl_weight=lambda step: steps.append(step) or 1.0)
    assert same(trained(loss=loss), trained())
    assert (loss.step, max(steps)) == (0, 5)


# ------------------------------------------------------------------------------------------------------------ refused


def different(change):
    made = []

    def make(seed):
        made.append(seed)
        model = change(len(made) - 1)
        return model, AutoRadial(model)

    return make


DIFFERENT = {
    "likelihoods": (
        lambda index: network(2, [likelihoods.Categorical(), likelihoods.Bernoulli()][index]),
        r"one likelihood, got Categorical\(event_dim=1\) for member 0 and Bernoulli\(event_dim=1\) for member 1",
    ),
    "settings": (
        lambda index: network(2, likelihoods.HeteroscedasticGaussian(floor=[0.1, 0.2][index])),
        r"floor=0.1\) for member 0 and .*floor=0.2\) for member 1",
    ),
}


@pytest.mark.parametrize(("change", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_members_of_different_models_are_refused_before_training(change, message):
    ensemble = Ensemble(different(change), 2)
    with pytest.raises(ValueError, match=message):
        ensemble.fit((X, Y), **FIT)
    assert ensemble.members == []


def test_members_of_different_shapes_are_refused_before_they_are_mixed():
    ensemble = trained(different(lambda index: network(2 + index)), size=2)
    with pytest.raises(ValueError, match=r"one shape of outputs, got \(2,\) for member 0 and \(3,\) for member 1"):
        ensemble.predict(X)


def test_arguments_out_of_range_are_refused_by_name():
    for arguments, message in (
        ((radial, 0), "size must be a positive integer, got 0"),
        ((radial, True), "size must be a positive integer, got True"),
        ((None, 2), "make must be a function from a seed to a model and its guide, got NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            Ensemble(*arguments)
    with pytest.raises(ValueError, match="seed must be a non-negative integer, got -1"):
        Ensemble(radial, seed=-1)
    with pytest.raises(ValueError, match=r"make must return a model and its guide, an nn\.Module, got Linear"):
        trained(lambda seed: nn.Linear(1, 1))
    with pytest.raises(ValueError, match="epochs must be a positive integer, got 0"):
        trained(epochs=0)


def test_prediction_before_training_is_refused():
    with pytest.raises(RuntimeError, match="the members must be trained before they predict; call fit first"):
        Ensemble(radial, 2).predict(X)
