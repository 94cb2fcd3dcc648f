# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The functions of a guide in training: the model linearized at the means of the guide's sites."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

import pyro.poutine as poutine
import torch
from pyro.distributions import Delta
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal, MultivariateNormal, Normal, biject_to

from pyro_radial._pyro.compat import is_capturing, is_subsample
from pyro_radial._pyro.types import Guide, Message, Node
from pyro_radial.distributions.constraints import is_real
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.infer.loss.elbo import Run
from pyro_radial.infer.loss.site_kl import is_auxiliary, own_distribution
from pyro_radial.nn.linearized.linearization import CovarianceBlock, Linearization, Structure
from pyro_radial.nn.linearized.site_moments import moments_of_site
from pyro_radial.nn.modules import evaluating


class GuideProcess:
    """The moments of function values under a guide, differentiable in its parameters.

    The model runs in evaluation mode, so it drops no units and does not change running statistics.
    """

    def __init__(
        self, run: Run, function_site: str, structures: dict[tuple[object, ...], Structure]
    ) -> None:
        mean: dict[str, Tensor] = {}
        blocks: list[CovarianceBlock] = []
        for means, block in _joint_posteriors(run.model_trace, run.guide_trace):
            mean |= means
            blocks.append(block)
        for name, site in run.model_trace.iter_stochastic_nodes():
            if name in mean or is_subsample(site):
                continue
            distribution = _posterior(name, site, run.guide_trace)
            moments = None if distribution is None else moments_of_site(name, distribution)
            if moments is not None:
                mean[name], block = moments
                blocks.append(block)
        self.sites_with_moments = frozenset(mean)
        self._model = run.model_in_full_precision
        self._linearization = Linearization(self._model, mean, blocks, function_site, structures)

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each function value, ``[N, O]``; the sites it depends on must have moments."""
        with evaluating(self._model):
            return self._linearization.marginals(x)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean ``[N, O]`` and covariances over points of each output, ``[O, N, N]``, in float64."""
        with evaluating(self._model):
            return self._linearization.moments(x)

    def sites(self, x: Tensor) -> frozenset[str]:
        """Return the sites that the function depends on."""
        with evaluating(self._model):
            return frozenset(self._linearization.structure(x).sites)


def _posterior(name: str, site: Node, guide_trace: poutine.Trace) -> Any:
    """Return the distribution of a site in a guide, before a plate of particles; None if it is unknown."""
    if name not in guide_trace:
        return None
    distribution = own_distribution(guide_trace.nodes[name])
    if not isinstance(leaf(distribution), Delta):
        return distribution
    # Pyro's AutoNormal draws the value at an auxiliary site first.
    unconstrained = guide_trace.nodes.get(f"{name}_unconstrained")
    if unconstrained is not None:
        return own_distribution(unconstrained) if is_real(site["fn"].support) else None
    # A Delta is a point unless its value may be computed from a draw.
    is_drawn = any(is_auxiliary(node) for _, node in guide_trace.iter_stochastic_nodes())
    return None if is_drawn else distribution


class _Vector(NamedTuple):
    """A normal vector with mean ``[P]``, variances ``[P]`` and a factor ``[P, R]`` or none, and draws of it."""

    mean: Tensor
    variance: Tensor
    factor: Tensor | None
    draws: Tensor


def _joint_posteriors(
    model_trace: poutine.Trace, guide_trace: poutine.Trace
) -> Iterator[tuple[dict[str, Tensor], CovarianceBlock]]:
    """Yield the means of sites that a guide draws together, by name, and their covariance.

    A guide such as Pyro's ``AutoMultivariateNormal`` draws one normal vector at an auxiliary site and then puts its
    elements, in order, at the other sites. Constrained sites have no moments here.
    """
    sites = dict[str, Node](guide_trace.iter_stochastic_nodes())
    order = list(sites)
    auxiliary = [name for name, site in sites.items() if is_auxiliary(site)]
    for name in auxiliary:
        vector = _vector(sites[name])
        following = takewhile(lambda site: site not in auxiliary, order[order.index(name) + 1 :])
        if vector is not None:
            slices = _slices_by_site(vector, following, sites, model_trace)
            if slices:
                yield from _moments_by_site(vector, slices, model_trace)


def _vector(site: Node) -> _Vector | None:
    """Return the vector that an auxiliary site draws, or None if it draws something else."""
    distribution: Any = own_distribution(site)
    if len(distribution.event_shape) != 1 or distribution.batch_shape.numel() != 1:
        return None
    base: Any = leaf(distribution)
    (size,) = distribution.event_shape
    factor: Tensor | None = None
    if isinstance(base, LowRankMultivariateNormal):
        variance = base.cov_diag
        factor = base.cov_factor.reshape(size, -1)
    elif isinstance(base, MultivariateNormal):
        variance = torch.zeros_like(base.loc)
        factor = base.scale_tril.reshape(size, -1)
    elif isinstance(base, Normal):
        variance = base.variance
    else:
        return None
    return _Vector(
        base.loc.reshape(size),
        variance.reshape(size),
        factor,
        draws=site["value"].reshape(-1, size),
    )


def _slices_by_site(
    vector: _Vector, names: Iterable[str], sites: dict[str, Node], model_trace: poutine.Trace
) -> dict[str, slice]:
    """Return, by site, which elements of the vector are the site's value; sites that change them are left out."""
    slices = {}
    start = 0
    for name in names:
        if name not in model_trace or not isinstance(leaf(own_distribution(sites[name])), Delta):
            continue
        prior: Any = model_trace.nodes[name]["fn"]
        free = biject_to(prior.support).inv(sites[name]["value"]).reshape(len(vector.draws), -1)
        elements = slice(start, start + free.shape[-1])
        # A graph that is being captured has no values; the runs before it were checked.
        if is_real(prior.support) and (
            is_capturing() or torch.equal(free, vector.draws[:, elements].to(free))
        ):
            slices[name] = elements
        start = elements.stop
    return slices


def _moments_by_site(
    vector: _Vector, slices: dict[str, slice], model_trace: poutine.Trace
) -> Iterator[tuple[dict[str, Tensor], CovarianceBlock]]:
    """Yield the moments of all sites together, or of each by itself if they are independent."""
    like: Any = model_trace.nodes[next(iter(slices))]["value"]
    factor = None if vector.factor is None else vector.factor.to(like.dtype)
    vector = vector._replace(
        mean=vector.mean.to(like.dtype), variance=vector.variance.to(like.dtype), factor=factor
    )
    means = {}
    for name, elements in slices.items():
        prior: Any = own_distribution(model_trace.nodes[name])
        means[name] = vector.mean[elements].reshape(prior.batch_shape + prior.event_shape)
    if vector.factor is None:
        for name, elements in slices.items():
            variance = vector.variance[elements].reshape(means[name].shape)
            yield {name: means[name]}, CovarianceBlock((name,), variance)
        return
    variance = torch.cat([vector.variance[elements] for elements in slices.values()])
    factor = torch.cat([vector.factor[elements] for elements in slices.values()])
    yield means, CovarianceBlock(tuple(slices), variance, factor=factor)


def sites_led_to(
    guide: Guide, auxiliary: Iterable[str], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, set[str]]:
    """Find by a gradient, for each auxiliary site of a guide, the other latent sites that depend on its value."""
    handler = _AddZeros(auxiliary)
    led_to: dict[str, set[str]] = {name: set() for name in handler.names}
    with torch.enable_grad():
        with poutine.block(), handler:
            trace = poutine.trace(guide).get_trace(*args, **kwargs)
        for name, site in dict[str, Node](trace.iter_stochastic_nodes()).items():
            if name in handler.names or not handler.zeros or not site["value"].requires_grad:
                continue
            # The graphs of two sites may have nodes in common.
            gradients = torch.autograd.grad(
                site["value"].sum(),
                list(handler.zeros.values()),
                retain_graph=True,
                allow_unused=True,
            )
            for source, gradient in zip(handler.zeros, gradients, strict=True):
                if gradient is not None:
                    led_to[source].add(name)
    return led_to


class _AddZeros(Messenger):
    """Adds zeros to the values of some sites, to differentiate in."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = frozenset(names)
        self.zeros: dict[str, Tensor] = {}

    def _pyro_post_sample(self, msg: Message) -> None:
        name = msg["name"]
        value = msg["value"]
        if name in self.names and value.is_floating_point():
            self.zeros[name] = torch.zeros_like(value, requires_grad=True)
            msg["value"] = value + self.zeros[name]
