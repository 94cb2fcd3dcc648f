# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.functional``."""

import math
from functools import cache

import pyro.distributions as dist
import torch
from pyro.contrib.gp.kernels import RBF
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, FunctionalELBO, SupervisedModel
from pyro_radial.functional import (
    FunctionPrior,
    GaussianKL,
    GaussianProcess,
    GaussianScore,
    ImplicitProcess,
    LinearizedKL,
    MarginalKL,
    PosteriorProcess,
    RegularizedKL,
    SteinKL,
    SteinScore,
    UniformBox,
)
from pyro_radial.nn import likelihoods
from tests.calls.sweep import (
    Call,
    Lazy,
    flag,
    function,
    non_negative_float,
    non_negative_int,
    optional,
    positive_float,
    positive_int,
    some,
    tensor,
    text,
)

NAN, INF = math.nan, math.inf
X = torch.linspace(0, 1, 5).unsqueeze(-1)
Y = torch.tensor([0.1, 0.4, 0.2, 0.3, 0.5])
F = torch.linspace(-1, 1, 15).reshape(3, 5, 1).sin()

positive = positive_float | {"flag": True}
non_negative = non_negative_float | {"flag": True}
points = tensor | some(1.0, [[0.1]], X.numpy(), X.long(), X[:, 0], X[:0], X * NAN)
batch = tensor | some(1.0, X.numpy(), X.long(), X[:, 0])
observations = tensor | some(1.0, [0.1] * 5, Y.numpy(), Y[:4], Y[:, None, None], Y * NAN, Y.bool())
further = tensor | some(1.0, X.numpy(), X[:, 0], X.expand(5, 2), X[:0], X * NAN)
values = tensor | some(1.0, F.numpy(), F[:, :4], F[0], F.long(), F * NAN)
site = text | some(["f"])


def kernel():
    return RBF(1)


def process():
    return GaussianProcess(RBF(1), noise=0.1)


def noisy():
    found = process()
    found.observation_noise.fill_(0.1)
    return found


def box():
    return UniformBox(-1.0, 1.0, num_points=4)


def network():
    return BayesianModule(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)))


@cache
def network_and_guide():
    bnn = network()
    guide = AutoRadial(bnn)
    guide.setup(torch.zeros(2, 1))
    return bnn, guide


@cache
def model_and_guide():
    model = SupervisedModel(network(), likelihoods.Gaussian(num_data=5, scale=0.1))
    guide = AutoMeanField(model)
    guide.setup(X, X)
    return model, guide


def posterior_process():
    bnn, guide = network_and_guide()
    return PosteriorProcess(bnn, guide.posterior())


def points_of_posterior():
    return {name: dist.Delta(q.mean).to_event(q.mean.dim()) for name, q in network_and_guide()[1].posterior().items()}


class OfMoments(FunctionPrior):
    """A prior of one's own."""

    def moments(self, x, num_outputs=1):
        return torch.zeros(len(x), num_outputs).double(), torch.eye(len(x)).double().expand(num_outputs, -1, -1)


priors = some(None, "x", 3, kernel(), GaussianProcess)
processes = some(None, "x", 3, kernel())


def finite(*shape):
    return lambda found: tuple(found.shape) == shape and bool(found.isfinite().all())


def moments_of_five(found):
    return found[0].shape == (5, 1) and found[1].shape == (1, 5, 5)


def marginals_of_five(found):
    return found[0].shape == (5, 1) and found[1].shape == (5, 1)


def estimated(found):
    return bool(found.surrogate.isfinite()) and (found.value is None or bool(found.value.isfinite()))


def loss_of(elbo):
    """The loss of a small network, for arguments that are read only then."""
    model, guide = model_and_guide()
    return elbo(model, guide)(X, X)


PRIORS = [
    Call(
        "functional.GaussianProcess",
        lambda: dict(kernel=kernel(), mean=0.0, jitter=1e-8, noise=0.1),
        lambda found: found.noise == 0.1,
        invalid=dict(
            kernel=some(None, "x", 3, [], [None]),
            mean=some("x", NAN, INF, [0.0], True),
            jitter=positive,
            noise=non_negative,
        ),
        also=(({"mean": None}, lambda found: found.mean == 0.0), ({"noise": 0}, lambda found: found.noise == 0.0)),
    ),
    Call(
        "functional.GaussianProcess.log_marginal_likelihood",
        lambda: dict(x=X, y=Y),
        finite(),
        invalid=dict(x=points, y=observations),
        on=noisy,
    ),
    Call(
        "functional.GaussianProcess.posterior",
        lambda: dict(x=X, y=Y, at=X + 0.1),
        moments_of_five,
        invalid=dict(x=points, y=observations, at=further),
        on=noisy,
    ),
    Call(
        "functional.GaussianProcess.fit",
        lambda: dict(x=X, y=Y, num_points=4, steps=2, observation_noise=0.1),
        lambda history: bool(history[-1] >= history[0]),
        invalid=dict(
            x=points, y=observations, num_points=positive_int, steps=positive_int, observation_noise=optional(positive)
        ),
        also=(({"observation_noise": None}, lambda history: bool(history[-1] > history[0])),),
        on=process,
    ),
    Call(
        "functional.ImplicitProcess",
        lambda: dict(sampler=lambda x, number: torch.randn(number, len(x))),
        lambda found: found.sample(X, 3).shape == (3, 5, 1),
        invalid=dict(sampler=function | some(lambda x, n: None, lambda x, n: 3.0, lambda x, n: [1.0])),
        then=lambda found: (found.sample(X, 3), found)[1],
    ),
    Call(
        "functional.PosteriorProcess",
        lambda: dict(model=model_and_guide()[0], posterior=model_and_guide()[1].posterior(), function_site="f"),
        lambda found: marginals_of_five(found.marginals(X)),
        invalid=dict(
            model=some(None, "x", 3, Lazy(lambda: model_and_guide()[1])),
            posterior=some(None, "x", 3, {}, Lazy(lambda: model_and_guide()[1]), Lazy(points_of_posterior)),
            function_site=site,
        ),
    ),
    Call(
        "functional.PosteriorProcess.posterior",
        lambda: dict(x=X, y=Y, at=X + 0.1, observation_noise=0.1),
        moments_of_five,
        invalid=dict(x=points, y=observations, at=further, observation_noise=non_negative),
        on=posterior_process,
    ),
    Call(
        "functional.PosteriorProcess.train",
        lambda: dict(mode=True),
        lambda found: not found.training,
        on=posterior_process,
        unchecked={"mode": "it stays in evaluation mode"},
    ),
    Call(
        "functional.FunctionPrior",
        dict,
        lambda found: found.noise == 0.0,
        unchecked={"args": "torch's Module takes none", "kwargs": "torch's Module takes none"},
    ),
    *(
        Call(
            "functional.FunctionPrior.sample",
            lambda: dict(x=X, num_samples=3, num_outputs=1),
            finite(3, 5, 1),
            invalid=dict(x=points, num_samples=positive_int, num_outputs=positive_int),
            on=make,
            case=case,
        )
        for case, make in {
            "own": OfMoments,
            "process": process,
            "implicit": lambda: ImplicitProcess(lambda x, number: torch.randn(number, len(x))),
            "posterior": posterior_process,
        }.items()
    ),
    *(
        Call(
            name,
            lambda: dict(f=F, x=X),
            finite(3, 5, 1) if name.endswith("score") else finite(3),
            invalid=dict(f=values, x=points),
            on=process,
        )
        for name in ("functional.FunctionPrior.score", "functional.FunctionPrior.log_prob")
    ),
    *(
        Call(
            f"functional.{method}",
            lambda: dict(x=X, num_outputs=1),
            moments_of_five if method.endswith("moments") else marginals_of_five,
            invalid=dict(x=points, num_outputs=positive_int),
            on=make,
        )
        for method, make in (
            ("FunctionPrior.marginals", process),
            ("GaussianProcess.moments", process),
        )
    ),
    *(
        Call(
            f"functional.PosteriorProcess.{method}",
            lambda: dict(x=X, num_outputs=1),
            check,
            invalid=dict(x=points, num_outputs=some("x", 0, -1, 1.5, 2)),
            also=(({"num_outputs": None}, check),),
            on=posterior_process,
        )
        for method, check in (("moments", moments_of_five), ("marginals", marginals_of_five))
    ),
]

DIVERGENCES = [
    Call(
        "functional.GaussianKL",
        lambda: dict(factorize=False, num_prior_samples=100),
        lambda found: found.num_prior_samples == 100,
        invalid=dict(factorize=flag, num_prior_samples=positive_int),
    ),
    Call(
        "functional.RegularizedKL",
        lambda: dict(gamma=0.1, factorize=False, num_prior_samples=100),
        lambda found: found.gamma == 0.1,
        invalid=dict(gamma=positive, factorize=flag, num_prior_samples=positive_int),
    ),
    Call(
        "functional.SteinKL",
        lambda: dict(estimator=GaussianScore(), num_prior_samples=100),
        lambda found: isinstance(found.estimator, GaussianScore),
        invalid=dict(estimator=optional(function) | some([1], SteinScore), num_prior_samples=positive_int),
        also=(({"estimator": None}, lambda found: isinstance(found.estimator, SteinScore)),),
    ),
    Call(
        "functional.LinearizedKL",
        lambda: dict(gamma=0.1, num_prior_samples=100),
        lambda found: found.gamma == 0.1,
        invalid=dict(gamma=non_negative, num_prior_samples=positive_int),
    ),
    *(
        Call(
            "functional.GaussianKL.__call__" if name == "RegularizedKL" else f"functional.{name}.__call__",
            lambda: dict(f=torch.randn(30, 5, 1), x=X, prior=process()),
            estimated,
            invalid=dict(f=values, x=points, prior=priors),
            on=make,
            case="regularized" if name == "RegularizedKL" else "",
        )
        for name, make in {
            "GaussianKL": GaussianKL,
            "RegularizedKL": lambda: RegularizedKL(0.1),
            "SteinKL": SteinKL,
        }.items()
    ),
    *(
        Call(
            f"functional.{divergence.__name__}.__call__",
            lambda: dict(process=process(), x=X, prior=process()),
            estimated,
            invalid=dict(process=processes, x=points, prior=priors),
            on=divergence,
        )
        for divergence in (LinearizedKL, MarginalKL)
    ),
    Call(
        "functional.init_to_prior",
        lambda: dict(network=nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)), prior=process(), points=X),
        lambda found: found[0].weight.shape == (3, 1),
        invalid=dict(
            network=some(None, 3, nn.Linear(2, 1), nn.Tanh(), nn.Conv1d(1, 1, 1)),
            prior=priors,
            points=points,
        ),
    ),
    Call(
        "functional.function_space_laplace",
        lambda: dict(
            model=model_and_guide()[0],
            trained=model_and_guide()[1],
            data=(X, Y[:, None]),
            prior=process(),
            points=X,
            rank=2,
            num_steps=0,
        ),
        lambda found: found.covariance().shape == (13, 13),
        invalid=dict(
            model=some(None, "x", 3, nn.Linear(1, 1)),
            trained=some(None, "x", 3, GaussianKL),
            data=some(None, "x", 3, X, (X, Y[:3])),
            prior=priors,
            points=points,
            rank=optional(positive_int) | {"above the values": 6},
            num_steps=non_negative_int,
        ),
        also=(({"rank": None}, lambda found: found.factor.shape == (13, 5)),),
    ),
]

SAMPLES = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
draws = tensor | some(
    *(1.0, [[1.0]], SAMPLES.numpy(), SAMPLES[:, 0], SAMPLES.long(), SAMPLES[:1], SAMPLES * NAN, 0 * SAMPLES)
)
elsewhere = optional(tensor) | some(
    1.0, [[1.0]], SAMPLES.numpy(), SAMPLES[:, 0], SAMPLES[:, :2], SAMPLES.long(), SAMPLES * NAN
)

SCORES = [
    Call(
        "functional.SteinScore",
        lambda: dict(ridge=0.01),
        lambda found: found.ridge == 0.01,
        invalid=dict(ridge=positive),
    ),
    *(
        Call(
            f"functional.{estimator.__name__}.__call__",
            lambda: dict(samples=SAMPLES, at=SAMPLES[:2]),
            finite(2, 3),
            invalid=dict(samples=draws, at=elsewhere),
            also=(({"at": None}, finite(20, 3)),),
            on=estimator,
        )
        for estimator in (GaussianScore, SteinScore)
    ),
]

POINTS = [
    Call(
        "functional.UniformBox",
        lambda: dict(low=-1.0, high=[1.0, 2.0], num_points=3),
        lambda found: found(torch.zeros(2, 2)).shape == (3, 2),
        invalid=dict(
            low=some(None, "x", NAN, 3.0, [0.0, 0.0, 0.0], {}),
            high=some(None, "x", NAN, -3.0, {}),
            num_points=positive_int,
        ),
    ),
    Call(
        "functional.UniformBox.around",
        lambda: dict(x_train=torch.tensor([[0.0, 10.0], [1.0, 30.0]]), num_points=5, margin=0.5),
        lambda found: found.low.tolist() == [-0.5, 0.0] and found.high.tolist() == [1.5, 40.0],
        invalid=dict(x_train=points, num_points=positive_int, margin=non_negative),
    ),
    Call("functional.UniformBox.__call__", lambda: dict(x=X), finite(4, 1), invalid=dict(x=batch), on=box),
    Call(
        "functional.BetweenRows",
        lambda: dict(points=X, num_points=3),
        lambda found: found(X).shape == (3, 1),
        invalid=dict(points=points, num_points=positive_int),
    ),
]

ELBO = [
    Call(
        "functional.FunctionalELBO",
        lambda: dict(
            prior=process(),
            measurement_points=box(),
            divergence=RegularizedKL(0.1),
            compare_at="both",
            weight_space_kl=0.0,
            function_site="f",
            num_functions=30,
            kl_weight=1.0,
        ),
        lambda found: found.num_particles == 30,
        invalid=dict(
            prior=priors,
            measurement_points=optional(function)
            | some(
                X,
                UniformBox,
                lambda x: None,
                lambda x: x[:, 0],
                lambda x: x.expand(5, 2),
                lambda x: x.long(),
                lambda x: x * NAN,
            ),
            divergence=optional(function)
            | some(GaussianKL, [1], lambda f, x, prior: None, lambda f, x, prior: torch.tensor(1.0)),
            compare_at=some(None, "x", 3),
            weight_space_kl=non_negative_float,
            function_site=site,
            num_functions=positive_int,
            kl_weight=non_negative_float,
        ),
        also=(
            ({"measurement_points": None}, lambda found: found.measurement_points is None),
            ({"divergence": None}, lambda found: isinstance(found.divergence, SteinKL)),
        ),
        then=lambda found: (loss_of(found), found)[1],
        unchecked={"kwargs": "other arguments of RadialELBO"},
    ),
    Call(
        "functional.FunctionalELBO.compared_with_process",
        lambda: dict(model=model_and_guide()[0], guide=model_and_guide()[1], data=(X, X), new_inputs=X + 0.1),
        lambda found: len(found.places) == 3,
        invalid=dict(
            model=function,
            guide=function,
            data=some(None, "x", 3, (X,), (X, None), (X, X[:3])),
            new_inputs=some("x", 3, X[:, 0], X.expand(5, 2), X * NAN),
        ),
        also=(({"new_inputs": None}, lambda found: len(found.places) == 2),),
        on=lambda: FunctionalELBO(noisy(), box(), num_functions=8),
    ),
]

CALLS = [*PRIORS, *DIVERGENCES, *SCORES, *POINTS, *ELBO]
NOT_CALLED = {"functional.FunctionPrior.moments": "users define it; marginals, score and log_prob call it"}
