# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pytest
import torch
from torch.distributions import biject_to
from torch.nn.functional import normalize

from pyro_radial.distributions import PowerSpherical, VonMisesFisherStable

each_kind = pytest.mark.parametrize("kind", [VonMisesFisherStable, PowerSpherical])


def unit(*shape, dtype=torch.double):
    return normalize(torch.randn(shape, dtype=dtype), dim=-1)


@each_kind
def test_infer_shapes_agrees_with_the_distribution(kind):
    distribution = kind(unit(4, 1, 3), torch.ones(5, dtype=torch.double))
    shapes = kind.infer_shapes(loc=torch.Size((4, 1, 3)), concentration=torch.Size((5,)))
    assert shapes == (distribution.batch_shape, distribution.event_shape) == ((4, 5), (3,))


@each_kind
@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_concentration_that_is_negative_or_not_finite_is_refused_by_name(kind, bad):
    with pytest.raises(ValueError, match="concentration"):
        kind(torch.eye(3), torch.tensor([1.0, bad, 2.0]))
    kind(torch.eye(3), torch.tensor([1.0, bad, 2.0]), validate_args=False)


@each_kind
@pytest.mark.parametrize("bad", [[0.0, 0.0], [1.0, 1.0], [math.nan, 1.0], [0.0, 1.0001]])
def test_a_loc_that_is_not_of_length_one_is_refused_by_name(kind, bad):
    with pytest.raises(ValueError, match="loc"):
        kind(torch.tensor(bad), 1.0)
    kind(torch.tensor(bad), 1.0, validate_args=False)


@each_kind
def test_what_normalize_gives_in_float32_is_accepted_in_any_dimension(kind):
    for dim in (2, 3, 500, 10**5):
        distribution = kind(unit(50, dim, dtype=torch.float), torch.tensor(10.0))
        assert bool(distribution.support.check(distribution.sample()).all())


@each_kind
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.ones(4, 1), 1.0), "last dimension of loc must be at least 2, got 1.*sign"),
        ((torch.ones(4, 0), 1.0), "last dimension of loc must be at least 2, got 0"),
        ((torch.tensor(1.0), 1.0), "loc must be a tensor"),
        (([0.6, 0.8], 1.0), "loc must be a tensor"),
        ((torch.eye(2, dtype=torch.long), 1.0), "loc must be a floating-point"),
        ((torch.eye(2), torch.tensor(1)), "concentration must be a floating-point"),
        ((torch.eye(2), torch.ones(3)), "broadcast"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_words(kind, arguments, words):
    with pytest.raises(ValueError, match=words):
        kind(*arguments)


@each_kind
def test_the_constraint_of_the_concentration_has_a_bijection(kind):
    constraint = kind.arg_constraints["concentration"]
    assert bool(constraint.check(biject_to(constraint)(torch.randn(10))).all())


@each_kind
def test_half_precision_draws_and_densities_are_finite(kind):
    for dtype in (torch.float16, torch.bfloat16):
        distribution = kind(unit(5, 100).to(dtype), torch.tensor(50.0, dtype=dtype), validate_args=False)
        value = distribution.rsample()
        assert value.dtype == dtype
        assert bool(value.isfinite().all())
        assert bool(distribution.log_prob(value).isfinite().all())


@each_kind
def test_a_subclass_is_kept_by_expand_and_one_with_arguments_of_its_own_must_say_how(kind):
    class Renamed(kind):
        pass

    class OfOneNumber(kind):
        def __init__(self, number):
            super().__init__(torch.eye(2), number)

    assert type(Renamed(torch.eye(2), 1.0).expand([4, 2])) is Renamed
    with pytest.raises(NotImplementedError, match="OfOneNumber"):
        OfOneNumber(1.0).expand([4, 2])
