# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How far means and widths are from rest, against losses whose rest is known."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, NaturalGradient, SupervisedModel, fit
from pyro_radial.infer.diagnose.arrival import find_arrivals
from pyro_radial.infer.training.options import FitOptions
from pyro_radial.nn import likelihoods

WEIGHTS = 400


def model():
    """Weights with a loss that the tests make up."""
    w = pyro.sample("w", dist.Normal(torch.zeros(WEIGHTS), 1.0).to_event(1))
    with pyro.plate("data", 1):
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=torch.zeros(1))


# Settings of an optimizer, first widths, the weight of the KL, rows of batches, steps taken and planned.
RUNS = {
    "early": ({}, 0.1, 1.0, [40], 60, 600),
    "at its end": ({}, 0.1, 1.0, [40], 300, 300),
    "batches": ({}, 0.1, 1.0, [5] * 8, 480, 480),
    "a small last batch": ({}, 0.1, 1.0, [13, 13, 13, 1], 400, 400),
    "a small rate": ({"lr": 0.03}, 0.1, 1.0, [40], 200, 200),
    "narrow": ({}, 0.005, 1.0, [40], 150, 300),
    "tempered": ({}, 0.1, 0.1, [40], 300, 300),
}
# Means and widths of these have come as far as noise lets them.
AT_REST = ("at its end", "batches", "a small last batch", "tempered")


@pytest.mark.parametrize("name", RUNS)
def test_the_estimates_are_the_distances_from_rest(name):
    """The loss is quadratic in each weight; rows of batches come once in each epoch."""
    settings, start, kl_weight, rows, steps, planned = RUNS[name]
    torch.manual_seed(0)
    curvature, rest = 10 ** (2 * torch.rand(WEIGHTS)), torch.randn(WEIGHTS)
    guide = AutoMeanField(model, init_stddev=start)
    optim = NaturalGradient(**settings)
    optimizer = optim.optimizer(model, guide)
    scheduler = optim.scheduler(optimizer, planned)
    (site,) = optimizer.sites
    for step in range(steps):
        if step % len(rows) == 0:
            noise = curvature.sqrt() * torch.randn(40, WEIGHTS)
            means = [4.0 * batch.mean(0) for batch in (noise - noise.mean(0)).split(rows)]
        scale, draw = site.to_scale(site.scale.detach()), torch.randn(WEIGHTS)
        site.loc.grad = curvature * (site.loc.detach() + scale * draw - rest) + means[step % len(rows)]
        by_scale = site.loc.grad * draw - kl_weight / scale
        site.scale.grad = by_scale * torch.sigmoid(site.scale.detach())
        optimizer.step()
        scheduler.step()
    arrival = find_arrivals(optimizer.progress(), rows, kl_weight)["w"]
    stddev = (kl_weight / curvature).sqrt()
    means_off = float(((site.loc.detach() - rest) / stddev).square().mean().sqrt())
    widths_off = float((site.to_scale(site.scale.detach()) / stddev).log().square().mean().sqrt())
    # Distances still to go are rough estimates.
    rel = 0.2 if name in AT_REST else 0.6
    assert arrival.mean_error == pytest.approx(means_off, rel=rel)
    assert arrival.width_error == pytest.approx(widths_off, rel=rel)
    is_off = means_off > 0.2 or widths_off > 0.1
    assert bool(arrival.words()) == is_off == (name not in ("at its end", "batches"))
    narrow = (site.to_scale(site.scale.detach()) / stddev).log() < -0.09
    if name in ("early", "narrow"):
        assert arrival.share_too_narrow == pytest.approx(float(narrow.double().mean()), abs=0.3)


def regression(rows=100):
    """A linear regression, its guide, its rows and others."""
    torch.manual_seed(0)
    x = torch.randn(2 * rows, 5)
    y = x @ torch.randn(5, 4) + 0.5 * torch.randn(2 * rows, 4)
    network = BayesianModule(nn.Linear(5, 4, bias=False), dist.Normal(0.0, 1.0))
    model = SupervisedModel(network, likelihoods.Gaussian(scale=0.5))
    return model, AutoRadial(model), (x[:rows], y[:rows]), (x[rows:], y[rows:])


@pytest.mark.parametrize(
    ("optim", "settings", "words"),
    [
        ({}, {"epochs": 20}, "after epoch 19 of 20.* 'weight' .means by about .*; give more epochs"),
        ({"lr": 0.03}, {"epochs": 60}, "give more epochs or a larger batch_size, or leave lr out"),
        ({}, {"callback": lambda record: record["epoch"] == 25}, "after epoch 25 of 300.*; return the last epoch"),
        ({}, {"patience": 1, "epochs": 150}, "of 150.*; return the last epoch, without validation"),
    ],
)
def test_fit_warns_of_what_it_returns(optim, settings, words):
    model, guide, data, validation = regression()
    settings = {"epochs": 300, **settings}
    if "patience" in settings:
        settings |= {"validation": validation, "options": FitOptions(patience=settings.pop("patience"))}
    with pytest.warns(UserWarning, match=words):
        result = fit(model, guide, data, optim=NaturalGradient(**optim), batch_size=100, progress=False, **settings)
    assert result.arrivals["weight"].words()


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.filterwarnings("ignore:.*has not arrived:UserWarning")
def test_a_checkpoint_keeps_how_far_a_run_has_come(validated, tmp_path):
    ends = []
    for _ in range(2):
        model, guide, data, validation = regression()
        settings = {"validation": validation} if validated else {}
        settings |= {"epochs": 12, "seed": 0, "checkpoint": tmp_path / "run", "progress": False}
        arrivals = fit(model, guide, data, optim=NaturalGradient(), **settings).arrivals
        ends.append(torch.cat([values.reshape(-1) for values in arrivals["weight"]]))
    assert torch.equal(*ends)
