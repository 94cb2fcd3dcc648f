# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Random changes of a batch of images: an affine map with one interpolation, and whole pixels without any."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample


@dataclass(frozen=True)
class RandomAffine:
    r"""Flip, rotate, shift and zoom each image of a batch at random. The defaults suit fundus images.

    Each axis is flipped with probability one half, and the image is rotated by an angle uniform in :math:`\pm`
    ``degrees``. Padding of a share p of the size, uniform between 0 and ``shift``, is added on all sides, and the image
    is cropped back to its size at a uniform place. Finally it is cropped to a share z of its size, uniform within
    ``zoom``, again at a uniform place, and resized. Pixels outside the image get the value ``fill``. In coordinates in
    which the image is :math:`[-1, 1]^2`, the new pixel at u shows the old image at

    .. math:: F R (z u + t), \qquad t = 2 p \, e + |1 - z| \, e', \quad e, e' \sim U[-1, 1]^2,

    with a flip F and a rotation R in pixels.

    Source: Farquhar, Osborne and Gal (2020), "Radial Bayesian Neural Networks", appendix D.1, after Leibig et al.
    (2017), "Leveraging uncertainty information from deep neural networks for disease detection".

    :param bool flip: whether to flip.
    :param float degrees: the largest angle.
    :param float shift: the largest share that is added on each side.
    :param zoom: the smallest and the largest share of the size that is kept; above one the image shrinks.
    :param fill: value outside the image, one number or one per channel; black after the images' normalization.
    :raises ValueError: if an argument is out of range, or if images have another shape.
    """

    flip: bool = True
    degrees: float = 180.0
    shift: float = 0.05
    zoom: tuple[float, float] = (0.9, 1.1)
    fill: float | tuple[float, ...] = 0.0

    def __post_init__(self) -> None:
        for name in ("degrees", "shift"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a finite number of at least zero, got {getattr(self, name)!r}")
        if not 0.0 < self.zoom[0] <= self.zoom[1] < float("inf"):
            raise ValueError(f"zoom must be the smallest and the largest share, both positive, got {self.zoom}")

    @torch.no_grad()
    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Transform floating-point images ``[N, C, H, W]``, each in its own way."""
        if images.ndim != 4 or not images.is_floating_point():
            raise ValueError(
                f"images must be floating-point of shape [N, C, H, W], got {images.dtype} {list(images.shape)}"
            )
        fill = torch.as_tensor(self.fill, dtype=images.dtype, device=images.device).reshape(-1, 1, 1)
        if len(fill) not in (1, images.shape[1]):
            raise ValueError(f"fill must be one number or one for each of {images.shape[1]} channels, got {self.fill}")
        grid = affine_grid(self._matrices(images, generator), list(images.shape), align_corners=False)
        return grid_sample(images - fill, grid, padding_mode="zeros", align_corners=False) + fill

    def _matrices(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """Affine maps from coordinates in the new images to those in the old ones, ``[N, 2, 3]``."""
        number, _, height, width = images.shape

        def uniform(*shape: int) -> Tensor:
            return 2 * torch.rand(number, *shape, generator=generator, dtype=images.dtype, device=images.device) - 1

        angle = torch.deg2rad(self.degrees * uniform())
        flips = uniform(2).sign() if self.flip else torch.ones_like(uniform(2))
        low, high = self.zoom
        zoom = low + (high - low) * (uniform() + 1) / 2
        pad = self.shift * (uniform(1) + 1) / 2
        offset = 2 * pad * uniform(2) + (1 - zoom).abs()[:, None] * uniform(2)
        cos, sin = angle.cos(), angle.sin()
        # Coordinates run from -1 to 1 along both axes, whatever their lengths.
        rows = [cos, -sin * height / width, sin * width / height, cos]
        linear = flips[:, :, None] * torch.stack(rows, -1).reshape(number, 2, 2)
        return torch.cat([zoom[:, None, None] * linear, linear @ offset[:, :, None]], -1)


@torch.no_grad()
def shifted_and_mirrored(images: Tensor, most: int = 2) -> Tensor:
    """Shift images ``[N, C, H, W]`` by up to so many pixels along each axis, and mirror left and right in half of them.

    The pixels that come in repeat those of the border.
    """
    number, _, height, width = images.shape
    rows, columns = (torch.randint(-most, most + 1, (number, 1), device=images.device) for _ in range(2))
    places = torch.arange(width, device=images.device).expand(number, width)
    mirrored = torch.rand(number, 1, device=images.device) < 0.5
    columns = (torch.where(mirrored, width - 1 - places, places) + columns).clamp(0, width - 1)
    rows = (torch.arange(height, device=images.device) + rows).clamp(0, height - 1)
    shown = images.movedim(1, -1)[
        torch.arange(number, device=images.device)[:, None, None], rows[:, :, None], columns[:, None, :]
    ]
    return shown.movedim(-1, 1)
