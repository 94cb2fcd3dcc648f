# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The two tables that drive the generic tests: a new distribution, or a new family of guides, is one row in its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from scipy import stats

from pyro_radial.distributions import HypersphericalUniform, RadialNormal, VonMisesFisherStable
from pyro_radial.infer.autoguide import AutoMeanField, AutoRadial, AutoRadialDirectional, families


@dataclass(frozen=True)
class Row:
    """A distribution to test."""

    #: A small example with parameters of this dtype, batch and event dimensions at will.
    make: Callable[[torch.dtype], Any]
    #: Another distribution of these shapes to which it has a KL in closed form, or None if there is none.
    kl_to: Callable[[torch.dtype], Any] | None = None
    #: From the example to the log-density of SciPy's distribution at ``values[index]``, where SciPy has it.
    scipy: Callable[[Any, np.ndarray, tuple[int, ...]], float] | None = None


def _radial(shape, event_dim, scale_shape=None):
    def make(dtype):
        loc, scale = torch.randn(shape, dtype=dtype), 0.2 + torch.rand(scale_shape or shape, dtype=dtype)
        return RadialNormal(loc, scale, event_dim)

    return make


def _normal(shape, event_dim, scale_shape=None):
    def make(dtype):
        loc, scale = torch.randn(shape, dtype=dtype), 0.2 + torch.rand(scale_shape or shape, dtype=dtype)
        return dist.Normal(loc, scale).to_event(event_dim)

    return make


def _von_mises_fisher(shape, concentration):
    def make(dtype):
        loc = torch.nn.functional.normalize(torch.randn(shape, dtype=dtype), dim=-1)
        return VonMisesFisherStable(loc, torch.tensor(concentration, dtype=dtype))

    return make


def _uniform(dtype):
    return HypersphericalUniform(4, (2,), like=torch.zeros((), dtype=dtype))


def _scipy_normal(distribution, value, index):
    return stats.norm(distribution.mean[index].numpy(), distribution.stddev[index].numpy()).logpdf(value).sum()


def _scipy_von_mises_fisher(distribution, value, index):
    concentration = float(distribution.concentration[index])
    if concentration == 0.0:
        # SciPy refuses zero; as good as that, the density is the one over the sphere's area.
        concentration = 1e-12
    return float(stats.vonmises_fisher(distribution.loc[index].numpy(), concentration).logpdf(value))


def _normal_but_for_matrices(name, site):
    return families.Normal() if site["fn"].event_dim < 2 else None


def _shared_scale(name, site):
    family = families.Normal if site["fn"].event_dim < 2 else families.Radial
    return family(shared_scale=True)


def _full_covariance(name, site):
    return families.MultivariateNormal(init_stddev=0.1)


def _low_rank_covariance(name, site):
    return families.MultivariateNormal(init_stddev=0.1, rank=1)


DISTRIBUTIONS = {
    "Normal": Row(_normal((2, 3), 0), kl_to=_normal((2, 3), 0), scipy=_scipy_normal),
    "NormalOneScale": Row(_normal((2, 4, 3), 2, (2, 1, 1)), kl_to=_normal((2, 4, 3), 2, (1, 4, 3))),
    "RadialNormalVector": Row(_radial((3, 5), 1), kl_to=_normal((3, 5), 1)),
    "RadialNormalMatrix": Row(_radial((2, 4, 3), 2), kl_to=_radial((2, 4, 3), 2)),
    "RadialNormalOneScale": Row(_radial((2, 4, 3), 2, (2, 1, 1)), kl_to=_normal((2, 4, 3), 2, (1,))),
    "RadialNormalPair": Row(_radial((2,), 1), kl_to=_radial((2,), 1)),
    "RadialNormalOneElement": Row(_radial((4, 1), 1), kl_to=_normal((4, 1), 1), scipy=_scipy_normal),
    "RadialNormalNoEvent": Row(_radial((3, 2), 0), kl_to=_normal((3, 2), 0), scipy=_scipy_normal),
    "RadialNormalPerRow": Row(
        lambda dtype: _radial((2, 4, 3), 1)(dtype).to_event(1),
        kl_to=lambda dtype: _radial((2, 4, 3), 1)(dtype).to_event(1),
    ),
    "VonMisesFisherCircle": Row(
        _von_mises_fisher((2,), [0.0, 1.5, 40.0]),
        kl_to=_von_mises_fisher((2,), [1.0, 2.5, 30.0]),
        scipy=_scipy_von_mises_fisher,
    ),
    "VonMisesFisherSphere": Row(
        _von_mises_fisher((2, 3), [0.0, 7.0]),
        kl_to=_von_mises_fisher((2, 3), [2.0, 3.0]),
        scipy=_scipy_von_mises_fisher,
    ),
    "VonMisesFisherVector": Row(
        _von_mises_fisher((3, 1, 12), [0.0, 30.0]),
        kl_to=_von_mises_fisher((3, 1, 12), [5.0, 20.0]),
        scipy=_scipy_von_mises_fisher,
    ),
    "VonMisesFisherToUniform": Row(
        _von_mises_fisher((2, 4), [0.5, 6.0]), kl_to=_uniform, scipy=_scipy_von_mises_fisher
    ),
    "HypersphericalUniform": Row(_uniform, kl_to=_von_mises_fisher((2, 4), [0.5, 3.0])),
}

# A guide with several settings has as many of them as go together, so that a setting is tested once.
GUIDES = {
    "AutoRadial": lambda model, **kwargs: AutoRadial(model, init_stddev=0.1, **kwargs),
    "AutoRadialPerRowMixed": lambda model, **kwargs: AutoRadial(
        model, init_scale=0.2, event_dim=1, families=_normal_but_for_matrices, **kwargs
    ),
    "AutoRadialSharedScaleMixed": lambda model, **kwargs: AutoRadial(
        model, init_stddev=0.1, families=_shared_scale, **kwargs
    ),
    "AutoRadialDirectional": lambda model, **kwargs: AutoRadialDirectional(model, init_stddev=0.1, **kwargs),
    "AutoRadialDirectionalOwnConcentrations": lambda model, **kwargs: AutoRadialDirectional(
        model, init_stddev=0.1, shared_concentration=False, **kwargs
    ),
    "AutoMeanField": lambda model, **kwargs: AutoMeanField(model, init_stddev=0.1, **kwargs),
    "AutoMeanFieldFullCovariance": lambda model, **kwargs: AutoMeanField(model, families=_full_covariance, **kwargs),
    "AutoMeanFieldLowRank": lambda model, **kwargs: AutoMeanField(model, families=_low_rank_covariance, **kwargs),
}
