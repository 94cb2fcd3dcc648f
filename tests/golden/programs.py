# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The table of programs, and the small problems that they share."""

import importlib
from collections.abc import Callable
from contextlib import contextmanager

import pyro
import pyro.distributions as dist
import torch
from torch import nn
from torch.distributions import Distribution

from pyro_radial import BayesianModule, SupervisedModel, TermsELBO, fit
from pyro_radial.nn import likelihoods

FILES = (
    "chains",
    "compression",
    "distributions",
    "functional",
    "guides",
    "losses",
    "models",
    "posthoc",
    "predictions",
    "training",
    "uncertainty",
)

#: A program returns tensors, numbers, or lists and dictionaries of these.
Program = Callable[[], dict]

PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Enter a function in the table."""
    PROGRAMS[function.__name__] = function
    return function


def all_programs() -> dict[str, Program]:
    """Return every program by its name."""
    for file in FILES:
        importlib.import_module(f"tests.golden.{file}")
    return dict(sorted(PROGRAMS.items()))


@contextmanager
def double_precision():
    """Compute in double precision, on one thread, from seed 0 and without parameters of other programs."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    Distribution.set_default_validate_args(True)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        pyro.clear_param_store()


def run(function: Program) -> dict[str, torch.Tensor]:
    """Run a program and return its results as one flat dictionary of tensors."""
    with double_precision():
        return flat(function())


def flat(results, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return nested results as one dictionary of tensors."""
    if isinstance(results, dict):
        parts = results.items()
    elif isinstance(results, list | tuple):
        parts = enumerate(results)
    else:
        return {prefix: torch.as_tensor(results).detach().clone()}
    return {
        name: value
        for key, part in parts
        for name, value in flat(part, f"{prefix}/{key}" if prefix else str(key)).items()
    }


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classification(rows: int = 24, features: int = 3, classes: int = 2, seed: int = 3):
    """Return inputs and labels."""
    x = torch.randn(rows, features, generator=generator(seed))
    return x, (x.sum(-1) + 0.5 * x[:, 0] > 0).long() + (classes - 2) * (x[:, 1] > 0).long()


def regression(rows: int = 16, seed: int = 4):
    """Return inputs and targets in one dimension."""
    x = torch.rand(rows, 1, generator=generator(seed)) * 4 - 2
    return x, torch.sin(2 * x) + 0.1 * torch.randn(rows, 1, generator=generator(seed + 1))


#: Not the package's default, so that a program keeps its results when that changes.
NORMAL_PRIOR = dist.Normal(0.0, 1.0)


def network(inputs: int = 3, hidden: int = 5, outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def classifier(net: nn.Module | None = None, prior=None, num_data: int | None = 24, **options) -> SupervisedModel:
    bnn = BayesianModule(network() if net is None else net, NORMAL_PRIOR if prior is None else prior)
    return SupervisedModel(bnn, likelihoods.Categorical(num_data=num_data), **options)


def regressor(hidden: int = 8, num_data: int = 16, scale: float = 0.2, **options) -> SupervisedModel:
    likelihood = likelihoods.Gaussian(num_data=num_data, scale=scale)
    return SupervisedModel(BayesianModule(network(1, hidden, 1), NORMAL_PRIOR), likelihood, **options)


def loss_and_gradients(loss, model, guide, *args) -> dict:
    """Return one loss, its gradients, and the terms of a loss that has them."""
    guide(*args)
    pyro.set_rng_seed(11)
    parameters = named_parameters(model, guide)
    for parameter in parameters.values():
        parameter.grad = None
    value = loss.differentiable_loss(model, guide, *args)
    value.backward()
    results = {"loss": value, "gradients": {name: p.grad for name, p in parameters.items() if p.grad is not None}}
    if isinstance(loss, TermsELBO):
        results["nll"] = loss.terms.nll_by_site
        results["kl"] = loss.terms.kl_by_site
    return results


def named_parameters(model, guide) -> dict[str, nn.Parameter]:
    modules = {"model": model, "guide": guide}
    return {
        f"{owner}.{name}": parameter
        for owner, module in modules.items()
        if isinstance(module, nn.Module)
        for name, parameter in module.named_parameters()
    }


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a module has learned."""
    return dict(module.named_parameters())


def trained(model, guide, data, *, lr: float = 0.02, **settings):
    """Train with ``fit`` on batches of six rows, for two epochs unless told otherwise."""
    settings = {"epochs": 2, "batch_size": 6, "seed": 5, "progress": False, **settings}
    settings.setdefault("optim", lambda parameters: torch.optim.Adam(parameters, lr=lr))
    return fit(model, guide, data, **settings)
