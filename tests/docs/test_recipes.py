# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The recipes for other tools call them rightly, here with stand-ins for them."""

import sys
import types

import pytest
import torch

from tests.docs.test_pages import LINES
from tests.helpers.pages import DOCS, examples

pytestmark = pytest.mark.site

NUMBERS = {"loss", "nll", "kl", "kl_weight", "validation_nll", "epoch"}


@pytest.fixture
def recipe(monkeypatch):
    """Run a recipe with stand-ins for modules, by name; returns its scope."""

    def run(library, **modules):
        scope = {"__name__": library}
        exec(examples(DOCS / "recipes.md")[0], scope)
        for name, content in modules.items():
            module = types.ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        exec(LINES["recipes", library], scope)
        return scope

    return run


class Run:
    """Records what it is given, with its step; also a context manager, as runs and writers are."""

    def __init__(self, *args, **kwargs):
        self.logged, self.open = [], False

    def __enter__(self):
        self.open = True
        return self

    def __exit__(self, *error):
        self.open = False

    def log(self, numbers, step):
        assert self.open
        self.logged.append((step, dict(numbers)))

    def add_scalar(self, name, value, step):
        self.log({name: value}, step)


def checked(logged):
    """Each number of each of three epochs, at its step."""
    found = {}
    for step, numbers in logged:
        found.setdefault(step, {}).update(numbers)
    assert sorted(found) == [0, 1, 2]
    assert all(numbers.keys() == NUMBERS and numbers["epoch"] == step for step, numbers in found.items())


def test_a_summary_writer_gets_each_number(recipe):
    writers = []

    def made(*args):
        writers.append(Run())
        return writers[-1]

    recipe("tensorboard", **{"torch.utils.tensorboard": {"SummaryWriter": made}})
    checked(writers[0].logged)


def test_mlflow_gets_the_metrics_of_its_run(recipe):
    run = Run()

    def log_metrics(metrics, step):
        run.log(metrics, step)
        return run  # As MLflow does when it logs asynchronously; it must not stop the training.

    recipe("mlflow", mlflow={"set_tracking_uri": str, "start_run": lambda: run, "log_metrics": log_metrics})
    checked(run.logged)


def test_a_pruned_trial_stops_its_training(recipe):
    class TrialPruned(Exception):
        pass

    class Trial:
        def __init__(self, prune_at):
            self.prune_at, self.reports = prune_at, []

        def suggest_float(self, name, low, high, log):
            return 0.01

        def report(self, value, step):
            self.reports.append((step, value))

        def should_prune(self):
            return self.reports[-1][0] >= self.prune_at

    class Study:
        def __init__(self, pruner):
            self.results = []

        def optimize(self, objective, n_trials):
            for prune_at in (9, 1):
                trial = Trial(prune_at)
                try:
                    value = objective(trial)
                except TrialPruned:
                    value = None
                self.results.append((value, trial.reports))

    pruners = types.SimpleNamespace(MedianPruner=lambda n_startup_trials: None)
    scope = recipe("optuna", optuna={"TrialPruned": TrialPruned, "pruners": pruners, "create_study": Study})
    (value, reports), (pruned, stopped) = scope["study"].results
    assert value == min(value for _, value in reports)
    assert len(reports) == 3
    assert pruned is None
    assert [step for step, _ in stopped] == [0, 1]


def test_samples_of_a_laplace_object_are_those_of_its_network(recipe):
    class Laplace:
        """Draws that are the network itself."""

        def __init__(self, net, likelihood, subset_of_weights, hessian_structure):
            self.net = net

        def fit(self, loader):
            next(iter(loader))

        def sample(self, number):
            return torch.nn.utils.parameters_to_vector(self.net.parameters()).detach().expand(number, -1)

    scope = recipe("laplace", laplace={"Laplace": Laplace})
    x, _ = scope["held_out"]
    with torch.no_grad():
        torch.testing.assert_close(scope["draws"].samples[3], scope["trained"](x))
