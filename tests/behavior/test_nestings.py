# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What takes distributions apart, and everything that uses it, over all nestings of all distributions."""

import warnings
from itertools import product

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import ExpandedDistribution
from torch.distributions import TransformedDistribution, kl_divergence
from torch.distributions.transforms import AffineTransform, ExpTransform

from pyro_radial import AutoMeanField, AutoRadial, AutoRadialDirectional, PriorChain
from pyro_radial.distributions.constraints import is_on_sphere, is_real
from pyro_radial.distributions.moments import center, match_moments, moments
from pyro_radial.distributions.storage import describe, rebuild
from pyro_radial.distributions.wrappers import expand_copy, leaf, map_leaf, mask_of, pull_back, remove_masks, to_like
from pyro_radial.poutine import mean_only, swap_prior
from tests.tables import DISTRIBUTIONS

EXP, AFFINE = ExpTransform(), AffineTransform(0.5, 2.0)
OPERATIONS = ("event", "expand", "mask", "exp", "affine")


def mask_for(distribution):
    """A mask that hides every other element of the batch."""
    shape = distribution.batch_shape
    return (torch.arange(max(1, shape.numel())) % 2 == 0)[: shape.numel()].reshape(shape)


def applied(operation, distribution):
    """The distribution wrapped once more, or None where that makes no sense."""
    if operation == "event":
        return distribution.to_event(1) if distribution.batch_shape else None
    if operation == "expand":
        return expand_copy(distribution, (2, *distribution.batch_shape))
    if operation == "mask":
        return distribution.mask(mask_for(distribution))
    if operation == "exp" and not is_real(distribution.support):
        return None
    # On the sphere neither makes sense; an affine map of positive values is on the whole line for torch.
    if is_on_sphere(distribution.support):
        return None
    return dist.TransformedDistribution(distribution, [EXP if operation == "exp" else AFFINE])


def sequences():
    """Every sequence of up to two operations, and of three so many that each first meets each last one.

    A sequence of three comes with its alternatives in the middle, of which the first that makes sense counts.
    """
    for depth in (0, 1, 2):
        for operations in product(OPERATIONS, repeat=depth):
            yield [operations]
    for (i, first), (j, last) in product(enumerate(OPERATIONS), repeat=2):
        # Rotated, so that the middle ones meet all others too.
        middles = [OPERATIONS[(i + j + shift) % len(OPERATIONS)] for shift in range(len(OPERATIONS))]
        yield [(first, middle, last) for middle in middles]


def nestings(distribution):
    """``(operations, wrapped distribution)`` for every sequence of operations that makes sense, the empty one first."""
    for alternatives in sequences():
        wrapped = {operations: wrap(operations, distribution) for operations in alternatives}
        yield from [item for item in wrapped.items() if item[1] is not None][:1]


def wrap(operations, distribution):
    """The distribution after these operations, or None where one of them makes no sense."""
    for operation in operations:
        distribution = None if distribution is None else applied(operation, distribution)
    return distribution


def without_masks(operations, distribution):
    """The same nesting but for its masks, built anew."""
    for operation in operations:
        if operation != "mask":
            distribution = applied(operation, distribution)
    return distribution


def masks_inside_an_event(operations):
    """Whether single elements of one event are masked. What is inside a transform is no mask of the whole."""
    transforms = [i for i, operation in enumerate(operations) if operation in ("exp", "affine")]
    own = operations[transforms[-1] + 1 :] if transforms else operations
    return "mask" in own and "event" in own[own.index("mask") :]


def is_positive(support):
    """Whether a constraint lets positive values pass, whatever the shape."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support == constraints.positive


NUM_SAMPLES = 2_000
WRAPPERS = (torch.distributions.Independent, dist.MaskedDistribution, ExpandedDistribution)


def base_of(name):
    pyro.set_rng_seed(0)
    return DISTRIBUTIONS[name].make(torch.float64)


# The first row of each class, and a radius for each element.
NAMES = [*{type(leaf(base_of(name))): name for name in reversed(DISTRIBUTIONS)}.values(), "RadialNormalNoEvent"]


@pytest.fixture(params=NAMES)
def base(request):
    return base_of(request.param)


def cases(base):
    """Every nesting with its operations, and what an assertion should say of it."""
    return [(operations, wrapped, " of ".join(reversed(operations))) for operations, wrapped in nestings(base)]


def same(one, other, words):
    value = one.sample()
    assert (one.batch_shape, one.event_shape) == (other.batch_shape, other.event_shape), words
    torch.testing.assert_close(other.log_prob(value), one.log_prob(value), msg=words)


def test_a_leaf_is_no_wrapper_and_mapping_it_keeps_the_rest(base):
    for _, wrapped, words in cases(base):
        assert not isinstance(leaf(wrapped), WRAPPERS), words
        assert map_leaf(lambda inner: inner, wrapped) is wrapped, words
        # Another object of the same distribution goes into the same nesting.
        same(wrapped, map_leaf(lambda inner: inner.expand(inner.batch_shape), wrapped), words)


def test_without_its_masks_it_is_the_nesting_without_them(base):
    for operations, wrapped, words in cases(base):
        same(without_masks(operations, base), remove_masks(wrapped), words)


def test_the_mask_is_where_the_density_is_left_out(base):
    for operations, wrapped, words in cases(base):
        if masks_inside_an_event(operations):
            with pytest.raises(ValueError, match="masked inside its event"):
                mask_of(wrapped)
            continue
        mask = mask_of(wrapped)
        kept = torch.ones(wrapped.batch_shape, dtype=torch.bool) if mask is None else mask
        # A mask of a distribution without a batch is one bool.
        kept = torch.as_tensor(kept).expand(wrapped.batch_shape)
        value = wrapped.sample()
        hidden = wrapped.log_prob(value) == 0.0
        if "exp" not in operations and "affine" not in operations:
            assert torch.equal(hidden, ~kept), words
        elif not isinstance(leaf(wrapped), TransformedDistribution):
            assert bool((hidden | kept).all()), words


def test_moving_changes_the_dtype_alone(base):
    for _, wrapped, words in cases(base):
        single = to_like(wrapped, torch.zeros(()))
        value = wrapped.sample()
        with pyro.validation_enabled(False):
            log_prob = single.log_prob(value.float().clone())
        assert single.sample().dtype == torch.float32, words
        torch.testing.assert_close(log_prob.double(), wrapped.log_prob(value), rtol=1e-3, atol=1e-3, msg=words)


def test_what_is_stored_comes_back(base):
    for _, wrapped, words in cases(base):
        same(wrapped, rebuild(*describe(wrapped)), words)


def noiseless(operations, value):
    """What the operations make of a value."""
    for operation in operations:
        value = {"expand": lambda v: v.expand(2, *v.shape), "exp": torch.exp, "affine": lambda v: 0.5 + 2 * v}.get(
            operation, lambda v: v
        )(value)
    return value


def test_the_center_is_what_the_nesting_makes_of_the_mean(base):
    for operations, wrapped, words in cases(base):
        torch.testing.assert_close(center(wrapped), noiseless(operations, base.mean), msg=words)


def test_moments_are_those_of_the_affine_part(base):
    for operations, wrapped, words in cases(base):
        transforms = [operation for operation in operations if operation in ("exp", "affine")]
        mean, stddev = moments(wrapped, EXP if is_positive(wrapped.support) else None)
        # What follows the exponential has no closed form; what comes before it is affine.
        before = [operation for operation in operations if operation != "exp"]
        if transforms.count("exp") > 1 or ("exp" in transforms and transforms[-1] != "exp"):
            continue
        torch.testing.assert_close(mean, noiseless(before, base.mean), msg=words)
        expected = base.variance.sqrt() * 2.0 ** before.count("affine")
        torch.testing.assert_close(stddev, noiseless([o for o in before if o == "expand"], expected), msg=words)


def test_the_matched_normal_has_the_moments_or_is_refused_by_class(base):
    for _, wrapped, words in cases(base):
        if is_on_sphere(base.support):
            with pytest.raises(ValueError, match=type(base).__name__):
                match_moments(wrapped)
            continue
        normal = match_moments(wrapped)
        assert (normal.batch_shape, normal.event_shape) == (wrapped.batch_shape, wrapped.event_shape), words
        transform = EXP if is_positive(wrapped.support) else None
        for ours, theirs in zip(moments(normal, transform), moments(wrapped, transform), strict=True):
            assert (ours is None) == (theirs is None), words
            if ours is not None:
                torch.testing.assert_close(ours, theirs, msg=words)
        # What was masked is masked still.
        hidden = wrapped.log_prob(wrapped.sample()) == 0.0
        assert torch.equal(hidden, normal.log_prob(normal.sample()) == 0.0), words


def test_a_pull_back_has_the_density_of_the_change_of_variables(base):
    for operations, wrapped, words in cases(base):
        if not is_positive(wrapped.support):
            continue
        if "mask" in operations[operations.index("exp") :]:
            with pytest.raises(NotImplementedError, match="masked"):
                pull_back(wrapped, [EXP])
            continue
        back = pull_back(wrapped, [EXP])
        value = wrapped.sample().clone()
        event = tuple(range(-len(wrapped.event_shape), 0))
        jacobian = value.log().sum(event) if event else value.log()
        torch.testing.assert_close(back.log_prob(value.log()), wrapped.log_prob(value) + jacobian, msg=words)


@pytest.mark.parametrize("name", ["Normal", "RadialNormalVector", "RadialNormalNoEvent"])
def test_a_closed_kl_is_the_mean_of_the_difference_of_log_densities(name):
    q_base, closed = base_of(name), 0
    for loc, scale in ((q_base.loc + 0.3, 1.5 * q_base.scale), (q_base.loc, torch.ones_like(q_base.scale))):
        p_base = dist.Normal(loc, scale, validate_args=False).to_event(q_base.event_dim)
        for (operations, wide_q, words), (_, wide_p, _) in zip(cases(q_base), cases(p_base), strict=True):
            # Masked alike, and on either side alone.
            one_sided = [(wide_q, remove_masks(wide_p)), (remove_masks(wide_q), wide_p)] if "mask" in operations else []
            for q, p in [(wide_q, wide_p), *one_sided]:
                try:
                    kl = kl_divergence(q, p)
                except NotImplementedError:
                    continue
                closed += 1
                draws = q.sample((NUM_SAMPLES,))
                difference = q.log_prob(draws) - p.log_prob(draws)
                error = difference.std(0) / NUM_SAMPLES**0.5
                assert bool(((difference.mean(0) - kl).abs() <= 5 * error + 1e-9).all()), words
    assert closed > 90


def test_every_nesting_is_a_prior_to_swap_and_the_new_one_takes_over_its_mask(base):
    for operations, wrapped, words in cases(base):

        def model(wrapped=wrapped):
            return pyro.sample("w", wrapped)

        if masks_inside_an_event(operations):
            with pytest.raises(ValueError, match="'w' masks single elements"):
                swap_prior(model, {"w": remove_masks(wrapped)})()
            continue
        node = poutine.trace(swap_prior(model, {"w": remove_masks(wrapped)})).get_trace().nodes["w"]
        value = node["value"].clone()
        if not any(operation in ("exp", "affine") for operation in operations):
            torch.testing.assert_close(node["fn"].log_prob(value), wrapped.log_prob(value), msg=words)


def test_mean_only_runs_a_guide_of_every_nesting(base):
    for operations, wrapped, words in cases(base):
        with mean_only():
            value = pyro.sample("w", wrapped)
        torch.testing.assert_close(value, noiseless(operations, base.mean), msg=words)


@pytest.mark.parametrize("form", ["exact", "normal"])
def test_a_chain_advances_with_every_nesting_or_names_the_site(base, form):
    for _, wrapped, words in cases(base):
        chain = PriorChain(lambda wrapped=wrapped: pyro.sample("w", wrapped), form)
        if form == "normal" and is_on_sphere(base.support):
            with pytest.raises(ValueError, match=f"site 'w': {type(base).__name__}"):
                chain.advance({"w": wrapped})
            continue
        chain.advance({"w": wrapped})
        assert chain.prior["w"].shape() == wrapped.shape(), words


def test_guides_start_at_every_nesting(base):
    types = [AutoRadialDirectional] if is_on_sphere(base.support) else [AutoRadial, AutoMeanField]
    for _, wrapped, words in cases(base):
        # A guide takes events; a batch without plates is no site of Pyro's.
        wrapped = remove_masks(wrapped).to_event(len(wrapped.batch_shape))
        transform = EXP if is_positive(wrapped.support) else None
        mean, _ = moments(wrapped, transform)
        for guide_type in types:
            guide = guide_type(lambda wrapped=wrapped: pyro.sample("w", wrapped))
            guide.start_at({"w": wrapped})
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                guide.setup()
            start = guide.median()["w"]
            if is_real(wrapped.support) or is_positive(wrapped.support):
                expected = None if mean is None else (mean if transform is None else mean.exp())
                if expected is not None:
                    torch.testing.assert_close(start, expected, msg=words)
            assert guide.posterior()["w"].shape() == wrapped.shape(), words
