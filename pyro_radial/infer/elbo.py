# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loss: a true ELBO whose KLs are analytic wherever a closed form exists."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer import TraceMeanField_ELBO
from pyro.infer.util import is_validation_enabled
from pyro.poutine import Trace
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from torch import Tensor

from pyro_radial._pyro.checks import positive_count
from pyro_radial._pyro.compat import (
    check_mean_field_requirement,
    check_model_guide_match,
    check_site_shape,
    is_deterministic,
)
from pyro_radial.infer.loss_terms import LossTerms, average, entropies, entropy_parts, total, weighted
from pyro_radial.infer.site_kl import RecordDistribution, analytic_kl, sampled_kl

__all__ = ["RadialELBO", "check_weight"]

PARTICLE_PLATE = "num_particles_vectorized"


class RadialELBO(TraceMeanField_ELBO):
    r"""The evidence lower bound with analytic KLs, a weight on them that works, and its terms kept.

    .. math:: -\mathrm{ELBO} = E_q[-\log p(y \mid w)] + \lambda\, KL(q(w) \,\|\, p(w)),

    in nats for the whole data set: the likelihood's plate scales a mini-batch by N / B, and nothing scales the KL
    but ``kl_weight``. For weight 1 it is a bound on the log evidence, and its expectation is that of
    :class:`~pyro.infer.Trace_ELBO`, also where :class:`~pyro.infer.TraceMeanField_ELBO` is not: at a ``Delta`` with a
    log-density (constrained sites of Pyro's autoguides), and where a handler scales or masks the model but not the
    guide.

    After each evaluation ``terms`` holds its :class:`LossTerms`, at no second pass. Works with ``SVI``, and as
    ``elbo(model, guide)`` with a torch optimizer; an object serves one model and guide.

    :param int num_particles: draws of the guide for one loss.
    :param kl_weight: :math:`\lambda`, a number of at least 0, or a function of ``step``. It is applied here because
        ``poutine.scale`` around a model does not reach an analytic KL.
    :param bool strict_kl: raise where a KL would be estimated from samples, instead of doing so in silence;
        ``sampled_kl`` of its :class:`LossTerms` lists where.
    :param kwargs: ``vectorize_particles``, ``max_plate_nesting`` and the rest of Pyro's.
    :raises ValueError: for a negative or infinite weight or no particles; naming the site, for a latent site that the
        guide lacks, and under ``strict_kl``; naming the parameter of the guide that is NaN or infinite, where
        validation stops at what comes of it.

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

    #: The weight of a second KL, of the weights of functions to their own prior, in losses that have one.
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
        self.strict_kl = strict_kl
        #: Losses evaluated with gradients so far, the argument of a ``kl_weight`` schedule.
        self.step = 0
        self._given_weight: float | Tensor | None = None
        self._current_weight: float | Tensor = 1.0
        self._particles: list[LossTerms] = []
        self._kept: LossTerms | None = None
        self._sampled: dict[str, str] = {}
        # The model of the loss that is being evaluated, without the plate of its particles and in full precision.
        self._model: Any = None

    @property
    def terms(self) -> LossTerms:
        """The terms of the latest loss, averaged over its particles.

        :raises RuntimeError: before the first loss.
        """
        if self._kept is not None:
            return self._kept
        if not self._particles:
            raise RuntimeError("RadialELBO.terms: a loss must be evaluated first, got no loss yet")
        return average(self._particles, self.num_particles)

    def weight_now(self) -> float:
        """The weight of the KL at this step."""
        return check_weight(self.kl_weight(self.step)) if callable(self.kl_weight) else float(self.kl_weight)

    @contextmanager
    def weighted_by(self, weight: float | Tensor) -> Iterator[None]:
        """Evaluate with this weight in the place of ``kl_weight``: a tensor is an input of a graph that is recorded."""
        before, self._given_weight = self._given_weight, weight
        try:
            yield
        finally:
            self._given_weight = before

    def keep(self, terms: LossTerms, gradients: bool) -> None:
        """Take over the terms of a loss that was evaluated elsewhere, as by a graph.

        :param LossTerms terms: its terms.
        :param bool gradients: whether it was evaluated with gradients, and so counts as a step.
        """
        self._particles, self._kept = [], terms
        self.step += gradients

    def _get_traces(
        self, model: Any, guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[Trace, Trace]]:
        self._particles, self._kept = [], None
        self._current_weight = self.weight_now() if self._given_weight is None else self._given_weight
        if torch.is_grad_enabled():
            self.step += 1
        self._model = getattr(model, "in_full_precision", model)
        try:
            yield from super()._get_traces(model, guide, args, kwargs)
        finally:
            self._model = None

    def _get_trace(self, model: Any, guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Trace, Trace]:
        """One run of the guide and the model on it, with the log-densities of observations alone.

        Pyro computes those of all latent sites as well; where the KL is analytic nothing asks for them.
        """
        run: Any = poutine.trace(guide)
        try:
            guide_trace = run.get_trace(*args, **kwargs)
            model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
        except ValueError as error:
            # Where validation stops at what came of it.
            self._check_parameters(run.trace, error)
            raise
        self._check_covered(model_trace, guide_trace)
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
        """The loss as a tensor to differentiate, without a host-device synchronization."""
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
        self._sampled = {}
        latent = self._kl_by_site(model_trace, guide_trace)
        of_weights = self._weight_space_kl_by_site(model_trace, guide_trace)
        loss = weighted(total(observed), self._current_weight, total(latent))
        loss = weighted(loss, self.weight_space_kl, total(of_weights))
        self._particles.append(
            LossTerms(
                self._current_weight,
                {name: value.detach() for name, value in observed.items()},
                {name: value.detach() for name, value in latent.items()},
                partial(
                    entropies,
                    {name: entropy_parts(site) for name, site in guide_trace.nodes.items() if name in latent},
                ),
                _num_data(model_trace, observed),
                self._sampled,
                self.weight_space_kl,
                {name: value.detach() for name, value in of_weights.items()},
            )
        )
        return loss.detach(), loss

    def _kl_by_site(self, model_trace: Trace, guide_trace: Trace) -> dict[str, Tensor]:
        return {
            name: self._site_kl(name, site, model_trace, guide_trace)
            for name, site in guide_trace.nodes.items()
            if site["type"] == "sample" and not site["is_observed"] and not site_is_subsample(site)
        }

    def _weight_space_kl_by_site(self, model_trace: Trace, guide_trace: Trace) -> dict[str, Tensor]:
        """The KLs of the weights of functions, where the KL is not of weights already."""
        return {}

    def _vectorized_num_particles(self, fn: Any) -> Any:
        """As Pyro's, but sites remember what distribution they had before."""
        repeated = super()._vectorized_num_particles(RecordDistribution("own_distribution")(fn))
        return RecordDistribution("repeated_distribution")(repeated)

    def _site_kl(self, name: str, guide_site: Any, model_trace: Trace, guide_trace: Trace) -> Tensor:
        """The KL of one site; keeps the reason where it must be sampled."""
        kl = analytic_kl(name, guide_site, model_trace, guide_trace)
        if isinstance(kl, Tensor):
            return kl
        if self.strict_kl:
            raise ValueError(f"strict_kl: site '{name}' is {kl}, so its KL would be estimated from samples")
        self._sampled[name] = kl
        return sampled_kl(name, model_trace, guide_trace)

    def _check_covered(self, model_trace: Trace, guide_trace: Trace) -> None:
        missing = [
            name
            for name, site in model_trace.iter_stochastic_nodes()
            if name not in guide_trace and not site_is_subsample(site)
        ]
        if not missing:
            return
        advice = ""
        if any(
            name not in model_trace and not _is_auxiliary(site) for name, site in guide_trace.iter_stochastic_nodes()
        ):
            advice = (
                "; the guide has sites that the model has no more, as after use_head: make a new guide of the model as "
                "it is now, such as AutoRadial(model), or chain.guide(AutoRadial) of a PriorChain, or call use_head "
                "with the head that the guide was made for"
            )
        raise ValueError(
            f"{type(self).__name__}: guide must have latent site '{missing[0]}' of the model, got none{advice}"
        )

    def _check_parameters(self, guide_trace: Trace, error: ValueError) -> None:
        """Raise a ``ValueError`` that names the first parameter of the guide that is not finite."""
        for name, site in dict[str, Any](guide_trace.nodes).items():
            if site["type"] == "param" and not bool(torch.isfinite(site["value"]).all()):
                raise ValueError(
                    f"{type(self).__name__}: guide must have finite parameters, got NaN or infinity in '{name}': "
                    "training has diverged. Go back to a checkpoint, or start anew with a smaller learning rate"
                ) from error


def _is_auxiliary(site: Any) -> bool:
    """Whether a guide says of a site that the model has none of its name."""
    return bool(site["infer"].get("is_auxiliary", False))


def _with_density_shape(site: Any) -> Any:
    """The site with a stand-in of its log-density's shape, for Pyro's check of plates."""
    return site if "log_prob" in site else {**site, "log_prob": torch.empty(site["fn"].batch_shape, device="meta")}


def check_weight(weight: float, name: str = "kl_weight") -> float:
    """The weight of a KL as a float.

    :raises ValueError: naming it, unless it is finite and not negative.
    """
    if not isinstance(weight, int | float) or not 0.0 <= weight < math.inf:
        functions = " or a function that returns one" if name == "kl_weight" else ""
        raise ValueError(f"{name} must be a non-negative finite number{functions}, got {weight!r}")
    return float(weight)


def _num_data(model_trace: Trace, observed: dict[str, Tensor]) -> int | None:
    """The full size of the plates around the observations; sites that share their plates count once."""
    sizes = {}
    for name in observed:
        frames = [f for f in model_trace.nodes[name]["cond_indep_stack"] if f.name != PARTICLE_PLATE]
        if frames:
            sizes[frozenset(f.name for f in frames)] = math.prod(f.full_size or f.size for f in frames)
    return sum(sizes.values()) if sizes else None
