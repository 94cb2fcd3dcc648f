# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The recipes are the settings of the results that they quote."""

import json
from dataclasses import replace
from math import ceil
from pathlib import Path

import pyro
import pytest
import torch
from torch import nn

from benchmarks.continual import permuted_mnist, published_settings
from benchmarks.continual._cells import keeping_of
from benchmarks.continual._chains import Tuned
from pyro_radial.continual import Coreset, PriorChain, Task, TaskStream, recipes, train_stream
from pyro_radial.nn import MultiHead
from tests.helpers.streams import clusters, stream

#: A recipe, the results, the line, what is kept, and the rows that a task of a test run is learned from.
QUOTED = {
    "nothing kept": (recipes.nothing_kept(), published_settings, "permuted MNIST, nothing kept", 60_000),
    "functions": (recipes.functions(), permuted_mnist, None, 53_800),
    "nothing kept, heads": (
        recipes.nothing_kept(heads=True),
        published_settings,
        "split Fashion-MNIST, a head a task, nothing kept",
        12_000,
    ),
    "functions, heads": (
        recipes.functions(heads=True),
        published_settings,
        "split MNIST, a head a task, 200 inputs kept",
        12_000,
    ),
    "functions, new classes": (
        replace(recipes.functions(heads=True), epochs=10),
        published_settings,
        "split Fashion-MNIST, ten outputs for all tasks, 200 inputs kept",
        12_000,
    ),
}


def quoted(module, line, recipe):
    """The rows of results of a mean-field chain on test data, with functions held or not."""
    rows = json.loads(Path(module.__file__).with_suffix(".json").read_text())["rows"]
    use = "nothing" if recipe.coreset is None else "functions"
    keys = {"method": "mean field", "measured_on": "test", "use": use} | ({"line": line} if line else {})
    return [row for row in rows if keys.items() <= row.items()]


def compared(options):
    """Epochs, batches, learning rates by name, and what the losses weigh."""
    losses = [options["loss"], options["first_task"]["loss"]]
    weights = [(type(loss), loss.kl_weight, loss.strict_kl, loss.num_particles) for loss in losses]
    return options["epochs"], options["batch_size"], options["optim"].pt_optim_args, weights


@pytest.mark.parametrize(("recipe", "module", "line", "rows"), QUOTED.values(), ids=QUOTED.keys())
def test_a_recipe_has_the_settings_of_the_rows_that_it_is_quoted_for(recipe, module, line, rows):
    found = quoted(module, line, recipe)
    assert len(found) >= 5
    for row in found:
        # A line has its own size of a batch.
        batch_size = min(row["batch_size"], module.LINES[line].batch_size) if line else row["batch_size"]
        setting = Tuned(**{name: row.get(name, default) for name, default in vars(Tuned(1)).items()})
        steps = recipe.epochs * ceil(rows / batch_size)
        setting = replace(setting, batch_size=batch_size, decay_over=steps)
        theirs = setting.training("mean field", compile=False) | {"coreset": keeping_of(row).options()}
        ours = recipe.options
        assert compared(ours) == compared(theirs)
        assert ours["coreset"] == theirs["coreset"]
        # Along a cosine to zero over the steps of a task.
        assert ours["scheduler"] == "cosine"
        assert theirs["scheduler"].func is torch.optim.lr_scheduler.CosineAnnealingLR
        assert theirs["options"].scheduler_interval == "step"
        assert (row["noise"], row["prior_stddev"]) == (recipe.noise, recipe.prior_stddev)
        assert row.get("past_weight", 1.0) == recipe.weight
        if not line:
            assert row["decay_over"] == steps


def test_a_chain_has_what_the_recipe_says():
    for recipe in (recipes.nothing_kept(), recipes.functions(heads=True)):
        pyro.set_rng_seed(0)
        one = recipe.chain(nn.Linear(4, 4))
        assert isinstance(one, PriorChain)
        assert (one.form, one.weight) == ("normal", recipe.weight)
        assert one.model.bnn.prior.scale == recipe.prior_stddev
        assert one.model.local_reparameterization == (recipe.noise == "local")
        guide = recipe.options["guide"](one)
        guide(*clusters(8, 0))
        for q in guide.posterior().values():
            torch.testing.assert_close(q.stddev, torch.full_like(q.mean, recipe.init_stddev))


@pytest.mark.parametrize(("heads", "kept"), [(False, True), (True, False)])
def test_a_stream_is_learned_by_a_recipe(heads, kept):
    recipe = recipes.functions(6, heads=heads) if kept else recipes.nothing_kept(heads=heads)
    # With heads and nothing kept, functions are held at all 24 rows, not at 2,000.
    recipe = replace(recipe, epochs=12, batch_size=8, fewest_steps=None, learning_rate=0.1)
    torch.manual_seed(0)
    net = MultiHead(nn.Linear(4, 8), [nn.Linear(8, 2) for _ in range(2)]) if heads else nn.Linear(4, 4)
    test = clusters(16, 2)
    alike = TaskStream.of([Task(str(seed), clusters(24, seed), test) for seed in (0, 1)], num_outputs=4)
    tasks = stream() if heads else alike
    matrix = train_stream(recipe.chain(net), tasks, progress=False, **recipe.options)
    assert matrix.learned.min() == 1.0


def test_the_size_is_that_of_the_coreset():
    assert recipes.functions(30).coreset == Coreset(30, use="functions", weight=10.0)
