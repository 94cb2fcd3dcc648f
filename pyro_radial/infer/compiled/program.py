# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Loss, terms and gradients of a Pyro program as one function of tensors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyro.poutine as poutine
import torch
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_radial.infer.elbo import RadialELBO
from pyro_radial.infer.loss_terms import LossTerms, entropies, entropy_parts

__all__ = ["Call", "Evaluation", "Layout", "ScaleInputs", "evaluate", "guide_sites", "scales_of"]


class Call(NamedTuple):
    """One evaluation of a loss to make.

    :param ELBO loss: a loss with ``differentiable_loss``.
    :param model: a Pyro model.
    :param guide: its guide.
    :param args: what both are called with.
    :param kwargs: the same by name.
    :param bool gradients: whether to compute gradients too.
    :param also: parameters by name that are trained besides those of ``param`` statements, if the loss depends on them.
    """

    loss: Any
    model: Callable[..., Any]
    guide: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    gradients: bool
    also: Mapping[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """What the numbers of an evaluation are of: all of it but the numbers.

    :param nll_sites: the observed sites, in the order of their terms.
    :param kl_sites: the latent sites, in theirs.
    :param int num_data: as in :class:`~pyro_radial.infer.LossTerms`.
    :param sampled_kl: as there.
    :param used: for each parameter, whether the loss depends on it.
    :param weight_sites: the sites of the weight-space KL, in the order of their terms.
    :param float weight_space_kl_weight: as in :class:`~pyro_radial.infer.LossTerms`.
    """

    nll_sites: tuple[str, ...] = ()
    kl_sites: tuple[str, ...] = ()
    num_data: int | None = None
    sampled_kl: tuple[tuple[str, str], ...] = ()
    used: tuple[bool, ...] = ()
    weight_sites: tuple[str, ...] = ()
    weight_space_kl_weight: float = 0.0


@dataclass(frozen=True)
class Evaluation:
    """A loss, its terms and its gradients.

    :param Tensor loss: a 0-d tensor, detached.
    :param terms: 0-d tensors, those of the layout's sites; none where the loss keeps no terms.
    :param gradients: of the parameters that are used.
    :param Layout layout: what these are of.
    """

    loss: Tensor
    terms: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    layout: Layout

    @property
    def tensors(self) -> list[Tensor]:
        """All numbers, in one list."""
        return [self.loss, *self.terms, *self.gradients]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], layout: Layout) -> "Evaluation":
        """The way back from :attr:`tensors`."""
        num_terms = len(layout.nll_sites) + len(layout.kl_sites) + len(layout.weight_sites)
        return cls(tensors[0], tuple(tensors[1 : 1 + num_terms]), tuple(tensors[1 + num_terms :]), layout)

    def loss_terms(self, kl_weight: float, sites: Callable[[], Mapping[str, Mapping[str, Any]]]) -> LossTerms:
        """The terms as the loss keeps them.

        :param float kl_weight: the weight in this loss.
        :param sites: makes what the entropies are computed from.
        """
        layout, terms = self.layout, iter(self.terms)
        nll, kl, of_weights = (
            {name: next(terms) for name in names} for names in (layout.nll_sites, layout.kl_sites, layout.weight_sites)
        )
        return LossTerms(
            kl_weight,
            nll,
            kl,
            lambda: entropies(sites()),
            layout.num_data,
            dict(layout.sampled_kl),
            layout.weight_space_kl_weight,
            of_weights,
        )


class ScaleInputs(Messenger):
    """Makes the scale of each site, such as N / B, a tensor, so that other numbers make no other graph.

    It is the outermost handler, which sees what all plates together make of a scale.

    :param tensors: a 0-d tensor for each number; others are noted in :attr:`seen` and stay numbers.
    """

    def __init__(self, tensors: Mapping[float, Tensor]) -> None:
        super().__init__()
        self.tensors = tensors
        self.seen: list[float] = []

    def _pyro_sample(self, msg: Any) -> None:
        scale = msg["scale"]
        if isinstance(scale, int | float) and scale not in (0, 1):
            self.seen.append(scale)
            msg["scale"] = self.tensors.get(scale, scale)


def evaluate(call: Call) -> tuple[Evaluation, dict[str, Tensor]]:
    """One evaluation of the true program.

    :returns: it, and what it trains by name, unconstrained, as ``SVI`` finds it.
    """
    loss, model, guide, args, kwargs, gradients, also = call
    with poutine.trace(param_only=True) as capture, torch.set_grad_enabled(gradients):
        value = torch.as_tensor(loss.differentiable_loss(model, guide, *args, **kwargs))
    parameters = _trained(capture.trace)
    known = {id(parameter) for parameter in parameters.values()}
    parameters |= {name: p for name, p in also.items() if p.requires_grad and id(p) not in known}
    found: Sequence[Tensor | None] = ()
    if parameters and value.requires_grad:
        found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    used = tuple(gradient is not None for gradient in found) or (False,) * len(parameters)
    terms: tuple[Tensor, ...] = ()
    layout = Layout(used=used)
    if isinstance(loss, RadialELBO):
        named = loss.terms
        layout = Layout(
            tuple(named.nll_by_site),
            tuple(named.kl_by_site),
            named.num_data,
            tuple(named.sampled_kl.items()),
            used,
            tuple(named.weight_space_kl_by_site),
            named.weight_space_kl_weight,
        )
        by_site = (named.nll_by_site, named.kl_by_site, named.weight_space_kl_by_site)
        terms = tuple(value for values in by_site for value in values.values())
    return Evaluation(value.detach(), terms, _apart(g for g in found if g is not None), layout), parameters


def _apart(gradients: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Gradients in memory of their own, as backward leaves them, so that each can be changed in place."""
    taken: set[int] = set()
    own = []
    for gradient in gradients:
        storage = gradient.untyped_storage()
        alone = gradient.is_contiguous() and len(storage) == gradient.nbytes and storage.data_ptr() not in taken
        own.append(gradient if alone else gradient.clone(memory_format=torch.contiguous_format))
        taken.add(own[-1].untyped_storage().data_ptr())
    return tuple(own)


def scales_of(call: Call) -> list[float]:
    """The scales other than one that the sites of a program have, by running it once."""
    loss, model, guide, args, kwargs, *_ = call
    scales = ScaleInputs({})
    with scales, torch.no_grad():
        loss.differentiable_loss(model, guide, *args, **kwargs)
    return list(dict.fromkeys(scales.seen))


def guide_sites(guide: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """What the entropies of a guide's sites are computed from, as its parameters are now."""
    with torch.no_grad(), torch.random.fork_rng([]), poutine.block():
        trace = poutine.trace(guide).get_trace(*args, **kwargs)
    return {name: entropy_parts(site) for name, site in trace.iter_stochastic_nodes()}


def _trained(trace: Trace) -> dict[str, Tensor]:
    """The parameters that a run has read, as Pyro's optimizers see them."""
    values = {name: site["value"] for name, site in dict[str, Any](trace.nodes).items()}
    own = {n: value.unconstrained() if hasattr(value, "unconstrained") else value for n, value in values.items()}
    return {name: value for name, value in own.items() if value.requires_grad}
