# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A diagnosis under a functional prior says what is off beside the exact posterior, and nothing else is."""

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.contrib.gp.kernels import Linear
from torch import nn

from pyro_radial import AutoMeanField, BayesianModule, FunctionalELBO, SupervisedModel, diagnose
from pyro_radial.functional import GaussianKL, GaussianProcess, ImplicitProcess, UniformBox, process_comparison
from pyro_radial.nn import likelihoods

ROWS, WIDTH, NOISE = 30, 3, 0.3
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(ROWS, WIDTH, generator=GENERATOR)
Y = X @ torch.tensor([[1.0], [-0.5], [0.2]]) + NOISE * torch.randn(ROWS, 1, generator=GENERATOR)
NEW = torch.randn(50, WIDTH, generator=GENERATOR)
# Of 256 draws, four standard errors of a point's standard deviation: those of the means are smaller.
TOLERANCE = 4 / (2 * 256) ** 0.5


class Exact(nn.Module):
    """The conjugate posterior of a linear network, with its mean moved and its width stretched."""

    def __init__(self, moved: float, stretched: float) -> None:
        super().__init__()
        precision = torch.eye(WIDTH) + X.T @ X / NOISE**2
        self.covariance = stretched**2 * precision.inverse()
        self.loc = precision.inverse() @ X.T @ Y.squeeze() / NOISE**2 + moved

    def forward(self, *args: torch.Tensor) -> None:
        normal = dist.MultivariateNormal(self.loc, self.covariance)
        pyro.sample(
            "weight", dist.TransformedDistribution(normal, dist.transforms.ReshapeTransform((WIDTH,), (1, WIDTH)))
        )


def problem(moved=0.0, stretched=1.0, noise=NOISE):
    net = nn.Linear(WIDTH, 1, bias=False)
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=ROWS, scale=noise))
    prior = GaussianProcess(Linear(WIDTH))
    prior.observation_noise.fill_(NOISE)
    box = UniformBox.around(X, 10)
    return model, Exact(moved, stretched), FunctionalELBO(prior, box, divergence=GaussianKL(), num_functions=60)


def compared(**problem_of):
    model, guide, loss = problem(**problem_of)
    return diagnose(model, guide, (X, Y), loss=loss, new_inputs=NEW)


def test_the_exact_posterior_is_where_it_should_be_and_nothing_stands_out():
    diagnosis = compared()
    comparison = diagnosis.comparison
    assert [place.place for place in comparison.places] == ["training inputs", "new inputs", "measurement points"]
    assert [len(place.mean) for place in comparison.places] == [ROWS, len(NEW), 10]
    for place in comparison.places:
        assert place.distance < TOLERANCE
        assert place.width == pytest.approx(1.0, abs=TOLERANCE)
    assert comparison.noise == pytest.approx(NOISE)
    assert diagnosis.findings == []
    assert "compared with the exact posterior: noise 0.3, 1.00 times that of the process" in str(diagnosis)


@pytest.mark.parametrize(
    ("off", "word"),
    [
        ({"moved": 0.2}, "mean"),
        ({"stretched": 0.5}, "narrow"),
        ({"stretched": 2.0}, "wide"),
        ({"noise": 0.5}, "noise"),
        ({"noise": 0.1}, "noise"),
    ],
)
def test_what_is_off_is_named_and_nothing_else(off, word):
    findings = compared(**off).findings
    assert len(findings) == 1
    assert word in findings[0].lower().split(".")[0].split(":")[0]


@pytest.mark.parametrize("compare_at", ["both", "measurement_points"])
def test_points_elsewhere_are_advised_only_if_the_width_is_right_at_the_points_of_the_loss(compare_at):
    model, guide, loss = problem(stretched=0.5)
    loss.compare_at = compare_at
    (finding,) = diagnose(model, guide, (X, Y), loss=loss, new_inputs=NEW).findings
    assert finding.endswith("Train longer, or take function_space_laplace for the widths.")
    comparison = compared().comparison
    assert [place.measured for place in comparison.places] == [True, False, True]
    inputs, new, points = comparison.places
    narrow = replace(new, stddev=new.stddev / 2)
    (finding,) = replace(comparison, places=(inputs, narrow, points)).findings
    assert finding.endswith("at the new inputs. Put measurement points where predictions are made.")


def test_a_prior_without_an_exact_posterior_is_refused():
    model, guide, loss = problem()
    implicit = ImplicitProcess(lambda x, n: torch.randn(n, len(x), 1))
    with pytest.raises(ValueError, match=r"loss must have a prior with an exact posterior.*ImplicitProcess"):
        diagnose(model, guide, (X, Y), loss=FunctionalELBO(implicit, loss.measurement_points, num_functions=60))


def test_a_process_that_knows_no_noise_is_refused():
    model, guide, loss = problem()
    loss.prior.observation_noise.zero_()
    with pytest.raises(ValueError, match=r"loss must have a prior that knows the noise.*prior\.fit"):
        diagnose(model, guide, (X, Y), loss=loss)


def test_more_rows_than_a_covariance_can_hold_are_refused(monkeypatch):
    monkeypatch.setattr(process_comparison, "MOST_ROWS", ROWS - 1)
    model, guide, loss = problem()
    with pytest.raises(ValueError, match=r"data must have at most 29 rows.*got 30; train and compare on fewer rows"):
        diagnose(model, guide, (X, Y), loss=loss)


def test_labels_have_no_process_to_compare_with():
    model = SupervisedModel(BayesianModule(nn.Linear(WIDTH, 2)), likelihoods.Categorical(num_data=ROWS))
    loss = problem()[2]
    with pytest.raises(ValueError, match="model must have a normal likelihood"):
        diagnose(model, AutoMeanField(model), (X, (Y[:, 0] > 0).long()), loss=loss, batch_size=10)


def test_new_inputs_need_a_loss():
    model, guide, _ = problem()
    with pytest.raises(ValueError, match="loss must be given"):
        diagnose(model, guide, (X, Y), new_inputs=NEW)
