# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A chain of functions: those of the last posterior, held where inputs of earlier tasks were kept."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from pyro.poutine import Trace
from torch import Tensor

from pyro_radial._pyro.capturing import is_capturing
from pyro_radial._pyro.checks import positive_count
from pyro_radial.continual.prior_chain import PriorChain
from pyro_radial.functional.divergences.marginal_kl import kl_of_marginals
from pyro_radial.functional.guide_process import GuideProcess
from pyro_radial.functional.linearization import Structure
from pyro_radial.functional.priors import PosteriorProcess
from pyro_radial.infer.elbo import RadialELBO, check_weight
from pyro_radial.nn.likelihood import FUNCTION_SITE
from pyro_radial.nn.multi_head import under_head

__all__ = ["FunctionChainELBO", "FunctionMemory"]

# Rows whose moments are computed at a time.
ROWS = 512


class FunctionMemory(NamedTuple):
    """The function values of a posterior at inputs that were kept, under one head."""

    head: int
    #: Inputs ``[M, ...]``.
    x: Tensor
    #: Of each value, ``[M, O]``.
    mean: Tensor
    variance: Tensor
    #: How many of the rows there are, the others being room for more; None for all of them.
    size: int | None = None

    @classmethod
    @torch.no_grad()
    def of(cls, chain: PriorChain, x: Tensor, head: int = 0, *, capacity: int = 0) -> "FunctionMemory":
        """Those of a chain's prior, by :class:`~pyro_radial.functional.PosteriorProcess`.

        :param int capacity: the rows that there will be at last. With room for them shapes stay as they are, so that
            the compiled graph of one task serves the next.
        :raises ValueError: naming the site, for one that the function depends on without a mean or variance.
        """
        with under_head(chain, head):
            process = PosteriorProcess(chain, chain.prior)
        moments = [process.marginals(rows) for rows in x.split(ROWS)]
        mean, variance = (torch.cat(parts) for parts in zip(*moments, strict=True))
        free = max(0, capacity - len(x))
        x, mean, variance = (torch.cat([t, t.new_zeros(free, *t.shape[1:])]) for t in (x, mean, variance))
        return cls(head, x, mean, variance, len(x) - free)

    @property
    def filled(self) -> int:
        """How many of the rows there are."""
        return len(self.x) if self.size is None else self.size

    def at(self, rows: Any) -> "FunctionMemory":
        """The same at some of the inputs."""
        return FunctionMemory(self.head, self.x[rows], self.mean[rows], self.variance[rows])


class FunctionChainELBO(RadialELBO):
    r"""The loss of a task whose functions are held where those of the last posterior were, at kept inputs.

    .. math:: E_q[-\log p(y \mid w)] + \beta\, KL(q(w) \,\|\, p(w))
        + \lambda\, \frac{H M_h}{m} \sum_{n=1}^{m} \sum_o KL\big(q(f_{no}) \,\|\, q_0(f_{no})\big),

    with :math:`q(f_{no})` the normal of an output of the model under head h at the n-th of m kept inputs, linearized at
    the means of the guide, and :math:`q_0` that of the last posterior, which is known beforehand. The m inputs are
    drawn for each loss from the :math:`M_h` of a head, of H heads the next at each ``step``, so that the sum is in
    expectation that over all kept inputs. A regularizer and no bound, as
    :class:`~pyro_radial.functional.MarginalKL` says; ``terms`` has the sum under "f" in its ``kl_by_site``, and the
    KL of the weights in its ``weight_space_kl_by_site``.

    Source: Rudner, Bickford Smith, Feng, Teh and Gal (2022), "Continual Learning via Sequential Function-Space
    Variational Inference", without its covariances between points.

    :param kept: for each head the functions at its kept inputs.
    :param int num_particles: draws of the guide for one loss, as of all others here.
    :param float kl_weight: :math:`\lambda`.
    :param float weight_space_kl: :math:`\beta`, of the KL of all weights to their own prior; zero for none.
    :param int max_points: the most inputs of one loss.
    :param kwargs: as of :class:`~pyro_radial.RadialELBO`.
    :raises ValueError: naming the argument that does not fit.
    """

    def __init__(
        self,
        kept: Sequence[FunctionMemory],
        num_particles: int = 1,
        *,
        kl_weight: float = 10.0,
        weight_space_kl: float = 1.0,
        max_points: int = 200,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_particles, kl_weight=kl_weight, **kwargs)
        self.kept = tuple(kept)
        if not self.kept:
            raise ValueError("FunctionChainELBO: kept must hold the functions of at least one head, got none")
        self.weight_space_kl = check_weight(weight_space_kl, "weight_space_kl")
        self.max_points = positive_count("max_points", max_points)
        # How many inputs each has, for a graph to read.
        self._numbers = [torch.tensor(k.filled, device=k.x.device) for k in self.kept]
        self._structures: dict[Any, Structure] = {}

    def _kl_by_site(self, model_trace: Trace, guide_trace: Trace) -> dict[str, Tensor]:
        """The divergence of the functions, times the particles, over which all terms are summed."""
        if len(self.kept) > 1 and is_capturing():
            raise RuntimeError("the heads of kept functions take turns")
        turn = self.step % len(self.kept)
        kept, number = self.kept[turn], self._numbers[turn]
        drawn = self._drawn(kept, number)
        process = GuideProcess(self._model, model_trace, guide_trace, FUNCTION_SITE, self._structures)
        with under_head(self._model, kept.head):
            divergence = kl_of_marginals(process.marginals(drawn.x), (drawn.mean, drawn.variance))
        scale = self.num_particles * len(self.kept) / len(drawn.x) * number
        return {FUNCTION_SITE: (scale * divergence).to(drawn.x.dtype)}

    def _drawn(self, kept: FunctionMemory, number: Tensor) -> FunctionMemory:
        """The functions at some of the kept inputs, drawn at random, or at all where there are no more."""
        if len(kept.x) <= self.max_points:
            return kept.at(slice(kept.filled))
        # For a graph to serve all tasks its shapes must not depend on how many rows there are.
        keys = torch.rand(len(kept.x), device=kept.x.device)
        is_free = torch.arange(len(kept.x), device=kept.x.device) >= number
        return kept.at(keys.masked_fill(is_free, 2.0).argsort()[: min(self.max_points, kept.filled)])

    def _weight_space_kl_by_site(self, model_trace: Trace, guide_trace: Trace) -> dict[str, Tensor]:
        return super()._kl_by_site(model_trace, guide_trace) if self.weight_space_kl else {}
