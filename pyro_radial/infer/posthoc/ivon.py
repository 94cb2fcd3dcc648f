# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Training by IVON, an optimizer with a diagonal normal posterior as its state."""

import importlib
from typing import Any

import pyro.poutine as poutine
from torch import Tensor, nn
from torch.distributions import Normal
from torch.optim.lr_scheduler import CosineAnnealingLR

from pyro_radial._pyro.checks import non_negative_integer, positive_count, positive_float
from pyro_radial._pyro.random_numbers import seeded
from pyro_radial.distributions.moments import moments
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.infer.autoguide import AutoMeanField
from pyro_radial.infer.training.data import Batches, Rows, device_of, dtype_of
from pyro_radial.nn.supervised import SupervisedModel

__all__ = ["fit_ivon"]


def fit_ivon(
    model: SupervisedModel,
    data: Any,
    *,
    epochs: int,
    batch_size: int = 128,
    lr: float = 0.1,
    hess_init: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99999,
    mc_samples: int = 1,
    seed: int = 0,
) -> AutoMeanField:
    r"""Train a mean-field guide by IVON, an optimizer with a diagonal normal posterior as its state.

    IVON minimizes the negative ELBO per datum. With N rows and a prior :math:`N(0, s^2)` its weight decay is
    :math:`\delta = 1 / (N s^2)`, and the posterior is

    .. math:: N\big(m, (N (h + \delta))^{-1}\big)

    for running averages m of the weights and h of the diagonal Hessian. Training starts at the network's own weights;
    the learning rate decays to zero along a cosine. ``pip install 'pyro-radial[ivon]'`` installs the authors' package
    ``ivon-opt``, with the license GPL 3 or later.

    Source: Shen, Daheim, Cong, Nickl, Marconi, Bazan, Yokota, Gurevych, Cremers, Khan and Möllenhoff (2024),
    "Variational Learning is Effective for Large Deep Networks", algorithm 1.

    :param SupervisedModel model: a model with a zero-mean normal prior of one variance at each site.
    :param data: training rows, in any form that :func:`~pyro_radial.fit` takes.
    :param int epochs: the number of passes over the rows.
    :param int batch_size: rows in a step.
    :param float lr: the initial rate in the authors' units: ``hess_init`` and weight decay multiply it.
    :param float hess_init: the initial h.
    :param float beta1: the fraction of the gradients' average that a step keeps.
    :param float beta2: the fraction of the Hessian's average that a step keeps.
    :param int mc_samples: draws of the weights in a step.
    :param int seed: the seed of batches and draws; the global random state is restored.
    :returns: a guide for :func:`~pyro_radial.predict`.
    :raises ImportError: without ``ivon-opt``.
    :raises ValueError: for an argument out of range, another model, a site with another prior or with positive values,
        parameters besides the sites, and a run that diverges.

    Example::

        >>> import torch
        >>> from pyro_radial import BayesianModule, predict
        >>> from pyro_radial.nn import likelihoods
        >>> model = SupervisedModel(BayesianModule(nn.Linear(4, 3)), likelihoods.Categorical())
        >>> x, y = torch.randn(50, 4), torch.randint(3, (50,))
        >>> guide = fit_ivon(model, (x, y), epochs=2)  # doctest: +SKIP
        >>> predict(model, guide, x).mean.shape  # doctest: +SKIP
        torch.Size([50, 3])
    """
    for name, count in (("epochs", epochs), ("batch_size", batch_size), ("mc_samples", mc_samples)):
        positive_count(name, count)
    for name, number in (("lr", lr), ("hess_init", hess_init)):
        positive_float(name, number)
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{name} must be at least zero and less than one, got {beta!r}")
    non_negative_integer("seed", seed)
    ivon = _package()
    if not isinstance(model, SupervisedModel):
        raise ValueError(f"model must be a SupervisedModel, got {type(model).__name__}")
    rows = Rows(data, "data", dtype_of(model))
    batches = Batches(rows, batch_size, seed, device_of(model))
    model.likelihood.train_on(len(rows))
    guide = AutoMeanField(model)
    guide.setup(*batches.first_rows())
    means = guide.loc_scale_means()
    precisions = _prior_precisions(model, guide, means)
    weights = {name: nn.Parameter(mean) for name, mean in means.items()}
    groups = [{"params": [weights[n]], "weight_decay": precision / len(rows)} for n, precision in precisions.items()]
    optimizer = ivon.IVON(groups, lr, len(rows), hess_init=hess_init, beta1=beta1, beta2=beta2, mc_samples=mc_samples)
    _train(model, optimizer, weights, batches, epochs, mc_samples, seed)
    guide.load_means(weights)
    groups = optimizer.param_groups
    guide.set_stddevs({name: _stddev(group, weights[name]) for name, group in zip(weights, groups, strict=True)})
    return guide


def _package() -> Any:
    try:
        return importlib.import_module("ivon")
    except ImportError as error:
        raise ImportError("fit_ivon needs ivon-opt: pip install 'pyro-radial[ivon]'") from error


def _prior_precisions(model: SupervisedModel, guide: AutoMeanField, means: dict[str, Tensor]) -> dict[str, float]:
    """One over the prior's variance, by site."""
    besides = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    besides += [name for name in guide.latent_sites if name not in means]
    if besides:
        raise ValueError(
            f"model must have no parameters besides real-valued sites, got {besides}; "
            "BayesianModule(net, select=lambda name, parameter: True) makes all of a network's sites"
        )
    found = {}
    assert guide.prototype_trace is not None
    for name, site in guide.prototype_trace.iter_stochastic_nodes():
        mean, stddev = moments(site["fn"])
        fits = isinstance(leaf(site["fn"]), Normal) and mean is not None and stddev is not None
        if not fits or bool((mean != 0).any()) or bool((stddev != stddev.flatten()[0]).any()):  # type: ignore[union-attr]
            raise ValueError(
                f"site '{name}' must have a zero-mean normal prior of one variance, got "
                f"{type(leaf(site['fn'])).__name__}"
            )
        found[name] = float(stddev.flatten()[0]) ** -2  # type: ignore[union-attr]
    return found


def _train(
    model: SupervisedModel,
    optimizer: Any,
    weights: dict[str, nn.Parameter],
    batches: Batches,
    epochs: int,
    mc_samples: int,
    seed: int,
) -> None:
    scheduler = CosineAnnealingLR(optimizer, epochs * batches.per_epoch)
    mode = model.training
    model.train()
    try:
        with seeded(seed, batches.device), poutine.block():
            for epoch in range(epochs):
                for number in range(batches.per_epoch):
                    x, y = batches.get(epoch, number)
                    for _ in range(mc_samples):
                        with optimizer.sampled_params(train=True):
                            optimizer.zero_grad()
                            _nll(model, weights, x, y).backward()
                    optimizer.step()
                    scheduler.step()
                _check_finite(weights)
    except ValueError as error:
        _check_finite(weights, error)
        raise
    finally:
        model.train(mode)


def _check_finite(weights: dict[str, nn.Parameter], cause: Exception | None = None) -> None:
    for name, weight in weights.items():
        if not bool(weight.isfinite().all()):
            raise ValueError(f"lr must be smaller, because site '{name}' diverged") from cause


def _nll(model: SupervisedModel, weights: dict[str, nn.Parameter], x: Any, y: Any) -> Tensor:
    """The mean negative log-likelihood of a batch at these weights, without the scale N/B."""
    target: Any = poutine.trace(poutine.condition(model, data=dict(weights))).get_trace(x, y).nodes["y"]
    return -target["fn"].log_prob(target["value"]).mean()


def _stddev(group: Any, weight: Tensor) -> Tensor:
    return (group["ess"] * (group["hess"] + group["weight_decay"])).rsqrt().reshape(weight.shape)
