# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Each loss on weights, and the handlers that change one."""

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, TermsELBO, diagnose
from pyro_radial.infer import HalfCauchyReparam
from pyro_radial.poutine import mean_only, swap_prior
from tests.golden.programs import classification, classifier, loss_and_gradients, program

LOCAL = {"local_reparameterization": True}


@program
def trace_mean_field_elbo():
    results = {}
    for guide_type in (AutoRadial, AutoMeanField):
        model = classifier()
        results[guide_type.__name__] = loss_and_gradients(
            TraceMeanField_ELBO(), model, guide_type(model, init_stddev=0.1), *classification()
        )
    return results


@program
def radial_elbo():
    losses = {
        "weighted": TermsELBO(kl_weight=lambda step: min(1.0, (step + 1) / 10)),
        "particles": TermsELBO(num_particles=3),
        "vectorized": TermsELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1),
        "strict": TermsELBO(strict_kl=True, kl_weight=0.1),
    }
    model = classifier(num_data=100)
    results = {}
    for name, loss in losses.items():
        guide = AutoRadial(model, init_stddev=0.1)
        results[name] = [loss_and_gradients(loss, model, guide, *classification()) for _ in range(2)]
        results[f"{name} entropy"] = loss.terms.entropy_by_site
    return results


def images():
    x = torch.randn(6, 1, 6, 6, generator=torch.Generator().manual_seed(2))
    return x, (x.sum((1, 2, 3)) > 0).long()


def convolutional():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2))


@program
def local_reparameterization():
    results = {}
    problems = {"linear": (None, classification()), "convolutional": (convolutional(), images())}
    for kind, (net, data) in problems.items():
        for guide_type in (AutoRadial, AutoMeanField):
            model = classifier(net, **LOCAL)
            guide = guide_type(model, init_stddev=0.3)
            results[f"{kind} {guide_type.__name__}"] = loss_and_gradients(TermsELBO(), model, guide, *data)
    return results


@program
def half_cauchy_reparameterization():
    @poutine.reparam(config={"tau": HalfCauchyReparam(), "local": HalfCauchyReparam()})
    def model(x, y=None):
        tau = pyro.sample("tau", dist.HalfCauchy(0.5))
        local = pyro.sample("local", dist.HalfCauchy(torch.ones(3)).to_event(1))
        weights = pyro.sample("weights", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ (tau * local * weights), 0.5), obs=y)

    x, y = classification()
    results = loss_and_gradients(TermsELBO(strict_kl=True), model, AutoMeanField(model), x, y.to(x.dtype))
    pyro.set_rng_seed(13)
    trace = poutine.trace(model).get_trace(x)
    trace.compute_log_prob()
    results["log_prob"] = {name: trace.nodes[name]["log_prob_sum"] for name in trace.stochastic_nodes}
    return results


@program
def handlers():
    data = classification()
    model = classifier()
    guide = AutoRadial(model, init_stddev=0.2)
    guide.setup(*data)
    wide = swap_prior(
        model,
        {
            name: dist.Normal(0.1, 2.0).expand(q.mean.shape).to_event(q.mean.dim())
            for name, q in guide.posterior().items()
        },
    )
    return {
        "mean only": loss_and_gradients(TraceMeanField_ELBO(), model, mean_only(guide), *data),
        "other prior": loss_and_gradients(TermsELBO(), wide, guide, *data),
    }


@program
def diagnosis():
    data = classification()
    model = classifier()
    guide = AutoRadial(model, init_stddev=0.2)
    found = diagnose(model, guide, data, num_particles=4)
    return {"nll": found.terms.nll_by_site, "kl": found.terms.kl_by_site, "signal": found.signal, "noise": found.noise}
