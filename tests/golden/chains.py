# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The posterior as the next prior: chains in both forms, coresets, streams, and chains of functions."""

import torch

from pyro_radial import AutoMeanField, AutoRadial, PriorChain, TermsELBO
from pyro_radial.continual import Coreset, train_stream
from pyro_radial.continual.coresets import random_coreset
from pyro_radial.continual.function_memory import FunctionChainELBO, FunctionMemory
from pyro_radial.nn import MultiHead
from tests.golden.programs import classification, classifier, loss_and_gradients, network, program, trained, values
from tutorials.streams import class_split_stream, permuted_stream


def advanced(form, guide_type):
    """Return the losses of three tasks, each with the posterior before as its prior, and the last prior."""
    chain = PriorChain(classifier(), form)
    results = {}
    for task in range(3):
        data = classification(seed=task)
        guide = chain.guide(guide_type, init_stddev=0.1) if task == 0 else chain.guide(guide_type)
        trained(chain, guide, data)
        results[f"task {task}"] = loss_and_gradients(TermsELBO(), chain, guide, *data)
        results[f"task {task} posterior"] = values(guide)
        chain.advance(guide)
        results[f"prior {task}"] = {name: [q.mean, q.stddev] for name, q in chain.prior.items()}
    return results


@program
def radial_chain():
    return advanced("normal", AutoRadial)


@program
def exact_radial_chain():
    return advanced("exact", AutoRadial)


@program
def mean_field_chain():
    return advanced("normal", AutoMeanField)


@program
def function_chain_elbo():
    results = {}
    for guide_type in (AutoRadial, AutoMeanField):
        chain, data = PriorChain(classifier()), classification()
        guide = chain.guide(guide_type, init_stddev=0.2)
        trained(chain, guide, data)
        chain.advance(guide)
        memory = FunctionMemory.of(chain, data[0][:5])
        after = guide_type(chain, init_stddev=0.3)
        loss = FunctionChainELBO([memory], kl_weight=7.0, weight_space_kl=0.3, max_points=4)
        results[guide_type.__name__] = [loss_and_gradients(loss, chain, after, *data) for _ in range(2)]
        results[f"{guide_type.__name__} memory"] = [memory.mean, memory.variance]
    return results


OPTIONS = {
    "epochs": 1,
    "batch_size": 8,
    "optim": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    "num_samples": 3,
    "seed": 3,
    "progress": False,
}


def clusters(rows, seed):
    """Return rows around four points, one for each class."""
    y = torch.arange(rows) % 4
    return 3.0 * torch.eye(4)[y] + 0.3 * torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)), y


def learned(chain, stream, **options):
    matrix = train_stream(chain, stream, **{**OPTIONS, **options})
    return {"matrix": matrix.values.nan_to_num(-1.0), "prior": {name: q.mean for name, q in chain.prior.items()}}


@program
def streams():
    train, test = clusters(48, 0), clusters(16, 1)
    torch.manual_seed(1)
    heads = MultiHead(network(4, 5, 5), [torch.nn.Linear(5, 2) for _ in range(2)])
    return {
        "split": learned(
            PriorChain(classifier(heads, num_data=None)), class_split_stream(train, test, multi_head=True)
        ),
        "permuted with a coreset": learned(
            PriorChain(classifier(network(4, 5, 4), num_data=None)),
            permuted_stream(train, test, 2),
            coreset=Coreset(6, fit_options={"epochs": 1}),
        ),
        "split with functions": learned(
            PriorChain(classifier(network(4, 5, 4), num_data=None)),
            class_split_stream(train, test, multi_head=False),
            coreset=Coreset(6, use="functions", max_points=4),
        ),
    }


@program
def coresets():
    x, _ = clusters(48, 0)
    return {"random": random_coreset(x, 7, seed=1)}
