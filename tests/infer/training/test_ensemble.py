# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Ensembles: each member its own start, one mixture of them all, and nothing lost when a run is killed or fails."""

import io
import os
import random
import signal
import sys
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.optim import Adam

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, RadialELBO, SupervisedModel, predict
from pyro_radial.infer import Ensemble
from pyro_radial.infer.autoguide import families
from pyro_radial.nn import likelihoods

X = torch.randn(20, 2, generator=torch.Generator().manual_seed(1))
Y = (X.sum(-1) > 0).long()
LOCS_OF_W = "locs.w_unconstrained"
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
    return [
        value
        for member in ensemble.state_dict()["members"].values()
        for part in member.values()
        for value in part.values()
        if isinstance(value, torch.Tensor)
    ]


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


def test_a_larger_ensemble_of_the_same_seed_begins_with_the_smaller_one():
    small, large = trained(size=2).state_dict()["members"], trained(size=3).state_dict()["members"]
    assert torch.equal(
        small[1]["guide"]["locs.0.weight_unconstrained"], large[1]["guide"]["locs.0.weight_unconstrained"]
    )


# -------------------------------------------------------------------------------------------------- a stranger's parts


def test_members_of_pyros_own_guides_and_functions_share_no_parameters():
    kept = pyro.param("bias", torch.tensor(5.0))
    ensemble = trained(strange)
    state = ensemble.state_dict()["members"]
    assert len({float(member["guide"][LOCS_OF_W][0]) for member in state.values()}) == 3
    assert len({float(member["loose"]["0"]) for member in state.values()}) == 3
    assert [*pyro.get_param_store()] == ["bias"]
    assert torch.equal(pyro.param("bias"), kept)
    samples = ensemble.predict(X, 50).samples.reshape(3, 50, 20)
    for index, member in enumerate(state.values()):
        expected = X @ member["guide"][LOCS_OF_W] + member["loose"]["0"]
        torch.testing.assert_close(samples[index].mean(0), expected, rtol=0.0, atol=4.5 * 0.15 * 3 / 50**0.5)


def test_the_likelihoods_know_the_number_of_rows_afterwards():
    assert [model.likelihood.num_data for model, _ in trained().members] == [20, 20, 20]
    assert [model.likelihood.num_data for model, _ in trained(num_data=60).members] == [60, 60, 60]


# --------------------------------------------------------------------------------------------------- killed, resumed


def test_processes_give_what_one_process_gives(tmp_path):
    one, two = trained(), trained(workers=2, checkpoint=tmp_path)
    assert same(one, two)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["member_0.pt", "member_1.pt", "member_2.pt"]
    assert same(one, trained(checkpoint=tmp_path))


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


def test_a_member_that_fails_is_named_with_its_cause_and_the_others_are_kept(tmp_path):
    ensemble = Ensemble(radial, 3)
    with pytest.raises(RuntimeError, match=r"1 of 3 members .* kept: member 1 \(seed \d+\): OSError: no sp") as error:
        ensemble.fit((X, Y), **FIT, optim=failing({1}), checkpoint=tmp_path)
    assert isinstance(error.value.__cause__, OSError)
    assert "in optim" in error.value.__cause__.__notes__[0]
    assert [*ensemble.state_dict()["members"]] == [0, 2]
    assert ensemble.predict(X, 2).samples.shape == (4, 20, 3)
    # Called again, it trains what is missing.
    ensemble.fit((X, Y), **FIT, optim=partial(Adam, lr=1e-3), checkpoint=tmp_path)
    assert len(ensemble.members) == 3


def test_what_fails_all_members_is_raised_as_it_is():
    with pytest.raises(ValueError, match="fit: epochs must be a positive integer, got 0"):
        trained(epochs=0)
    with pytest.raises(OSError, match="no space left"):
        trained(optim=failing({0, 1, 2}))


def test_each_member_has_a_loss_of_its_own():
    steps = []
    loss = RadialELBO(kl_weight=lambda step: steps.append(step) or 1.0)
    assert same(trained(loss=loss), trained())
    assert (loss.step, max(steps)) == (0, 5)


# ------------------------------------------------------------------------------------------------------- saved, loaded


@pytest.mark.parametrize("make", [radial, strange])
def test_what_is_saved_predicts_the_same_when_loaded(make):
    ensemble, file = trained(make), io.BytesIO()
    torch.save(ensemble.state_dict(), file)
    file.seek(0)
    other = Ensemble(make, 3)
    other.setup(X[:2], Y[:2].float() if make is strange else Y[:2])
    other.load_state_dict(torch.load(file, weights_only=True))
    predictions = []
    for one in (ensemble, other):
        pyro.set_rng_seed(3)
        predictions.append(one.predict(X, 3).samples)
    assert torch.equal(*predictions)


def test_loading_refuses_what_does_not_belong():
    state = trained().state_dict()
    with pytest.raises(RuntimeError, match="call setup"):
        Ensemble(radial, 3).load_state_dict(state)
    for other, message in (
        (Ensemble(radial, 3, seed=1), "seed must be that of the saved one, 0, got 1"),
        (Ensemble(radial, 2), "size must be at least 3, as it was saved, got 2"),
        (Ensemble(plain, 3), "checkpoint of member 0 is from another guide"),
    ):
        other.setup(X, Y)
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)


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
    "shapes": (
        lambda index: network(2 + index),
        r"one shape of site 'f', got \(2,\) for member 0 and \(3,\) for member 1",
    ),
}


@pytest.mark.parametrize(("change", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_members_of_different_models_are_refused_before_training(change, message):
    ensemble = Ensemble(different(change), 2)
    with pytest.raises(ValueError, match=message):
        ensemble.fit((X, Y), **FIT)
    assert ensemble.members == []


def test_arguments_out_of_range_are_refused_by_name():
    for arguments, message in (
        ((radial, 0), "Ensemble: size must be a positive integer, got 0"),
        ((radial, True), "Ensemble: size must be a positive integer, got True"),
        ((None, 2), "Ensemble: make must be a function from a seed to a model and its guide, got NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            Ensemble(*arguments)
    with pytest.raises(ValueError, match="Ensemble: seed must be a non-negative integer, got -1"):
        Ensemble(radial, seed=-1)
    with pytest.raises(ValueError, match="workers must be a positive integer, got 0"):
        trained(workers=0)
    with pytest.raises(ValueError, match=r"seed must be given as Ensemble\(make, seed=...\), got it as a setting"):
        trained(seed=3)
    with pytest.raises(ValueError, match=r"make must return a model and its guide, an nn\.Module, got Linear"):
        trained(lambda seed: nn.Linear(1, 1))


def test_prediction_before_training_is_refused():
    ensemble = Ensemble(radial, 2)
    with pytest.raises(RuntimeError, match=r"Ensemble.predict: members must be trained, got none .*call fit first"):
        ensemble.predict(X)
    ensemble.setup(X, Y)
    with pytest.raises(RuntimeError, match=r"Ensemble\.predict: members must be trained"):
        ensemble.predict(X)


def test_several_workers_without_joblib_say_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "joblib", None)
    with pytest.raises(ImportError, match="workers=2 needs joblib"):
        trained(workers=2)
