# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Blur images, add noise, lower their contrast, or rotate them.

Source: Hendrycks and Dietterich (2019), "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations". Noise has the strengths for ImageNet, contrast those for CIFAR-10. The paper blurs images of 224 and of
32 pixels; ours have 28, and the blur goes from half a pixel to two and a half.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

__all__ = ["ANGLES", "CORRUPTIONS", "NUM_STRENGTHS", "Corruption", "corrupted", "turned"]


def _blurred(images: np.ndarray, stddev: float, seed: int) -> np.ndarray:
    """By a normal kernel of this many pixels, within each image."""
    return ndimage.gaussian_filter(images, (0, 0, stddev, stddev), mode="nearest")


def _noisy(images: np.ndarray, stddev: float, seed: int) -> np.ndarray:
    """With normal noise in each pixel, cut off at black and white."""
    noise = np.random.default_rng(seed).normal(0.0, stddev, images.shape)
    return np.clip(images + noise, 0.0, 1.0)


def _flat(images: np.ndarray, factor: float, seed: int) -> np.ndarray:
    """With each image's differences from its own mean multiplied by a factor."""
    mean = images.mean((-2, -1), keepdims=True)
    return mean + factor * (images - mean)


class Corruption(NamedTuple):
    """How images are changed, and the strengths by their number from one on."""

    change: Callable[[np.ndarray, float, int], np.ndarray]
    strengths: tuple[float, ...]
    #: What a strength is.
    unit: str


NUM_STRENGTHS = 5
CORRUPTIONS: Mapping[str, Corruption] = MappingProxyType(
    {
        "blur": Corruption(_blurred, (0.5, 1.0, 1.5, 2.0, 2.5), "standard deviation of the kernel, in pixels"),
        "noise": Corruption(_noisy, (0.08, 0.12, 0.18, 0.26, 0.38), "standard deviation; white is 1"),
        "contrast": Corruption(_flat, (0.75, 0.5, 0.4, 0.3, 0.15), "factor on the difference from the mean"),
    }
)
#: In degrees.
ANGLES = tuple(range(0, 181, 15))


def corrupted(images: Tensor, kind: str, strength: int, seed: int = 0) -> Tensor:
    """Images with a corruption.

    :param images: intensities in ``[0, 1]``, ``[N, C, H, W]``.
    :param kind: of :data:`CORRUPTIONS`.
    :param strength: from 1 to 5; 0 leaves them as they are.
    :param seed: of the noise.
    :returns: intensities in ``[0, 1]`` of that shape.
    """
    if strength == 0:
        return images
    change, strengths, _ = CORRUPTIONS[kind]
    return _as_images(change(images.numpy(), strengths[strength - 1], seed))


def turned(images: Tensor, degrees: float) -> Tensor:
    """Images turned against the clock around their middle, with black where nothing comes from.

    :param images: intensities in ``[0, 1]``, ``[N, C, H, W]``.
    :param degrees: by how much.
    :returns: intensities in ``[0, 1]`` of that shape, interpolated linearly.
    """
    return _as_images(ndimage.rotate(images.numpy(), degrees, axes=(-1, -2), reshape=False, order=1))


def _as_images(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(pixels, dtype=np.float32)).clamp(0.0, 1.0)
