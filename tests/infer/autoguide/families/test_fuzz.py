# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Constructors of families and of priors, fuzzed: what they refuse they refuse by the argument's name."""

import inspect
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyro_radial.infer.autoguide import families
from pyro_radial.nn import priors

CONSTRUCTORS = (
    families.Normal,
    families.Radial,
    families.Delta,
    families.VonMisesFisher,
    priors.FanIn,
    priors.RadialDirectionalPrior,
    priors.ScaleMixture,
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**6),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.floats(), max_size=2),
)


@pytest.mark.parametrize("constructor", CONSTRUCTORS, ids=lambda constructor: constructor.__name__)
@settings(max_examples=60, derandomize=True, deadline=None)
@given(drawn=st.data())
def test_a_constructor_takes_an_argument_or_names_it(constructor, drawn):
    names = list(inspect.signature(constructor).parameters)
    if not names:
        return
    name = drawn.draw(st.sampled_from(names))
    value = drawn.draw(VALUES)
    refused = None
    try:
        made = constructor(**{name: value})
    except (TypeError, ValueError) as error:
        refused = error
    if refused is not None:
        assert name in str(refused)
        return
    numbers = [number for number in vars(made).values() if isinstance(number, float)]
    assert all(math.isfinite(number) for number in numbers)
