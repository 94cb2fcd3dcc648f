# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Random changes of a batch of images: an affine map with one interpolation, and whole pixels without any."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

#: The largest angle, the largest share that is added on each side, and the range of shares that are kept.
DEGREES, SHIFT, ZOOM = 180.0, 0.05, (0.9, 1.1)


@dataclass(frozen=True)
class RandomAffine:
    r"""Flip, rotate, shift and zoom each image of a batch at random, as suits fundus images.

    Each axis is flipped with probability one half, and the image is rotated by any angle. Padding of a share p of the
    size, uniform up to ``SHIFT``, is added on all sides, and the image is cropped back to its size at a uniform place.
    Finally it is cropped to a share z of its size, uniform within ``ZOOM``, again at a uniform place, and resized. In
    coordinates in which the image is :math:`[-1, 1]^2`, the new pixel at u shows the old image at

    .. math:: F R (z u + t), \qquad t = 2 p \, e + |1 - z| \, e', \quad e, e' \sim U[-1, 1]^2,

    with a flip F and a rotation R in pixels.

    Source: Farquhar, Osborne and Gal (2020), "Radial Bayesian Neural Networks", appendix D.1, after Leibig et al.
    (2017), "Leveraging uncertainty information from deep neural networks for disease detection".

    :param fill: value outside the image, one for each channel; black after the images' normalization.
    """

    fill: tuple[float, ...]

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Transform floating-point images ``[N, C, H, W]``, each in its own way."""
        fill = torch.as_tensor(self.fill, dtype=images.dtype, device=images.device).reshape(-1, 1, 1)
        grid = affine_grid(affine_maps(images), list(images.shape), align_corners=False)
        return grid_sample(images - fill, grid, padding_mode="zeros", align_corners=False) + fill


def affine_maps(images: Tensor) -> Tensor:
    """Affine maps from coordinates in the new images to those in the old ones, ``[N, 2, 3]``."""
    number, _, height, width = images.shape

    def uniform(*shape: int) -> Tensor:
        return 2 * torch.rand(number, *shape, dtype=images.dtype, device=images.device) - 1

    angle = torch.deg2rad(DEGREES * uniform())
    flips = uniform(2).sign()
    low, high = ZOOM
    zoom = low + (high - low) * (uniform() + 1) / 2
    pad = SHIFT * (uniform(1) + 1) / 2
    offset = 2 * pad * uniform(2) + (1 - zoom).abs()[:, None] * uniform(2)
    cos, sin = angle.cos(), angle.sin()
    # Coordinates run from -1 to 1 along both axes, whatever their lengths.
    rows = [cos, -sin * height / width, sin * width / height, cos]
    linear = flips[:, :, None] * torch.stack(rows, -1).reshape(number, 2, 2)
    return torch.cat([zoom[:, None, None] * linear, linear @ offset[:, :, None]], -1)


@torch.no_grad()
def shifted_and_mirrored(images: Tensor) -> Tensor:
    """Shift images ``[N, C, H, W]`` by up to two pixels along each axis, and mirror left and right in half of them.

    The pixels that come in repeat those of the border.
    """
    number, _, height, width = images.shape
    rows, columns = (torch.randint(-2, 3, (number, 1), device=images.device) for _ in range(2))
    places = torch.arange(width, device=images.device).expand(number, width)
    mirrored = torch.rand(number, 1, device=images.device) < 0.5
    columns = (torch.where(mirrored, width - 1 - places, places) + columns).clamp(0, width - 1)
    rows = (torch.arange(height, device=images.device) + rows).clamp(0, height - 1)
    shown = images.movedim(1, -1)[
        torch.arange(number, device=images.device)[:, None, None], rows[:, :, None], columns[:, None, :]
    ]
    return shown.movedim(-1, 1)
