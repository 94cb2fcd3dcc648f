# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of a posterior's sites, from a guide or from samples, and checks that they fit the model."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.infer.autoguide import AutoGuide, AutoGuideList
from torch import Tensor, nn

from pyro_radial._pyro.compat import handlers_around, is_subsample
from pyro_radial._pyro.random_numbers import seeded
from pyro_radial._pyro.types import Batch, Guide, Model
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.infer.autoguide.per_site import AutoPerSite
from pyro_radial.infer.prediction.even_draws import even_draws
from pyro_radial.infer.prediction.prediction import are_identical
from pyro_radial.nn.likelihoods import is_target
from pyro_radial.nn.modules import device_of, evaluating
from pyro_radial.poutine.local_reparameterization import check_drawn
from pyro_radial.poutine.swap_prior import SWAPPED

# Draws that are made at once have at most so many numbers, 64 MB, unless two of them have more.
NUMBERS_IN_BLOCK = 2**24


class DrawBlock(NamedTuple):
    """Draws of a guide that are made at once: n from its sites' distributions, or one by a run of the guide."""

    #: The values ``[n, *shape]`` by site.
    values: dict[str, Tensor]
    #: The sites, with values if the guide ran.
    sites: poutine.Trace
    is_from_distributions: bool
    #: For each draw a seed of what the model samples, so that it moves no draw of the guide.
    seeds: list[int]

    def trace(self, number: int) -> poutine.Trace:
        """Return one of the draws, as a trace that a model can be replayed with."""
        if not self.is_from_distributions:
            return self.sites
        return _copy_trace(self.sites, lambda name: self.values[name][number])


class GuideDraws:
    """Draws of all sites of a guide.

    A guide of this library samples every site from a distribution that depends on its parameters alone. After its
    first run, further draws come from these distributions, in the guide's order. Any other guide runs for every draw,
    and so does a guide with a ``forward`` of its own, with plates, or with a handler around it or around this call.

    :param guide: a guide with its parameters.
    :raises ValueError: for what is not a guide, for an autoguide without parameters, and from a draw for one under
        :func:`~pyro_radial.poutine.local_reparameterization`.
    """

    def __init__(self, guide: Guide) -> None:
        if hasattr(guide, "get_samples"):
            raise ValueError(
                f"guide must be a function, got {type(guide).__name__}; predict takes mcmc.get_samples()"
            )
        check_has_parameters("guide", guide)
        self._guide = guide
        #: The sites of the first run without values, if draws come from their distributions; else None.
        self.distributions: poutine.Trace | None = None

    def block(self, most: int, *args: object) -> DrawBlock:
        """Draw all sites some times, at most ``most``: as often as memory allows, or once if the guide runs.

        The number depends on the sites alone. Draws from distributions are those of :func:`even_draws`.
        """
        trace = self.run(*args) if self.distributions is None else self.distributions
        sites = dict[str, Any](trace.iter_stochastic_nodes())
        if self.distributions is None:
            values = {name: site["value"].unsqueeze(0) for name, site in sites.items()}
            return DrawBlock(values, trace, False, _seeds(1))
        size = sum(site["fn"].shape().numel() for site in sites.values())
        number = min(most, max(2, NUMBERS_IN_BLOCK // max(1, size)))
        values = {name: even_draws(site["fn"], number) for name, site in sites.items()}
        return DrawBlock(values, self.distributions, True, _seeds(number))

    def run(self, *args: object) -> poutine.Trace:
        """Run the guide once, and return the trace, which a model can be replayed with."""
        trace = poutine.trace(self._guide).get_trace(*args)
        for name, site in trace.iter_stochastic_nodes():
            check_drawn(name, site, "guide must draw whole functions")
        # A plate has a site too, so a guide that samples its own sites alone has no plates.
        names = {name for name, _ in trace.iter_stochastic_nodes()}
        if not handlers_around() and _own_sites(self._guide) == names:
            # Without its values, which are a copy of all weights.
            self.distributions = _copy_trace(trace, lambda name: None)
        return trace

    def is_point(self, drawn: poutine.Trace, ignored: set[str]) -> bool:
        """Return whether all draws are the same except at ignored sites; ``drawn`` is one of them."""
        if isinstance(self._guide, PosteriorSamples):
            return all(
                name in ignored or are_identical(values)
                for name, values in self._guide.samples.items()
            )
        for name, site in drawn.iter_stochastic_nodes():
            if name in ignored or is_subsample(site):
                continue
            if not isinstance(leaf(site["fn"]), dist.Delta):
                return False
        return True


class PosteriorSamples:
    """A guide that returns the samples of all sites one after another, a sample in each run.

    :ivar dict samples: the samples.
    :param samples: values ``[S, *shape]`` on the support of each site, as Pyro's ``MCMC.get_samples()`` gives them.
    :raises ValueError: naming the site, for values that are not such tensors, or for different numbers of samples.

    Example::

        >>> guide = PosteriorSamples({"w": torch.arange(6.0).reshape(3, 2)})
        >>> len(guide), guide()["w"], guide()["w"]
        (3, tensor([0., 1.]), tensor([2., 3.]))
    """

    def __init__(self, samples: Mapping[str, Tensor]) -> None:
        for name, values in samples.items():
            if values.dim() == 0 or len(values) == 0:
                raise ValueError(
                    f"samples of site '{name}' must be a tensor [S, ...] of S draws, got shape {tuple(values.shape)}"
                )
        numbers = {name: len(values) for name, values in samples.items()}
        if len({*numbers.values()}) != 1:
            raise ValueError(f"samples must have one number of draws for all sites, got {numbers}")
        self.samples = dict(samples)
        self._num_runs = 0

    def __len__(self) -> int:
        return len(next(iter(self.samples.values())))

    def __call__(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """Return the next sample of every site; the arguments of the model are not used."""
        values = {name: values[self._num_runs] for name, values in self.samples.items()}
        self._num_runs += 1
        return sample_at(values)

    def check(self, model: Model, x: Batch) -> None:
        """Raise a ValueError naming a site that is not a latent site of ``model(x)``, or has another shape."""
        with seeded(0, device_of(model)), evaluating(model), torch.no_grad():
            trace = poutine.trace(model).get_trace(x)
        sites: dict[str, Any] = dict(trace.iter_stochastic_nodes())
        shapes = {
            name: tuple(site["value"].shape)
            for name, site in sites.items()
            if not is_subsample(site) and not is_target(site)
        }
        for name, values in self.samples.items():
            if name not in shapes:
                raise ValueError(
                    f"samples must be of latent sites of the model, {sorted(shapes)}, got some of '{name}'"
                )
            if tuple(values.shape[1:]) != shapes[name]:
                raise ValueError(
                    f"samples of site '{name}' must have shape {('S', *shapes[name])}, got {tuple(values.shape)}; "
                    "MCMC.get_samples() joins the chains, unless group_by_chain=True"
                )


def sample_at(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sample sites that each have one value."""
    return {
        name: pyro.sample(name, dist.Delta(value, event_dim=value.dim()))
        for name, value in values.items()
    }


def check_global(drawn: poutine.Trace, requirement: str, got: str) -> None:
    """Raise a ValueError naming a site inside a plate: its draw belongs to the rows that it was made for."""
    for name, site in drawn.iter_stochastic_nodes():
        if site["cond_indep_stack"]:
            raise ValueError(
                f"{requirement}, since site '{name}' of the guide is inside a plate, got {got}"
            )


def check_sites(drawn: poutine.Trace, trace: poutine.Trace) -> None:
    """Raise a ValueError for a guide with sites of another model; sites of this one would come from their priors.

    A guide may leave sites out, or have more than the model runs (``trace``), but not both. Sites with a swapped prior
    may always be left out: a head in use again has one from a :class:`~pyro_radial.PriorChain`.
    """
    unused = [
        name
        for name, site in dict[str, Any](drawn.iter_stochastic_nodes()).items()
        if not (name in trace or is_subsample(site) or site["infer"].get("is_auxiliary"))
    ]
    missing = [
        name
        for name, site in dict[str, Any](trace.iter_stochastic_nodes()).items()
        if not (name in drawn or is_subsample(site) or is_target(site))
        and not site["infer"].items() >= SWAPPED.items()
    ]
    if unused and missing:
        raise ValueError(
            f"guide must have the latent sites of the model, got none for {missing}, which would be drawn from "
            f"their priors, and {unused}, which the model does not run, as after use_head: call use_head with the head "
            "that the guide was made for, or take the guide of this head"
        )


def check_has_parameters(argument: str, guide: object) -> None:
    """Raise a ValueError that names the argument, for an autoguide that has no parameters yet."""
    # Without targets a new autoguide would take them for latent.
    for module in guide.modules() if isinstance(guide, nn.Module) else ():
        has_prototype = isinstance(module, AutoGuide) and not isinstance(module, AutoGuideList)
        if has_prototype and module.prototype_trace is None:
            raise ValueError(
                f"{argument} must have its parameters, got {type(module).__name__} without any yet; train it, or run "
                "it once on inputs and targets: guide(x, y)"
            )


def _seeds(number: int) -> list[int]:
    return torch.randint(2**62, (number,), device="cpu").tolist()


def _copy_trace(trace: poutine.Trace, value_of: Callable[[str], object]) -> poutine.Trace:
    """Return a trace with the same sites, each with the value of its name."""
    copied = poutine.Trace()
    for name, site in trace.iter_stochastic_nodes():
        copied.add_node(name, **{**site, "value": value_of(name)})
    return copied


def _own_sites(guide: object) -> set[str] | None:
    """Return the sites of a guide of this library, or of a list of such, if its call is not overridden; else None."""
    if isinstance(guide, AutoPerSite):
        return set(guide.chosen_families()) if _runs_as(guide, AutoPerSite) else None
    if not isinstance(guide, AutoGuideList) or not _runs_as(guide, AutoGuideList):
        return None
    sites_of_members = list(map(_own_sites, guide))
    return None if None in sites_of_members else set().union(*filter(None, sites_of_members))


def _runs_as(guide: nn.Module, cls: type[nn.Module]) -> bool:
    """Return whether calling the guide does what the class does."""
    own_forward = getattr(guide.forward, "__func__", None) is cls.forward
    return own_forward and type(guide).__call__ is cls.__call__
