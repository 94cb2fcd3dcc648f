# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Why a model does not learn, in words, from its loss, its scales, its predictions and its intervals."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from pyro_radial._pyro.compat import is_subsample, tree_leaves
from pyro_radial._pyro.random_numbers import one_at_a_time, seeded
from pyro_radial._pyro.types import Batch, Guide, Model
from pyro_radial.distributions.moments import moments
from pyro_radial.infer.autoguide import AutoPerSite
from pyro_radial.infer.data import Rows, move, num_rows
from pyro_radial.infer.diagnose.importance import (
    LEVEL,
    IntervalShare,
    interval_shares,
    judge_intervals,
    judge_k_hat,
    k_hat_word,
)
from pyro_radial.infer.loss.elbo import TermsELBO, not_finite_parameter, traces_of
from pyro_radial.infer.loss.not_finite import first_not_finite
from pyro_radial.infer.loss.terms import LossTerms
from pyro_radial.nn.bayesian_module import BayesianModule, modules_of
from pyro_radial.nn.likelihoods import (
    FUNCTION_SITE,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
)
from pyro_radial.nn.modules import device_of, dtype_of, evaluating
from pyro_radial.nn.named_likelihoods import NamedLikelihoods, function_sites
from pyro_radial.poutine import mean_only

# Scales within this root mean square of log(scale / initial scale) count as never moved.
UNMOVED = 0.01
# A term dominates if it is this many times the other one.
DOMINATES = 2.0
# In mean field the accuracy of a small perceptron fell as scales grew to this share of the prior's standard deviation
# (benchmarks/PAST.md).
WIDE = 0.5
# Measured root mean squares. In regression, inputs of 30 are predicted no better than by the mean, and a mean target of
# 10 is missed by several standard deviations. Classes are still learned from pixels up to 255, but not well from 4000.
MOST_OF_INPUT, MOST_OF_INPUT_FOR_CLASSES, MOST_OF_TARGET = 30.0, 300.0, 10.0
# Widths are not trained if the loss falls by more nats than this for each weight and unit of log(width), on average
# over a site, or in more than this share of its weights, by so many standard errors, which few draws make too small.
MOST_PULL, LEAST_SHARE, PULL_ERRORS = 0.4, 0.02, 6.0
# Means are not trained if the root mean square of their distances from rest, in standard deviations of the posterior,
# is more than this, and its square more than so many times what noise adds.
MOST_DISTANCE, TIMES_NOISE = 0.5, 8.0
# About this many weights of a site are looked at.
SAMPLED = 1000
#: The likelihoods of real targets.
REAL_TARGETS = (Gaussian, HeteroscedasticGaussian)
# In units of the first noise, but at most of one: below it the noise stays at 16 times the error.
LEAST_SPREAD = 0.1


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` found; printing it gives a short report.

    :param LossTerms terms: the loss in nats for the whole data set, estimated from the given rows.
    :param int num_rows: the number of given rows; None with ``intervals``.
    :param unmoved_scales: the sites with scales where they started.
    :param scale_pulls: the derivative of the loss by log(scale), on average over the weights, of the sites where it is
        far from zero; if only a share of the weights has such a derivative, on average over these. There the scales are
        not trained: a positive number says they are too wide, -1 that the data hardly limit them yet.
    :param mean_distances: the root mean square over weights of the distance of means from rest, in standard deviations
        of the posterior, of the sites where it is large; only from all rows, and if the scales have moved.
    :param sampled_kl: the sites with a KL estimated from samples.
    :param float signal: the standard deviation over inputs of the mean function; None without the function site or with
        one row of data.
    :param float noise: the standard deviation over draws of the function at one input; None as ``signal``.
    :param findings: what stands out and what to try.
    :param intervals: if asked for, for each latent site the share of the posterior that its 90 % intervals hold
        (``coverage``), and the Pareto k of that estimate (``pareto_k``).
    :param k_hat: with ``intervals``, the Pareto k of the ratios p / q of all sites together, the PSIS k-hat of the
        guide: good up to 0.5, usable up to 0.7. Its standard error is about 0.1. None if all sites are points.
    """

    terms: LossTerms
    num_rows: int | None
    unmoved_scales: list[str]
    scale_pulls: dict[str, float]
    mean_distances: dict[str, float]
    sampled_kl: list[str]
    signal: float | None
    noise: float | None
    findings: list[str]
    intervals: dict[str, IntervalShare] = field(default_factory=dict)
    k_hat: float | None = None

    def __str__(self) -> str:
        has_num_data = self.terms.num_data is not None
        terms = self.terms.per_datum() if has_num_data else self.terms
        rows = "" if self.num_rows is None else f", from {self.num_rows} rows"
        lines = [
            f"loss{rows}{f' for num_data={self.terms.num_data}' if has_num_data else ''}: "
            f"negative log-likelihood {float(terms.negative_log_likelihood):.4g}, "
            f"KL {float(terms.kl):.4g} (weight {terms.kl_weight:g}), in nats{' per datum' if has_num_data else ''}"
        ]
        largest = sorted(terms.kl_by_site.items(), key=lambda item: -float(item[1]))[:3]
        lines.append(
            "largest KL: " + ", ".join(f"{name} {float(value):.4g}" for name, value in largest)
        )
        if self.signal is not None:
            lines.append(
                f"function: varies by {self.signal:.3g} over inputs, by {self.noise:.3g} over draws"
            )
        if self.intervals:
            least = sorted(self.intervals.items(), key=lambda item: item[1].coverage)[:3]
            coverages = (
                f"{name} {interval.coverage:.0%} (Pareto k {interval.pareto_k:.2f})"
                for name, interval in least
            )
            lines.append(f"of the posterior, {LEVEL:.0%} intervals hold: {', '.join(coverages)}")
        if self.k_hat is not None:
            lines.append(f"Pareto k-hat of the guide: {self.k_hat:.2f}, {k_hat_word(self.k_hat)}")
        return "\n".join(
            lines + [f"- {finding}" for finding in self.findings or ["nothing stands out"]]
        )


@torch.no_grad()
def diagnose(
    model: Callable[..., object],
    guide: nn.Module,
    data: Any,
    *,
    num_particles: int = 16,
    kl_weight: float = 1.0,
    function_site: str = FUNCTION_SITE,
    intervals: bool = False,
) -> Diagnosis:
    """Say which term of the loss dominates, which scales are not trained, which intervals fail, and what to try.

    Nothing is trained, and random number generators keep their states.

    With ``intervals`` it also estimates which share of the posterior the central 90 % intervals of each latent site
    hold, by importance sampling with 1,000 runs of guide and model, 1,000 more if all sites are in plates, and 4,000
    more if only some are. Sites in a plate are compared with the posterior given the sites outside of it, others with
    the joint posterior of all sites. So is the whole guide: its ``k_hat`` says whether importance weights can correct
    its draws. More than about fifty numbers are too many for importance sampling even with a good guide;
    the report then says that it cannot tell. For a network see :func:`~pyro_radial.uncertainty.evaluate`.

    Source: Vehtari, Simpson, Gelman, Yao and Gabry (2024), "Pareto smoothed importance sampling"; Yao, Vehtari, Simpson
    and Gelman (2018), "Yes, but did it work?: Evaluating variational inference", section 3.1,
    for ``k_hat``.

    :param model: a Pyro model ``model(x, y)``; with ``intervals``, one of any arguments.
    :param guide: its guide, trained or not.
    :param data: a batch or the whole data set, as :func:`~pyro_radial.fit` takes it; with ``intervals``, a tuple of the
        model's arguments, with all rows and the targets.
    :param int num_particles: the number of draws to average over.
    :param float kl_weight: the weight used in training.
    :param str function_site: the deterministic site of the function values; without it nothing is said about them.
    :param bool intervals: whether to check intervals too.
    :returns: a report with its numbers as attributes, such as ``terms``, ``unmoved_scales`` and ``findings``.
    :raises ValueError: for NaN or infinity in the data or in a parameter, by name; for ``intervals`` of a mini-batch.

    Example::

        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
        >>> from pyro_radial.nn import likelihoods
        >>> model = SupervisedModel(BayesianModule(nn.Linear(2, 1)), likelihoods.Gaussian(num_data=32))
        >>> x = torch.randn(32, 2)
        >>> diagnosis = diagnose(model, AutoRadial(model), (x, 2 * x[:, :1]))
        >>> diagnosis.unmoved_scales
        ['weight', 'bias']
    """
    elbo = TermsELBO(num_particles=num_particles, kl_weight=kl_weight)
    device = device_of(guide, model)
    if intervals:
        whole = inputs = data
    else:
        x, y = move(Rows(data, "data", dtype_of(guide, model)).all(), device)
        whole, inputs = (x, y), (x,)
    nonfinite_name = first_not_finite(guide.named_parameters())
    if nonfinite_name is not None:
        raise not_finite_parameter(nonfinite_name)
    # Validation is off so that a value that is not finite reaches the report.
    with (
        one_at_a_time(),
        evaluating(model, guide),
        seeded(0, device),
        pyro.validation_enabled(False),
    ):
        elbo(model, guide)(*whole)  # type: ignore[arg-type]
        sites = tree_leaves(function_sites(getattr(model, "likelihood", None), function_site))
        spreads = [_spreads(model, guide, inputs, max(2, num_particles), site) for site in sites]
        # With several outputs, take the one that follows its inputs least.
        signal, noise = min(spreads, key=lambda pair: (pair[0] or 0.0) / max(pair[1] or 0.0, 1e-30))
        wide = None
        gradients: dict[str, Tensor] = {}
        if isinstance(guide, AutoPerSite):
            gradients = _site_gradients(
                TermsELBO(kl_weight=kl_weight), model, guide, whole, max(4, num_particles)
            )
            wide = None if intervals else share_of_wide(model, guide, *inputs)
        shares, k_hat = interval_shares(model, guide, data) if intervals else ({}, None)
    terms = elbo.terms
    sampled = list(terms.sampled_kl)
    changes = guide.scale_change() if isinstance(guide, AutoPerSite) else {}
    unmoved = [name for name, change in changes.items() if change < UNMOVED]
    follows_inputs = signal is not None and noise is not None and signal > noise
    units = None if intervals else not_standardized(model, *whole)
    links = [likelihood.repeated_link for likelihood in modules_of(Likelihood, model)]
    scale_pulls: dict[str, float] = {}
    named_pulls: dict[str, float] = {}
    mean_distances: dict[str, float] = {}
    # The means are not at rest for the rows of one batch.
    has_all_rows = not intervals and num_rows(whole[1]) == terms.num_data
    for name, (by_width, by_mean) in gradients.items():
        pull, share = _find_pull(by_width)
        if pull:
            scale_pulls[name] = pull
        if pull and name not in unmoved:
            named_pulls[name if share == 1.0 else f"{share:.0%} of {name}"] = pull
        if has_all_rows and name not in unmoved and (distance := _find_distance(by_mean)):
            mean_distances[name] = distance
    findings = [
        *[finding for finding in (*links, units) if finding is not None],
        *_judge_terms(terms, follows_inputs),
        *_judge_scales(unmoved, changes, wide),
        *_judge_pulls(named_pulls),
        *_judge_means(mean_distances),
        *_judge_draws(signal, noise, sampled),
        *judge_intervals(shares, guide),
        *judge_k_hat(k_hat),
    ]
    return Diagnosis(
        terms,
        num_rows=None if intervals else num_rows(whole[1]),
        unmoved_scales=unmoved,
        scale_pulls=scale_pulls,
        mean_distances=mean_distances,
        sampled_kl=sampled,
        signal=signal,
        noise=noise,
        findings=findings,
        intervals=shares,
        k_hat=k_hat,
    )


@torch.no_grad()
def share_of_wide(model: Model, guide: Guide, *inputs: object) -> float | None:
    """Return the share of weights at least half as wide as their priors, or None if no width is known."""
    trace, drawn = traces_of(model, guide, *inputs)
    wide = total = 0
    for name, site in drawn.iter_stochastic_nodes():
        if is_subsample(site) or name not in trace:
            continue
        posterior_stddev = moments(site["fn"]).stddev
        prior_stddev = moments(trace.nodes[name]["fn"]).stddev
        if posterior_stddev is not None and prior_stddev is not None:
            wide += int((posterior_stddev > WIDE * prior_stddev).sum())
            total += posterior_stddev.numel()
    return wide / total if total else None


def _spreads(
    model: Model,
    guide: nn.Module,
    inputs: Sequence[object],
    num_draws: int,
    function_site: str,
) -> tuple[float | None, float | None]:
    """Return root mean squares of the function's standard deviations over inputs (at the means) and over draws."""

    def function(own_guide: Guide) -> Any:
        nodes = traces_of(model, own_guide, *inputs)[0].nodes
        if function_site not in nodes and function_site != FUNCTION_SITE:
            raise ValueError(
                f"function_site must be a site of the model, got {function_site!r}, which it does not have"
            )
        return nodes[function_site]["value"] if function_site in nodes else None

    center = function(mean_only(guide))
    if center is None or len(center) < 2:
        return None, None
    draws = torch.stack([function(guide) for _ in range(num_draws)])
    signal = center.var(0, unbiased=False).mean().sqrt()
    return float(signal), float(draws.var(0).mean().sqrt())


def _find_pull(by_width: Tensor) -> tuple[float, float]:
    """Return the mean derivative by log(scale) over weights, if it is far from zero, and one.

    Otherwise return the mean over the weights that have one far from zero, and their share, if it is large enough, else
    zeros.

    :param by_width: the derivatives in each draw, ``[draws, weights]``.
    """
    of_site = by_width.mean(-1)
    mean = float(of_site.mean())
    if abs(mean) > max(MOST_PULL, 4.0 * float(_standard_error(of_site))):
        return mean, 1.0
    means = by_width.mean(0)
    is_far = means.abs() > (PULL_ERRORS * _standard_error(by_width)).clamp(min=MOST_PULL)
    share = float(is_far.double().mean())
    return (float(means[is_far].mean()), share) if share > LEAST_SHARE else (0.0, 0.0)


def _find_distance(by_mean: Tensor) -> float:
    """Return the root mean square over weights of the distance of means from rest, or zero if it is small.

    :param by_mean: the derivatives by means in each draw, ``[draws, weights]``, in units of the posterior's deviation.
    """
    noise = float(_standard_error(by_mean).square().mean())
    square = float(by_mean.mean(0).square().mean()) - noise
    return square**0.5 if square > max(MOST_DISTANCE**2, TIMES_NOISE * noise) else 0.0


def _standard_error(draws: Tensor) -> Tensor:
    """Return the standard error of the mean over draws."""
    return draws.std(0) / len(draws) ** 0.5


def _site_gradients(
    loss: TermsELBO, model: Any, guide: AutoPerSite, batch: Sequence[object], number: int
) -> dict[str, Tensor]:
    """Return derivatives of the sites whose means and scales are trained, ``[2, draws, weights]``.

    The first row is by log(scale), the second by the mean, in units of the posterior's standard deviation.
    """
    sites = {
        name: site
        for name, site in guide.loc_scale_sites().items()
        if site.scale.requires_grad and site.loc.requires_grad
    }
    draws: dict[str, list[Tensor]] = {}
    parameters: list[Tensor] = []
    for site in sites.values():
        parameters += site.loc, site.scale
    for _ in range(number if sites else 0):
        with torch.enable_grad():
            value = loss(model, guide)(*batch)
            gradients = iter(torch.autograd.grad(value, parameters, allow_unused=True))
        for (name, site), by_loc, by_scale in zip(sites.items(), gradients, gradients, strict=True):
            if by_loc is not None and by_scale is not None:
                scale, by_log_scale = site.constrained_scale()
                by_width = by_scale * by_log_scale
                # The derivative by a shared scale is a sum over its weights.
                by_width = (by_width * (scale.numel() / by_loc.numel())).expand_as(by_loc)
                by_mean = by_loc * scale / site.family.scale_of(site.site, 1.0)
                derivatives = torch.stack([_some_of(by_width), _some_of(by_mean)])
                draws.setdefault(name, []).append(derivatives.double())
    return {name: torch.stack(derivatives, 1) for name, derivatives in draws.items()}


def _some_of(values: Tensor) -> Tensor:
    """Return the values of about a thousand weights of a site, or of all if it has fewer."""
    # An odd step does not stay in one column of a matrix.
    return values.detach().flatten()[:: values.numel() // SAMPLED | 1]


def _judge_terms(terms: LossTerms, follows_inputs: bool) -> Iterator[str]:
    """Yield findings on the terms of the loss."""
    nll = float(terms.negative_log_likelihood)
    kl = terms.kl_weight * float(terms.kl)
    if terms.num_data is None:
        yield (
            "No observation is inside a plate, so the likelihood of a mini-batch is not scaled to the data set and "
            "the KL counts too much. Put the observations in pyro.plate('data', N, subsample=...)."
        )
    if not (torch.isfinite(terms.negative_log_likelihood) and torch.isfinite(terms.kl)):
        yield f"Not finite: {', '.join(terms.not_finite())}. Try a smaller init_stddev or learning rate."
    elif kl > DOMINATES * abs(nll) and follows_inputs:
        yield (
            "The KL dominates the loss, as in most networks with more weights than data, but the function varies more "
            "over inputs than over draws, so it has learned from the data. Judge it by the predictive density on "
            "validation data; if that is poor, compare a tempered TermsELBO(kl_weight=0.1)."
        )
    elif kl > DOMINATES * abs(nll):
        yield (
            "The KL dominates the loss, so training pulls the posterior to the prior and predictions to a constant. "
            "Check first that num_data is the size of the training set. Early in training: train longer, or start at "
            "a larger init_stddev, closer to the prior's. After long training the network has too many weights for "
            "the data: use a smaller one, more data, or a tempered TermsELBO(kl_weight=0.1)."
        )
    elif nll > DOMINATES * abs(kl):
        yield (
            "The likelihood dominates the loss, so the prior hardly matters. This is expected with many data; "
            "with few, check that num_data, or the size of the plate, is not larger than the training set."
        )


def _judge_scales(
    unmoved: list[str], changes: dict[str, float], share_wide: float | None
) -> Iterator[str]:
    """Yield findings on scales that did not move, and on a posterior that is nearly as wide as the prior."""
    if unmoved:
        subject = (
            "No scale has"
            if len(unmoved) == len(changes)
            else f"The scales of {', '.join(unmoved)} have not"
        )
        yield (
            f"{subject} moved from the start, so the uncertainty is still the initial one. This is expected before "
            "training; after it, train longer or with a larger learning rate."
        )
    if share_wide is not None and share_wide > 0.5:
        yield (
            f"The posteriors of {share_wide:.0%} of the weights are at least half as wide as their priors, so the data "
            "say little about them. If predictions became worse during training: stop at the best epoch "
            "(fit(..., validation=...)), give scales a smaller rate, or take a narrower prior or a tempered "
            "TermsELBO(kl_weight=0.1)."
        )


def _judge_pulls(pulls: dict[str, float]) -> Iterator[str]:
    """Yield findings on scales that the loss still pulls at."""
    narrow = ", ".join(name for name, pull in pulls.items() if pull < 0)
    wide = ", ".join(name for name, pull in pulls.items() if pull > 0)
    advice = (
        "so they are not trained. Train longer, at a higher rate, or at one that falls to zero."
    )
    if narrow:
        yield f"The scales of {narrow} are too narrow: the loss falls if they grow, {advice}"
    if wide:
        yield f"The scales of {wide} are too wide: the loss falls if they shrink, {advice}"


def _judge_means(distances: dict[str, float]) -> Iterator[str]:
    """Yield a finding on means that are not at rest."""
    if distances:
        named = ", ".join(f"{name} ({distance:.2g})" for name, distance in distances.items())
        yield (
            f"The means of {named} are not at rest; in parentheses their distance in standard deviations of the "
            "posterior. Train longer, return the last epoch instead of the best on validation, or use a larger "
            "learning rate."
        )


def _judge_draws(signal: float | None, noise: float | None, sampled: list[str]) -> Iterator[str]:
    """Yield findings on functions that vary more over draws than over inputs, and on sampled KLs."""
    if signal is not None and noise is not None and noise > signal:
        yield (
            "The function varies more over draws of the weights than over inputs, so predictions are nearly constant. "
            "Start at a smaller init_stddev, train the means first (FitOptions(mean_only_epochs=1)), or warm up the KL "
            "with TermsELBO(kl_weight=lambda step: min(1.0, step / 1000))."
        )
    if sampled:
        yield (
            f"The KL of {', '.join(sampled)} is estimated from samples, which is noisy. A normal prior has a closed "
            "form; TermsELBO(strict_kl=True) names the first such site and why."
        )


@torch.no_grad()
def not_standardized(model: object, x: Batch, y: Batch) -> str | None:
    """Say which inputs or real targets have another size, with the numbers; None if all fit or nothing is known."""
    likelihood = getattr(model, "likelihood", None)
    if likelihood is None or num_rows(x) < 2:
        return None
    real = list(_real_outputs(likelihood, y))
    problems = []
    sizes = [_largest(tensor) for tensor in tree_leaves(x) if tensor.is_floating_point()]
    size = max(sizes, default=0.0)
    if size > (MOST_OF_INPUT if real else MOST_OF_INPUT_FOR_CLASSES) and not _scales_inputs(model):
        problems.append(f"inputs with a root mean square of up to {size:.3g}")
    for name, output, targets in real:
        if not (isinstance(targets, Tensor) and targets.is_floating_point()):
            continue
        observed_targets = targets[~targets.reshape(len(targets), -1).isnan().any(-1)]
        if not len(observed_targets):
            continue
        mean = float(observed_targets.mean())
        spread = float(observed_targets.std(0, correction=0).max())
        least = LEAST_SPREAD * min(1.0, float(torch.as_tensor(getattr(output, "scale", 1.0)).min()))
        if _largest(observed_targets) > MOST_OF_TARGET or 0.0 < spread < least:
            problems.append(
                f"{name}targets with mean {mean:.3g} and standard deviation {spread:.3g}"
            )
    if not problems:
        return None
    return (
        f"The data have {' and '.join(problems)}, but the priors and the noise expect about unit size. Standardize "
        "inputs and real targets by the training rows, and convert predictions back."
    )


def _real_outputs(likelihood: object, y: Batch) -> Iterator[tuple[str, Likelihood, Batch]]:
    """Yield the name, the likelihood and the targets of each output of real numbers; a single one has no name."""
    if isinstance(likelihood, REAL_TARGETS):
        yield "", likelihood, y
    if isinstance(likelihood, NamedLikelihoods) and isinstance(y, dict):
        for name, output in likelihood.by_name.items():
            if name in y and isinstance(output, REAL_TARGETS):
                yield f"{name} ", output, y[name]


def _largest(values: Tensor) -> float:
    """Return the root mean square over rows of the largest element of a row."""
    return float(torch.linalg.vector_norm(values, dim=0).max()) / len(values) ** 0.5


def _scales_inputs(model: object) -> bool:
    """Return whether the first layer with parameters of a Bayesian network normalizes its inputs."""
    for network in modules_of(BayesianModule, model):
        for layer in network.skeleton.modules():
            if [*layer.parameters(recurse=False)]:
                return "Norm" in type(layer).__name__
    return False
