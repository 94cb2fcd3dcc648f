# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What a run is of is told from others by what changes its course, and by nothing else."""

import pytest
from torch import nn
from torch.optim import Adam

from pyro_radial import AutoMeanField, AutoRadial, RadialELBO
from pyro_radial.infer.training.processes import Processes
from pyro_radial.infer.training.run_settings import check_alike, details, settings_of
from tests.helpers.runs import data, problem


def settings(lr=0.1, betas=(0.9, 0.999), **given):
    model, guide = problem()
    guide.setup(*data())
    parameters = dict(RadialELBO()(model, guide).named_parameters())
    return settings_of(model, guide, RadialELBO(), Adam(parameters.values(), lr=lr, betas=betas), **given)


def test_another_learning_rate_is_no_other_setting():
    assert settings() == settings(lr=0.2)
    assert settings() != settings(betas=(0.8, 0.999))
    assert settings(seed=1) != settings(seed=2)
    assert settings(seed=1)["guide"] == "AutoRadial"


def test_details_reach_the_family_of_each_site_in_a_list_of_guides_too():
    def families(guide):
        model, made = problem(guide=guide)
        made.setup(*data())
        parameters = dict(made.named_parameters())
        optimizer = Adam(parameters.values())
        return details(model, nn.ModuleList([made]), RadialELBO(), None, optimizer, parameters)["families"]

    radial, normal = families(AutoRadial), families(AutoMeanField)
    assert radial.keys() == normal.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert radial["0.weight"][""] == "Radial"
    assert normal["0.weight"][""] == "Normal"


def test_groups_are_told_by_their_parameters_and_settings_but_no_rate():
    def groups(**own):
        model, guide = problem()
        guide.setup(*data())
        parameters = dict(RadialELBO()(model, guide).named_parameters())
        first, *others = parameters.values()
        optimizer = Adam([{"params": [first], **own}, {"params": others}])
        return details(model, guide, RadialELBO(), None, optimizer, parameters)["optimizer groups"]

    assert groups()["0.parameters"] == "guide.locs.0.weight_unconstrained"
    assert groups() == groups(lr=0.1)
    changed = groups(weight_decay=0.1)
    assert {name for name, value in changed.items() if value != groups()[name]} == {"0.weight_decay"}


class Others(Processes):
    """Stands for several processes, of which the last differs."""

    def gather(self, value):
        return [value, value, value | {"optimizer": {"lr": 0.2}}]


def test_the_process_that_differs_is_named_with_both_values():
    check_alike(Processes(), {"seed": 1})
    with pytest.raises(ValueError, match=r"got optimizer\.lr=0\.1 in process 0 and optimizer\.lr=0\.2 in process 2"):
        check_alike(Others(0, 3), {"seed": 1, "optimizer": {"lr": 0.1}})
