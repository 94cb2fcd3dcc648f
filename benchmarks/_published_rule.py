# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The natural gradients of Shen et al. (2024), algorithm 1.

The paper is "Variational Learning is Effective for Large Deep Networks".
Saved results came from this rule when it was a part of the package. Its widths hardly move from their first values, so
``hess_init`` decides how well a network predicts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pyro.poutine as poutine
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pyro_radial import NaturalGradient
from pyro_radial._pyro.random_numbers import seeded
from pyro_radial.distributions.moments import moments
from pyro_radial.infer.autoguide import AutoPerSite
from pyro_radial.infer.loss.elbo import num_data_of
from pyro_radial.infer.optim.joint import DEFAULT_OPTIM, GuideOptim, rise_and_fall
from pyro_radial.infer.optim.natural_gradient import SiteState, by_log_scale
from pyro_radial.nn.bayesian_module import submodules
from pyro_radial.nn.modules import device_of, evaluating

#: The root mean square of a step of log(variance) is at most this.
LIMIT = 0.1
#: The share of a new value in the average of squared derivatives, to which that limit is relative.
SHARE = 0.05
#: Added to the root of that average.
TINY = 1e-12
#: A width whose logarithm has changed by less than this was not trained; the change is rounding.
ROUNDING = 1e-5


class PublishedRule(GuideOptim):
    r"""Train all normal and radial sites of a guide by the published rule, and other parameters by ``other_optim``.

    With m a mean, v a marginal variance and L the loss for all data, a step is

    .. math::
        \log v &\leftarrow \log v - (1 - \beta_2)\, \partial L / \partial \log \sigma, \\
        m &\leftarrow m - \mathrm{lr}\, v\, \overline{\nabla_m L},

    where the bar is an average with decay :math:`\beta_1`. Unlike the authors', it has the prior's gradient too.

    :param lr: the rate of means, in variances.
    :param hess_init: the curvature h of the loss per datum that widths start from: v = 1 / (N h + 1 / s^2) with N the
        number of data and s the prior's standard deviation. By default they start where the guide has them.
    """

    def __init__(
        self,
        lr: float,
        *,
        hess_init: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.99999,
        other_optim: Any = DEFAULT_OPTIM,
    ) -> None:
        self.lr, self.hess_init, self.beta1, self.beta2 = lr, hess_init, beta1, beta2
        self.other_optim = other_optim

    def optimizer(self, model: Any, guide: nn.Module, *args: Any, **kwargs: Any) -> "PublishedOptimizer":
        """Make the optimizer, and set widths that were never trained for ``hess_init``."""
        natural = NaturalGradient(other_optim=self.other_optim).optimizer(model, guide, *args, **kwargs)
        if self.hess_init is not None:
            _set_widths(self.hess_init, model, guide, *args, **kwargs)
        settings = {"lr": self.lr, "beta1": self.beta1, "beta2": self.beta2}
        return PublishedOptimizer(natural.sites, natural.other_optimizer, settings)

    def scheduler(self, optimizer: Optimizer, steps: int) -> LambdaLR:
        """Let rates rise for 5 % of the steps, then fall to zero along a cosine."""
        return rise_and_fall(optimizer, steps)


class PublishedOptimizer(Optimizer):
    """What :class:`PublishedRule` makes."""

    def __init__(self, sites: Sequence[SiteState], other_optimizer: Optimizer | None, settings: dict[str, Any]) -> None:
        super().__init__([parameter for site in sites for parameter in (site.loc, site.scale)], settings)
        self.sites, self.other_optimizer = sites, other_optimizer
        for site in sites:
            averages = {"average": site.average, "width_square": site.width_square}
            self.state[site.loc] = {"steps": 0, "width_steps": 0, **averages}
        if other_optimizer is not None:
            self.param_groups += other_optimizer.param_groups
            self._share_groups()

    def _share_groups(self) -> None:
        """Let the optimizer of other parameters use the groups and the state of this optimizer."""
        if self.other_optimizer is not None:
            self.other_optimizer.param_groups, self.other_optimizer.state = self.param_groups[1:], self.state

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share_groups()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for site in self.sites:
            self._update(site)
        if self.other_optimizer is not None:
            self.other_optimizer.step()
        return loss

    def _update(self, site: SiteState) -> None:
        group, state = self.param_groups[0], self.state[site.loc]
        scale = site.to_scale(site.scale)
        variance = (scale / site.per_stddev).square()
        if site.scale.grad is not None:
            state["width_steps"] += 1
            by_log = by_log_scale(site.to_scale, site.scale, scale)
            derivative = site.scale.grad * by_log / site.weights_per_scale
            square = state["width_square"].lerp_(derivative.square(), SHARE)
            limit = LIMIT * (1.0 - (1.0 - SHARE) ** state["width_steps"]) ** 0.5
            fall = derivative * (limit / (square.sqrt() + TINY)).clamp(max=1.0 - group["beta2"])
            site.scale.addcmul_(fall, by_log, value=-0.5)
            variance = variance * torch.exp(-fall)
        if site.loc.grad is not None:
            state["steps"] += 1
            average = state["average"].lerp_(site.loc.grad, 1.0 - group["beta1"])
            site.loc.sub_(variance * average * (group["lr"] / (1.0 - group["beta1"] ** state["steps"])))


def first_stddev(hess_init: float, num_data: int, prior_stddev: Any) -> Any:
    """The standard deviation of a weight at a curvature of each datum."""
    return (prior_stddev**-2 + num_data * hess_init) ** -0.5


def _set_widths(hess_init: float, model: Any, guide: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Set the widths that were never trained, from the prior's precision and the curvature of all data."""
    with evaluating(model, guide), torch.no_grad(), poutine.block(), seeded(0, device_of(guide, model)):
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    num_data = num_data_of(trace)
    assert num_data is not None
    for part in submodules(guide):
        if isinstance(part, AutoPerSite):
            changes, stddevs = part.scale_change(), {}
            for name, site in part.loc_scale_sites().items():
                prior_stddev = moments(trace.nodes[name]["fn"], site.site.transform).stddev
                if changes[name] < ROUNDING and prior_stddev is not None:
                    stddevs[name] = first_stddev(hess_init, num_data, prior_stddev)
            part.set_stddevs(stddevs)
