# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Estimate by importance sampling which share of the posterior a guide's intervals hold."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyro.poutine as poutine
import torch
from pyro.infer.autoguide import AutoContinuous
from torch import Tensor

from pyro_radial._pyro.compat import is_subsample
from pyro_radial._pyro.types import Guide, Model, Node
from pyro_radial.infer.autoguide import AutoPerSite
from pyro_radial.infer.autoguide.families import MultivariateNormal
from pyro_radial.infer.loss.elbo import traces_of

LEVEL = 0.9
NUM_DRAWS = 1_000
#: Number of draws at which sites outside of a plate are held; for each, ``NUM_DRAWS`` draws of the sites inside.
NUM_STARTS = 4
#: Shares this much below the level are too small. On the count model of benchmarks/guides/coverage.py, independent
#: normals hold 0.73 of the posterior, and a full covariance holds 0.89.
MARGIN = 0.05
#: The largest k at which weights are reliable (Vehtari et al., 2024).
MOST_K = 0.7
#: The largest k at which ratios have a finite variance.
GOOD_K = 0.5
#: The most numbers for which a larger k is the fault of the guide; for 250 a good one already has 1.
MOST_NUMBERS = 50
#: The most elements of plates for which shares are estimated, in equal distances.
MOST_ELEMENTS = 100

#: Names, dims and sizes of the plates around a site.
Plates = frozenset[tuple[str, int, int]]


class IntervalShare(NamedTuple):
    """What central 90 % intervals of a site hold.

    :param float coverage: the share of the posterior inside: a mean over the elements of plates, and the least one of
        the elements of an event.
    :param float error: its standard error.
    :param float pareto_k: the shape of the tail of ratios p / q, a median over the elements of plates. Above 0.7 too
        few draws count, and ``coverage`` says little.
    :param int numbers: how many numbers are drawn together; other sites stay at one draw.
    :param int event_numel: the number of elements of an event.
    """

    coverage: float
    error: float
    pareto_k: float
    numbers: int
    event_numel: int


class _Compared(NamedTuple):
    """Log ratios ``[S, n]`` for n elements of plates, and draws ``[S, n, E]`` of each site."""

    ratios: Tensor
    draws: dict[str, Tensor]


@torch.no_grad()
def interval_shares(
    model: Model, guide: Guide, args: Sequence[object]
) -> tuple[dict[str, IntervalShare], float | None]:
    """Estimate the share for each latent site that is not a point, and the Pareto k of all sites together, or None.

    Each element of a plate has separate ratios: all sites in the plate are drawn together, and sites outside of it
    stay at one of four draws. For sites outside of plates, and for guides that draw the elements of a plate together,
    all sites are drawn together.

    :raises ValueError: naming the plate, for a mini-batch.
    """
    starts = [poutine.trace(guide).get_trace(*args) for _ in range(NUM_STARTS)]
    start = starts[0]
    model_trace = poutine.trace(poutine.replay(model, trace=start)).get_trace(*args)
    _check_all_rows(model_trace)
    sites: dict[str, Node] = {
        name: site
        for name, site in dict[str, Any](model_trace.iter_stochastic_nodes()).items()
        if not is_subsample(site) and _differ(start, starts[1], name)
    }
    together: dict[Plates, list[str]] = {}
    for name, site in sites.items():
        plates = _plates(site)
        given_others = poutine.trace(_fix_sites_outside(guide, start, plates)).get_trace(*args)
        if not _differ(start, given_others, name):
            plates = Plates()
        together.setdefault(plates, []).append(name)
    if sites:
        together.setdefault(Plates(), [])
    shares = {}
    k_hat = None
    for plates, names in together.items():
        plate_sites = [site for site in sites.values() if plates <= _plates(site)]
        numbers = sum(site["value"].numel() for site in plate_sites)
        # Without sites outside, all starts are the same.
        different_starts = starts[:1] if len(plate_sites) == len(sites) else starts
        runs = []
        for trace in different_starts:
            guide_outside_fixed = _fix_sites_outside(guide, trace, plates)
            runs.append(_compare_draws(model, guide_outside_fixed, args, plates, names))
        weights, shapes = smooth_weights(torch.cat([run.ratios for run in runs], 1))
        for name in names:
            draws = torch.cat([run.draws[name] for run in runs], 1)
            coverages, errors = _coverages(draws, weights)
            least = int(coverages.argmin())
            shares[name] = IntervalShare(
                coverage=float(coverages[least]),
                error=float(errors[least]),
                pareto_k=float(shapes.median()),
                numbers=numbers // math.prod(size for _, _, size in plates),
                event_numel=sites[name]["fn"].event_shape.numel(),
            )
        if not plates:
            k_hat = float(shapes)
    return shares, k_hat


def k_hat_word(k_hat: float) -> str:
    """Return what a Pareto k says of a guide; NaN is unreliable."""
    return "good" if k_hat <= GOOD_K else "usable" if k_hat <= MOST_K else "unreliable"


def judge_k_hat(k_hat: float | None) -> Iterator[str]:
    """Yield a finding if importance weights of all sites together have a heavy tail."""
    if k_hat is None or k_hat <= GOOD_K:
        return
    if k_hat <= MOST_K:
        yield (
            f"The Pareto k-hat of the guide is {k_hat:.2f}, above {GOOD_K} but usable: importance weights can correct "
            "its draws, with some more noise."
        )
    else:
        yield (
            f"The Pareto k-hat of the guide is {k_hat:.2f}, not up to {MOST_K}: all sites together, it is far from the "
            f"posterior, and importance weights cannot correct its draws. With more than about {MOST_NUMBERS} numbers "
            "even a good guide has such a k-hat."
        )


def judge_intervals(shares: Mapping[str, IntervalShare], guide: object) -> Iterator[str]:
    """Yield findings on intervals that fail, and on intervals that cannot be judged."""
    unknown = []
    for name, interval in shares.items():
        advice = _advice(name, interval, guide)
        at_worst = "" if interval.event_numel == 1 else " (its worst element)"
        reliable = interval.pareto_k <= MOST_K
        if not reliable and interval.numbers > MOST_NUMBERS:
            unknown.append(name)
        elif interval.coverage + 2 * interval.error < LEVEL - MARGIN:
            yield (
                f"The {LEVEL:.0%} intervals of '{name}' are too narrow: they hold about {interval.coverage:.0%} of the "
                f"posterior, or less{at_worst}. {advice}"
            )
        elif not reliable:
            yield (
                f"The {LEVEL:.0%} intervals of '{name}' cannot be trusted, since the guide misses a part of the "
                f"posterior (Pareto k {interval.pareto_k:.2f} above {MOST_K}). {advice}"
            )
    if unknown:
        yield (
            f"Whether intervals of {', '.join(unknown)} hold is unknown: {shares[unknown[0]].numbers} numbers are "
            "drawn together, too many for importance sampling. Compare with MCMC on a part of the data."
        )


def _advice(name: str, interval: IntervalShare, guide: object) -> str:
    """Return what to try for a site whose intervals fail."""
    train = "If the loss still falls, train longer."
    if isinstance(guide, AutoContinuous):
        return f"Write the model non-centered, or take MCMC. {train}"
    sites = (
        "If it is correlated with other sites, make them one site with an event, write the model non-centered, or take "
        "Pyro's AutoMultivariateNormal."
    )
    families = guide.chosen_families() if isinstance(guide, AutoPerSite) else {}
    if isinstance(families.get(name), MultivariateNormal):
        return (
            "It has a full covariance: train longer, or remove coefficients that the data say nothing about, such as "
            f"one for each level beside a base. {sites}"
        )
    if interval.event_numel == 1:
        return f"{sites} {train}"
    return f"Give it a full covariance: families={{'{name}': families.MultivariateNormal()}}. {sites} {train}"


def _check_all_rows(trace: poutine.Trace) -> None:
    """Raise a ValueError naming a plate with a part of its rows."""
    for site in trace.nodes.values():
        for frame in site.get("cond_indep_stack", ()):
            if frame.full_size not in (None, frame.size):
                raise ValueError(
                    f"data must have all rows of the plate '{frame.name}', got {frame.size} of {frame.full_size}"
                )


def _plates(site: Node) -> Plates:
    """Return the plates around a site, without those that are loops."""
    stack = site["cond_indep_stack"]
    return Plates((frame.name, frame.dim, frame.size) for frame in stack if frame.vectorized)


def _differ(trace_a: Any, trace_b: Any, name: str) -> bool:
    return not torch.equal(trace_a.nodes[name]["value"], trace_b.nodes[name]["value"])


def _fix_sites_outside(guide: Guide, trace: poutine.Trace, plates: Plates) -> Guide:
    """Return the guide with the sites outside of the plates at their values in a trace."""
    fixed_trace = trace.copy()
    for name in trace.stochastic_nodes:
        if plates <= _plates(trace.nodes[name]):
            fixed_trace.remove_node(name)
    return poutine.replay(guide, trace=fixed_trace)


def _compare_draws(
    model: Model, guide: Guide, args: Sequence[object], plates: Plates, names: Sequence[str]
) -> _Compared:
    """Draw from the guide, and compare it with the model, for each element of some plates."""
    dims = sorted(dim for _, dim, _ in plates)
    ratios = []
    draws: dict[str, list[Tensor]] = {name: [] for name in names}
    for _ in range(NUM_DRAWS):
        model_trace, guide_trace = traces_of(model, guide, *args)
        ratio = _log_prob(model_trace, plates, dims) - _log_prob(guide_trace, plates, dims)
        number = len(ratio)
        selected = torch.linspace(0, number - 1, min(number, MOST_ELEMENTS)).long()
        ratios.append(ratio[selected])
        for name in names:
            site: Node = model_trace.nodes[name]
            plate_dims = [dim - site["fn"].event_dim for dim in dims]
            value = site["value"].movedim(plate_dims, list(range(len(dims))))
            draws[name].append(value.reshape(number, -1).cpu()[selected])
    return _Compared(
        torch.stack(ratios), {name: torch.stack(values) for name, values in draws.items()}
    )


def _log_prob(trace: poutine.Trace, plates: Plates, dims: Sequence[int]) -> Tensor:
    """Return the log density of all sites in some plates, for each element of these."""
    trace.compute_log_prob()
    total = torch.zeros((), dtype=torch.float64)
    for site in trace.nodes.values():
        if site["type"] != "sample" or is_subsample(site) or not plates <= _plates(site):
            continue
        log_prob = site["log_prob"].to(total)
        for dim in range(-log_prob.dim(), 0):
            if dim not in dims:
                log_prob = log_prob.sum(dim, keepdim=True)
        total = total + log_prob
    return total.flatten()


def _coverages(draws: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares ``[E]`` of weights ``[S, n]`` in central intervals of draws ``[S, n, E]``, and their errors."""
    ordered = draws.sort(0).values
    num_outside = round(NUM_DRAWS * (1 - LEVEL) / 2)
    is_inside = ((draws >= ordered[num_outside]) & (draws < ordered[-num_outside])).double()
    coverage = (weights.unsqueeze(-1) * is_inside).sum(0)
    errors = (weights.unsqueeze(-1) * (is_inside - coverage)).square().sum(0)
    return coverage.mean(0), errors.mean(0).div(len(coverage)).sqrt()


def smooth_weights(log_ratios: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the largest ratios by quantiles of a Pareto distribution fitted to them.

    Source: Vehtari, Simpson, Gelman, Yao and Gabry (2024), "Pareto smoothed importance sampling", section 3.

    :param Tensor log_ratios: ``[S, n]`` in double precision.
    :returns: weights ``[S, n]`` that sum to one over draws, and shapes k of the tails ``[n]``.
    """
    number = len(log_ratios)
    log_ratios = log_ratios - log_ratios.amax(0)
    size = int(min(0.2 * number, 3 * number**0.5))
    ordered, order = log_ratios.sort(0)
    cutoff = ordered[-size - 1].exp()
    shape, scale = _fit_pareto(ordered[-size:].exp() - cutoff)
    levels = ((torch.arange(size).to(ordered) + 0.5) / size).unsqueeze(-1)
    quantiles = cutoff + scale * torch.expm1(-shape * torch.log1p(-levels)) / shape
    # Ratios that are all the same have no tail.
    smooth = torch.where(shape.isfinite(), quantiles.log().clamp_max(0.0), ordered[-size:])
    weights = log_ratios.scatter(0, order[-size:], smooth).softmax(0)
    # A density that is NaN must not pass for such ratios.
    return weights, shape.nan_to_num(nan=0.0).where(~log_ratios.isnan().any(0), torch.nan)


def _fit_pareto(excess: Tensor) -> tuple[Tensor, Tensor]:
    """Fit generalized Pareto distributions to ascending numbers ``[M, n]``; return shapes and scales, ``[n]``.

    Source: Zhang and Stephens (2009), "A new and efficient estimation method for the generalized Pareto distribution";
    the shape has the weak prior of Vehtari et al. (2024), appendix C.
    """
    number = len(excess)
    count = 30 + int(number**0.5)
    ranks = torch.arange(1, count + 1).to(excess).unsqueeze(-1) - 0.5
    quartile = excess[int(number / 4 + 0.5) - 1]
    candidates = (1 - (count / ranks).sqrt()) / (3 * quartile) + 1 / excess[-1]
    shapes = torch.log1p(-candidates.unsqueeze(1) * excess).mean(1)
    profile = number * ((-candidates / shapes).log() - shapes - 1)
    rate = (candidates * profile.softmax(0)).sum(0)
    shape = torch.log1p(-rate * excess).mean(0)
    scale = -shape / rate
    return (number * shape + 5) / (number + 10), scale
