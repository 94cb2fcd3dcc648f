# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The outputs of a random last layer in closed form: exact bounds, quadrature, gradients, scales, and bad input."""

import copy
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import nn

from benchmarks.guides._examples.program import Program, compared
from pyro_radial import (
    AutoMeanField,
    BayesianModule,
    FitOptions,
    PriorChain,
    SupervisedModel,
    fit,
    predict,
)
from pyro_radial.functional import PosteriorProcess
from pyro_radial.infer import LastLayerELBO, RadialELBO, SampledNetwork
from pyro_radial.infer.autoguide import AutoCorrelated
from pyro_radial.infer.compiled.captured_loss import CapturedLoss
from pyro_radial.nn import likelihoods

ROWS, INPUTS, SCALE, NAN = 12, 3, 0.4, float("nan")
X = torch.linspace(-1, 1, ROWS * INPUTS, dtype=torch.float64).sin().reshape(ROWS, INPUTS)
X = X + 0.5 * torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LABELS = torch.arange(ROWS) % 3
TARGETS = {
    likelihoods.Gaussian: Y,
    likelihoods.Categorical: LABELS,
    likelihoods.Bernoulli: (Y > 0).double(),
    likelihoods.Poisson: Y.abs().round(),
}


def network(outputs=2, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def ready(likelihood, outputs=2, net=None, init_stddev=0.3, select=r"^2\."):
    net = network(outputs) if net is None else net
    model = SupervisedModel(BayesianModule(net, prior=dist.Normal(0.1, 0.8), select=select), likelihood)
    guide = AutoCorrelated(model, init_stddev=init_stddev)
    y = TARGETS.get(type(likelihood), Y)
    guide.setup(X, y if y.dim() == 1 else y[:, :outputs])
    return model, guide


def linear(outputs=2, **options):
    torch.manual_seed(0)
    likelihood = likelihoods.Gaussian(scale=SCALE, **options)
    return ready(likelihood, net=nn.Linear(INPUTS, outputs).double(), select=None)


def vector_of(guide):
    return torch.cat([guide.median()[name].flatten() for name in guide.correlated])


def design(features, outputs):
    """The matrix ``[N * O, P]`` from the vector of weights and biases to the outputs."""
    eye = torch.eye(outputs, dtype=torch.float64)
    weights = torch.einsum("ni,ok->noki", features, eye).reshape(len(features) * outputs, -1)
    return torch.cat([weights, eye.repeat(len(features), 1)], -1)


def dense_kl(guide):
    loc, covariance = vector_of(guide), guide.covariance()
    prior = dist.MultivariateNormal(torch.full_like(loc, 0.1), 0.64 * torch.eye(len(loc), dtype=torch.float64))
    return torch.distributions.kl_divergence(dist.MultivariateNormal(loc, covariance), prior)


def log_evidence():
    a = design(X, 2)
    loc = a @ torch.full((a.shape[1],), 0.1, dtype=torch.float64)
    covariance = 0.64 * a @ a.T + SCALE**2 * torch.eye(len(a), dtype=torch.float64)
    return dist.MultivariateNormal(loc, covariance).log_prob(Y.flatten())


def exact_posterior():
    a = design(X, 2)
    covariance = (a.T @ a / SCALE**2 + torch.eye(a.shape[1], dtype=torch.float64) / 0.64).inverse()
    return covariance @ (a.T @ Y.flatten() / SCALE**2 + 0.1 / 0.64), covariance


def output_moments(model, guide):
    """Means and covariances of the outputs ``[N, O]`` from dense matrices."""
    features = copy.deepcopy(model.bnn.to_module(guide.median()))[:-1](X).detach()
    a = design(features, 2 if guide.correlated[0] == "weight" else len(guide.median()["2.bias"]))
    mean, covariance = a @ vector_of(guide), a @ guide.covariance() @ a.T
    outputs = a.shape[0] // ROWS
    variance = covariance.diagonal().reshape(ROWS, outputs)
    return mean.reshape(ROWS, outputs), variance


def test_the_bound_of_a_regression_is_the_exact_one():
    model, guide = linear()
    elbo = LastLayerELBO()
    loss = elbo(model, guide)(X, Y)
    a = design(X, 2)
    residual = Y.flatten() - a @ vector_of(guide)
    spread = (a @ guide.covariance() @ a.T).trace()
    nll = 0.5 * (residual.square().sum() + spread) / SCALE**2 + ROWS * math.log(2 * math.pi * SCALE**2)
    torch.testing.assert_close(elbo.terms.negative_log_likelihood, nll)
    torch.testing.assert_close(elbo.terms.kl, dense_kl(guide))
    torch.testing.assert_close(loss.detach(), nll + dense_kl(guide))
    assert loss.item() > -float(log_evidence()) + 1.0
    entropy = dist.MultivariateNormal(vector_of(guide), guide.covariance()).entropy()
    torch.testing.assert_close(elbo.terms.entropy, entropy)


def test_it_is_the_expectation_of_the_loss_of_draws():
    model, guide = ready(likelihoods.Gaussian(scale=SCALE))
    pyro.set_rng_seed(0)
    with torch.no_grad():
        each = torch.tensor([RadialELBO().loss(model, guide, X, Y) for _ in range(2000)])
        loss = LastLayerELBO().loss(model, guide, X, Y)
    assert abs(float(each.mean()) - loss) < 4 * float(each.std()) / 2000**0.5


def test_at_its_optimum_it_is_the_log_evidence_and_the_posterior_is_the_exact_one():
    model, guide = linear()
    elbo = LastLayerELBO()
    optimizer = torch.optim.LBFGS(guide.parameters(), max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = elbo(model, guide)(X, Y)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    loss = closure()
    assert loss.item() == pytest.approx(-float(log_evidence()), abs=1e-6)
    mean, covariance = exact_posterior()
    torch.testing.assert_close(vector_of(guide), mean, atol=1e-4, rtol=0)
    torch.testing.assert_close(guide.covariance(), covariance, atol=1e-4, rtol=0)


def test_predictions_have_the_variances_that_the_loss_has():
    model, guide = ready(likelihoods.Gaussian(scale=SCALE))
    mean, variance = output_moments(model, guide)
    draws = predict(model, guide, X, 4000, method="linearized").samples
    assert float(((draws.mean(0) - mean) / variance.sqrt()).abs().max()) < 5 / 4000**0.5
    elbo = LastLayerELBO()
    elbo(model, guide)(X, Y)
    at_mean = -dist.Normal(mean, SCALE).log_prob(Y).sum()
    expected = at_mean + 0.5 * variance.sum() / SCALE**2
    torch.testing.assert_close(elbo.terms.negative_log_likelihood, expected)


def test_the_bound_of_classes_is_below_the_expectation_and_tight_for_small_variances():
    gaps = []
    for stddev in (0.6, 0.06, 0.006):
        model, guide = ready(likelihoods.Categorical(), 3, init_stddev=stddev)
        elbo = LastLayerELBO()
        elbo(model, guide)(X, LABELS)
        mean, variance = output_moments(model, guide)
        bound = mean.gather(1, LABELS[:, None]).squeeze(1) - (mean + 0.5 * variance).exp().sum(1).log()
        torch.testing.assert_close(elbo.terms.negative_log_likelihood, -bound.sum())
        torch.manual_seed(0)
        logits = predict(model, guide, X, 20_000, method="linearized").samples
        each = dist.Categorical(logits=logits).log_prob(LABELS).sum(1)
        error = float(each.std()) / 20_000**0.5
        gaps.append(float(each.mean() - bound.sum()))
        assert gaps[-1] > -4 * error
    assert gaps[0] > 0.05
    # The gap is of the order of the variance.
    assert abs(gaps[2]) < 0.01 * gaps[0]


@pytest.mark.parametrize(("kind", "is_exact"), [(likelihoods.Poisson, True), (likelihoods.Bernoulli, False)])
def test_other_likelihoods_agree_with_quadrature(kind, is_exact):
    model, guide = ready(kind())
    elbo = LastLayerELBO()
    elbo(model, guide)(X, TARGETS[kind])
    mean, variance = output_moments(model, guide)
    nodes, weights = (torch.tensor(part) for part in np.polynomial.hermite_e.hermegauss(60))
    f = mean + variance.sqrt() * nodes[:, None, None]
    densities = kind().observation(f).log_prob(TARGETS[kind])
    expected = -((weights / weights.sum())[:, None] * densities).sum()
    if is_exact:
        torch.testing.assert_close(elbo.terms.negative_log_likelihood, expected)
    else:
        assert (
            float(expected) < float(elbo.terms.negative_log_likelihood) < float(expected) + 0.5 * float(variance.sum())
        )


@pytest.mark.parametrize("kind", TARGETS)
def test_gradients_are_those_of_finite_differences(kind):
    outputs = 3 if kind is likelihoods.Categorical else 2
    model, guide = ready(kind(), outputs)
    elbo, y = LastLayerELBO(), TARGETS[kind]
    parameters = [*guide.parameters(), *model.bnn.parameters()]
    elbo(model, guide)(X, y).backward()
    assert len(parameters) >= 7
    for parameter in parameters:
        flat, step = parameter.data.view(-1), 1e-5
        for place in range(0, len(flat), 5):
            before, values = float(flat[place]), []
            for sign in (1, -1):
                flat[place] = before + sign * step
                values.append(elbo.loss(model, guide, X, y))
            flat[place] = before
            found = float(parameter.grad.view(-1)[place])
            assert found == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-6)


def test_mini_batches_average_to_the_whole_data():
    model, guide = ready(likelihoods.Gaussian(num_data=ROWS, scale=SCALE))
    elbo, found = LastLayerELBO(), []
    for rows in (slice(None), slice(0, 4), slice(4, 8), slice(8, 12)):
        elbo.loss(model, guide, X[rows], Y[rows])
        found.append(elbo.terms)
    torch.testing.assert_close(
        found[0].negative_log_likelihood, sum(part.negative_log_likelihood for part in found[1:]) / 3
    )
    assert all(torch.equal(part.kl, found[0].kl) for part in found)


def test_missing_targets_add_nothing():
    model, guide = ready(likelihoods.MaskedGaussian(scale=SCALE))
    y = Y.clone()
    y[3, 0] = y[5] = NAN
    elbo = LastLayerELBO()
    elbo(model, guide)(X, y).backward()
    mean, variance = output_moments(model, guide)
    each = -dist.Normal(mean, SCALE).log_prob(Y) + 0.5 * variance / SCALE**2
    torch.testing.assert_close(elbo.terms.negative_log_likelihood, each[~y.isnan()].sum())
    assert all(parameter.grad.isfinite().all() for parameter in guide.parameters())


class MaskTargets(Messenger):
    def _pyro_sample(self, msg):
        if msg["name"] == "y":
            msg["mask"] = torch.arange(ROWS) < 4


def test_a_handler_masks_rows():
    model, guide = ready(likelihoods.Gaussian(scale=SCALE))
    elbo = LastLayerELBO()
    elbo.loss(MaskTargets()(model), guide, X, Y)
    mean, variance = output_moments(model, guide)
    each = -dist.Normal(mean, SCALE).log_prob(Y) + 0.5 * variance / SCALE**2
    torch.testing.assert_close(elbo.terms.negative_log_likelihood, each[:4].sum())
    with pytest.raises(ValueError, match=r"prior must be normal at site '2.weight', without scale or mask, got N"):
        elbo.loss(poutine.scale(model, 2.0), guide, X, Y)


def test_random_layers_before_are_drawn_and_noise_is_as_it_was():
    """The last layer is integrated given the others, so the loss has the same expectation and a smaller variance."""
    noise = likelihoods.Gaussian(precision_prior=dist.Gamma(torch.tensor(6.0).double(), torch.tensor(6.0).double()))
    model, guide = ready(noise, select=None)
    pyro.set_rng_seed(0)
    with torch.no_grad():
        of_draws, closed = (
            torch.tensor([elbo.loss(model, guide, X, Y) for _ in range(1500)])
            for elbo in (RadialELBO(), LastLayerELBO())
        )
    error = (of_draws.var() + closed.var()).sqrt() / 1500**0.5
    assert abs(float(of_draws.mean() - closed.mean())) < 4 * float(error)
    assert float(closed.var()) < float(of_draws.var())


@pytest.mark.parametrize("kind", [likelihoods.Gaussian, likelihoods.Categorical])
def test_a_step_under_a_recorded_graph_is_the_step_as_it_is(kind):
    model, guide = ready(kind(), 3 if kind is likelihoods.Categorical else 2)
    elbo, y = LastLayerELBO(), TARGETS[kind]
    captured = CapturedLoss(model, guide, elbo, compile=False)
    for seed in (1, 2):
        _, error, _ = compared(Program(model, guide, elbo, (X, y)), captured, seed)
        assert error <= 1e-9
    assert not captured.eager_because
    assert len(captured.recordings) == 1


def test_training_continues_from_a_file_and_through_a_chain(tmp_path):
    losses = {}
    for name in ("whole", "parts"):
        model, guide = ready(likelihoods.Gaussian(scale=SCALE))
        chain = PriorChain(model)
        own = {"loss": LastLayerELBO(), "batch_size": 4, "seed": 0, "progress": False}
        for epochs in (4,) if name == "whole" else (2, 4):
            guide = chain.guide(AutoCorrelated)
            fit(chain, guide, (X, Y), epochs=epochs, checkpoint=tmp_path / name, **own)
        chain.advance(guide)
        saved = tmp_path / f"{name}.pt"
        torch.save({"chain": chain.state_dict(), "guide": guide.state_dict()}, saved)
        following = copy.deepcopy(guide)
        following.load_state_dict(torch.load(saved, weights_only=True)["guide"])
        elbo = LastLayerELBO()
        losses[name] = elbo.loss(chain, following, X, Y)
        # The chained prior has the marginals of the posterior: the KL is that of correlations alone.
        covariance = guide.covariance()
        expected = 0.5 * (covariance.diagonal().log().sum() - covariance.logdet())
        assert float(elbo.terms.kl) == pytest.approx(float(expected), rel=1e-6)
    assert losses["whole"] == losses["parts"]


def test_epochs_of_means_alone_have_no_variances():
    model, guide = ready(likelihoods.Gaussian(scale=SCALE))
    options = FitOptions(mean_only_epochs=1)
    result = fit(model, guide, (X, Y), epochs=1, options=options, loss=LastLayerELBO(), seed=0, progress=False)
    _, plain = ready(likelihoods.Gaussian(scale=SCALE))
    expected = fit(plain.model, plain, (X, Y), epochs=1, options=options, seed=0, progress=False)
    assert result.history[0]["nll"] == pytest.approx(expected.history[0]["nll"])


def test_botorch_models_have_its_posterior():
    models = pytest.importorskip("pyro_radial.decisions.botorch_models")
    model, guide = ready(likelihoods.Gaussian(scale=SCALE), 1)
    fit(model, guide, (X, Y[:, :1]), epochs=3, loss=LastLayerELBO(), seed=0, progress=False)
    features = model.bnn.to_module(guide.median())[:-1](X).detach()
    a = design(features, 1)
    mean, covariance = a @ vector_of(guide), a @ guide.covariance() @ a.T
    found = models.ProcessModel(PosteriorProcess(model, guide.posterior())).posterior(X)
    torch.testing.assert_close(found.mean.squeeze(-1), mean)
    torch.testing.assert_close(found.distribution.covariance_matrix, covariance, rtol=1e-5, atol=1e-7)
    pyro.set_rng_seed(0)
    draws = models.FunctionDraws(SampledNetwork(model, guide, 4000)).posterior(X).values.detach().squeeze(-1)
    stddev = covariance.diagonal().sqrt()
    assert float(((draws.mean(0) - mean) / stddev).abs().max()) < 5 / 4000**0.5
    assert float(((draws.T.cov() - covariance) / stddev[:, None] / stddev).abs().max()) < 5 * (2 / 4000) ** 0.5


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(INPUTS, INPUTS).double()

    def forward(self, x):
        return self.last(self.last(x).tanh())


class NotLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(INPUTS, 2).double()

    def forward(self, x):
        return 2.0 * self.last(x)


class Wider(likelihoods.Gaussian):
    def observation(self, f, **noise):
        return super().observation(f, scale=2.0 * noise["scale"])


def loss_of(likelihood=None, net=None, y=Y, prior=None, make=AutoCorrelated, **options):
    net = network() if net is None else net
    likelihood = likelihoods.Gaussian() if likelihood is None else likelihood
    bnn = BayesianModule(net, prior=dist.Normal(0.0, 1.0) if prior is None else prior)
    model = SupervisedModel(bnn, likelihood)
    return LastLayerELBO().loss(model, make(model, **options), X, y)


LAPLACE = {"2.weight": dist.Laplace(torch.zeros(2, 4).double(), 1.0).to_event(2)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"make": AutoMeanField}, "guide must be an AutoCorrelated for LastLayerELBO, got AutoMeanField"),
        ({"net": nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()}, "model must have a network that ends with"),
        ({"net": NotLast()}, "model must have a network that ends with"),
        ({"sites": "network"}, r"guide must correlate the last layer for LastLayerELBO, got sites \('0.weight'"),
        ({"sites": ["0.weight", "0.bias"]}, "guide must correlate the last layer for LastLayerELBO, got sites"),
        ({"net": Reused(), "y": X}, "model must call its last layer once for LastLayerELBO, got 2 calls"),
        ({"likelihood": likelihoods.HeteroscedasticGaussian(), "y": Y[:, :1]}, "model must have one likelihood of Ber"),
        ({"likelihood": Wider()}, "model must have one likelihood of .* for LastLayerELBO, got Wider"),
        (
            {"prior": lambda name, parameter: LAPLACE.get(name, dist.Normal(0.0, 1.0))},
            "prior must be normal at site '2.weight', without scale or mask, got Laplace",
        ),
        ({"y": torch.zeros(ROWS, 3)}, "y must have shape"),
    ],
)
def test_what_has_no_closed_form_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        loss_of(**arguments)


def test_vectorized_particles_are_refused():
    model, guide = ready(likelihoods.Gaussian(scale=SCALE))
    with pytest.raises(ValueError, match="vectorize_particles must be False"):
        LastLayerELBO(vectorize_particles=True, max_plate_nesting=1).loss(model, guide, X, Y)
