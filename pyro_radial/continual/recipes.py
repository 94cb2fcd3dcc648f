# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Measured settings of a chain and its training on a stream of tasks; the page on chains has what they reach."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import pyro
import pyro.distributions as dist
from torch import nn

from pyro_radial.continual.coresets import Coreset
from pyro_radial.continual.prior_chain import PriorChain
from pyro_radial.infer.autoguide import AutoMeanField
from pyro_radial.infer.loss.elbo import TermsELBO
from pyro_radial.nn.bayesian_module import BayesianModule
from pyro_radial.nn.likelihoods import Categorical
from pyro_radial.nn.supervised import SupervisedModel

__all__ = ["functions", "nothing_kept"]


class Rates(NamedTuple):
    """The settings of Amsgrad for a parameter of a guide, by its name."""

    means: float
    scales: float

    def __call__(self, name: str) -> dict[str, Any]:
        """Return them as Pyro's optimizers ask."""
        return {"lr": self.scales if ".scales." in name else self.means, "amsgrad": True}


@dataclass(frozen=True)
class Recipe:
    """The settings of a mean-field chain and of its training; ``dataclasses.replace`` changes some of them.

    :param int epochs: passes over the data of each task.
    :param int batch_size: rows of a step.
    :param int fewest_steps: steps that a task takes at least, by smaller batches if it has few rows; see
        :func:`~pyro_radial.continual.train_stream`. No measured task has fewer.
    :param float learning_rate: learning rate of means, which falls to zero within each task.
    :param float scale_rate: learning rate of scales, which falls too; None for that of means.
    :param float init_stddev: standard deviation of weights at the start of the first task.
    :param float prior_stddev: standard deviation of the first prior.
    :param str noise: "local" to draw the outputs of layers, or "weights" to draw one network for a batch.
    :param float first_kl: weight of the KL in the first task.
    :param float later_kl: weight of the KL in later tasks.
    :param float weight: how often the data of a task count in the next prior.
    :param Coreset coreset: what is kept of each task.
    """

    epochs: int
    batch_size: int = 512
    fewest_steps: int | None = 400
    learning_rate: float = 3e-3
    scale_rate: float | None = 1e-2
    init_stddev: float = 0.03
    prior_stddev: float = 0.1
    noise: Literal["local", "weights"] = "local"
    first_kl: float = 0.1
    later_kl: float = 1.0
    weight: float = 1.0
    coreset: Coreset | None = None

    def chain(self, net: nn.Module) -> PriorChain:
        """Make the chain of a network that classifies.

        :param nn.Module net: returns logits; with a head for each task, a :class:`~pyro_radial.nn.MultiHead`. With ReLU
            units, initialize weights by ``nn.init.kaiming_normal_(weight, nonlinearity="relu")`` and biases at zero.
        :returns: the chain.
        """
        bnn = BayesianModule(net, prior=dist.Normal(0.0, self.prior_stddev))
        return PriorChain(
            SupervisedModel(bnn, Categorical(), local_reparameterization=self.noise == "local"),
            weight=self.weight,
        )

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``train_stream(chain, stream, **options)``."""
        scale_rate = self.learning_rate if self.scale_rate is None else self.scale_rate
        return {
            "guide": partial(
                PriorChain.guide, guide_type=AutoMeanField, init_stddev=self.init_stddev
            ),
            "coreset": self.coreset,
            "first_task": {"loss": TermsELBO(strict_kl=True, kl_weight=self.first_kl)},
            "loss": TermsELBO(strict_kl=True, kl_weight=self.later_kl),
            "optim": pyro.optim.Adam(Rates(self.learning_rate, scale_rate)),  # type: ignore[attr-defined]
            "scheduler": "cosine",
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "fewest_steps": self.fewest_steps,
        }


def nothing_kept(*, heads: bool = False) -> Recipe:
    """Return the settings that remember most with nothing kept of earlier tasks.

    With one head for all tasks the data of each task but the first count twice in the next prior. With a head for each
    task, functions under earlier heads are held at up to 2,000 inputs of the task in training; the KL of weights is off
    after the first task, so these functions alone remember.

    :param bool heads: whether each task has a head of its own.
    :returns: the settings.

    Example::

        >>> from pyro_radial.continual import recipes
        >>> recipe = recipes.nothing_kept()
        >>> chain = recipe.chain(nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 2)))
        >>> chain.weight, sorted(recipe.options)[:3]
        (2.0, ['batch_size', 'coreset', 'epochs'])
    """
    if heads:
        return _with_heads(Coreset(2000, use="functions", weight=1.0, inputs="current"))
    return Recipe(epochs=20, weight=2.0)


def functions(size: int = 200, *, heads: bool = False) -> Recipe:
    """Return the settings that remember most with some inputs of each task kept, without labels.

    The network's functions are held at these inputs. If tasks bring new classes under one head, take the settings with
    heads, and ten epochs for the 12,000 rows of a measured task.

    :param int size: number of inputs to keep of each task.
    :param bool heads: whether each task has a head of its own.
    :returns: the settings.

    Example::

        >>> from dataclasses import replace
        >>> from pyro_radial.continual import recipes
        >>> replace(recipes.functions(200, heads=True), epochs=10).coreset.weight
        20.0
    """
    if heads:
        return _with_heads(Coreset(size, use="functions", weight=20.0))
    return Recipe(epochs=8, later_kl=0.3, coreset=Coreset(size, use="functions", weight=10.0))


def _with_heads(coreset: Coreset) -> Recipe:
    """Return settings with noise in the weights, a wide first prior, and no KL of weights after the first task."""
    return Recipe(
        epochs=60,
        batch_size=256,
        learning_rate=1e-3,
        scale_rate=None,
        init_stddev=0.01,
        prior_stddev=1.0,
        noise="weights",
        first_kl=1.0,
        later_kl=0.0,
        coreset=coreset,
    )
