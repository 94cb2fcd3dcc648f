# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Pruning: scores of weights, the plain network, the channels that go, and the small network."""

import torch
from torch import nn

from pyro_radial import AutoRadialDirectional, TermsELBO
from pyro_radial.compression import mean_network, prune
from pyro_radial.compression.scores import tensor_scores
from pyro_radial.nn.priors import RadialDirectionalPrior
from tests.golden.losses import images
from tests.golden.programs import classifier, program, trained


@program
def pruned_network():
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)
    )
    model = classifier(net, RadialDirectionalPrior("row", global_scale=0.1), num_data=6)
    guide = AutoRadialDirectional(model, init_mean_cosine=0.95, shared_concentration=False)
    x, y = images()
    trained(model, guide, (x, y), lr=0.1, epochs=3, loss=TermsELBO(strict_kl=True))
    pruned = prune(model, guide, (x, y), 100.0, num_cuts=6)
    return {
        "scores": tensor_scores(guide).rows,
        "mean network": mean_network(model.bnn, guide)(x),
        "removed": [{name: torch.tensor(channels) for name, channels in size.removed.items()} for size in pruned.path],
        "sizes": [[size.error, size.weights, size.flops] for size in pruned.path],
        "small": pruned.network(x),
    }
