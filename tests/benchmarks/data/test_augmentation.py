# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pytest
import torch

from benchmarks.data.augmentation import RandomAffine, shifted_and_mirrored

NOTHING = {"flip": False, "degrees": 0.0, "shift": 0.0, "zoom": (1.0, 1.0)}
N = 400


def only(**changed):
    return RandomAffine(**{**NOTHING, **changed})


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def spots(x, y, height, width, stddev=2.0):
    """Images of one soft spot, its place in pixels from the center."""
    rows = torch.arange(height, dtype=torch.float64)[:, None] - (height - 1) / 2
    columns = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    spot = torch.exp(-((columns - x) ** 2 + (rows - y) ** 2) / (2 * stddev**2))
    return spot.expand(N, 1, height, width)


def centers(images):
    """The center of mass ``[N, 2]`` in pixels from the center, x and y."""
    height, width = images.shape[-2:]
    rows = torch.arange(height, dtype=torch.float64)[:, None] - (height - 1) / 2
    columns = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    mass = images.sum((1, 2, 3))
    return torch.stack([(images * place).sum((1, 2, 3)) / mass for place in (columns, rows)], -1)


def test_flips_are_the_four_and_as_frequent():
    images = torch.rand(1, 2, 5, 8, generator=generator()).expand(N, -1, -1, -1)
    flipped = only(flip=True)(images, generator(1))
    kinds = [images[0], images[0].flip(-1), images[0].flip(-2), images[0].flip((-1, -2))]
    matches = torch.stack([((flipped - kind).abs().amax((1, 2, 3)) < 1e-5) for kind in kinds])
    assert torch.equal(matches.sum(0), torch.ones(N, dtype=torch.long))
    # Five standard deviations of a share of a quarter.
    assert ((matches.double().mean(1) - 0.25).abs() < 5 * math.sqrt(0.25 * 0.75 / N)).all()


@pytest.mark.parametrize(("height", "width"), [(61, 61), (61, 91)])
def test_rotations_keep_the_distance_in_pixels_and_take_every_angle(height, width):
    rotated = only(degrees=180.0)(spots(12.0, 9.0, height, width), generator(2))
    found = centers(rotated)
    torch.testing.assert_close(found.norm(dim=-1), torch.full((N,), 15.0, dtype=torch.float64), rtol=0, atol=0.05)
    angles = torch.atan2(found[:, 1], found[:, 0])
    quarters = torch.histc(angles, 4, -math.pi, math.pi) / N
    assert ((quarters - 0.25).abs() < 5 * math.sqrt(0.25 * 0.75 / N)).all()


def test_shifted_images_are_crops_of_images_with_a_repeated_border():
    torch.manual_seed(0)
    images = torch.rand(200, 2, 5, 6)
    found = shifted_and_mirrored(images)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2), mode="replicate")
    seen = set()
    for image, around in zip(found, padded, strict=True):
        crops = {
            (row, column, mirrored): crop.flip(-1) if mirrored else crop
            for row in range(5)
            for column in range(5)
            for mirrored in (False, True)
            for crop in [around[:, row : row + 5, column : column + 6]]
        }
        which = [key for key, crop in crops.items() if torch.equal(image, crop)]
        assert which
        seen |= set(which)
    # Of 50 equally likely ones, each is missed with a chance of 2 %.
    assert len(seen) >= 45
