# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pytest
import torch

from benchmarks.common import Results
from benchmarks.uncertainty._referred import SHARES, compared, curve_of, judged
from pyro_radial.infer import Prediction
from pyro_radial.nn import likelihoods

LABELS = torch.arange(60) % 2


def prediction(seed, draws, sharpness=1.0):
    generator = torch.Generator().manual_seed(seed)
    evidence = sharpness * (2 * LABELS - 1) + torch.randn(draws, 60, generator=generator)
    return Prediction(torch.stack([-evidence, evidence], -1), likelihoods.Categorical())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    found = Results(tmp_path_factory.mktemp("referred") / "results.json", {})
    for method, shift, draws in (("a", 0, 8), ("b", 100, 8), ("single", 0, 1)):
        for seed in (10, 11):
            row = judged(prediction(seed + shift, draws), LABELS, 20)
            found.add({"part": "test", "method": method, "seed": seed}, lambda row=row: row)
    return found


def test_draws_rank_by_mutual_information_and_one_draw_by_entropy(results):
    assert list(results.find({"method": "a"})["referred"]) == ["mutual information", "entropy"]
    assert list(results.find({"method": "single"})["referred"]) == ["entropy"]


def test_curves_are_means_over_seeds(results):
    rows = results.where(method="a")
    scores = [torch.tensor(row["referred"]["mutual information"]["score"]) for row in rows]
    curve = curve_of(rows)
    torch.testing.assert_close(curve.score, (sum(scores) / 2).double())
    assert curve.resamples.shape == (20, len(SHARES))
    assert curve.score[0] == pytest.approx(sum(row["auc"] for row in rows) / 2, abs=1e-4)


def test_differences_are_paired_in_seeds_and_images(results):
    mean, error = compared(results, "a", "a")
    assert torch.equal(mean, torch.zeros(len(SHARES)))
    assert torch.equal(error, torch.zeros(len(SHARES)))
    mean, error = compared(results, "a", "b")
    a, b = (curve_of(results.where(method=name)) for name in "ab")
    torch.testing.assert_close(mean.double(), a.score - b.score, rtol=0, atol=1e-6)
    of_images = (a.resamples - b.resamples).std(0)
    assert (error >= of_images - 1e-6).all()
    per_seed = torch.tensor(
        [x["auc"] - y["auc"] for x, y in zip(results.where(method="a"), results.where(method="b"), strict=True)]
    )
    expected = (per_seed.var() / 2 + of_images[0] ** 2).sqrt()
    assert error[0].item() == pytest.approx(expected.item(), abs=2e-4)
