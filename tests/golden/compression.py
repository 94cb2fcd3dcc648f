# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Pruning: scores of units, cuts, the masked and the small network."""

import torch
from torch import nn

from pyro_radial import AutoRadialDirectional, TermsELBO
from pyro_radial.compression import cut_network, mean_network, unit_scores
from pyro_radial.compression.prune import evaluate_cut, nested_cuts
from pyro_radial.nn.priors import RadialDirectionalPrior
from tests.golden.losses import images
from tests.golden.programs import classifier, program, trained
from tests.helpers.chains import masked


@program
def pruning():
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2)
    )
    model = classifier(net, RadialDirectionalPrior("row", global_scale=0.1), num_data=6)
    guide = AutoRadialDirectional(model, init_mean_cosine=0.95, shared_concentration=False)
    x, y = images()
    trained(model, guide, (x, y), lr=0.1, epochs=3, loss=TermsELBO(strict_kl=True))
    plain, scores = mean_network(model.bnn, guide), unit_scores(guide)
    results = {"scores": dict(scores.outputs), "mean network": plain(x)}
    cuts = nested_cuts(scores, 6, per_layer=False)
    results["kept"] = [dict(cut.outputs) for cut in cuts]

    def loss(small):
        return nn.functional.cross_entropy(small(x), y).item()

    records = [evaluate_cut(plain, cut, loss, (1, 6, 6)) for cut in cuts]
    results["records"] = [[record.loss, record.weights, record.flops] for record in records]
    results["masked"] = masked(plain, cuts[3])(x)
    results["small"] = cut_network(plain, cuts[3])(x)
    return results
