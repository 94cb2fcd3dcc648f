# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Tiny made-up data in the places of the real ones, so that every experiment runs anywhere in seconds."""

import numpy as np
import pytest
import torch

from tutorials import image_sets
from tutorials.image_sets import Images

NUM_SPLITS = 20


@pytest.fixture
def tiny_data(tmp_path, monkeypatch):
    """A folder of data as the experiments expect it; images come from memory, since real ones are checked by digest."""
    monkeypatch.setattr(image_sets, "load", tiny_images)
    folder = tmp_path / "data"
    write_uci(folder / "uci")
    return folder


def tiny_images(name, data_dir=None):
    if name == "retinamnist":
        return tiny_fundus_images()
    generator = torch.Generator().manual_seed(0)
    labels = [torch.arange(10).repeat(count) for count in (30, 10)]
    pixels = [0.5 * torch.rand(len(own), 1, 28, 28, generator=generator) for own in labels]
    for part, own in zip(pixels, labels, strict=True):
        part[torch.arange(len(own)), 0, :, 2 * own] += 0.5
    return Images(tuple("0123456789"), pixels[0], labels[0], pixels[1], labels[1])


def tiny_fundus_images():
    """Grades from 2 on are red, in three parts as the publisher's."""
    generator = torch.Generator().manual_seed(0)
    labels = [torch.arange(5).repeat(count) for count in (12, 8, 8)]
    pixels = [0.5 * torch.rand(len(own), 3, 28, 28, generator=generator) for own in labels]
    for part, own in zip(pixels, labels, strict=True):
        part[own >= 2, 0] += 0.5
    train, validation, test = zip(pixels, labels, strict=True)
    return Images(tuple("01234"), *train, *test, *validation)


def write_uci(folder):
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3))
    y = x @ [1.0, -2.0, 0.5] + 0.1 * rng.normal(size=40)
    order = rng.permutation(40)
    splits = {f"{part}_indices_{i}": rows for i in range(NUM_SPLITS) for part, rows in halves(order).items()}
    columns = {"feature_columns": np.arange(3), "target_column": np.array(3)}
    for name in ("yacht", "bostonHousing"):
        np.savez(folder / f"{name}.npz", data=np.column_stack([x, y]), **columns, **splits)


def halves(order):
    return {"train": order[:30], "test": order[30:]}
