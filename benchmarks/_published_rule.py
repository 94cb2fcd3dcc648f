# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The natural gradients of Shen et al. (2024), algorithm 1.

The paper is "Variational Learning is Effective for Large Deep Networks". The rule hardly moves widths from their first
values, so ``hess_init`` decides how well a network predicts.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from pyro_radial.distributions.moments import moments
from pyro_radial.infer.autoguide import AutoPerSite
from pyro_radial.infer.autoguide.per_site import LocScaleSite

#: The root mean square of a step of log(variance) is at most this.
LIMIT = 0.1
#: The share of a new value in the average of squared derivatives, to which that limit is relative.
SHARE = 0.05
#: Added to the root of that average.
TINY = 1e-12
#: The default for parameters without a posterior.
ADAM = partial(Adam, lr=1e-3)


class PublishedRule(Optimizer):
    r"""Train all normal and radial sites of a guide by the published rule, and other parameters by ``other_optim``.

    With m a mean, v a marginal variance and L the loss for all data, a step is

    .. math::
        \log v &\leftarrow \log v - (1 - \beta_2)\, \partial L / \partial \log \sigma, \\
        m &\leftarrow m - \mathrm{lr}\, v\, \overline{\nabla_m L},

    where the bar is an average with decay :math:`\beta_1`. Unlike the authors', it has the prior's gradient too.

    :param parameters: all parameters to train, as ``fit`` lists them.
    :param guide: a new guide that has its parameters. Its widths are set for ``hess_init``.
    :param num_data: the number of data.
    :param lr: the rate of means, in variances.
    :param hess_init: the curvature h of the loss per datum that widths start from: v = 1 / (N h + 1 / s^2) with N the
        number of data and s the prior's standard deviation.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        guide: AutoPerSite,
        num_data: int,
        lr: float,
        *,
        hess_init: float,
        beta1: float = 0.9,
        beta2: float = 0.99999,
        other_optim: Callable[[list[Tensor]], Optimizer] = ADAM,
    ) -> None:
        named_sites = guide.loc_scale_sites()
        _set_widths(guide, named_sites, num_data * hess_init)
        self.sites = list(named_sites.values())
        of_sites = [parameter for site in self.sites for parameter in (site.loc, site.scale)]
        super().__init__(of_sites, {"lr": lr, "beta1": beta1, "beta2": beta2})
        for site in self.sites:
            averages = {"average": torch.zeros_like(site.loc), "width_square": torch.zeros_like(site.scale)}
            self.state[site.loc] = {"steps": 0, **averages}
        others = [parameter for parameter in parameters if parameter not in set(of_sites)]
        self.other_optimizer = other_optim(others) if others else None
        if self.other_optimizer is not None:
            self.param_groups += self.other_optimizer.param_groups
            self._share_groups()

    def _share_groups(self) -> None:
        """Let the optimizer of other parameters use the groups and the state of this optimizer."""
        if self.other_optimizer is not None:
            self.other_optimizer.param_groups, self.other_optimizer.state = self.param_groups[1:], self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share_groups()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for site in self.sites:
            if site.loc.grad is not None and site.scale.grad is not None:
                self._update(site, site.loc.grad, site.scale.grad)
        if self.other_optimizer is not None:
            self.other_optimizer.step()

    def _update(self, site: LocScaleSite, loc_gradient: Tensor, scale_gradient: Tensor) -> None:
        group, state = self.param_groups[0], self.state[site.loc]
        state["steps"] += 1
        scale, by_log = site.constrained_scale()
        derivative = scale_gradient * by_log
        square = state["width_square"].lerp_(derivative.square(), SHARE)
        limit = LIMIT * (1.0 - (1.0 - SHARE) ** state["steps"]) ** 0.5
        fall = derivative * (limit / (square.sqrt() + TINY)).clamp(max=1.0 - group["beta2"])
        site.scale.addcmul_(fall, by_log, value=-0.5)
        variance = (scale / site.family.scale_of(site.site, 1.0)).square() * torch.exp(-fall)
        average = state["average"].lerp_(loc_gradient, 1.0 - group["beta1"])
        site.loc.sub_(variance * average * (group["lr"] / (1.0 - group["beta1"] ** state["steps"])))


def _set_widths(guide: AutoPerSite, sites: dict[str, LocScaleSite], curvature: float) -> None:
    """Set the widths to the precision of the prior and the curvature of all data."""
    stddevs = {}
    for name, site in sites.items():
        assert guide.prototype_trace is not None
        prior_stddev = moments(guide.prototype_trace.nodes[name]["fn"], site.site.transform).stddev
        assert prior_stddev is not None
        stddevs[name] = (prior_stddev**-2 + curvature) ** -0.5
    guide.set_stddevs(stddevs)
