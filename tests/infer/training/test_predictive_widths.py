# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Widths that are found by the score of predictions on rows that the means do not see."""

from functools import partial
from queue import SimpleQueue

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    BayesianModule,
    CompiledSVI,
    SupervisedModel,
    TermsELBO,
    diagnose,
    fit,
)
from pyro_radial.infer import FitOptions
from pyro_radial.infer.autoguide import families
from pyro_radial.infer.training import predictive_widths
from pyro_radial.nn import likelihoods

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(400, 2, generator=GENERATOR)
LABELS = (X[:, 0] > torch.randn(400, generator=GENERATOR)).long()
GUIDES = {"normal": AutoMeanField, "radial": AutoRadial}
each_guide = pytest.mark.parametrize("make", GUIDES.values(), ids=GUIDES)


def classifier(make=AutoRadial, widths="predictive", **kwargs):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical())
    return model, make(model, widths=widths, **kwargs)


def train(model, guide, data=(X, LABELS), epochs=4, seed=1, **kwargs):
    return fit(model, guide, data, epochs=epochs, seed=seed, progress=False, **kwargs)


def stddevs(guide):
    return {name: float(q.variance.flatten()[0].sqrt()) for name, q in guide.posterior().items()}


def test_a_width_makes_up_for_what_the_noise_of_the_model_lacks():
    """Of a target with variance one, y ~ N(b, 1/4) with b ~ N(m, s^2) predicts best at s^2 = 3/4.

    With the mean over 8 draws in place of the expectation, the best s is 0.9 to within 0.05, by 400 times 8 draws.
    """
    y = 1.0 + torch.randn(4000, 1, generator=torch.Generator().manual_seed(1))
    net = nn.Linear(1, 1)
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(scale=0.5))
    guide = AutoMeanField(model, widths="predictive")
    train(model, guide, (torch.zeros(4000, 1), y), epochs=60)
    assert stddevs(guide)["bias"] == pytest.approx(0.9, rel=0.12)


@each_guide
def test_the_result_does_not_depend_on_where_the_guide_starts_its_scales(make):
    found = []
    for start in (1e-3, 0.1):
        model, guide = classifier(make, init_stddev=start)
        train(model, guide)
        found.append(guide.state_dict())
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_means_and_widths_see_different_rows():
    seen = {"means": set(), "widths": set()}
    numbers = set()

    class Recording(nn.Linear):
        def forward(self, x):
            grads = torch.is_grad_enabled()
            if grads:
                seen["widths" if len(x) == 40 else "means"].update(x[:, 0].tolist())
            return super().forward(x)

    model = SupervisedModel(BayesianModule(Recording(1, 2)), likelihoods.Categorical())
    guide = AutoMeanField(model, widths="predictive")
    rows = torch.arange(400.0)[:, None]
    train(
        model,
        guide,
        (rows / 400, LABELS),
        batch_size=60,
        callback=lambda record: numbers.add(model.likelihood.num_data),
    )
    assert len(seen["means"]) == 360
    assert len(seen["widths"]) <= 40
    assert not seen["means"] & seen["widths"]
    assert numbers == {360}


@pytest.mark.parametrize("kind", ["rows set aside", "validation", "dataset"])
def test_a_resumed_run_ends_where_an_undisturbed_one_does(tmp_path, kind):
    data, kwargs = (X, LABELS), {}
    if kind == "validation":
        data, kwargs = (X[:300], LABELS[:300]), {"validation": (X[300:], LABELS[300:])}
    if kind == "dataset":
        data = TensorDataset(X, LABELS)
    saving = {"checkpoint": tmp_path / "run", "options": FitOptions(checkpoint_every=1)}
    whole = classifier()
    train(*whole, data, **kwargs)

    def kill(record):
        if record["epoch"] == 1:
            raise KeyboardInterrupt

    parts = classifier()
    with pytest.raises(KeyboardInterrupt):
        train(*parts, data, callback=kill, **saving, **kwargs)
    parts = classifier()
    train(*parts, data, callback=lambda record: False, **saving, **kwargs)
    for name, value in whole[1].state_dict().items():
        assert torch.equal(value, parts[1].state_dict()[name]), name


def test_replayed_steps_see_the_present_widths(recorded_only):
    found = []
    for compile_steps in (False, True):
        model, guide = classifier()
        train(model, guide, epochs=8, batch_size=90, options=FitOptions(compile=compile_steps))
        found.append(guide.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-3, atol=1e-4, msg=name)


def test_compiled_training_replays_the_score(recorded_only, monkeypatch):
    # A graph would notice that a list has grown, but not what a queue holds.
    runs = SimpleQueue()

    def counted(*args):
        runs.put(None)
        return traces_of(*args)

    traces_of = predictive_widths.traces_of
    monkeypatch.setattr(predictive_widths, "traces_of", counted)
    numbers, widths = [], []
    for compile_steps in (False, True):
        before = runs.qsize()
        model, guide = classifier()
        train(model, guide, epochs=40, batch_size=90, options=FitOptions(compile=compile_steps))
        numbers.append(runs.qsize() - before)
        widths.append(stddevs(guide))
    assert numbers[0] == predictive_widths.NUM_DRAWS * (40 * 4 // predictive_widths.LEAST_INTERVAL - 1)
    assert numbers[1] < numbers[0] / 3
    assert widths[1] == pytest.approx(widths[0], rel=1e-3)


def test_a_site_that_the_targets_do_not_see_keeps_its_share():
    class Model(SupervisedModel):
        def forward(self, x, y=None):
            pyro.sample("unseen", dist.Normal(torch.zeros(3), 1.0).to_event(1))
            return super().forward(x, y)

    torch.manual_seed(0)
    model = Model(BayesianModule(nn.Linear(2, 2)), likelihoods.Categorical())
    guide = AutoMeanField(model, widths="predictive")
    train(model, guide, batch_size=30)
    size = guide.posterior()["unseen"].mean.square().mean().sqrt()
    expected = predictive_widths.FIRST_SHARE * max(float(size), predictive_widths.LEAST_SIZE)
    assert stddevs(guide)["unseen"] == pytest.approx(expected, rel=0.05)


def test_other_loops_leave_the_widths_alone():
    model, guide = classifier(init_stddev=0.05)
    svi = CompiledSVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TermsELBO(), compile=False)
    for _ in range(3):
        svi.step(X, LABELS)
    assert all(value == pytest.approx(0.05) for value in stddevs(guide).values())
    assert max(guide.scale_change().values()) < 1e-6


def test_a_user_may_bring_an_optimizer():
    model, guide = classifier()
    before = stddevs(guide) if guide.setup(X, LABELS) else None
    train(model, guide, optim=partial(torch.optim.Adam, lr=0.01))
    assert stddevs(guide) != before


def embedding():
    model = SupervisedModel(BayesianModule(nn.Linear(2, 50)), likelihoods.Categorical())
    return model, AutoMeanField(model, widths="predictive")


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="widths must be"):
        classifier(widths="narrow")
    with pytest.raises(ValueError, match=r"data must have at least 200 rows .* use widths='elbo'"):
        train(*classifier(), (X[:150], LABELS[:150]))
    with pytest.raises(ValueError, match="validation must hold other rows than data"):
        train(*classifier(), validation=(X.clone(), LABELS))
    with pytest.raises(ValueError, match="as many rows for the widths as there are classes, 50, got 40"):
        train(*embedding())
    model, guide = classifier(families={"2.bias": families.MultivariateNormal()})
    with pytest.raises(ValueError, match=r"site '2\.bias' must have a family with one scale"):
        train(model, guide)


def test_there_may_be_more_rows_for_the_widths_than_for_the_means():
    result = train(*classifier(), data=(X[:50], LABELS[:50]), validation=(X[50:], LABELS[50:]))
    assert len(result.history) == 4


def test_a_score_that_is_not_finite_stops_with_the_site():
    class Narrow(likelihoods.Gaussian):
        def observation(self, f, **kwargs):
            # Targets of held-out rows have a density of zero.
            scale = torch.where(f.detach().abs() > 1e6, torch.nan, 1.0)
            return dist.Normal(f, scale, validate_args=False).to_event(1)

    model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), Narrow(scale=1.0))
    guide = AutoMeanField(model, widths="predictive")
    held_out = (1e12 * X[:100], X[:100, :1])
    with pytest.raises(
        FloatingPointError, match="score of predictions on held-out rows, for the scale of site 'weight'"
    ):
        train(model, guide, (X[100:], X[100:, :1]), validation=held_out, batch_size=30)


def test_targets_of_the_rows_set_aside_are_checked_too():
    for row in range(20):
        labels = LABELS.clone()
        labels[row] = 5
        with pytest.raises(ValueError, match=r"^data: "):
            train(*classifier(), data=(X, labels))


def test_all_rows_count_again_after_the_training():
    model, guide = classifier()
    train(model, guide)
    assert model.likelihood.num_data == len(X)
    assert diagnose(model, guide, (X, LABELS)).num_rows == len(X)
    # More rows than it was given are an error, as before.
    with pytest.raises(ValueError, match=f"num_data must be at least {len(X) + 1}"):
        diagnose(model, guide, (torch.cat([X, X[:1]]), torch.cat([LABELS, LABELS[:1]])))
