# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest
import torch

from benchmarks.common import Results
from benchmarks.continual.regression_stream import AT_ONCE, LAST, STREAM, Setting, Size, arriving, as_keys, chosen
from benchmarks.continual.sequential_regression import NUM_WEIGHTS, closed


def rows_of(batches):
    return torch.cat([torch.cat(batch, -1) for batch in batches])


def sorted_targets(split):
    """All targets of a split in their own units, up to a shift."""
    y = torch.cat([*(y for _, y in split.batches), split.measured[1]]).squeeze(-1).sort().values * split.unit
    return y - y[0]


@pytest.mark.parametrize("split", [0, 1])
def test_a_stream_is_standardized_by_its_first_batch_alone(tiny_data, split):
    found = arriving(tiny_data, "yacht", split, 3)
    first = rows_of(found.batches[:1]).double()
    torch.testing.assert_close(first.mean(0), torch.zeros(4).double(), rtol=0.0, atol=1e-6)
    torch.testing.assert_close(first.std(0, correction=0), torch.ones(4).double())
    later = rows_of(found.batches[1:])
    assert (later.std(0) - 1).abs().max() > 0.01


def test_every_row_is_in_one_place_and_settings_are_chosen_without_test_rows(tiny_data):
    file = np.load(tiny_data / "uci" / "yacht.npz")
    targets = torch.tensor(file["data"][:, -1], dtype=torch.float32)
    for split, rows in ((0, file["train_indices_0"]), (1, np.arange(len(targets)))):
        found = arriving(tiny_data, "yacht", split, 3)
        expected = targets[rows].sort().values
        torch.testing.assert_close(sorted_targets(found), expected - expected[0], rtol=1e-4, atol=1e-4)
        assert len(found.measured[0]) == (3 if split == 0 else 10)


def test_the_setting_is_the_best_after_the_last_batch_of_split_0_over_sets(tmp_path):
    worse, better = Setting(0.01, 0.01), Setting(0.02, 0.01)
    size = Size(sets=("a", "b"), grid=(worse, better))
    results = Results(tmp_path / "rows.json", {})
    method = ("radial", "normal", STREAM)
    scores = {
        ("a", worse): [0.0, 1.0],
        ("b", worse): [0.0, 1.0],
        ("a", better): [-1.0, 4.0],
        ("b", better): [-1.0, 0.0],
    }
    for given in (method, ("radial", "", AT_ONCE)):
        for (name, setting), values in scores.items():
            keys = {"data": name, **as_keys(given, "local"), **setting._asdict()}
            results.add(keys | {"split": 0}, lambda values=values: {"log_likelihood": values})
            results.add(keys | {"split": 1}, lambda last=9.0 * (setting == worse): {"log_likelihood": [0.0, last]})
    assert chosen(results, size, method, "local") == better
    assert chosen(results, size, ("radial", "", LAST), "local") == better


def test_the_best_chain_of_normals_is_exact_where_features_are_orthogonal():
    x = torch.linalg.qr(torch.randn(3, 20, NUM_WEIGHTS)).Q
    y = x.sum(-1, keepdim=True) + torch.randn(3, 20, 1)
    for row in closed(x, y):
        assert row["error"] < 1e-4
        assert abs(row["ratio"] - 1.0) < 1e-4
