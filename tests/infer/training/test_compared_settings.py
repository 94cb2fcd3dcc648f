# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Settings tell runs apart, and are the same for the same run, also in another process or after training."""

import os
import subprocess
import sys
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.optim import Adam

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, TermsELBO
from pyro_radial.functional import GaussianProcess, UniformBox
from pyro_radial.infer.training.compared_settings import (
    describe_setting,
    likelihood_settings,
    optimizer_settings,
    run_settings,
)
from pyro_radial.nn import likelihoods
from pyro_radial.nn.priors import FanIn, RadialDirectionalPrior
from tests.helpers.runs import Counting, data, function_problem, problem, trained
from tests.helpers.scale_priors import LearnedScale


def squared(x):
    return x**2


def cubed(x):
    return x**3


PAIRS = {
    "numbers": (1.0, 2.0),
    "types": (1, "1"),
    "tensors": (torch.zeros(9), torch.zeros(9).index_fill(0, torch.tensor([8]), 1e-30)),
    "equal elements": (torch.zeros(9), torch.ones(9)),
    "dtypes": (torch.zeros(9), torch.zeros(9, dtype=torch.float64)),
    "shapes": (torch.zeros(9), torch.zeros(3, 3)),
    "names": (squared, cubed),
    "partial": (partial(squared, x=1), partial(squared, x=2)),
    "nested": ({"a": [1, (2, 3)]}, {"a": [1, (2, 4)]}),
    "prior function": (FanIn(1.0), FanIn(2.0)),
    "directional prior": tuple(RadialDirectionalPrior("row", bias_scale=scale) for scale in (1.0, 2.0)),
    "distribution": (dist.Normal(0.0, 1.0), dist.Normal(0.0, 2.0)),
    "transformed": tuple(dist.TransformedDistribution(dist.Normal(0.0, s), []) for s in (1.0, 2.0)),
    "mixture": tuple(
        dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(torch.zeros(2), s)) for s in (1.0, 2.0)
    ),
    "likelihood": tuple(likelihoods.Gaussian(num_data=5, scale=scale) for scale in (1.0, 2.0)),
    "box": tuple(UniformBox(-s, s, num_points=3) for s in (1.0, 2.0)),
    "function prior": tuple(GaussianProcess(squared, noise=s) for s in (0.1, 0.2)),
    "pyro optimizer": tuple(pyro.optim.Adam({"lr": lr}) for lr in (0.1, 0.2)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_things_that_differ_are_described_otherwise(pair):
    one, other = PAIRS[pair]
    assert describe_setting(one) == describe_setting(one)
    assert describe_setting(one) != describe_setting(other)


def test_a_description_is_the_same_in_another_process():
    code = (
        "from tests.infer.training.test_compared_settings import *; "
        "print([describe_setting(p[0]) for p in PAIRS.values()])"
    )
    # Another seed than that of the hashes here, which is random unless it is set.
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    command = [sys.executable, "-W", "ignore", "-c", code]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    shown = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=120, text=True).stdout
    assert shown.strip() == str([describe_setting(pair[0]) for pair in PAIRS.values()])


@pytest.mark.parametrize("view", [torch.arange(12.0).reshape(4, 3)[:, :1], torch.arange(6.0).reshape(2, 3).mT])
def test_a_view_is_described_as_its_copy(view):
    """Rows in memory may be columns of a table."""
    assert not view.is_contiguous()
    assert describe_setting(view) == describe_setting(view.clone(memory_format=torch.contiguous_format))


def test_code_and_what_it_closes_over_are_no_part_of_a_description():
    def function(number):
        return lambda x=number: number * x * 0.1

    assert describe_setting(function(1.0)) == describe_setting(function(2.0)) == "<lambda>"


def test_a_cycle_and_a_state_of_a_users_object_end_a_description():
    things = {"number": 1}
    things["itself"] = things
    assert describe_setting(things, depth=1) == {"": "dict", "number": 1, "itself": {"": "dict"}}
    assert describe_setting(Counting()) == {"": "Counting"}


def settings_of(model, guide=None, loss=None, scheduler=None):
    guide = AutoRadial(model) if guide is None else guide
    guide.setup(*data())
    return run_settings(model, guide, TermsELBO() if loss is None else loss, scheduler, data())


def with_prior(prior):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return SupervisedModel(BayesianModule(net, prior=prior), likelihoods.Categorical(num_data=20))


def test_the_prior_of_a_hand_written_model_is_read_from_its_trace():
    def model(x, y=None, scale=1.0):
        w = pyro.sample("w", dist.Normal(0.0, scale).expand([3, 2]).to_event(2))
        with pyro.plate("data", 20, subsample=torch.arange(len(x))):
            pyro.sample("y", dist.Categorical(logits=x @ w), obs=y)

    one, other = (settings_of(partial(model, scale=scale))["prior"] for scale in (1.0, 2.0))
    assert one.keys() == {"w"}
    assert one["w"]["scale"] == "torch.float32 (3, 2) of 1.0"
    assert other["w"]["scale"] == "torch.float32 (3, 2) of 2.0"


def test_what_depends_on_trained_parameters_is_named_alone():
    model = with_prior(LearnedScale(1.0))
    prior = settings_of(model)["prior"]
    assert prior["0.weight"]["scale"].endswith("trained")
    function, guide = function_problem()
    settings_of(function, guide)


def test_training_changes_no_setting():
    model, guide = problem("batch norm")
    loss = TermsELBO()
    before = settings_of(model, guide, loss)
    trained(model, guide, epochs=1, loss=loss)
    assert settings_of(model, guide, loss) == before


def test_settings_move_no_random_numbers_and_no_buffers():
    model, guide = problem("batch norm")
    guide.setup(*data())
    before, state = torch.get_rng_state(), {n: v.clone() for n, v in model.state_dict().items()}
    run_settings(model, guide, TermsELBO(), None, data())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.training


def test_likelihoods_are_known_by_their_modules_and_settings():
    def model(scale):
        named = {"a": likelihoods.Gaussian(scale=scale), "b": likelihoods.Poisson()}
        return SupervisedModel(BayesianModule(nn.Linear(2, 2)), named)

    one, other = likelihood_settings(model(1.0)), likelihood_settings(model(2.0))
    assert one.keys() == {"likelihood.by_name.a", "likelihood.by_name.b"}
    assert one["likelihood.by_name.b"] == other["likelihood.by_name.b"]
    assert (one["likelihood.by_name.a"]["scale"], other["likelihood.by_name.a"]["scale"]) == (1.0, 2.0)
    assert likelihood_settings(squared) == {}


def settings_of_optimizer(lr=0.1, betas=(0.9, 0.999), **first_group):
    model, guide = problem()
    guide.setup(*data())
    parameters = dict(TermsELBO()(model, guide).named_parameters())
    first, *others = parameters.values()
    optimizer = Adam([{"params": [first], **first_group}, {"params": others}], lr=lr, betas=betas)
    return optimizer_settings(optimizer, parameters, parameters.keys())


def test_another_learning_rate_is_not_another_optimizer():
    assert settings_of_optimizer() == settings_of_optimizer(lr=0.2)
    assert settings_of_optimizer() != settings_of_optimizer(betas=(0.8, 0.999))


def test_groups_are_known_by_their_parameters_and_settings_but_not_their_rate():
    first = settings_of_optimizer()["optimizer groups"]["0"]
    assert first["parameters"] == "guide.locs.0.weight_unconstrained"
    assert settings_of_optimizer(lr=0.3)["optimizer groups"]["0"] == first
    changed = settings_of_optimizer(weight_decay=0.1)["optimizer groups"]["0"]
    assert {name for name, value in changed.items() if value != first[name]} == {"weight_decay"}


def test_the_settings_of_a_run_have_the_family_of_each_site_in_a_list_of_guides_too():
    def families(guide):
        model, made = problem(guide=guide)
        parts = pyro.infer.autoguide.AutoGuideList(model)
        parts.append(made)
        parts(*data())
        return run_settings(model, parts, TermsELBO(), None, data())["families"]

    radial, normal = families(AutoRadial), families(AutoMeanField)
    assert radial.keys() == normal.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert radial["0.weight"][""] == "Radial"
    assert normal["0.weight"][""] == "Normal"
