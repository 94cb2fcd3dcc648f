# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Random flips, rotations, shifts and zooms of a batch of images, at one interpolation."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from pyro_radial._pyro.checks import positive_float

__all__ = ["RandomAffine"]


@dataclass(frozen=True)
class RandomAffine:
    r"""Each image of a batch flipped, rotated, shifted and zoomed at random; the defaults are those for fundus images.

    An image is flipped along either axis with probability one half each, and rotated by an angle that is uniform
    between :math:`\pm` ``degrees``. Then a share p of its size, uniform between 0 and ``shift``, is added on all sides,
    and it is cropped back to its size anywhere within. Last it is cropped to a share z of its size, uniform between the
    two of ``zoom``, again anywhere, and resized. What was outside of the image is ``fill``. A pixel at u, in
    coordinates in which the image is :math:`[-1, 1]^2`, so shows what was at

    .. math:: F R (z u + t), \qquad t = 2 p \, e + |1 - z| \, e', \quad e, e' \sim U[-1, 1]^2,

    with a flip F and a rotation R in pixels, by one bilinear interpolation of its four neighbors.

    Source: Farquhar, Osborne and Gal (2020), "Radial Bayesian Neural Networks", appendix D.1, after Leibig et al.
    (2017), "Leveraging uncertainty information from deep neural networks for disease detection". Normalize images
    after it, or give the normalized black as ``fill``.

    :param bool flip: whether to flip.
    :param float degrees: the largest angle.
    :param float shift: the largest share that is added on each side, from 0.
    :param zoom: the least and the largest share of the size that is kept; above one the image becomes smaller.
    :param fill: of what was outside, one number or one for each channel.
    :raises ValueError: naming the argument that is out of range; from a call, for images of another shape.

    Example::

        >>> images = torch.rand(8, 3, 28, 28)
        >>> RandomAffine()(images).shape
        torch.Size([8, 3, 28, 28])

    Before each batch of a training, by the function that makes batches::

        >>> from torch.utils.data import DataLoader, TensorDataset, default_collate
        >>> def augmented(items, augment=RandomAffine()):
        ...     images, labels = default_collate(items)
        ...     return augment(images), labels
        >>> data = DataLoader(TensorDataset(images, torch.zeros(8)), batch_size=4, collate_fn=augmented)

    which :func:`~pyro_radial.fit` takes.
    """

    flip: bool = True
    degrees: float = 180.0
    shift: float = 0.05
    zoom: tuple[float, float] = (0.9, 1.1)
    fill: float | tuple[float, ...] = 0.0

    def __post_init__(self) -> None:
        for name in ("degrees", "shift"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"RandomAffine: {name} must be a number of at least zero, got {getattr(self, name)!r}")
        low, high = (positive_float("RandomAffine: zoom", share) for share in self.zoom)
        if high < low:
            raise ValueError(f"RandomAffine: zoom must be the least and the largest share, got {self.zoom}")

    @torch.no_grad()
    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Each image with a transform of its own.

        :param torch.Tensor images: floating-point, ``[N, C, H, W]``.
        :param torch.Generator generator: of random numbers on the images' device; torch's own by default.
        :returns: a tensor of the same shape.
        :raises ValueError: for another shape, or a ``fill`` of another number of channels.
        """
        if images.ndim != 4 or not images.is_floating_point():
            raise ValueError(
                "RandomAffine: images must be floating-point of shape [N, C, H, W], got "
                f"{images.dtype} {list(images.shape)}"
            )
        fill = torch.as_tensor(self.fill, dtype=images.dtype, device=images.device).reshape(-1, 1, 1)
        if len(fill) not in (1, images.shape[1]):
            raise ValueError(
                f"RandomAffine: fill must be one number or {images.shape[1]} for as many channels, got {self.fill}"
            )
        grid = affine_grid(self._matrices(images, generator), list(images.shape), align_corners=False)
        return grid_sample(images - fill, grid, padding_mode="zeros", align_corners=False) + fill

    def _matrices(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """From places in the new images to places in the old ones, ``[N, 2, 3]``."""
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
        # Coordinates run from -1 to 1 along both axes, however long they are.
        rows = [cos, -sin * height / width, sin * width / height, cos]
        linear = flips[:, :, None] * torch.stack(rows, -1).reshape(number, 2, 2)
        return torch.cat([zoom[:, None, None] * linear, linear @ offset[:, :, None]], -1)
