# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of a guide's sites, one after another, and whether they are draws of a model's."""

from collections.abc import Callable
from typing import Any

import pyro.poutine as poutine
from pyro.infer.autoguide import AutoGuide, AutoGuideList
from pyro.poutine import Trace
from pyro.poutine.util import site_is_subsample
from torch import nn

from pyro_radial._pyro.compat import handlers_around
from pyro_radial.infer.autoguide import AutoPerSite
from pyro_radial.nn.likelihood import is_target
from pyro_radial.poutine.local_reparameterization import check_drawn
from pyro_radial.poutine.swap_prior import SWAPPED

__all__ = ["GuideDraws", "check_global", "check_sites"]


class GuideDraws:
    """Draws of all sites of a guide.

    A guide of this library samples every site from a distribution that depends on its parameters alone, so that its
    first run tells all of them; further draws come from these distributions, in the guide's order, and are the numbers
    that the guide itself would draw. Any other guide runs for every draw: one with a ``forward`` of its own, with
    plates, with a handler around it or around this call.

    :param guide: a guide with its parameters.
    :param str who: what errors call the caller.
    :raises ValueError: for an autoguide without parameters, and from a draw for one under
        :func:`~pyro_radial.poutine.local_reparameterization`.
    """

    def __init__(self, guide: Callable[..., Any], who: str) -> None:
        _check_has_parameters(guide, who)
        self._guide, self._who = guide, who
        self._first: Trace | None = None

    @property
    def from_distributions(self) -> bool:
        """Whether the next draw comes from the distributions of the first."""
        return self._first is not None

    def draw(self, *args: Any) -> Trace:
        """One draw of all sites.

        :param args: the guide's arguments.
        :returns: a trace that a model can be replayed with.
        """
        if self._first is not None:
            return _redrawn(self._first)
        trace = poutine.trace(self._guide).get_trace(*args)
        for name, site in trace.iter_stochastic_nodes():
            check_drawn(name, site, f"{self._who}: guide must draw whole functions")
        if not handlers_around() and _samples_each_site_alone(self._guide, trace):
            # Its values, a copy of all weights, are let go.
            self._first = _with_values(trace, lambda site: None)
        return trace


def _redrawn(first: Trace) -> Trace:
    return _with_values(first, lambda site: site["fn"]())


def _with_values(trace: Trace, value_of: Callable[[Any], Any]) -> Trace:
    new = Trace()
    for name, site in trace.iter_stochastic_nodes():
        new.add_node(name, **{**site, "value": value_of(site)})
    return new


def _samples_each_site_alone(guide: Any, trace: Trace) -> bool:
    """Whether it sampled its own sites alone, and so from distributions of its parameters; a plate has a site too."""
    return _own_sites(guide) == {name for name, _ in trace.iter_stochastic_nodes()}


def _own_sites(guide: Any) -> set[str] | None:
    """The sites of a guide that is this library's, or a list of such, and runs as it does there; else None."""
    if isinstance(guide, AutoPerSite):
        return set(guide.latent_sites) if _runs_as(guide, AutoPerSite) else None
    if not isinstance(guide, AutoGuideList) or not _runs_as(guide, AutoGuideList):
        return None
    found = [_own_sites(part) for part in guide]
    return None if None in found else {name for sites in found for name in sites or ()}


def _runs_as(guide: nn.Module, cls: Any) -> bool:
    """Whether calling the guide does what the class does."""
    own_forward = getattr(guide.forward, "__func__", None) is cls.forward
    return own_forward and type(guide).__call__ is cls.__call__


def _check_has_parameters(guide: Any, who: str) -> None:
    """Without targets a new autoguide would take them for latent."""
    for part in guide.modules() if isinstance(guide, nn.Module) else ():
        if isinstance(part, AutoGuide) and not isinstance(part, AutoGuideList) and part.prototype_trace is None:
            raise ValueError(
                f"{who}: guide must have its parameters, got a {type(part).__name__} without any yet; train it, or "
                "run it once on inputs and targets: guide(x, y)"
            )


def check_global(drawn: Trace, wanted: str, got: str) -> None:
    """Refuse a site inside a plate, whose draw belongs to the rows that it was made for.

    :param Trace drawn: of the guide.
    :param str wanted: what must be.
    :param str got: what is.
    :raises ValueError: naming the site.
    """
    for name, site in drawn.iter_stochastic_nodes():
        if site["cond_indep_stack"]:
            raise ValueError(f"{wanted}, since site '{name}' of the guide is inside a plate, got {got}")


def check_sites(drawn: Trace, trace: Trace, who: str) -> None:
    """Refuse a guide of other sites than the model's, whose own would then silently be drawn from their priors.

    A guide may leave sites out, and a model may run a part of the guide's: not both, but where the sites left out have
    got a prior in the place of the model's, as those of a head in use again have from a
    :class:`~pyro_radial.PriorChain`.

    :param Trace drawn: of the guide.
    :param Trace trace: of the model, replayed with it.
    :param str who: what errors call the caller.
    :raises ValueError: naming the sites.
    """
    unused = [name for name, site in drawn.iter_stochastic_nodes() if name not in trace and not _is_own(site)]
    missing = [name for name, site in trace.iter_stochastic_nodes() if name not in drawn and not _has_prior(site)]
    if unused and missing:
        raise ValueError(
            f"{who}: guide must have the latent sites of the model, got none for {missing}, which would be drawn from "
            f"their priors, and {unused}, which the model does not run, as after use_head: call use_head with the head "
            "that the guide was made for, or take the guide of this head"
        )


def _is_own(site: Any) -> bool:
    """Whether a site of a guide is no latent site of any model."""
    return site_is_subsample(site) or bool(site["infer"].get("is_auxiliary", False))


def _has_prior(site: Any) -> bool:
    """Whether a site of a model is drawn from its distribution on purpose."""
    return site_is_subsample(site) or is_target(site) or site["infer"].items() >= SWAPPED.items()
