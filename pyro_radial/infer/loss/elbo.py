# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loss: a true ELBO with an analytic KL wherever a closed form exists, kept in its terms."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import pyro.poutine as poutine
import torch
from pyro.distributions.util import scale_and_mask
from pyro.infer import TraceMeanField_ELBO
from pyro.infer.util import is_validation_enabled
from pyro.poutine.util import prune_subsample_sites
from pyro.util import warn_if_nan
from torch import Tensor

from pyro_radial._pyro.checks import positive_count
from pyro_radial._pyro.compat import (
    check_mean_field_requirement,
    check_model_guide_match,
    check_site_shape,
    is_deterministic,
    is_subsample,
)
from pyro_radial._pyro.types import Guide, Model, Node
from pyro_radial.infer.loss.site_kl import (
    RecordDistribution,
    analytic_kl,
    estimate_kl,
    is_auxiliary,
)
from pyro_radial.infer.loss.terms import LossTerms, as_tensor, average
from pyro_radial.nn.modules import Autocast

PARTICLE_PLATE = "num_particles_vectorized"


class Run(NamedTuple):
    """A run of a guide, and of the model replayed with its draw."""

    model: Model
    guide: Guide
    args: tuple[object, ...]
    kwargs: dict[str, object]
    model_trace: poutine.Trace
    guide_trace: poutine.Trace
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
    :raises ValueError: for a negative or infinite weight, or no particles; naming the site, for a latent site that the
        guide lacks, and under ``strict_kl``; naming the parameter, for a guide with NaN or infinity if validation stops
        there.

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
        self.strict_kl = strict_kl
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

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the latest terms, which hold functions that cannot be saved."""
        return {**self.__dict__, "_terms": None}

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
        losses = []
        evaluated = []
        for loss, terms in self._passes(model, guide, args, dict(kwargs), weight, step):
            losses.append(loss)
            evaluated.append(terms)
        return as_tensor(sum(losses) / self.num_particles), average(evaluated, self.num_particles)

    def loss(self, model: Model, guide: Guide, *args: object, **kwargs: object) -> float:
        """Return the loss without gradients, as a number like Pyro's losses; this reads it on the host."""
        return float(self._total_of_passes(model, guide, args, kwargs, backward=False))

    def differentiable_loss(
        self, model: Model, guide: Guide, *args: object, **kwargs: object
    ) -> Tensor:
        """Return the loss as a tensor to differentiate, without a host-device synchronization."""
        step = self.step + torch.is_grad_enabled()
        loss, terms = self.loss_and_terms(
            model, guide, args, kwargs, self.weight_at(self.step), step
        )
        self.keep(lambda: terms, torch.is_grad_enabled())
        return loss

    def loss_and_grads(self, model: Model, guide: Guide, *args: object, **kwargs: object) -> Tensor:
        """Return the loss and add its gradients to those of the parameters, one pass after the other."""
        return self._total_of_passes(model, guide, args, kwargs, backward=True)

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
        for model_trace, guide_trace in self._get_traces(model, guide, args, kwargs):
            run = Run(model, guide, args, kwargs, model_trace, guide_trace, {}, step)
            kls, weight_space_kls = self._kls(run)
            terms = LossTerms(
                weight,
                nll_by_site={
                    name: -site["log_prob_sum"]
                    for name, site in observed_sites(model_trace).items()
                },
                kl_by_site=kls,
                entropies=partial(entropies, _without_values(guide_trace, kls)),
                num_data=num_data_of(model_trace),
                sampled_kl=run.sampled,
                weight_space_kl_weight=self.weight_space_kl,
                weight_space_kl_by_site=weight_space_kls,
            )
            yield terms.loss, terms.map(Tensor.detach)

    def _get_trace(
        self,
        model: Model,
        guide: Guide,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> tuple[poutine.Trace, poutine.Trace]:
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
        repeated = super()._vectorized_num_particles(RecordDistribution("own_distribution")(fn))
        return RecordDistribution("repeated_distribution")(repeated)

    def _kls(self, run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the KLs by site, and the KLs of the weights in losses that compare functions."""
        return self._site_kls(run), {}

    def _site_kls(
        self, run: Run, is_selected: Callable[[str], bool] = lambda _: True
    ) -> dict[str, Tensor]:
        """Return the KL of each latent site of the guide whose name ``is_selected``."""
        return {
            name: self._site_kl(name, run)
            for name, site in run.guide_trace.iter_stochastic_nodes()
            if not is_subsample(site) and is_selected(name)
        }

    def _site_kl(self, name: str, run: Run) -> Tensor:
        """Return the KL of one site, and record why it is sampled."""
        kl = analytic_kl(name, run.model_trace, run.guide_trace)
        if isinstance(kl, Tensor):
            return kl
        if self.strict_kl:
            raise ValueError(
                f"strict_kl: site '{name}' is {kl}, so its KL would be estimated from samples"
            )
        run.sampled[name] = kl
        return estimate_kl(name, run.model_trace, run.guide_trace)

    def _check_covered(self, model_trace: poutine.Trace, guide_trace: poutine.Trace) -> None:
        """Raise a ValueError naming a latent site of the model that the guide lacks."""
        for name, site in model_trace.iter_stochastic_nodes():
            if name in guide_trace or is_subsample(site):
                continue
            advice = ""
            drawn = guide_trace.iter_stochastic_nodes()
            if any(key not in model_trace and not is_auxiliary(node) for key, node in drawn):
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


def check_weight(weight: float, name: str = "kl_weight") -> float:
    """Return the weight of a KL as a float; raise a ValueError unless it is finite and not negative."""
    if not 0.0 <= weight < math.inf:
        functions = " or a function that returns one" if name == "kl_weight" else ""
        raise ValueError(f"{name} must be a non-negative finite number{functions}, got {weight!r}")
    return float(weight)


def traces_of(
    model: Model, guide: Guide, *args: object, **kwargs: object
) -> tuple[poutine.Trace, poutine.Trace]:
    """Run a guide, and the model replayed with its draw; return the traces of the model and of the guide."""
    guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
    replayed = poutine.replay(model, trace=guide_trace)
    return poutine.trace(replayed).get_trace(*args, **kwargs), guide_trace


def observed_sites(model_trace: poutine.Trace) -> dict[str, Node]:
    """Return the sites of observations."""
    return {
        name: model_trace.nodes[name]
        for name in model_trace.observation_nodes
        if not is_deterministic(model_trace.nodes[name])
    }


def num_data_of(model_trace: poutine.Trace) -> int | None:
    """Return the full size of the plates around the observations; sites that share their plates count once."""
    sizes = {}
    for site in observed_sites(model_trace).values():
        plates = {
            frame.name: frame.full_size or frame.size
            for frame in site["cond_indep_stack"]
            if frame.name != PARTICLE_PLATE
        }
        if plates:
            sizes[frozenset(plates)] = math.prod(plates.values())
    return sum(sizes.values()) if sizes else None


@torch.no_grad()
def entropies(sites: Mapping[str, Node]) -> dict[str, Tensor]:
    """Return the scaled entropy of each site that has one."""
    result = {}
    for name, site in sites.items():
        with suppress(NotImplementedError, AttributeError):
            entropy = scale_and_mask(site["fn"].entropy(), scale=site["scale"], mask=site["mask"])
            result[name] = entropy.expand(site["fn"].batch_shape).sum()
    return result


def _without_values(trace: poutine.Trace, names: Collection[str]) -> dict[str, Node]:
    """Return what an entropy needs of some sites; their values, a copy of all weights, are left out."""
    return {
        name: {"fn": site["fn"], "scale": site["scale"], "mask": site["mask"]}
        for name, site in trace.nodes.items()
        if name in names
    }
