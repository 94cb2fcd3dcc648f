# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What the rules of the library change for other distributions: nothing but a closed KL where there was none."""

import warnings
from contextlib import contextmanager

import pyro.distributions as dist
import pyro.distributions.transforms as T
import pytest
import torch
from torch.distributions import Distribution, kl_divergence
from torch.distributions import kl as registry

from pyro_radial.distributions.kl import RULES


def subclasses(cls):
    """All subclasses that torch and Pyro define."""
    direct = [sub for sub in cls.__subclasses__() if sub.__module__.startswith(("torch.", "pyro."))]
    return {subclass for sub in direct for subclass in (sub, *subclasses(sub))}


SIZE = 4
VECTOR = (SIZE,)


def normal(*shape):
    return dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape))


def positive(*shape):
    return dist.LogNormal(torch.zeros(shape), 1.0).to_event(len(shape))


# A row for each kind of transform of torch and Pyro: how to make it, and a distribution to apply it to.
TRANSFORMS = {
    "affine": (lambda: T.AffineTransform(1.0, 2.0), normal(*VECTOR)),
    "cat": (lambda: T.CatTransform([T.ExpTransform(), T.SigmoidTransform()], -1, [2, 2]), normal(*VECTOR)),
    "compose": (lambda: T.ComposeTransform([T.ExpTransform(), T.AffineTransform(0.0, 2.0)]), normal()),
    "exp of a gamma": (T.ExpTransform, dist.Gamma(torch.ones(SIZE), 1.0).to_event(1)),
    "log": (lambda: T.ExpTransform().inv, dist.Gamma(torch.ones(SIZE), 1.0).to_event(1)),
    "independent": (lambda: T.IndependentTransform(T.ExpTransform(), 1), normal(*VECTOR)),
    "power": (lambda: T.PowerTransform(2.0), positive()),
    "reshape": (lambda: T.ReshapeTransform((SIZE,), (2, 2)), normal(*VECTOR)),
    "reshape of a batch": (lambda: T.ReshapeTransform((SIZE,), (2, 2)), dist.Normal(torch.zeros(SIZE), 1.0)),
    "stick breaking": (T.StickBreakingTransform, normal(*VECTOR)),
    "tanh": (T.TanhTransform, normal()),
    "affine coupling": (lambda: T.affine_coupling(SIZE), normal(*VECTOR)),
    "batch norm": (lambda: T.batchnorm(SIZE).eval(), normal(*VECTOR)),
    "cholesky affine": (lambda: T.LowerCholeskyAffine(torch.zeros(SIZE), 2 * torch.eye(SIZE)), normal(*VECTOR)),
}


def others(q):
    """Distributions of the shape of q, of every kind that a rule is registered for, and some of other shapes."""
    shape, event_dim = q.batch_shape + q.event_shape, q.event_dim
    one_dim = {
        "normal": dist.Normal(torch.zeros(shape), 1.0),
        "repeated": dist.Normal(0.0, 1.0).expand(shape),
        "log-normal": dist.LogNormal(torch.zeros(shape), 1.0),
        "gamma": dist.Gamma(torch.full(shape, 2.0), 1.0),
        "inverse gamma": dist.InverseGamma(torch.full(shape, 2.0), 1.0),
        "laplace": dist.Laplace(torch.zeros(shape), 1.0),
        "uniform": dist.Uniform(torch.zeros(shape), 1.0),
    }
    yield from ((name, distribution.to_event(event_dim)) for name, distribution in one_dim.items())
    yield "masked", one_dim["normal"].to_event(event_dim).mask(True)
    yield "wrapped", dist.Independent(q, 0)
    yield "full covariance", dist.MultivariateNormal(torch.zeros(SIZE), torch.eye(SIZE))
    yield "one element", dist.Normal(0.0, 1.0)
    yield "another batch", dist.Normal(torch.zeros(3), 1.0)
    yield "another event", dist.Normal(torch.zeros(3), 1.0).to_event(1)


@contextmanager
def without_rules():
    """Torch's registry as it is without the library, with torch's and Pyro's own rules alone."""
    rules, ours = dict(registry._KL_REGISTRY), {(q, p) for q, p, _ in RULES}
    replaced = {(dist.MaskedDistribution, dist.MaskedDistribution)}
    try:
        for pair in ours - replaced:
            del registry._KL_REGISTRY[pair]
        registry._KL_MEMOIZE.clear()
        yield
    finally:
        registry._KL_REGISTRY.update(rules)
        registry._KL_MEMOIZE.clear()


def outcome(q, p):
    """The KL, or the class of the error."""
    try:
        return kl_divergence(q, p)
    except Exception as error:
        return type(error)


def assert_kl_is_that_of_samples(q, p, kl, words, count=1_000):
    value = q.sample((count,))
    draws = q.log_prob(value) - p.log_prob(value)
    error = 5 * draws.std(0) / count**0.5 + 1e-4
    assert bool(((draws.mean(0) - kl).abs() <= error).all()), words


def made(name):
    make, base = TRANSFORMS[name]
    with warnings.catch_warnings():
        # One of them is deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        return make(), base


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_the_rules_cannot_undo_is_treated_as_without_them(name):
    transform, base = made(name)
    q = dist.TransformedDistribution(base, [transform], validate_args=False)
    for other, p in others(q):
        for one, two in ((q, p), (p, q)):
            mine = outcome(one, two)
            with without_rules():
                torchs = outcome(one, two)
            words = f"{name} {other}: {mine} where it was {torchs}"
            if torchs is not NotImplementedError or not isinstance(mine, torch.Tensor):
                same = torch.equal(mine, torchs) if isinstance(mine, torch.Tensor) else mine is torchs
                assert same, words
            elif other == "wrapped":
                torch.testing.assert_close(mine, torch.zeros(q.batch_shape), atol=1e-5, rtol=0.0)
            else:
                assert_kl_is_that_of_samples(one, two, mine, words)


def test_a_transform_that_is_not_one_to_one_has_no_closed_kl():
    """Its pushforwards may be equal where the distributions before it are not."""
    q, p = (
        dist.Independent(dist.TransformedDistribution(dist.Normal(loc, 1.0), [T.AbsTransform()]), 0)
        for loc in (1.0, -1.0)
    )
    with pytest.raises(NotImplementedError):
        kl_divergence(q.base_dist, p)


def test_no_pair_of_classes_becomes_ambiguous():
    classes = subclasses(Distribution)

    def ambiguous():
        pairs = set()
        for q in classes:
            for p in classes:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    registry._dispatch_kl(q, p)
                pairs |= {(q, p)} if caught else set()
        return pairs

    mine = ambiguous()
    with without_rules():
        torchs = ambiguous()
    assert mine <= torchs


@pytest.mark.parametrize("q_mask", [False, True, torch.tensor(False), torch.tensor(True)])
@pytest.mark.parametrize("p_mask", [False, True, torch.tensor(False), torch.tensor(True)])
def test_two_masked_normals_have_pyros_kl(q_mask, p_mask):
    q, p = (dist.Normal(loc, 1.0).expand([2]).mask(mask) for loc, mask in ((0.0, q_mask), (1.0, p_mask)))
    mine = kl_divergence(q, p)
    if q_mask is False or p_mask is False:
        assert mine == 0.0
        assert isinstance(mine, float)
    else:
        torch.testing.assert_close(mine, torch.full((2,), 0.5 * float(q_mask & p_mask)))
