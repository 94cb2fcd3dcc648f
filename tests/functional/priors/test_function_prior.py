# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What a prior on functions does not know, and what a sampler may return."""

import math

import pytest
import torch

from pyro_radial.functional import FunctionPrior, ImplicitProcess
from tests.helpers.functional import points


def test_a_prior_names_its_class_for_all_that_it_does_not_know():
    class Unknown(FunctionPrior):
        pass

    for call in (
        lambda prior: prior.moments(points()),
        lambda prior: prior.score(torch.zeros(2, 6, 1), points()),
        lambda prior: prior.log_prob(torch.zeros(2, 6, 1), points()),
        lambda prior: prior.sample(points(), 2),
    ):
        with pytest.raises(NotImplementedError, match="Unknown"):
            call(Unknown())


def test_an_implicit_process_passes_draws_on_with_or_without_a_dim_for_outputs():
    x = torch.rand(4, 2)
    one = ImplicitProcess(lambda x, s: torch.arange(s)[:, None] + x[:, 0])
    torch.testing.assert_close(one.sample(x, 3)[2, :, 0], 2 + x[:, 0])
    several = ImplicitProcess(lambda x, s: torch.ones(s, len(x), 5, dtype=torch.double))
    assert several.sample(x, 3, num_outputs=5).dtype == torch.float32


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (lambda x, s: torch.zeros(s, 3), r"shape \(2, 4, 1\)"),
        (lambda x, s: torch.zeros(s, 4, 2), r"shape \(2, 4, 1\)"),
        (lambda x, s: torch.zeros(s, 4, dtype=torch.long), "floating-point"),
        (lambda x, s: torch.zeros(s, 4, dtype=torch.cfloat), "floating-point"),
        (lambda x, s: torch.full((s, 4), math.nan), "NaN"),
    ],
)
def test_draws_that_are_none_are_refused_by_name(sampler, words):
    with pytest.raises(ValueError, match=words):
        ImplicitProcess(sampler).sample(torch.rand(4, 2), 2)
