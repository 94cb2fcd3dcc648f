# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loss: a true ELBO with an analytic KL wherever a closed form exists, kept in its terms."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import pyro.poutine as poutine
import torch
from pyro.distributions import Delta
from pyro.distributions.util import scale_and_mask
from pyro.infer import TraceMeanField_ELBO
from pyro.infer.util import is_validation_enabled
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from pyro.util import warn_if_nan
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from pyro_radial._pyro.checks import check_flag, check_types, positive_count
from pyro_radial._pyro.compat import (
    check_mean_field_requirement,
    check_model_guide_match,
    check_site_shape,
    is_deterministic,
)
from pyro_radial._pyro.types import Guide, Message, Model, Node
from pyro_radial.distributions.kl import kl_by_cross_entropy
from pyro_radial.distributions.wrappers import leaf, remove_masks
from pyro_radial.nn.modules import Autocast
from pyro_radial.poutine.local_reparameterization import check_drawn

PARTICLE_PLATE = "num_particles_vectorized"


@dataclass(frozen=True)
class LossTerms:
    """A loss in its terms: detached 0-d tensors in nats, for the whole data set.

    ``loss = negative_log_likelihood + kl_weight * kl``, and at each site ``kl = cross_entropy - entropy`` if the
    guide's distribution has an entropy. Losses that compare functions may add ``weight_space_kl_weight *
    weight_space_kl``, the KL of the weights.

    :param float kl_weight: the weight of the KL in the loss; a 0-d tensor while a graph is recorded.
    :param nll_by_site: the negative log-likelihood of each observed site.
    :param kl_by_site: the KL of each latent site, without the weight.
    :param entropies: a function that returns :attr:`entropy_by_site`.
    :param int num_data: N, the size of the plates around the observations, or None without a plate.
    :param sampled_kl: for each site with a sampled KL, why it has no closed form.
    """

    kl_weight: Any
    nll_by_site: dict[str, Tensor]
    kl_by_site: dict[str, Tensor]
    entropies: Callable[[], dict[str, Tensor]]
    num_data: int | None
    sampled_kl: dict[str, str] = field(default_factory=dict)
    weight_space_kl_weight: float = 0.0
    weight_space_kl_by_site: dict[str, Tensor] = field(default_factory=dict)

    @property
    def entropy_by_site(self) -> dict[str, Tensor]:
        """The entropy of each latent site with an entropy in the guide."""
        return self.entropies()

    @property
    def negative_log_likelihood(self) -> Tensor:
        """The sum over observed sites."""
        return _total(self.nll_by_site)

    @property
    def kl(self) -> Tensor:
        """The sum over latent sites, without its weight."""
        return _total(self.kl_by_site)

    @property
    def weight_space_kl(self) -> Tensor:
        """The KL of the weights in a loss that compares functions, without its weight; zero in others."""
        return _total(self.weight_space_kl_by_site)

    @property
    def loss(self) -> Tensor:
        """The value of the loss."""
        of_functions = _add_kl(self.negative_log_likelihood, self.kl_weight, self.kl)
        return _add_kl(of_functions, self.weight_space_kl_weight, self.weight_space_kl)

    @property
    def entropy(self) -> Tensor | None:
        """The guide's entropy, or None if a site has none."""
        by_site = self.entropy_by_site
        return _total(by_site) if by_site.keys() == self.kl_by_site.keys() else None

    @property
    def cross_entropy(self) -> Tensor | None:
        """E[-log p(w)] under the guide, or None if a site has no entropy."""
        entropy = self.entropy
        return None if entropy is None else self.kl + entropy

    def per_datum(self) -> "LossTerms":
        """Return the same terms divided by N, with ``num_data=1``; a ValueError if no observation is in a plate."""
        if self.num_data is None:
            raise ValueError(
                "per_datum: observations must be in a plate, got none, so the number of data is unknown"
            )
        return replace(average([self], self.num_data), num_data=1)

    def copy(self) -> "LossTerms":
        """Return the same terms in memory of their own."""
        return replace(
            self,
            nll_by_site=_map_sites(Tensor.clone, self.nll_by_site),
            kl_by_site=_map_sites(Tensor.clone, self.kl_by_site),
            weight_space_kl_by_site=_map_sites(Tensor.clone, self.weight_space_kl_by_site),
        )

    def not_finite(self) -> list[str]:
        """Return in words which terms are NaN or infinite; reads each term on the host."""
        kinds = (
            ("log-likelihood", self.nll_by_site),
            ("KL", self.kl_by_site),
            ("weight-space KL", self.weight_space_kl_by_site),
        )
        found = []
        for kind, by_site in kinds:
            for name, value in by_site.items():
                if not bool(torch.isfinite(value)):
                    found.append(f"{kind} of site '{name}'")
        return found


def average(particles: Sequence[LossTerms], num_particles: int) -> LossTerms:
    """Return the mean over particles; a pass with vectorized particles holds the sum over all of them."""
    first = particles[0]
    sampled_kl: dict[str, str] = {}
    for terms in particles:
        sampled_kl |= terms.sampled_kl
    return LossTerms(
        first.kl_weight,
        _sum_and_divide([p.nll_by_site for p in particles], num_particles),
        _sum_and_divide([p.kl_by_site for p in particles], num_particles),
        lambda: _sum_and_divide([p.entropy_by_site for p in particles], num_particles),
        first.num_data,
        sampled_kl,
        first.weight_space_kl_weight,
        _sum_and_divide([p.weight_space_kl_by_site for p in particles], num_particles),
    )


@torch.no_grad()
def entropies(sites: Mapping[str, Node]) -> dict[str, Tensor]:
    """Return the scaled entropy of each site that has one."""
    result = {}
    for name, site in sites.items():
        try:
            entropy = scale_and_mask(site["fn"].entropy(), scale=site["scale"], mask=site["mask"])
            result[name] = entropy.expand(site["fn"].batch_shape).sum()
        except (NotImplementedError, AttributeError):
            continue
    return result


def _map_sites(
    function: Callable[[Tensor], Tensor], by_site: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    return {name: function(value) for name, value in by_site.items()}


def _total(by_site: Mapping[str, Tensor]) -> Tensor:
    """Return the sum over sites."""
    return as_tensor(sum(by_site.values()))


def as_tensor(number: float | Tensor) -> Tensor:
    """Return a number as a tensor. ``torch.as_tensor`` alone would move a tensor to the default device."""
    return number if isinstance(number, Tensor) else torch.as_tensor(number)


def _add_kl(negative_log_likelihood: Tensor, kl_weight: float | Tensor, kl: Tensor) -> Tensor:
    """Return the negative log-likelihood plus the weighted KL.

    A weight of zero leaves out the KL, which is infinite at the pole of a radial prior. A tensor is not read.
    """
    if not isinstance(kl_weight, Tensor) and not kl_weight:
        return negative_log_likelihood
    return negative_log_likelihood + kl_weight * kl


def _sum_and_divide(by_site: Sequence[Mapping[str, Tensor]], number: int) -> dict[str, Tensor]:
    """Return the sum over the mappings, site by site, divided by a number."""
    result = {}
    for name in by_site[0]:
        total = sum(each[name] for each in by_site)
        result[name] = as_tensor(total) / number
    return result


class Run(NamedTuple):
    """A run of a guide, and of the model replayed with its draw."""

    model: Model
    guide: Guide
    args: tuple[object, ...]
    kwargs: dict[str, object]
    model_trace: Trace
    guide_trace: Trace
    sampled: dict[str, str]  # why the KL of a site was sampled
    step: int = 0  # losses evaluated with gradients so far, perhaps with this one

    @property
    def model_in_full_precision(self) -> Any:
        """The model without the autocast of a training step."""
        return self.model.model if isinstance(self.model, Autocast) else self.model


class TermsELBO(TraceMeanField_ELBO):
    r"""The evidence lower bound with analytic KLs and a weight that scales them.

    .. math:: -\mathrm{ELBO} = E_q[-\log p(y \mid w)] + \lambda\, KL(q(w) \,\|\, p(w)),

    in nats for the whole data set: the likelihood's plate scales a mini-batch by N / B, and only ``kl_weight`` scales
    the KL. With weight 1 it bounds the log evidence and has the expectation of :class:`~pyro.infer.Trace_ELBO`, also
    where :class:`~pyro.infer.TraceMeanField_ELBO` does not: at a ``Delta`` with a log-density (constrained sites of
    Pyro's autoguides), and if a handler scales or masks only the model.

    After each evaluation ``terms`` holds the loss in its terms. Use it with ``SVI``, or as ``elbo(model, guide)`` with
    a torch optimizer. One object serves one model and guide.

    :param int num_particles: draws of the guide for one loss.
    :param kl_weight: :math:`\lambda`, a number of at least 0 or a function of ``step``. ``poutine.scale`` around a
        model does not reach an analytic KL; this argument does.
    :param bool strict_kl: whether to raise an error at a site without a closed-form KL instead of sampling its KL.
        ``terms.sampled_kl`` lists sampled sites.
    :param kwargs: ``vectorize_particles``, ``max_plate_nesting`` and the other arguments of Pyro's losses.
    :raises ValueError: for a negative or infinite weight, no particles, or a ``strict_kl`` that is not a bool; naming
        the site, for a latent site that the guide lacks, and under ``strict_kl``; naming the parameter, for a guide
        with NaN or infinity if validation stops there.

    Example::

        >>> import pyro, pyro.distributions as dist
        >>> from pyro_radial import AutoRadial
        >>> def model():
        ...     w = pyro.sample("w", dist.Normal(0., 1.).expand([10]).to_event(1))
        ...     with pyro.plate("data", 4):
        ...         pyro.sample("y", dist.Normal(w.sum(), 1.), obs=torch.zeros(4))
        >>> elbo = TermsELBO(strict_kl=True)
        >>> loss = elbo(model, AutoRadial(model))()
        >>> bool(torch.isclose(loss, elbo.terms.loss))
        True
        >>> sorted(elbo.terms.kl_by_site), elbo.terms.num_data
        (['w'], 4)
    """

    #: The weight of the KL of the weights in losses that compare functions.
    weight_space_kl: float = 0.0

    def __init__(
        self,
        num_particles: int = 1,
        *,
        kl_weight: float | Callable[[int], float] = 1.0,
        strict_kl: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_particles=positive_count("num_particles", num_particles), **kwargs)
        if not callable(kl_weight):
            check_weight(kl_weight)
        self.kl_weight = kl_weight
        self.strict_kl = check_flag("strict_kl", strict_kl)
        #: Losses evaluated with gradients so far, the argument of a ``kl_weight`` schedule.
        self.step = 0
        self._terms: Callable[[], LossTerms] | None = None

    @property
    def terms(self) -> LossTerms:
        """The terms of the latest loss, averaged over its particles; a RuntimeError before the first loss."""
        if self._terms is None:
            raise RuntimeError("TermsELBO.terms: a loss must be evaluated first, got no loss yet")
        return self._terms()

    def weight_at(self, step: int) -> float:
        """Return the weight of the KL at a step, counted from zero."""
        if callable(self.kl_weight):
            return check_weight(self.kl_weight(step))
        return float(self.kl_weight)

    def keep(self, terms: Callable[[], LossTerms], gradients: bool) -> None:
        """Let :attr:`terms` return the terms of a loss evaluated elsewhere; with gradients, count it as a step."""
        self._terms = terms
        self.step += gradients

    def loss_and_terms(
        self,
        model: Model,
        guide: Guide,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        weight: float | Tensor,
        step: int,
    ) -> tuple[Tensor, LossTerms]:
        """Evaluate with this weight of the KL instead of ``kl_weight``, and change nothing here.

        :param weight: a number, or a 0-d tensor while a graph is recorded.
        :param step: the number of the step, counted from one, instead of ``step``.
        :returns: the loss as a tensor to differentiate, and its terms.
        """
        loss, evaluated = self._loss_and_passes(model, guide, args, dict(kwargs), weight, step)
        return loss, average(evaluated, self.num_particles)

    def loss(self, model: Model, guide: Guide, *args: object, **kwargs: object) -> float:
        """Return the loss without gradients, as a number like Pyro's losses; this reads it on the host."""
        return float(self._total_of_passes(model, guide, args, kwargs, backward=False))

    def differentiable_loss(
        self, model: Model, guide: Guide, *args: object, **kwargs: object
    ) -> Tensor:
        """Return the loss as a tensor to differentiate, without a host-device synchronization."""
        step = self.step + torch.is_grad_enabled()
        loss, evaluated = self._loss_and_passes(
            model, guide, args, kwargs, self.weight_at(self.step), step
        )
        self.keep(lambda: average(evaluated, self.num_particles), torch.is_grad_enabled())
        return loss

    def loss_and_grads(self, model: Model, guide: Guide, *args: object, **kwargs: object) -> Tensor:
        """Return the loss and add its gradients to those of the parameters, one pass after the other."""
        return self._total_of_passes(model, guide, args, kwargs, backward=True)

    def _loss_and_passes(
        self,
        model: Model,
        guide: Guide,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        weight: float | Tensor,
        step: int,
    ) -> tuple[Tensor, list[LossTerms]]:
        """Return the mean loss of all passes, and the terms of each."""
        losses = []
        evaluated = []
        for loss, terms in self._passes(model, guide, args, kwargs, weight, step):
            losses.append(loss)
            evaluated.append(terms)
        return as_tensor(sum(losses) / self.num_particles), evaluated

    def _total_of_passes(
        self,
        model: Model,
        guide: Guide,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        backward: bool,
    ) -> Tensor:
        """Return the detached mean loss of all passes; with ``backward``, add the gradients of one after another."""
        total: float | Tensor = 0.0
        evaluated = []
        step = self.step + torch.is_grad_enabled()
        for loss, terms in self._passes(
            model, guide, args, kwargs, self.weight_at(self.step), step
        ):
            evaluated.append(terms)
            total = total + loss.detach() / self.num_particles
            if backward and loss.requires_grad:
                (loss / self.num_particles).backward(retain_graph=self.retain_graph)
        self.keep(lambda: average(evaluated, self.num_particles), torch.is_grad_enabled())
        warn_if_nan(as_tensor(total), "loss")
        return as_tensor(total)

    def _passes(
        self,
        model: Model,
        guide: Guide,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        weight: float | Tensor,
        step: int,
    ) -> Iterator[tuple[Tensor, LossTerms]]:
        """Yield the loss of each pass, which sums over vectorized particles, and its terms."""
        check_types(Callable, model=model, guide=guide)
        for model_trace, guide_trace in self._get_traces(model, guide, args, kwargs):
            run = Run(model, guide, args, kwargs, model_trace, guide_trace, {}, step)
            sites = _observed_sites(model_trace).items()
            observed = {name: -site["log_prob_sum"] for name, site in sites}
            latent, weights = self._kls(run)
            loss = _add_kl(_total(observed), weight, _total(latent))
            loss = _add_kl(loss, self.weight_space_kl, _total(weights))
            # An entropy needs no value, which is a copy of all weights.
            parts = {}
            for name, site in guide_trace.nodes.items():
                if name in latent:
                    parts[name] = {"fn": site["fn"], "scale": site["scale"], "mask": site["mask"]}
            terms = LossTerms(
                weight,
                _map_sites(Tensor.detach, observed),
                _map_sites(Tensor.detach, latent),
                partial(entropies, parts),
                num_data_of(model_trace),
                run.sampled,
                self.weight_space_kl,
                _map_sites(Tensor.detach, weights),
            )
            yield loss, terms

    def _get_trace(
        self,
        model: Model,
        guide: Guide,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> tuple[Trace, Trace]:
        """Run the guide, and the model on it, and compute the log-densities of observations only.

        Pyro also computes the log-densities of latent sites, which an analytic KL does not need.
        """
        run: Any = poutine.trace(guide)
        try:
            guide_trace = run.get_trace(*args, **kwargs)
            replayed = poutine.replay(model, trace=guide_trace)
            model_trace = poutine.trace(replayed).get_trace(*args, **kwargs)
        except ValueError as error:
            # Validation stops at a value that follows from a broken parameter.
            for name, site in dict[str, Node](run.trace.nodes).items():
                if site["type"] == "param" and not bool(torch.isfinite(site["value"]).all()):
                    raise not_finite_parameter(f"'{name}'") from error
            raise
        self._check_covered(model_trace, guide_trace)
        if is_validation_enabled():
            check_model_guide_match(model_trace, guide_trace, self.max_plate_nesting)
        model_trace = prune_subsample_sites(model_trace)
        guide_trace = prune_subsample_sites(guide_trace)
        model_trace.compute_log_prob(lambda _, site: site["is_observed"])
        if is_validation_enabled():
            nodes: list[Any] = [*model_trace.nodes.values(), *guide_trace.nodes.values()]
            for site in nodes:
                if site["type"] == "sample":
                    # Pyro checks plates by the shape of the log-density.
                    stand_in = {"log_prob": torch.empty(site["fn"].batch_shape, device="meta")}
                    check_site_shape(stand_in | site, self.max_plate_nesting)
            check_mean_field_requirement(model_trace, guide_trace)
        return model_trace, guide_trace

    def _vectorized_num_particles(self, fn: Model) -> Model:
        """Repeat the particles as Pyro does, and record each site's distribution before and after."""
        repeated = super()._vectorized_num_particles(_RecordDistribution("own_distribution")(fn))
        return _RecordDistribution("repeated_distribution")(repeated)

    def _kls(self, run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the KLs by site, and the KLs of the weights in losses that compare functions."""
        return self._site_kls(run), {}

    def _site_kls(
        self, run: Run, wanted: Callable[[str], bool] = lambda _: True
    ) -> dict[str, Tensor]:
        """Return the KL of each latent site of the guide with a wanted name."""
        kls = {}
        for name, site in run.guide_trace.iter_stochastic_nodes():
            if not site_is_subsample(site) and wanted(name):
                kls[name] = self._site_kl(name, site, run)
        return kls

    def _site_kl(self, name: str, guide_site: Node, run: Run) -> Tensor:
        """Return the KL of one site, and record why it is sampled."""
        kl = _analytic_kl(name, guide_site, run)
        if isinstance(kl, Tensor):
            return kl
        if self.strict_kl:
            raise ValueError(
                f"strict_kl: site '{name}' is {kl}, so its KL would be estimated from samples"
            )
        run.sampled[name] = kl
        return _estimate_kl(name, run.model_trace, run.guide_trace)

    def _check_covered(self, model_trace: Trace, guide_trace: Trace) -> None:
        """Raise a ValueError naming a latent site of the model that the guide lacks."""
        for name, site in model_trace.iter_stochastic_nodes():
            if name in guide_trace or site_is_subsample(site):
                continue
            advice = ""
            drawn = guide_trace.iter_stochastic_nodes()
            if any(other not in model_trace and not is_auxiliary(own) for other, own in drawn):
                advice = (
                    "; the guide has sites that the model no longer has, for instance after use_head: make a new guide "
                    "for the model as it is now, such as AutoRadial(model) or chain.guide(AutoRadial), or call "
                    "use_head with the head that the guide was made for"
                )
            raise ValueError(f"guide must have latent site '{name}' of the model, got none{advice}")


def not_finite_parameter(name: str) -> ValueError:
    """Return the error for a guide with a parameter that is not finite."""
    return ValueError(
        f"guide must have finite parameters, got NaN or infinity in {name}: training has diverged. Go back to a "
        "checkpoint, or start again with a smaller learning rate"
    )


def is_auxiliary(site: Node) -> bool:
    """Return whether a guide marks a site as one that the model does not have."""
    return bool((site["infer"] or {}).get("is_auxiliary", False))


def check_weight(weight: float, name: str = "kl_weight") -> float:
    """Return the weight of a KL as a float; raise a ValueError unless it is finite and not negative."""
    if not isinstance(weight, int | float) or not 0.0 <= weight < math.inf:
        functions = " or a function that returns one" if name == "kl_weight" else ""
        raise ValueError(f"{name} must be a non-negative finite number{functions}, got {weight!r}")
    return float(weight)


def _observed_sites(model_trace: Trace) -> dict[str, Node]:
    """Return the sites of observations."""
    found: dict[str, Node] = {}
    for name in model_trace.observation_nodes:
        site = model_trace.nodes[name]
        if not is_deterministic(site):
            found[name] = site
    return found


def num_data_of(model_trace: Trace) -> int | None:
    """Return the full size of the plates around the observations; sites that share their plates count once."""
    sizes = {}
    for site in _observed_sites(model_trace).values():
        plates = {}
        for frame in site["cond_indep_stack"]:
            if frame.name != PARTICLE_PLATE:
                plates[frame.name] = frame.full_size or frame.size
        if plates:
            sizes[frozenset(plates)] = math.prod(plates.values())
    return sum(sizes.values()) if sizes else None


class _RecordDistribution(Messenger):
    """Record under a key the distribution of each sample statement at this place among the handlers.

    One recorder inside and one outside of a plate of particles serve :func:`own_distribution`.
    """

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def _pyro_sample(self, msg: Message) -> None:
        msg[self.key] = msg["fn"]


def _analytic_kl(name: str, guide_site: Node, run: Run) -> Tensor | str:
    """Return the scaled and masked KL of a latent site in nats, or in words why it must be sampled."""
    model_site: Node | None = run.model_trace.nodes.get(name)
    if is_validation_enabled() and not guide_site["fn"].has_rsample:
        raise NotImplementedError(
            f"guide must have a reparameterized sampler at site '{name}', got {type(leaf(guide_site['fn'])).__name__}"
        )
    if model_site is None:
        return "an auxiliary site of the guide, whose log-density is sampled"
    if isinstance(leaf(guide_site["fn"]), Delta):
        # Exact given its value; Pyro's own rule forgets the log-density of the Delta.
        return _log_prob_sum(name, run.guide_trace) - _log_prob_sum(name, run.model_trace)
    scale_in_guide = guide_site["scale"]
    scale = model_site["scale"]
    if not _same(guide_site["mask"], model_site["mask"]):
        return "masked differently in the model and the guide"
    q = own_distribution(guide_site)
    p = own_distribution(model_site)
    # Torch's registry has Pyro's rule for two masked normals, which is wrong for different masks.
    are_masked = _is_masked_normal(q) and _is_masked_normal(p)
    try:
        kl = kl_by_cross_entropy(q, p) if are_masked else kl_divergence(q, p)
    except NotImplementedError:
        return f"without a closed-form KL from {type(leaf(q)).__name__} to {type(leaf(p)).__name__}"
    kl = scale_and_mask(kl, scale=scale, mask=guide_site["mask"])
    if not _same(scale_in_guide, scale):
        # E[a log q - b log p] = b KL - (a - b) H(q); tensors may be equal.
        try:
            entropy = q.entropy()
        except NotImplementedError:
            return "scaled differently in the model and the guide, without a closed-form entropy"
        kl = kl - scale_and_mask(entropy, scale=scale_in_guide - scale, mask=guide_site["mask"])
    return kl.expand(guide_site["fn"].batch_shape).sum()


def _is_masked_normal(distribution: Any) -> bool:
    return isinstance(leaf(distribution), Normal) and remove_masks(distribution) is not distribution


def _estimate_kl(name: str, model_trace: Trace, guide_trace: Trace) -> Tensor:
    """Estimate the KL of a latent site without bias, or return the log-density of an auxiliary site of the guide."""
    site: Node = guide_trace.nodes[name]
    check_drawn(name, site, "prior must have a KL in closed form")
    score_parts = site["fn"].score_parts(site["value"], *site["args"], **site["kwargs"])
    score_parts = score_parts.scale_and_mask(site["scale"], site["mask"])
    log_density: Tensor = score_parts.entropy_term.sum()
    if name not in model_trace.nodes:
        return log_density
    return log_density - _log_prob_sum(name, model_trace)


def own_distribution(site: Node) -> Any:
    """Return a site's distribution before particles repeated it, unless a handler has replaced it since."""
    if site["fn"] is site.get("repeated_distribution"):
        return site["own_distribution"]
    return site["fn"]


def _log_prob_sum(name: str, trace: Trace) -> Tensor:
    trace.compute_log_prob(lambda site_name, _: site_name == name)
    return trace.nodes[name]["log_prob_sum"]


def _same(a: object, b: object) -> bool:
    """Return whether two scales or masks are equal; tensors are compared by identity."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
