# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pytest
import torch

from benchmarks.uncertainty._corruptions import ANGLES, CORRUPTIONS, NUM_STRENGTHS, corrupted, turned

STRENGTHS = range(1, NUM_STRENGTHS + 1)


def some_images(count=20, side=28):
    return torch.rand(count, 1, side, side, generator=torch.Generator().manual_seed(0))


def a_dot(side=29):
    images = torch.zeros(1, 1, side, side)
    images[..., side // 2, side // 2] = 1.0
    return images


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_each_strength_changes_images_more_than_the_one_before(kind):
    images = some_images()
    changes = [float((corrupted(images, kind, strength) - images).square().mean()) for strength in (0, *STRENGTHS)]
    assert changes[0] == 0.0
    assert changes == sorted(changes)
    assert len(set(changes)) == len(CORRUPTIONS[kind].strengths) + 1 == NUM_STRENGTHS + 1


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_images_stay_images_and_the_originals_as_they_were(kind):
    images = some_images(3)
    before = images.clone()
    changed = corrupted(images, kind, NUM_STRENGTHS)
    assert changed.shape == images.shape
    assert changed.dtype == images.dtype
    assert ((changed >= 0) & (changed <= 1)).all()
    assert torch.equal(images, before)


@pytest.mark.parametrize("strength", STRENGTHS)
def test_a_blurred_dot_is_the_kernel(strength):
    stddev = CORRUPTIONS["blur"].strengths[strength - 1]
    place = torch.arange(29.0) - 14
    # Normal, at whole pixels, cut at four standard deviations.
    line = (-0.5 * (place / stddev).square()).exp() * (place.abs() <= 4 * stddev + 0.5)
    line /= line.sum()
    torch.testing.assert_close(corrupted(a_dot(), "blur", strength)[0, 0], line.outer(line))


def test_a_blur_leaves_other_images_alone():
    images = torch.cat([a_dot(), torch.zeros(1, 1, 29, 29)])
    assert not corrupted(images, "blur", NUM_STRENGTHS)[1].any()


@pytest.mark.parametrize("strength", STRENGTHS)
def test_noise_has_its_standard_deviation_where_nothing_is_cut(strength):
    stddev = CORRUPTIONS["noise"].strengths[strength - 1]
    gray = torch.full((100, 1, 28, 28), 0.5)
    noise = corrupted(gray, "noise", strength) - gray
    # Within one standard deviation, which no cut at 0 or 1 reaches.
    share = float((noise.abs() < stddev).double().mean())
    expected = math.erf(math.sqrt(0.5))
    assert share == pytest.approx(expected, abs=4 * (expected * (1 - expected) / gray.numel()) ** 0.5)
    assert torch.equal(noise, corrupted(gray, "noise", strength) - gray)
    assert not torch.equal(noise, corrupted(gray, "noise", strength, seed=1) - gray)


@pytest.mark.parametrize("strength", STRENGTHS)
def test_contrast_keeps_the_mean_and_scales_the_standard_deviation(strength):
    images = some_images()
    changed = corrupted(images, "contrast", strength)
    factor = CORRUPTIONS["contrast"].strengths[strength - 1]
    torch.testing.assert_close(changed.mean((1, 2, 3)), images.mean((1, 2, 3)))
    torch.testing.assert_close(changed.std((1, 2, 3)), factor * images.std((1, 2, 3)))


def test_images_turn_against_the_clock():
    images = some_images(2)
    torch.testing.assert_close(turned(images, 0), images)
    torch.testing.assert_close(turned(images, 90), images.rot90(1, (-2, -1)))
    torch.testing.assert_close(turned(images, 180), images.flip(-1, -2))
    assert (ANGLES[0], ANGLES[-1]) == (0, 180)


def test_a_turn_leaves_the_corners_black():
    assert not turned(torch.ones(1, 1, 28, 28), 45)[0, 0, [0, 0, -1, -1], [0, -1, 0, -1]].any()
