# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Priors on functions: each divergence, prior and set of measurement points."""

from functools import partial

import torch
from pyro.contrib.gp.kernels import RBF

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, FunctionalELBO
from pyro_radial.functional import (
    BetweenRows,
    GaussianKL,
    GaussianProcess,
    ImplicitProcess,
    LinearizedKL,
    PosteriorProcess,
    SteinKL,
    UniformBox,
)
from pyro_radial.functional.divergences.stein import SteinScore
from tests.golden.programs import (
    NORMAL_PRIOR,
    classification,
    loss_and_gradients,
    network,
    program,
    regression,
    regressor,
)

ELBO = partial(FunctionalELBO, num_functions=40)
AT_POINTS_ALONE = {"compare_at": "measurement_points"}


def kernel(a, b):
    return torch.exp(-2 * (a - b.T) ** 2)


def process(noise=0.05):
    return GaussianProcess(kernel, noise=noise)


def noisy_lines(x, num_samples):
    return torch.randn(num_samples, 1) * x[:, 0] + 0.3 * torch.randn(num_samples, len(x))


def box():
    return UniformBox([-2.0], [2.0], num_points=6)


def losses(divergence, prior=None, points=None, guide_types=(AutoRadial, AutoMeanField), **options):
    """Return the loss of each guide with its gradients."""
    results = {}
    for guide_type in guide_types:
        torch.manual_seed(0)
        model = regressor()
        guide = guide_type(model, init_stddev=0.2)
        elbo = ELBO(prior or process(), points or box(), divergence=divergence, **options)
        found = [loss_and_gradients(elbo, model, guide, *regression())]
        results[guide_type.__name__] = found
    return results


@program
def gaussian_kl():
    return {
        "joint": losses(GaussianKL()),
        "factorized": losses(GaussianKL(factorize=True), kl_weight=0.5),
        "weights too": losses(GaussianKL(), weight_space_kl=0.3, **AT_POINTS_ALONE),
    }


@program
def linearized_kl():
    return losses(LinearizedKL(gamma=0.01))


@program
def stein_kl_of_a_process():
    return losses(SteinKL())


@program
def stein_score():
    torch.manual_seed(2)
    draws, points = torch.randn(20, 3), torch.randn(7, 3)
    return {"draws": SteinScore(ridge=0.1)(draws), "points": SteinScore(ridge=0.1)(draws, points)}


@program
def measurement_points():
    x, _ = regression()
    torch.manual_seed(3)
    kinds = {"box": UniformBox.around(x, num_points=5), "between": BetweenRows(x, 4)}
    return {name: points(x[:3]) for name, points in kinds.items()}


@program
def priors_on_functions():
    x, y = regression()
    at = torch.linspace(-1.5, 1.5, 4)[:, None]
    torch.manual_seed(4)
    rbf = GaussianProcess(RBF(input_dim=1), noise=0.05)
    priors = {"process": process(), "rbf": rbf, "sampler": ImplicitProcess(lambda x, n: torch.randn(n, 1, 1) * x)}
    results = {}
    for name, prior in priors.items():
        torch.manual_seed(5)
        results[name] = prior.sample(at, 4)
    for name in ("process", "rbf"):
        results[f"{name} moments"] = priors[name].moments(at)
    f = torch.randn(3, len(at), 1, generator=torch.Generator().manual_seed(6))
    results["process score"] = process().score(f, at)
    results["process log_prob"] = process().log_prob(f, at)
    rbf.observation_noise.fill_(0.1)
    results["evidence"] = rbf.log_marginal_likelihood(x, y)
    results["posterior"] = rbf.posterior(x, y, at)
    torch.manual_seed(7)
    results["fitted"] = rbf.fit(x, y, steps=5)
    results["hyperparameters"] = dict(rbf.named_parameters())
    return results


@program
def implicit_prior():
    return losses(SteinKL(num_prior_samples=40), prior=ImplicitProcess(noisy_lines), guide_types=(AutoRadial,))


@program
def posterior_process():
    results = {}
    for guide_type in (AutoRadial, AutoMeanField):
        bnn = BayesianModule(network(3, 4, 2), NORMAL_PRIOR)
        guide = guide_type(bnn, init_stddev=0.3)
        x = classification(5)[0]
        guide.setup(x)
        posterior = PosteriorProcess(bnn, guide.posterior())
        f = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(6))
        results[guide_type.__name__] = {
            "marginals": posterior.marginals(x),
            "moments": posterior.moments(x),
            "score": posterior.score(f, x),
            "log_prob": posterior.log_prob(f, x),
        }
    return results
