# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Training: ``fit`` with its options, interrupted and resumed, and compiled steps."""

import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, CompiledSVI, FitOptions, TermsELBO
from tests.golden.programs import classification, classifier, program, trained, values


def result_of(result, guide):
    # Times differ from run to run.
    history = [{key: value for key, value in row.items() if "second" not in key} for row in result.history]
    return {"history": history, "best": result.best_epoch, "parameters": values(guide)}


@program
def training():
    model = classifier()
    guide = AutoRadial(model, init_stddev=0.05)
    return result_of(trained(model, guide, classification()), guide)


@program
def training_with_every_option():
    model = classifier()
    guide = AutoRadial(model, init_stddev=0.05)
    options = {
        "options": FitOptions(mean_only_epochs=1, accumulate=2, clip_norm=1.0, patience=2),
        "epochs": 5,
        "validation": classification(10, seed=8),
        "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        "loss": TermsELBO(num_particles=2, kl_weight=lambda step: min(1.0, step / 10)),
    }
    return result_of(trained(model, guide, classification(), lr=0.3, **options), guide)


class _Interrupted(Exception):
    pass


def problem():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 2))
    model = classifier(net)
    return model, AutoRadial(model, init_stddev=0.05)


def interrupt(model, at):
    """Raise an error at the given call of a model."""
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1
        if calls == at:
            raise _Interrupted

    return model.register_forward_pre_hook(count)


@program
def a_resumed_run():
    whole_model, whole = problem()
    undisturbed = trained(whole_model, whole, classification(), epochs=3)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = {"epochs": 3, "checkpoint": Path(folder) / "run.pt"}
        checkpoint["options"] = FitOptions(checkpoint_every=2)
        model, guide = problem()
        interrupt(model, 8)
        interrupted = False
        try:
            trained(model, guide, classification(), **checkpoint)
        except _Interrupted:
            interrupted = True
        model, guide = problem()
        resumed = trained(model, guide, classification(), **checkpoint)
    same = all(torch.equal(value, values(guide)[name]) for name, value in values(whole).items())
    return {
        "undisturbed": result_of(undisturbed, whole),
        "resumed": result_of(resumed, guide),
        "was interrupted": interrupted,
        "ends the same": same,
    }


@program
def compiled_steps():
    results = {}
    for guide_type in (AutoRadial, AutoMeanField):
        torch.manual_seed(6)
        model = classifier()
        guide = guide_type(model, init_stddev=0.05)
        optim = partial(torch.optim.Adam, lr=0.05)
        # The recorded graph, run without torch's compiler, which takes seconds.
        svi = CompiledSVI(model, guide, optim, TermsELBO(), compile=False)
        data = classification()
        results[guide_type.__name__] = {
            "losses": [svi.step(*data) for _ in range(4)],
            "other rows": svi.step(*classification(10)),
            "evaluated": svi.evaluate_loss(*data),
            "parameters": values(guide),
        }
    return results
