# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loss: a true ELBO, in its named terms."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.distributions import Delta
from pyro.distributions.util import scale_and_mask
from pyro.infer import TraceMeanField_ELBO
from pyro.infer.util import is_validation_enabled
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from torch import Tensor
from torch.distributions import kl_divergence

from pyro_radial._compat import (
    check_mean_field_requirement,
    check_model_guide_match,
    check_site_shape,
    is_deterministic,
)
from pyro_radial.distributions.wrappers import leaf

PARTICLE_PLATE = "num_particles_vectorized"


@dataclass(frozen=True)
class LossTerms:
    """One loss in its terms: detached tensors in nats, for the whole data set unless taken per datum.

    ``loss = negative_log_likelihood + kl_weight * kl``, and site by site ``kl = cross_entropy - entropy`` wherever
    the guide's distribution has an entropy.
    """

    kl_weight: float
    nll_by_site: dict[str, Tensor]
    kl_by_site: dict[str, Tensor]
    #: Makes :attr:`entropy_by_site`, which few ask for.
    entropies: Callable[[], dict[str, Tensor]]
    num_data: int | None

    @property
    def entropy_by_site(self) -> dict[str, Tensor]:
        """The entropy of each latent site whose distribution in the guide has one."""
        return self.entropies()

    @property
    def negative_log_likelihood(self) -> Tensor:
        """Of all observations."""
        return _total(self.nll_by_site)

    @property
    def kl(self) -> Tensor:
        """Of all latent sites, without its weight."""
        return _total(self.kl_by_site)

    @property
    def loss(self) -> Tensor:
        """The value of the loss."""
        return _weighted(self.negative_log_likelihood, self.kl_weight, self.kl)

    @property
    def entropy(self) -> Tensor | None:
        """The guide's entropy, or None where a site's distribution has none."""
        by_site = self.entropy_by_site
        return _total(by_site) if by_site.keys() == self.kl_by_site.keys() else None

    @property
    def cross_entropy(self) -> Tensor | None:
        """E[-log p(w)] under the guide, or None where a site's distribution has no entropy."""
        entropy = self.entropy
        return None if entropy is None else self.kl + entropy

    def per_datum(self) -> "LossTerms":
        """The same terms divided by N, the size of the plates around the observations.

        :raises ValueError: if no observation is in a plate.
        """
        number = self.num_data
        if number is None:
            raise ValueError("per_datum: the model observes nothing inside a plate, so the number of data is unknown")
        return LossTerms(
            self.kl_weight,
            _divided([self.nll_by_site], number),
            _divided([self.kl_by_site], number),
            lambda: _divided([self.entropy_by_site], number),
            num_data=1,
        )

    def not_finite(self) -> list[str]:
        """The terms that are NaN or infinite, in words; waits for the device."""
        named = [(f"log-likelihood of site '{name}'", value) for name, value in self.nll_by_site.items()]
        named += [(f"KL of site '{name}'", value) for name, value in self.kl_by_site.items()]
        return [name for name, value in named if not bool(torch.isfinite(value))]


class RadialELBO(TraceMeanField_ELBO):
    r"""The evidence lower bound with analytic KLs, a weight on them that works, and its terms kept.

    .. math:: -\mathrm{ELBO} = E_q[-\log p(y \mid w)] + \lambda\, KL(q(w) \,\|\, p(w)),

    in nats for the whole data set: the likelihood's plate scales a mini-batch by N / B, and nothing scales the KL
    but ``kl_weight``. For weight 1 it is a bound on the log evidence, and its expectation is that of
    :class:`~pyro.infer.Trace_ELBO`, also where :class:`~pyro.infer.TraceMeanField_ELBO` is not: at a ``Delta`` with a
    log-density (constrained sites of Pyro's autoguides), and where a handler scales or masks the model but not the
    guide.

    After each evaluation :attr:`terms` holds its :class:`LossTerms`, at no second pass. Works with ``SVI``, and as
    ``elbo(model, guide)`` with a torch optimizer; an object serves one model and guide.

    :param int num_particles: draws of the guide for one loss.
    :param kl_weight: :math:`\lambda`, a number of at least 0, or a function of :attr:`step`. It is applied here because
        ``poutine.scale`` around a model does not reach an analytic KL.
    :param bool strict_kl: raise where a KL would be estimated from samples, instead of doing so in silence.
    :param kwargs: ``vectorize_particles``, ``max_plate_nesting`` and the rest of Pyro's.
    :raises ValueError: for a negative or infinite weight; under ``strict_kl`` naming the site.

    Example::

        >>> import pyro, pyro.distributions as dist
        >>> from pyro_radial import AutoRadial
        >>> def model():
        ...     w = pyro.sample("w", dist.Normal(0., 1.).expand([10]).to_event(1))
        ...     with pyro.plate("data", 4):
        ...         pyro.sample("y", dist.Normal(w.sum(), 1.), obs=torch.zeros(4))
        >>> elbo = RadialELBO(strict_kl=True)
        >>> loss = elbo(model, AutoRadial(model))()
        >>> bool(torch.isclose(loss, elbo.terms.loss))
        True
        >>> sorted(elbo.terms.kl_by_site), elbo.terms.num_data
        (['w'], 4)
    """

    def __init__(
        self,
        num_particles: int = 1,
        *,
        kl_weight: float | Callable[[int], float] = 1.0,
        strict_kl: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_particles=num_particles, **kwargs)
        if not callable(kl_weight):
            _check_weight(kl_weight)
        self.kl_weight = kl_weight
        self.strict_kl = strict_kl
        #: Losses evaluated with gradients so far, the argument of a ``kl_weight`` schedule.
        self.step = 0
        self._current_weight = 1.0
        self._particles: list[LossTerms] = []

    @property
    def terms(self) -> LossTerms:
        """The terms of the latest loss, averaged over its particles.

        :raises RuntimeError: before the first loss.
        """
        if not self._particles:
            raise RuntimeError("RadialELBO.terms: no loss has been evaluated yet")
        return _average(self._particles, self.num_particles)

    def _get_traces(
        self, model: Any, guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[Trace, Trace]]:
        self._particles = []
        self._current_weight = _check_weight(self.kl_weight(self.step)) if callable(self.kl_weight) else self.kl_weight
        if torch.is_grad_enabled():
            self.step += 1
        yield from super()._get_traces(model, guide, args, kwargs)

    def _get_trace(self, model: Any, guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Trace, Trace]:
        """One run of the guide and the model on it, with the log-densities of observations alone.

        Pyro computes those of all latent sites as well; where the KL is analytic nothing asks for them.
        """
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
        if is_validation_enabled():
            check_model_guide_match(model_trace, guide_trace, self.max_plate_nesting)
        model_trace, guide_trace = prune_subsample_sites(model_trace), prune_subsample_sites(guide_trace)
        model_trace.compute_log_prob(lambda _, site: site["is_observed"])
        if is_validation_enabled():
            for site in (*model_trace.nodes.values(), *guide_trace.nodes.values()):
                if site["type"] == "sample":
                    check_site_shape(_with_density_shape(site), self.max_plate_nesting)
            check_mean_field_requirement(model_trace, guide_trace)
        return model_trace, guide_trace

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss as a tensor to differentiate, without waiting for the device."""
        losses = [
            self._differentiable_loss_particle(*traces)[1] for traces in self._get_traces(model, guide, args, kwargs)
        ]
        return torch.as_tensor(sum(losses) / self.num_particles)

    def _differentiable_loss_particle(self, model_trace: Trace, guide_trace: Trace) -> tuple[Tensor, Tensor]:
        observed = {
            name: -site["log_prob_sum"]
            for name, site in model_trace.nodes.items()
            if site["type"] == "sample" and site["is_observed"] and not is_deterministic(site)
        }
        self._check_covered(model_trace, guide_trace)
        latent = self._kl_by_site(model_trace, guide_trace)
        loss = _weighted(_total(observed), self._current_weight, _total(latent))
        self._particles.append(
            LossTerms(
                self._current_weight,
                {name: value.detach() for name, value in observed.items()},
                {name: value.detach() for name, value in latent.items()},
                partial(
                    _entropies,
                    {name: _distribution(site) for name, site in guide_trace.nodes.items() if name in latent},
                ),
                _num_data(model_trace, observed),
            )
        )
        return loss.detach(), loss

    def _kl_by_site(self, model_trace: Trace, guide_trace: Trace) -> dict[str, Tensor]:
        return {
            name: self._site_kl(name, site, model_trace, guide_trace)
            for name, site in guide_trace.nodes.items()
            if site["type"] == "sample" and not site["is_observed"] and not site_is_subsample(site)
        }

    def _vectorized_num_particles(self, fn: Any) -> Any:
        """As Pyro's, but sites remember what distribution they had before."""
        return _Record("repeated_distribution")(super()._vectorized_num_particles(_Record("own_distribution")(fn)))

    def _site_kl(self, name: str, guide_site: Any, model_trace: Trace, guide_trace: Trace) -> Tensor:
        """The scaled and masked KL of one site, summed; for a guide's auxiliary site its log-density."""
        model_site: Any = model_trace.nodes.get(name)
        if is_validation_enabled() and not guide_site["fn"].has_rsample:
            raise NotImplementedError(
                f"RadialELBO: the guide's distribution of site '{name}' has no reparameterized sampler"
            )
        if model_site is None:
            self._allow_sampling(name, "an auxiliary site of the guide, whose log-density is sampled")
            return _sampled_entropy_term(name, guide_trace)
        if isinstance(leaf(guide_site["fn"]), Delta):
            # Exact given its value; Pyro's own rule forgets the log-density of the Delta.
            return _log_prob_sum(name, guide_trace) - _log_prob_sum(name, model_trace)
        if not _same(guide_site["scale"], model_site["scale"]):
            reason = "scaled differently in the model and the guide"
        elif not _same(guide_site["mask"], model_site["mask"]):
            reason = "masked differently in the model and the guide"
        else:
            try:
                kl = kl_divergence(_own_distribution(guide_site), _own_distribution(model_site))
                kl = scale_and_mask(kl, scale=guide_site["scale"], mask=guide_site["mask"])
                return kl.expand(guide_site["fn"].batch_shape).sum()
            except NotImplementedError:
                q, p = (type(leaf(site["fn"])).__name__ for site in (guide_site, model_site))
                reason = f"without a closed-form KL from {q} to {p}"
        self._allow_sampling(name, reason)
        return _sampled_entropy_term(name, guide_trace) - _log_prob_sum(name, model_trace)

    def _allow_sampling(self, name: str, reason: str) -> None:
        if self.strict_kl:
            raise ValueError(f"strict_kl: site '{name}' is {reason}, so its KL would be estimated from samples")

    def _check_covered(self, model_trace: Trace, guide_trace: Trace) -> None:
        for name, site in model_trace.iter_stochastic_nodes():
            if name not in guide_trace and not site_is_subsample(site):
                raise ValueError(f"{type(self).__name__}: latent site '{name}' of the model is not in the guide")


class _Record(Messenger):
    """Keeps the distribution that a sample statement has at this place among the handlers."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def _pyro_sample(self, msg: Any) -> None:
        msg[self.key] = msg["fn"]


def _own_distribution(site: Any) -> Any:
    """A site's distribution before the plate of the particles repeated it, unless a handler has replaced it.

    A KL of distributions that all particles share is one KL, not as many.
    """
    return site["own_distribution"] if site["fn"] is site.get("repeated_distribution") else site["fn"]


def _with_density_shape(site: Any) -> Any:
    """The site with a stand-in of its log-density's shape, for Pyro's check of plates."""
    return site if "log_prob" in site else {**site, "log_prob": torch.empty(site["fn"].batch_shape, device="meta")}


def _log_prob_sum(name: str, trace: Trace) -> Tensor:
    trace.compute_log_prob(lambda site_name, _: site_name == name)
    log_prob: Tensor = trace.nodes[name]["log_prob_sum"]
    return log_prob


def _sampled_entropy_term(name: str, guide_trace: Trace) -> Tensor:
    site: Any = guide_trace.nodes[name]
    score_parts = site["fn"].score_parts(site["value"], *site["args"], **site["kwargs"])
    term: Tensor = score_parts.scale_and_mask(site["scale"], site["mask"]).entropy_term
    return term.sum()


def _same(a: Any, b: Any) -> bool:
    """Whether two scales or masks are equal, without looking into a tensor's values."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


def _weighted(negative_log_likelihood: Tensor, kl_weight: float, kl: Tensor) -> Tensor:
    # A weight of zero leaves the KL out altogether: at the pole of a radial prior it is infinite.
    return negative_log_likelihood + kl_weight * kl if kl_weight else negative_log_likelihood


def _check_weight(weight: float) -> float:
    if not isinstance(weight, int | float) or not 0.0 <= weight < math.inf:
        raise ValueError(f"kl_weight must be a non-negative finite number or a function returning one, got {weight!r}")
    return float(weight)


def _distribution(site: Any) -> dict[str, Any]:
    """What an entropy needs of a site; its value, a copy of all weights, is let go."""
    return {key: site[key] for key in ("fn", "scale", "mask")}


@torch.no_grad()
def _entropies(sites: dict[str, Any]) -> dict[str, Tensor]:
    """The scaled entropy of each site whose distribution has one."""
    result = {}
    for name, site in sites.items():
        try:
            entropy = scale_and_mask(site["fn"].entropy(), scale=site["scale"], mask=site["mask"])
            result[name] = entropy.expand(site["fn"].batch_shape).sum()
        except (NotImplementedError, AttributeError):
            continue
    return result


def _num_data(model_trace: Trace, observed: dict[str, Tensor]) -> int | None:
    """The full size of the plates around the observations; sites that share their plates count once."""
    sizes = {}
    for name in observed:
        frames = [f for f in model_trace.nodes[name]["cond_indep_stack"] if f.name != PARTICLE_PLATE]
        if frames:
            sizes[frozenset(f.name for f in frames)] = math.prod(f.full_size or f.size for f in frames)
    return sum(sizes.values()) if sizes else None


def _total(by_site: dict[str, Tensor]) -> Tensor:
    return torch.as_tensor(sum(by_site.values()))


def _divided(by_site: list[dict[str, Tensor]], number: int) -> dict[str, Tensor]:
    """The sum over the mappings, site by site, divided by a number."""
    return {name: torch.as_tensor(sum(d[name] for d in by_site)) / number for name in by_site[0]}


def _average(particles: list[LossTerms], num_particles: int) -> LossTerms:
    """The mean over looped particles; a vectorized trace holds the sum over all of them."""
    return LossTerms(
        particles[0].kl_weight,
        _divided([p.nll_by_site for p in particles], num_particles),
        _divided([p.kl_by_site for p in particles], num_particles),
        lambda: _divided([p.entropy_by_site for p in particles], num_particles),
        particles[0].num_data,
    )
