# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import copy
import csv
import io
import math
import pickle
import statistics

import numpy as np
import pytest
import torch

from pyro_radial.infer.loss.lazy_loss import DeviceLoss, as_number

# A tensor in host memory stands for one on a device.
LOSS, OTHER = DeviceLoss(torch.tensor(2.5)), DeviceLoss(torch.tensor(4.0))


def written(losses):
    file = io.StringIO()
    csv.writer(file).writerow(losses)
    return file.getvalue().strip()


def stored(loss):
    array = np.zeros(2)
    array[1] = loss
    return array.tolist()


USES = {
    "round": (lambda loss: round(loss, 1), 2.5),
    "int": (int, 2),
    "format": (lambda loss: f"{loss:.2f}", "2.50"),
    "str": (str, "2.5"),
    "a list of them": (lambda loss: str([loss]), "[2.5]"),
    "mean": (lambda loss: statistics.mean([loss, loss]), 2.5),
    "compared": (lambda loss: (loss < 3, loss >= OTHER, loss == 2.5, loss < 3.0), (True, False, True, True)),
    "arithmetic": (lambda loss: (1 + loss, loss / 2, 10 - loss, -loss, abs(loss)), (3.5, 1.25, 7.5, -2.5, 2.5)),
    "isnan": (math.isnan, False),
    "bool": (bool, True),
    "a key": (lambda loss: {loss: "best"}[2.5], "best"),
    "added to an array": (lambda loss: (np.zeros(2) + loss).tolist(), [2.5, 2.5]),
    "stored in an array": (stored, [0.0, 2.5]),
    "an array of them": (lambda loss: np.asarray([loss, loss], dtype=float).tolist(), [2.5, 2.5]),
    "written": (lambda loss: written([loss]), "2.5"),
    "pickled": (lambda loss: pickle.loads(pickle.dumps(loss)), 2.5),
    "copied": (copy.deepcopy, 2.5),
}


@pytest.mark.parametrize("name", USES)
def test_a_loss_on_a_device_is_used_like_a_float(name):
    use, expected = USES[name]
    assert use(LOSS) == expected
    assert use(2.5) == expected


def test_on_a_cpu_it_is_a_float_and_parts_are_a_tuple():
    assert as_number(torch.tensor(1.5)) == 1.5
    assert type(as_number(torch.tensor(1.5))) is float
    assert as_number(torch.tensor([1.5, 2.0])) == (1.5, 2.0)


def test_on_a_device_nothing_is_read_before_somebody_looks():
    assert isinstance(as_number(torch.tensor(1.5, device="meta")), DeviceLoss)
