# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel, predict
from pyro_radial.nn import likelihoods
from pyro_radial.uncertainty import auroc, evaluate, expected_calibration_error
from pyro_radial.uncertainty.metrics import accuracy
from tests.helpers.networks import Net


def of_classes():
    x = torch.randn(50, 2)
    y = (x[:, 0] > 0).long()
    model = SupervisedModel(BayesianModule(nn.Linear(2, 2)), likelihoods.Categorical())
    guide = AutoRadial(model, init_stddev=0.5)
    guide.setup(x, y)
    return model, guide, x, y


def of_numbers(noise=0.5):
    x = torch.randn(1000, 1)
    net = nn.Linear(1, 1)
    net.load_state_dict({"weight": torch.ones(1, 1), "bias": torch.zeros(1)})
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(scale=noise))
    guide = AutoMeanField(model, init_stddev=1e-4)
    guide.setup(x, x)
    return model, guide, x, x + noise * torch.randn(1000, 1)


def of_names():
    x = torch.randn(60, 2)
    y = {"height": x[:, :1].clone(), "kind": torch.arange(60) % 3}
    layers = {"height": nn.Linear(2, 1), "kind": nn.Linear(2, 3)}
    bnn = BayesianModule(Net(lambda net, x: {"height": net.height(x), "kind": net.kind(x)}, **layers))
    model = SupervisedModel(bnn, {"height": likelihoods.Gaussian(scale=0.5), "kind": likelihoods.Categorical()})
    guide = AutoMeanField(model, init_stddev=0.3)
    guide.setup(x, y)
    y["height"][5] = float("nan")
    y["kind"][[7, 9]] = -100
    return model, guide, x, y


def test_scores_of_classes_are_those_of_the_prediction():
    model, guide, x, y = of_classes()
    torch.manual_seed(1)
    found = evaluate(model, guide, (x, y), ood=10 * x, progress=False)
    torch.manual_seed(1)
    prediction, other = predict(model, guide, x), predict(model, guide, 10 * x)
    assert torch.equal(found.prediction.samples, prediction.samples)
    expected = {
        "accuracy": accuracy(prediction.mean, y),
        "NLL": -prediction.log_prob(y).mean(),
        "ECE": expected_calibration_error(prediction.mean, y),
        "AUROC, entropy": auroc(prediction.entropy, other.entropy),
        "AUROC, mutual information": auroc(prediction.mutual_information, other.mutual_information),
        "AUROC, energy": auroc(-prediction.samples.logsumexp(-1).mean(0), -other.samples.logsumexp(-1).mean(0)),
    }
    assert {name: found.scores[name] for name in expected} == pytest.approx({n: float(v) for n, v in expected.items()})
    assert {name.split(",")[0] for name in list(found.scores)[4:]} == {"AUROC", "FPR95"}


def test_it_scores_each_method_of_predict_and_the_probit_has_no_mutual_information():
    model, guide, x, y = of_classes()
    found = evaluate(model, guide, (x, y), ood=10 * x, method="probit", progress=False)
    prediction = predict(model, guide, x, method="probit")
    assert found.scores["NLL"] == pytest.approx(-float(prediction.log_prob(y).mean()))
    assert "AUROC, entropy" in found.scores
    assert "AUROC, mutual information" not in found.scores
    assert math.isnan(found.errors["NLL"])
    # One pass has no error bar to print.
    assert str(found).splitlines()[1].split() == ["NLL", f"{found.scores['NLL']:.4f}"]


def test_scores_of_real_targets_are_those_of_the_true_model():
    """A posterior that is nearly a point at the truth: all scores are those of its normal noise."""
    model, guide, x, y = of_numbers()
    found = evaluate(model, guide, (x, y), level=0.8)
    error = 4 / 1000**0.5
    assert found.scores["RMSE"] == pytest.approx(0.5, abs=0.5 * error)
    assert found.scores["NLL"] == pytest.approx(math.log(0.5) + 0.5 * math.log(2 * math.pi * math.e), abs=error)
    assert found.scores["coverage of 80 %"] == pytest.approx(0.8, abs=0.4 * error)
    # 1,024 draws of each interval, of 1,000 whose errors are independent.
    assert found.scores["mean width"] == pytest.approx(float(dist.Normal(0.0, 1.0).icdf(torch.tensor(0.9))), rel=0.01)
    assert found.scores["CRPS"] == pytest.approx(0.5 / math.pi**0.5, rel=0.1)


def test_standard_errors_are_those_over_new_draws():
    model, guide, x, y = of_classes()
    each = [evaluate(model, guide, (x, y), num_samples=16, progress=False) for _ in range(20)]
    spread = torch.tensor([one.scores["NLL"] for one in each]).std()
    told = torch.tensor([one.errors["NLL"] for one in each]).mean()
    # A spread of 20 values is known to 16 %, and the mean of 20 jackknives of eight groups to 6 %.
    assert 0.5 < told / spread < 1.8


def test_named_outputs_have_the_scores_of_their_own_predictions_without_missing_targets():
    model, guide, x, y = of_names()
    torch.manual_seed(1)
    found = evaluate(model, guide, (x, y), ood=10 * x, progress=False)
    torch.manual_seed(1)
    prediction, other = predict(model, guide, x), predict(model, guide, 10 * x)
    heights, kinds = torch.arange(60) != 5, y["kind"] >= 0
    assert list(found) == ["height", "kind"]
    assert torch.equal(found["height"].targets, y["height"][heights])
    error = (prediction["height"].mean - y["height"])[heights].square().mean().sqrt()
    assert found["height"].scores["RMSE"] == pytest.approx(float(error))
    assert found["kind"].scores["accuracy"] == float(accuracy(prediction["kind"].mean[kinds], y["kind"][kinds]))
    entropies = prediction["kind"].entropy[kinds], other["kind"].entropy
    assert found["kind"].scores["AUROC, entropy"] == pytest.approx(auroc(*entropies))
    assert all(math.isfinite(value) for each in found.values() for value in each.errors.values())
    lines = str(found).splitlines()
    assert sum("±" in line for line in lines) == sum(len(each.scores) for each in found.values())
    assert [lines.index(name) for name in found] == [0, len(found["height"].scores) + 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y["kind"], r"^y must be a dict with targets for \['height', 'kind'\]"),
        (lambda y: y | {"kind": y["kind"][:, None].expand(60, 2)}, "^output 'kind': y must have shape"),
        (
            lambda y: y | {"kind": y["kind"] * 0 - 100},
            "^test must have targets of output 'kind', got only missing ones",
        ),
    ],
)
def test_targets_of_named_outputs_must_fit_them(change, message):
    model, guide, x, y = of_names()
    with pytest.raises(ValueError, match=message):
        evaluate(model, guide, (x, change(y)))


def test_a_plot_is_of_calibration_and_marks_the_level_asked_for():
    model, guide, *data = of_classes()
    assert evaluate(model, guide, data, num_samples=8).plot().get_xlabel() == "Confidence"
    model, guide, *data = of_numbers()
    ax = evaluate(model, guide, data, num_samples=8, level=0.8, progress=False).plot()
    assert ax.get_xlabel() == "Level of the quantile"
    assert "ends of 80 % intervals" in [text.get_text() for text in ax.get_legend().get_texts()]
