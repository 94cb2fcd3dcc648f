# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import os
import sys

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.data.retinopathy import RetinopathyImages
from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, fit, predict
from pyro_radial.nn import likelihoods

Image = pytest.importorskip("PIL.Image")
GRADES = {"1_left": 0, "1_right": 2, "2_left": 1, "2_right": 4}
RED, GREEN = (200, 0, 0), (0, 200, 0)


def photograph(color, height=60, width=90):
    """A dark image with an upright rectangle of 40 x 50 pixels."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[5:55, 20:60] = color
    return Image.fromarray(pixels)


@pytest.fixture
def kaggle(tmp_path):
    """A folder of photographs, and their table."""
    folder = tmp_path / "train"
    folder.mkdir()
    for name, grade in GRADES.items():
        photograph(RED if grade >= 2 else GREEN).save(folder / f"{name}.png")
    (folder / "notes.txt").write_text("no image")
    table = tmp_path / "trainLabels.csv"
    write(table, GRADES)
    return folder, table


def write(table, grades, head="image,level", more=""):
    table.write_text("\n".join([head, *(f"{name},{grade}{more}" for name, grade in grades.items())]) + "\n")


def images(kaggle, tmp_path, **options):
    return RetinopathyImages(*kaggle, **{"size": 25, "cache_dir": tmp_path / "cache", **options})


def test_images_and_grades_are_in_the_order_of_the_table(kaggle, tmp_path):
    found = images(kaggle, tmp_path)
    assert (len(found), found.names, found.labels.tolist()) == (4, list(GRADES), list(GRADES.values()))
    for (pixels, label), grade in zip((found[i] for i in range(4)), GRADES.values(), strict=True):
        assert (pixels.shape, pixels.dtype, label.dtype, int(label)) == ((3, 25, 25), torch.float32, torch.int64, grade)
        color = 0 if grade >= 2 else 1
        assert pixels[color, 12, 12] == pytest.approx(200 / 255)
        assert pixels.amax() <= 1.0


def test_referable_grades_are_one_class(kaggle, tmp_path):
    assert images(kaggle, tmp_path, referable_from=2).labels.tolist() == [0, 1, 0, 1]
    assert images(kaggle, tmp_path, referable_from=4).labels.tolist() == [0, 0, 0, 1]


def test_the_dark_border_is_cut_off_and_the_rest_padded_to_a_square(kaggle, tmp_path):
    pixels, _ = images(kaggle, tmp_path, size=50)[0]
    # What is left has 40 columns of 50 rows: the height is full, five columns on each side are black.
    assert (pixels[1, :, 25] > 0.7).all()
    assert (pixels[1, :, :4] == 0).all()
    assert (pixels[1, :, -4:] == 0).all()
    assert (pixels[1, 25, 6:44] > 0.7).all()


def test_an_image_that_is_dark_all_over_stays(kaggle, tmp_path):
    Image.new("RGB", (30, 20)).save(kaggle[0] / "1_left.png")
    pixels, _ = images(kaggle, tmp_path)[0]
    assert pixels.shape == (3, 25, 25)
    assert pixels.max() == 0


def test_a_gray_or_transparent_image_has_three_channels(kaggle, tmp_path):
    photograph(RED).convert("L").save(kaggle[0] / "1_left.png")
    photograph(RED).convert("RGBA").save(kaggle[0] / "1_right.png")
    found = images(kaggle, tmp_path)
    assert found[0][0].shape == found[1][0].shape == (3, 25, 25)
    assert torch.equal(found[0][0][0], found[0][0][1])


def test_a_photograph_is_read_once(kaggle, tmp_path, monkeypatch):
    first = images(kaggle, tmp_path)[0][0]
    (cached,) = (tmp_path / "cache").glob("*/*.png")
    monkeypatch.setattr("benchmarks.data.retinopathy._resized", lambda *_: pytest.fail("read again"))
    assert torch.equal(images(kaggle, tmp_path)[0][0], first)
    assert [path.name for path in cached.parent.iterdir()] == ["1_left.png.png"]


def test_other_sizes_and_folders_have_caches_of_their_own(kaggle, tmp_path):
    images(kaggle, tmp_path)[0]
    assert images(kaggle, tmp_path, size=10)[0][0].shape == (3, 10, 10)
    other = tmp_path / "other" / "train"
    other.mkdir(parents=True)
    for name in GRADES:
        photograph(RED).save(other / f"{name}.png")
    pixels, _ = images((other, kaggle[1]), tmp_path)[0]
    assert pixels[0, 12, 12] > 0.7


def test_a_newer_photograph_and_a_damaged_cache_are_read_anew(kaggle, tmp_path):
    images(kaggle, tmp_path)[0]
    (cached,) = (tmp_path / "cache").glob("*/*.png")
    cached.write_bytes(cached.read_bytes()[:60])
    assert images(kaggle, tmp_path)[0][0][1, 12, 12] > 0.7
    photograph(RED).save(kaggle[0] / "1_left.png")
    later = cached.stat().st_mtime + 10
    os.utime(kaggle[0] / "1_left.png", (later, later))
    assert images(kaggle, tmp_path)[0][0][0, 12, 12] > 0.7


def test_a_network_is_trained_on_it_and_its_checkpoint_knows_it(kaggle, tmp_path):
    found = images(kaggle, tmp_path, size=8, referable_from=2)
    assert found.fingerprint() == images(kaggle, tmp_path, size=8, referable_from=2).fingerprint()
    assert found.fingerprint() != images(kaggle, tmp_path, size=8).fingerprint()
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical())
    guide = AutoRadial(model)
    settings = {"batch_size": 2, "seed": 0, "progress": False, "checkpoint": tmp_path / "run.pt"}
    fit(model, guide, found, epochs=2, **settings)
    assert predict(model, guide, found, num_samples=3).mean.shape == (4, 2)
    with pytest.raises(ValueError, match="data"):
        fit(model, guide, images(kaggle, tmp_path, size=8, referable_from=1), epochs=3, **settings)


def test_a_third_column_is_passed_over(kaggle, tmp_path):
    write(kaggle[1], GRADES, "image,level,Usage", ",Public")
    assert images(kaggle, tmp_path).labels.tolist() == list(GRADES.values())


def test_what_the_folder_lacks_is_named(kaggle, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder must be an existing folder, got .*nowhere"):
        images((tmp_path / "nowhere", kaggle[1]), tmp_path)
    write(kaggle[1], {**GRADES, "3_left": 0})
    with pytest.raises(ValueError, match=r"every image, but '3_left' is missing \(.*trainLabels\.csv, line 6\)"):
        images(kaggle, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"folder must hold images \(.jpeg, .*\), got none in .*empty"):
        images((tmp_path / "empty", kaggle[1]), tmp_path)
    photograph(RED).save(kaggle[0] / "1_left.jpeg")
    with pytest.raises(ValueError, match=r"one image of every name, got 1_left.jpeg and 1_left.png"):
        images(kaggle, tmp_path)


@pytest.mark.parametrize("level", ["5", "-1", "", "2.0", "mild"])
def test_a_grade_out_of_range_is_named(kaggle, tmp_path, level):
    write(kaggle[1], {**GRADES, "2_left": level})
    with pytest.raises(
        ValueError, match=rf"level must be a grade from 0 to 4, got '{level}' for '2_left' \(.*line 4\)"
    ):
        images(kaggle, tmp_path)


def test_what_the_table_lacks_is_named(kaggle, tmp_path):
    folder, table = kaggle
    with pytest.raises(FileNotFoundError, match=r"labels must be a file, got .*none\.csv"):
        images((folder, tmp_path / "none.csv"), tmp_path)
    table.write_text("image,grade\n1_left,0\n")
    with pytest.raises(ValueError, match=r"columns image and level, got \['image', 'grade'\]"):
        images(kaggle, tmp_path)
    table.write_text("image,level\n")
    with pytest.raises(ValueError, match="labels must have a line for each image, got none"):
        images(kaggle, tmp_path)
    table.write_text("image,level\n1_left,0\n1_left,1\n")
    with pytest.raises(ValueError, match=r"labels must name an image once, got '1_left' again \(.*line 3\)"):
        images(kaggle, tmp_path)
    table.write_text("image,level\n1_left\n")
    with pytest.raises(ValueError, match="level must be a grade from 0 to 4, got None"):
        images(kaggle, tmp_path)


def test_a_damaged_image_is_named_when_it_is_read(kaggle, tmp_path):
    path = kaggle[0] / "1_right.png"
    path.write_bytes(path.read_bytes()[:80])
    found = images(kaggle, tmp_path)
    with pytest.raises(ValueError, match=r"1_right\.png is not an image or is damaged"):
        found[1]
    assert not list((tmp_path / "cache").glob("*/*"))


def test_bad_settings_are_named(kaggle, tmp_path):
    with pytest.raises(ValueError, match="referable_from must be a grade from 1 to 4, got 5"):
        images(kaggle, tmp_path, referable_from=5)
    with pytest.raises(ValueError, match="size must be a positive integer, got 0"):
        images(kaggle, tmp_path, size=0)


def test_without_pillow_the_package_is_named(kaggle, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match="pip install pillow"):
        images(kaggle, tmp_path)
