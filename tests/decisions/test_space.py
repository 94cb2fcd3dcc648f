# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Boxes with continuous, ordered and unordered inputs."""

import math

import pytest
import torch

from pyro_radial.decisions.space import Space

BOUNDS = [[0.0, 1.0, -1.0], [10.0, 4.0, 1.0]]


def test_points_go_to_the_cube_and_back():
    space = Space(BOUNDS, discrete={1: range(1, 5)}, categorical={2: [-1, 1]})
    x = space.from_unit(space.random(200))
    assert ((x >= space.bounds[0]) & (x <= space.bounds[1])).all()
    assert sorted(x[:, 1].unique().tolist()) == [1, 2, 3, 4]
    assert sorted(x[:, 2].unique().tolist()) == [-1, 1]
    assert torch.allclose(space.from_unit(space.to_unit(x)), x)
    assert space.unit_values(space.discrete) == {1: [0.0, 1 / 3, 2 / 3, 1.0]}
    assert not space.is_continuous
    assert Space(BOUNDS).is_continuous


def test_a_point_between_values_goes_to_the_nearest():
    space = Space(BOUNDS, discrete={1: [1, 3.5]})
    assert space.from_unit(torch.tensor([0.5, 0.4, 0.5]).double()).tolist() == [5.0, 1.0, 0.0]
    assert space.from_unit(torch.tensor([0.5, 0.5, 0.5]).double()).tolist() == [5.0, 3.5, 0.0]


def test_each_value_is_as_likely():
    counts = Space(BOUNDS, discrete={1: range(1, 5)}).random(4000)[:, 1].unique(return_counts=True)[1]
    assert ((counts - 1000).abs() < 4 * math.sqrt(4000 * 0.25 * 0.75)).all()


BAD = {
    r"bounds must have shape \[2, D\], got \[3\]": ([0.0, 1.0, 2.0],),
    r"bounds must have shape \[2, D\], got \[3, 2\]": ([[0.0, 1.0]] * 3,),
    r"bounds must be finite": ([[0.0], [math.inf]],),
    r"bounds must have the least values first and below the largest, got \[1.0\] and \[0.0\]": ([[1.0], [0.0]],),
    r"discrete must be of inputs 0 to 2, got 3": (BOUNDS, {3: [1]}),
    r"discrete must have values of input 1 from 1 to 4, got \[1, 5\]": (BOUNDS, {1: [1, 5]}),
    r"categorical must have values of input 2 from -1 to 1, got \[\]": (BOUNDS, {}, {2: []}),
    r"categorical must be of other inputs than discrete, got \[1\] in both": (BOUNDS, {1: [1]}, {1: [1]}),
}


@pytest.mark.parametrize(("message", "arguments"), BAD.items(), ids=range(len(BAD)))
def test_bad_arguments_are_named(message, arguments):
    with pytest.raises(ValueError, match=message):
        Space(*arguments)
