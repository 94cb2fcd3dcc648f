# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pytest
import torch

from benchmarks.data import augmentation
from benchmarks.data.augmentation import RandomAffine, shifted_and_mirrored

N = 400
AFFINE = RandomAffine((0.0,))


@pytest.fixture(autouse=True)
def neither_shifted_nor_zoomed(monkeypatch):
    monkeypatch.setattr(augmentation, "SHIFT", 0.0)
    monkeypatch.setattr(augmentation, "ZOOM", (1.0, 1.0))


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


def test_flips_are_the_four_and_as_frequent(monkeypatch):
    monkeypatch.setattr(augmentation, "DEGREES", 0.0)
    images = torch.rand(1, 2, 5, 8).expand(N, -1, -1, -1)
    flipped = AFFINE(images)
    kinds = [images[0], images[0].flip(-1), images[0].flip(-2), images[0].flip((-1, -2))]
    matches = torch.stack([((flipped - kind).abs().amax((1, 2, 3)) < 1e-5) for kind in kinds])
    assert torch.equal(matches.sum(0), torch.ones(N, dtype=torch.long))
    # Five standard deviations of a share of a quarter.
    assert ((matches.double().mean(1) - 0.25).abs() < 5 * math.sqrt(0.25 * 0.75 / N)).all()


@pytest.mark.parametrize(("height", "width"), [(61, 61), (61, 91)])
def test_rotations_keep_the_distance_in_pixels_and_take_every_angle(height, width):
    found = centers(AFFINE(spots(12.0, 9.0, height, width)))
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
