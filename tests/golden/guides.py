# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Each guide, and each family of posteriors."""

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI

from pyro_radial import AutoMeanField, AutoRadial, AutoRadialDirectional, TermsELBO
from pyro_radial.infer.autoguide import families, init_to_network
from pyro_radial.infer.autoguide.families import Delta
from pyro_radial.nn.priors import RadialDirectionalPrior
from tests.golden.programs import classification, classifier, loss_and_gradients, program, values


def stepped(model, guide, *args, steps=3, loss=None):
    """Return a first loss with its gradients, and a few steps of SVI with where they end."""
    loss = TermsELBO() if loss is None else loss
    results = loss_and_gradients(loss, model, guide, *args)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss)
    results["steps"] = [svi.step(*args) for _ in range(steps)]
    results["after"] = values(guide)
    pyro.set_rng_seed(12)
    results["draw"] = guide(*args)
    return results


def pyro_model(x, group, y=None):
    """Weights that act together, sites of other supports, and a plate of local variables."""
    weights = pyro.sample("weights", dist.Normal(torch.zeros(x.shape[-1]), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    share = pyro.sample("share", dist.Beta(2.0, 3.0))
    with pyro.plate("groups", 4):
        offset = pyro.sample("offset", dist.Normal(0.0, scale))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ weights + share * offset[group], 0.5), obs=y)


def pyro_data():
    x, y = classification()
    return x, torch.arange(len(x)) % 4, y.to(x.dtype)


@program
def auto_radial():
    model = classifier()
    guide = AutoRadial(model, init_stddev=0.05)
    data = classification()
    results = stepped(model, guide, *data)
    results["median"] = guide.median(*data)
    results["quantiles"] = guide.quantiles([0.1, 0.5, 0.9], *data)
    results["means"] = {name: q.mean for name, q in guide.posterior().items()}
    return results


@program
def auto_radial_on_a_pyro_model():
    guide = AutoRadial(pyro_model, families={"scale|share|offset": families.Normal(init_stddev=0.2)})
    return stepped(pyro_model, guide, *pyro_data())


@program
def auto_mean_field():
    model = classifier()
    return stepped(model, AutoMeanField(model, init_stddev=0.1), *classification())


@program
def auto_mean_field_on_a_pyro_model():
    guide = AutoMeanField(pyro_model)
    results = stepped(pyro_model, guide, *pyro_data())
    results["quantiles"] = guide.quantiles([0.1, 0.9], *pyro_data())
    return results


@program
def auto_radial_directional():
    results = {}
    for grouping in ("row", "column", "double"):
        pyro.set_rng_seed(0)
        model = classifier(prior=RadialDirectionalPrior(grouping, global_scale=0.3))
        guide = AutoRadialDirectional(model, init_mean_cosine=0.8, shared_concentration=grouping == "double")
        results[grouping] = stepped(model, guide, *classification(), loss=TermsELBO(strict_kl=True))
    return results


@program
def each_family():
    model = classifier(prior=RadialDirectionalPrior({"0.weight": "row"}, global_scale=0.3))
    chosen = {
        r"0\.weight\.direction": families.VonMisesFisher(init_mean_cosine=0.7, shared_concentration=False),
        r"2\.weight": families.Radial(event_dim=1, init_scale=0.1),
        r"2\.bias": Delta(),
        "0.bias": families.Normal(init_stddev=0.05),
    }
    return stepped(model, AutoMeanField(model, families=chosen), *classification())


@program
def where_guides_start():
    model, data = classifier(), classification()
    first = AutoRadial(model, init_loc_fn=init_to_network, init_scale=0.2)
    first.setup(*data)
    second = AutoMeanField(model)
    second.start_at(first.posterior())
    second.setup(*data)
    third = AutoRadial(model)
    third.setup(*data)
    third.load_means(model.bnn.to_module({name: q.mean for name, q in second.posterior().items()}).state_dict())
    return {name: values(guide) for name, guide in {"first": first, "second": second, "third": third}.items()}
