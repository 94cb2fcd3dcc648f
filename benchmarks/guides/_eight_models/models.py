# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The models that are the same in Pyro and in NumPyro, but for the name of the library."""

from typing import Any

from benchmarks.guides._eight_models.data import GENES, GROUPS

#: A tensor of torch or an array of JAX.
Array = Any


def hierarchical(ppl: Any, x: Array, group: Array, y: Array) -> None:
    """Intercepts of groups, over a subsample of rows."""
    dist = ppl.distributions
    loc, spread = ppl.sample("loc", dist.Normal(0.0, 10.0)), ppl.sample("spread", dist.HalfNormal(5.0))
    noise = ppl.sample("noise", dist.HalfNormal(1.0))
    weight = ppl.sample("weight", dist.Normal(0.0, 1.0).expand([x.shape[-1]]).to_event(1))
    with ppl.plate("groups", GROUPS):
        intercept = ppl.sample("intercept", dist.Normal(loc, spread))
    with ppl.plate("rows", len(y), subsample_size=len(y) // 10) as rows:
        ppl.sample("y", dist.Normal(intercept[group[rows]] + x[rows] @ weight, noise), obs=y[rows])


def counts(ppl: Any, signatures: Array, counts: Array) -> None:
    """Negative-binomial counts with gamma factors."""
    dist = ppl.distributions
    locations, genes = ppl.plate("locations", len(counts), dim=-2), ppl.plate("genes", GENES, dim=-1)
    with genes:
        gain = ppl.sample("gain", dist.Gamma(5.0, 5.0))
        added = ppl.sample("added", dist.Gamma(1.0, 100.0))
        spread = ppl.sample("spread", dist.Exponential(3.0))
    with locations:
        sensitivity = ppl.sample("sensitivity", dist.Gamma(10.0, 10.0))
        cells = ppl.sample("cells", dist.Gamma(0.5, 1.0).expand([len(signatures)]).to_event(1))
    mean = sensitivity * ((cells.squeeze(-2) @ signatures) * gain + added)
    concentration = 1.0 / spread**2
    with locations, genes:
        ppl.sample("counts", dist.GammaPoisson(concentration, concentration / mean), obs=counts)


def schools(ppl: Any, y: Array, errors: Array) -> None:
    """Effects around a common mean."""
    dist = ppl.distributions
    loc, spread = ppl.sample("loc", dist.Normal(0.0, 5.0)), ppl.sample("spread", dist.HalfCauchy(5.0))
    with ppl.plate("schools", len(y)):
        own = ppl.sample("own", dist.Normal(0.0, 1.0))
        ppl.sample("y", dist.Normal(loc + spread * own, errors), obs=y)


def mixture(ppl: Any, y: Array, ones: Array) -> None:
    """Three components, summed over."""
    dist = ppl.distributions
    weights = ppl.sample("weights", dist.Dirichlet(ones))
    scale = ppl.sample("scale", dist.LogNormal(0.0, 1.0))
    with ppl.plate("components", 3):
        centers = ppl.sample("centers", dist.Normal(0.0, 5.0))
    with ppl.plate("rows", len(y)):
        which = ppl.sample("which", dist.Categorical(weights), infer={"enumerate": "parallel"})
        ppl.sample("y", dist.Normal(centers[which], scale), obs=y)
