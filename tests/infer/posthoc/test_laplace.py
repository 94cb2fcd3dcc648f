# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The last layer's posterior: exact where it can be, else the Hessian that finite differences find."""

import math
from types import SimpleNamespace

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_radial import AutoMeanField, BayesianModule, SupervisedModel, fit, predict
from pyro_radial.infer import last_layer_laplace
from pyro_radial.infer.autoguide.families import Delta
from pyro_radial.infer.posthoc.laplace import output_hessian
from pyro_radial.nn import likelihoods


def labels(x):
    return (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def overfitted(steps=200):
    """``(network, model, training rows, validation rows)``: a network of three classes that is too sure of itself."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    x, x_validation = torch.randn(60, 5), torch.randn(200, 5)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), labels(x)).backward()
        optimizer.step()
    model = SupervisedModel(BayesianModule(network), likelihoods.Categorical())
    return network, model, (x, labels(x)), (x_validation, labels(x_validation))


def guide_of(make, network, model, data):
    """A guide with the network's values as its means."""
    guide = make(model)
    guide.setup(*data)
    guide.load_means(network.state_dict())
    return guide


PRECISION = 0.7
NOISE = 0.4


def regression(num_rows=30, outputs=2, bias=True, off=0.0):
    """Linear regression at its maximum a posteriori, and its design matrix with the exact posterior precision."""
    torch.manual_seed(0)
    x = torch.randn(num_rows, 3, dtype=torch.float64)
    y = x @ torch.randn(3, outputs, dtype=torch.float64) + NOISE * torch.randn(num_rows, outputs, dtype=torch.float64)
    design = torch.cat([x, torch.ones_like(x[:, :1])], 1) if bias else x
    precision = design.mT @ design / NOISE**2 + PRECISION * torch.eye(design.shape[1])
    best = torch.linalg.solve(precision, design.mT @ y / NOISE**2).mT
    network = nn.Linear(3, outputs, bias=bias).double()
    with torch.no_grad():
        network.weight.copy_(best[:, :3] + off)
        if bias:
            network.bias.copy_(best[:, 3] + off)
    model = SupervisedModel(BayesianModule(network), likelihoods.Gaussian(scale=NOISE))
    return model, network, (x, y), design, precision


@pytest.mark.parametrize(
    ("structure", "bias", "off"), [("full", True, 0.3), ("kronecker", True, 0.0), ("kronecker", False, 0.3)]
)
def test_linear_regression_has_its_exact_posterior(structure, bias, off):
    """Also if the trained weights are not the most probable ones."""
    model, network, data, _, precision = regression(bias=bias, off=off)
    guide = last_layer_laplace(model, network, data, prior_precision=PRECISION, structure=structure, chunk_size=7)
    exact = torch.block_diag(*2 * [precision]).inverse()
    torch.testing.assert_close(guide.covariance(), exact, rtol=1e-6, atol=1e-9)
    weights = network.weight if not bias else torch.cat([network.weight, network.bias[:, None]], 1)
    torch.testing.assert_close(guide.mean, weights.detach().flatten() - off)


def test_each_output_of_linear_regression_has_the_exact_posterior_of_its_noise():
    """The evidence is exact too, and the predictive variance is that of the weights and the output's noise."""
    scales = torch.tensor([0.2, 1.5], dtype=torch.float64)
    _, network, (x, y), design, _ = regression(off=0.3)
    model = SupervisedModel(BayesianModule(network), likelihoods.Gaussian(scale=scales))
    guide = last_layer_laplace(model, network, (x, y), prior_precision=PRECISION, chunk_size=7)
    eye = torch.eye(4, dtype=torch.float64)
    covariances = [(design.mT @ design / scale**2 + PRECISION * eye).inverse() for scale in scales]
    torch.testing.assert_close(guide.covariance(), torch.block_diag(*covariances), rtol=1e-6, atol=1e-9)
    means = [covariances[k] @ design.mT @ y[:, k] / scales[k] ** 2 for k in range(2)]
    torch.testing.assert_close(guide.mean, torch.cat(means))
    evidence = 0.0
    for k in range(2):
        marginal = design @ design.mT / PRECISION + scales[k] ** 2 * torch.eye(len(x))
        zeros = torch.zeros(len(x), dtype=torch.float64)
        evidence += float(dist.MultivariateNormal(zeros, marginal).log_prob(y[:, k]))
    assert guide.log_evidence == pytest.approx(evidence, rel=1e-7)
    prediction = predict(model, guide, x, 4000, method="linearized")
    of_weights = torch.stack([(design @ covariance * design).sum(1) for covariance in covariances], 1)
    exact = of_weights + scales.square()
    torch.testing.assert_close(prediction.aleatoric_variance, scales.square().expand(len(x), 2))
    torch.testing.assert_close(prediction.variance, exact, rtol=5 * (2 / 4000) ** 0.5, atol=0.0)


def test_a_noise_of_each_output_that_was_not_learned_is_refused():
    network, x = nn.Linear(2, 2), torch.randn(20, 2)
    likelihood = likelihoods.Gaussian(scale=torch.tensor([0.5, 0.25]), learn_scale=True)
    model = SupervisedModel(BayesianModule(network), likelihood)
    with pytest.raises(ValueError, match=r"learn_scale=True at its first value tensor\(\[0.5000, 0.2500\]\)"):
        last_layer_laplace(model, network, (x, x), prior_precision=1.0)
    likelihood.scale = torch.tensor([0.5, 0.2])
    last_layer_laplace(model, network, (x, x), prior_precision=1.0)


@pytest.mark.parametrize("structure", ["full", "kronecker"])
@pytest.mark.parametrize("bias", [True, False])
def test_one_pass_has_the_moments_of_the_draws(structure, bias):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=bias)).double()
    model = SupervisedModel(BayesianModule(network), likelihoods.Categorical())
    x, y = torch.randn(40, 4, dtype=torch.float64), torch.randint(3, (40,))
    guide = last_layer_laplace(model, network, (x, y), prior_precision=PRECISION, structure=structure)
    f, covariance = guide.joint_marginals(model)(x)
    torch.testing.assert_close(f, network(x).detach())
    # The Jacobian of the outputs in the layer's weights, row by row.
    features = network[:2](x).detach()
    features = torch.cat([features, torch.ones_like(features[:, :1])], 1) if bias else features
    jacobian = torch.stack([torch.kron(torch.eye(3, dtype=torch.float64), row[None]) for row in features])
    torch.testing.assert_close(covariance, jacobian @ guide.covariance() @ jacobian.mT)
    draws = predict(model, guide, x, 2000, chunk_size=16, method="linearized").samples
    error = (draws.var(0) / covariance.diagonal(dim1=1, dim2=2) - 1.0).abs()
    assert float(error.max()) < 5 * (2 / 2000) ** 0.5


def test_the_probit_is_the_scaled_mean_and_near_the_integral():
    torch.manual_seed(2)
    network = nn.Linear(4, 1).double()
    model = SupervisedModel(BayesianModule(network), likelihoods.Bernoulli())
    x = torch.randn(60, 4, dtype=torch.float64)
    y = (x[:, :1] > 0).double()
    guide = last_layer_laplace(model, network, (x, y), prior_precision=PRECISION)
    f, covariance = guide.joint_marginals(model)(x)
    probit = predict(model, guide, x, method="probit")
    torch.testing.assert_close(probit.samples, (f / (1 + math.pi / 8 * covariance[:, 0]).sqrt())[None])
    # The integral of the sigmoid by Gauss-Hermite quadrature; MacKay's formula errs by up to 0.02.
    nodes, weights = (torch.tensor(values) for values in np.polynomial.hermite_e.hermegauss(64))
    values = (f + covariance[:, 0].sqrt() * nodes).sigmoid()
    exact = (values * weights / weights.sum()).sum(1, keepdim=True)
    torch.testing.assert_close(probit.mean, exact, rtol=0.0, atol=0.02)


@pytest.mark.parametrize("off", [0.0, 0.3])
def test_the_evidence_of_linear_regression_is_exact_and_its_maximum_found(off):
    model, network, (x, y), design, _ = regression(off=off)

    def exact(precision):
        covariance = design @ design.mT / precision + NOISE**2 * torch.eye(len(x))
        return dist.MultivariateNormal(torch.zeros(len(x), dtype=torch.float64), covariance).log_prob(y.mT).sum()

    guide = last_layer_laplace(model, network, (x, y), prior_precision=PRECISION)
    assert guide.log_evidence == pytest.approx(float(exact(PRECISION)), rel=1e-7)
    best = last_layer_laplace(model, network, (x, y))
    assert best.log_evidence == pytest.approx(float(exact(best.prior_precision)), rel=1e-7)
    assert exact(best.prior_precision) > max(exact(best.prior_precision * factor) for factor in (0.9, 1.1))


def test_a_precision_that_costs_the_rows_much_is_warned_of():
    network, model, (x, y), _ = overfitted(steps=300)
    with pytest.warns(UserWarning, match=r"rows given by 0\.\d\d nats.*Choose prior_precision on validation rows"):
        by_evidence = last_layer_laplace(model, network, (x, y), chunk_size=25)
    known = torch.nn.functional.cross_entropy(network(x), y)
    assert -predict(model, by_evidence, x, method="probit").log_prob(y).mean() > known + 0.1
    last_layer_laplace(model, network, (x, y), prior_precision=by_evidence.prior_precision)  # without a warning


@pytest.mark.parametrize("change", ["running_mean", "weight"])
def test_a_network_other_than_the_models_copy_is_refused_by_name(change):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    network[0].bias.requires_grad_(False)
    model = SupervisedModel(BayesianModule(network), likelihoods.Categorical())
    data = (torch.randn(20, 3), torch.arange(20) % 2)
    last_layer_laplace(model, network, data, prior_precision=1.0)
    with torch.no_grad():
        getattr(network[1], change).add_(1.0), network[0].bias.add_(1.0)
    with pytest.raises(ValueError, match=rf"trained must have .* values of \['0.bias', '1.{change}'\]"):
        last_layer_laplace(model, network, data, prior_precision=1.0)
    with pytest.raises(ValueError, match=r"no.* values of \['4.scale'\]|other values of \[.*'4.scale'"):
        last_layer_laplace(model, network.append(Scaled()), data, prior_precision=1.0)


def test_a_learned_noise_that_was_not_learned_is_refused():
    network, x = nn.Linear(2, 1), torch.randn(20, 2)
    model = SupervisedModel(BayesianModule(network), likelihoods.Gaussian(scale=0.3, learn_scale=True))
    with pytest.raises(ValueError, match=r"must have a trained scale, got learn_scale=True at its first value 0\.3"):
        last_layer_laplace(model, network, (x, x[:, :1]), prior_precision=1.0)
    model.likelihood.scale = torch.tensor(0.2)
    guide = last_layer_laplace(model, network, (x, x[:, :1]), prior_precision=1.0)
    design = torch.cat([x, torch.ones(20, 1)], 1)
    exact = (design.mT @ design / 0.2**2 + torch.eye(3)).inverse()
    torch.testing.assert_close(guide.covariance(), exact, rtol=1e-4, atol=1e-6)


class Scaled(nn.Module):
    """Multiplies its input in place."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x.mul_(self.scale)


def test_a_layer_whose_output_is_changed_in_place_is_not_the_last():
    network = nn.Sequential(nn.Linear(2, 2), Scaled())
    model = SupervisedModel(BayesianModule(network), likelihoods.Categorical())
    with pytest.raises(ValueError, match="must have a network that ends with a linear layer"):
        last_layer_laplace(model, network, (torch.randn(4, 2), torch.tensor([0, 1, 0, 1])))


def problem(likelihood, outputs=3):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    x = torch.randn(12, 2, dtype=torch.float64)
    model = SupervisedModel(BayesianModule(network), likelihood)
    with torch.no_grad():
        y = likelihood.observation(network(x), **({"scale": torch.tensor(0.3)} if likelihood.noise_sites else {}))
    return network, model, (x, y.sample())


LIKELIHOODS = {
    "categorical": lambda **options: likelihoods.Categorical(**options),
    "bernoulli": lambda **options: likelihoods.Bernoulli(**options),
    "poisson": lambda **options: likelihoods.Poisson(**options),
    "gaussian": lambda **options: likelihoods.Gaussian(scale=0.3, **options),
}


@pytest.mark.parametrize(
    ("name", "num_data"), [("categorical", None), ("bernoulli", 60), ("poisson", 60), ("gaussian", 60)]
)
def test_the_precision_is_the_hessian_of_finite_differences(name, num_data):
    network, model, (x, y) = problem(LIKELIHOODS[name](num_data=num_data))
    noise = {"scale": torch.tensor(0.3)} if model.likelihood.noise_sites else {}
    features = network[:2](x).detach()

    def loss(flat):
        matrix = flat.reshape(3, 5)
        f = features @ matrix[:, :4].mT + matrix[:, 4]
        return -model.likelihood.observation(f, **noise).log_prob(y).sum() * (num_data or 12) / 12

    flat = torch.cat([network[2].weight, network[2].bias[:, None]], 1).detach().flatten()
    step = 1e-5
    rows = []
    for direction in torch.eye(15, dtype=torch.float64):
        ahead, behind = ((flat + s * step * direction).requires_grad_() for s in (1, -1))
        high, low = (torch.autograd.grad(loss(point), point)[0] for point in (ahead, behind))
        rows.append((high - low) / (2 * step))
    guide = last_layer_laplace(model, network, (x, y), prior_precision=1.0)
    found = guide.covariance().inverse() - torch.eye(15)
    torch.testing.assert_close(found, torch.stack(rows), rtol=1e-5, atol=1e-6)


def test_the_kronecker_factors_are_the_mean_curvature_and_the_summed_features():
    network, model, (x, y) = problem(likelihoods.Categorical())
    features = torch.cat([network[:2](x), torch.ones_like(x[:, :1])], 1).detach()
    hessians = output_hessian(model.likelihood, network(x).detach(), {})
    exact = torch.kron(hessians.mean(0), features.mT @ features) + 2.0 * torch.eye(15)
    guide = last_layer_laplace(model, network, (x, y), prior_precision=2.0, structure="kronecker")
    torch.testing.assert_close(guide.covariance().inverse(), exact, rtol=1e-8, atol=1e-10)


def test_all_but_the_last_layer_are_points_at_the_medians_of_a_guide():
    network, model, data, _ = overfitted(steps=5)
    guide = guide_of(lambda model: AutoMeanField(model, families={".": Delta()}), network, model, data)
    fit(model, guide, data, epochs=2, seed=0, progress=False)
    laplace = last_layer_laplace(model, guide, data, prior_precision=1.0)
    first, second = laplace(), laplace()
    for name, value in guide.median().items():
        assert torch.equal(laplace.median()[name], value)
        assert torch.equal(first[name], value) == torch.equal(first[name], second[name]) == (name[0] == "0")


def test_random_noise_stays_at_its_median():
    torch.manual_seed(0)
    likelihood = likelihoods.Gaussian(precision_prior=dist.Gamma(6.0, 6.0))
    model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihood)
    guide = AutoMeanField(model)
    x = torch.randn(20, 2)
    guide.setup(x, x[:, :1])
    precision = float(guide.median()["precision"])
    laplace = last_layer_laplace(model, guide, (x, x[:, :1]), prior_precision=1.0)
    design = torch.cat([x, torch.ones(20, 1)], 1)
    exact = (precision * design.mT @ design + torch.eye(3)).inverse()
    torch.testing.assert_close(laplace.covariance(), exact, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"no value for the sites \['precision'\] of the model"):
        last_layer_laplace(model, nn.Linear(2, 1), (x, x[:, :1]))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(self.layer(x))


@pytest.mark.parametrize(
    ("network", "options", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Tanh()), {}, r"ends with a linear layer.*the linear layers \['0'\]"),
        (Twice(), {}, "a linear layer, which it calls once"),
        (
            nn.Linear(2, 2000),
            {"structure": "full"},
            "'kronecker' for more than 3000 weights, got 'full' for the 6000 of site 'weight'",
        ),
    ],
)
def test_bad_input_is_named(network, options, message):
    model = SupervisedModel(BayesianModule(network), likelihoods.Categorical())
    with pytest.raises(ValueError, match=message):
        last_layer_laplace(model, network, (torch.randn(4, 2), torch.tensor([0, 1, 0, 1])), **options)


def test_a_likelihood_that_is_not_known_is_named():
    network = nn.Linear(2, 2)
    data = (torch.randn(4, 2), torch.randn(4, 1))
    model = SupervisedModel(BayesianModule(network), likelihoods.HeteroscedasticGaussian())
    with pytest.raises(ValueError, match=r"likelihood must be one of Categorical, .*, got HeteroscedasticGaussian"):
        last_layer_laplace(model, network, data)
    model = SupervisedModel(BayesianModule(network), likelihoods.Gaussian(event_dim=0))
    with pytest.raises(ValueError, match=r"must be of outputs \[N, K\], with event_dim=1, got outputs \[4, 2\]"):
        last_layer_laplace(model, network, data)


def test_a_last_layer_that_is_not_random_is_named():
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    data = (torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))
    model = SupervisedModel(BayesianModule(network, select=r"^0"), likelihoods.Categorical())
    with pytest.raises(ValueError, match=r"site '1.weight' of the last layer must be random"):
        last_layer_laplace(model, network, data)
    with pytest.raises(ValueError, match="trained must be a guide or a torch network, got int"):
        last_layer_laplace(model, 3, data)


def test_weights_of_zero_have_no_precision_by_evidence():
    network = nn.Linear(2, 2)
    with torch.no_grad():
        network.weight.zero_(), network.bias.zero_()
    model = SupervisedModel(BayesianModule(network), likelihoods.Categorical())
    with pytest.raises(ValueError, match="prior_precision must be given, got 'evidence', which has no maximum"):
        last_layer_laplace(model, network, (torch.randn(4, 2), torch.tensor([0, 1, 0, 1])))
    assert math.isfinite(
        last_layer_laplace(model, network, (torch.randn(4, 2), torch.ones(4).long()), prior_precision=1.0).log_evidence
    )


class TwoHeads(nn.Module):
    """A network with two named outputs."""

    def __init__(self):
        super().__init__()
        self.body, self.size, self.kind = nn.Linear(3, 5), nn.Linear(5, 1), nn.Linear(5, 4)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return {"size": self.size(hidden), "kind": self.kind(hidden)}


class Kind(nn.Module):
    """One output of another network, as it is or as ``logits``, as models of transformers return it."""

    def __init__(self, net, wrap):
        super().__init__()
        self.net, self.wrap = net, wrap

    def forward(self, x):
        return self.wrap(self.net(x)["kind"])


def test_named_outputs_are_approximated_one_after_another():
    net, x, y = TwoHeads(), torch.randn(20, 3), torch.randint(4, (20,))
    kind = likelihoods.Categorical()
    named = SupervisedModel(BayesianModule(net), {"size": likelihoods.Gaussian(scale=0.1), "kind": kind})
    with pytest.raises(
        ValueError, match=r"one likelihood, got .* \['size', 'kind'\]; wrap the network in a module that"
    ):
        last_layer_laplace(named, net, (x, {"size": torch.zeros(20, 1), "kind": y}))
    with pytest.raises(ValueError, match="returns one tensor, got dict; wrap the network in a module that returns one"):
        last_layer_laplace(SupervisedModel(BayesianModule(net), kind), net, (x, y))
    alone = nn.Sequential(net.body, nn.Tanh(), net.kind)
    found = []
    for network in (alone, Kind(net, lambda f: f), Kind(net, lambda logits: SimpleNamespace(logits=logits))):
        model = SupervisedModel(BayesianModule(network), likelihoods.Categorical())
        guide = last_layer_laplace(model, network, (x, y), prior_precision=2.0)
        found.append((guide.covariance(), predict(model, guide, x, method="probit").mean))
    for covariance, mean in found[1:]:
        torch.testing.assert_close(covariance, found[0][0])
        torch.testing.assert_close(mean, found[0][1])
