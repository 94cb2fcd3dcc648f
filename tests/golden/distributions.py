# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Distributions: densities, draws with their gradients, entropies, moments and divergences."""

import torch
from pyro.distributions import HalfCauchy, LogNormal, Normal
from torch.distributions import kl_divergence

from pyro_radial.distributions import HypersphericalUniform, RadialNormal, VonMisesFisherStable
from pyro_radial.distributions.half_cauchy import half_cauchy_factors, log_mode, sqrt_product
from tests.golden.programs import program


def described(make, *parameters):
    """Return draws of a distribution, their density, the entropy, and the gradients of all in its parameters."""
    parameters = [torch.as_tensor(p, dtype=torch.float64).clone().requires_grad_() for p in parameters]
    distribution = make(*parameters)
    torch.manual_seed(1)
    draws = distribution.rsample((3,))
    results = {"draws": draws, "log_prob": distribution.log_prob(draws.detach()), "entropy": distribution.entropy()}
    weights = torch.cos(torch.arange(draws.numel(), dtype=draws.dtype)).view(draws.shape)
    for name, value in {"draws": draws * weights, **{key: results[key] for key in ("log_prob", "entropy")}}.items():
        if value.requires_grad:
            gradients = torch.autograd.grad(value.sum(), parameters, retain_graph=True, allow_unused=True)
            results[f"{name} gradients"] = [gradient for gradient in gradients if gradient is not None]
    return results


def unit(*shape, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=-1, keepdim=True)


@program
def radial_normal():
    loc = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    scale = 0.1 + torch.rand(2, 5, generator=torch.Generator().manual_seed(1))
    one = RadialNormal(loc, scale)
    return {
        "rows": described(lambda m, s: RadialNormal(m, s), loc, scale),
        "one radius": described(lambda m, s: RadialNormal(m, s, event_dim=2), loc, scale),
        "moments": [one.mean, one.variance],
        "quantiles": one.marginal_quantiles([0.1, 0.6]),
    }


@program
def von_mises_fisher():
    results = {}
    for dim in (2, 3, 10, 1000):
        for concentration in (0.0, 0.5, 20.0, 5000.0):
            results[f"{dim} {concentration}"] = described(VonMisesFisherStable, unit(2, dim), concentration)
            one = VonMisesFisherStable(unit(2, dim), torch.tensor(concentration))
            results[f"{dim} {concentration} mean"] = one.mean
    return results


@program
def half_cauchy():
    first, second = LogNormal(torch.tensor(0.2), torch.tensor(0.5)), LogNormal(torch.tensor(-0.3), torch.tensor(0.4))
    product = sqrt_product(first, second)
    factors = half_cauchy_factors(torch.tensor([0.5, 2.0]))
    x = torch.tensor([[0.3, 1.5], [2.0, 0.1]])
    return {
        "factors": [factor.log_prob(x) for factor in factors],
        "mode": log_mode(first),
        "product": [product.loc, product.scale],
        "density": HalfCauchy(1.0).log_prob(x),
    }


@program
def divergences_between_distributions():
    generator = torch.Generator().manual_seed(0)
    loc, other_loc = torch.randn(2, 2, 5, generator=generator)
    scale, other_scale = 0.2 + torch.rand(2, 2, 5, generator=generator)
    sphere, other = (
        VonMisesFisherStable(unit(2, 5), torch.tensor(4.0)),
        VonMisesFisherStable(unit(2, 5, seed=1), torch.tensor(9.0)),
    )
    pairs = {
        "radial to normal": (RadialNormal(loc, scale), Normal(other_loc, other_scale).to_event(1)),
        "normal to radial": (Normal(loc, scale).to_event(1), RadialNormal(other_loc, other_scale)),
        "radial to radial": (RadialNormal(loc, scale), RadialNormal(other_loc, other_scale)),
        "radial to radial around it": (RadialNormal(loc, scale), RadialNormal(loc, other_scale)),
        "vmf to vmf": (sphere, other),
        "vmf to uniform": (sphere, HypersphericalUniform(5)),
    }
    results = {}
    for name, (p, q) in pairs.items():
        torch.manual_seed(2)
        results[name] = kl_divergence(p, q)
    parameters = [loc.requires_grad_(), scale.requires_grad_()]
    for name, other in {
        "normal": Normal(other_loc, other_scale).to_event(1),
        "radial": RadialNormal(other_loc, other_scale),
    }.items():
        torch.manual_seed(2)
        kl = kl_divergence(RadialNormal(loc, scale), other)
        results[f"gradients to {name}"] = torch.autograd.grad(kl.sum(), parameters)
    return results
