# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Functions of the last posterior at kept inputs, and the loss that holds them there."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from pyro_radial._pyro.checks import positive_count, prefix_errors
from pyro_radial._pyro.compat import is_capturing
from pyro_radial.continual.coresets import Coreset, choose_inputs
from pyro_radial.continual.prior_chain import PriorChain
from pyro_radial.continual.streams import Task
from pyro_radial.functional.divergences.process import kl_of_marginals
from pyro_radial.functional.guide_process import GuideProcess
from pyro_radial.functional.priors import PosteriorProcess
from pyro_radial.infer.data import num_rows
from pyro_radial.infer.loss.elbo import Run, TermsELBO, check_weight
from pyro_radial.nn.likelihoods import FUNCTION_SITE
from pyro_radial.nn.linearized.linearization import Structure
from pyro_radial.nn.modules import device_of
from pyro_radial.nn.multi_head import under_head

# Rows whose moments are computed at a time.
ROWS = 512


class FunctionMemory(NamedTuple):
    """The function values of a posterior at kept inputs, under one head."""

    head: int
    #: Inputs ``[M, ...]``.
    x: Tensor
    #: Moments of the values, ``[M, O]``.
    mean: Tensor
    variance: Tensor
    #: Number of rows in use; the other rows are padding.
    size: int

    @classmethod
    @torch.no_grad()
    def of(cls, chain: PriorChain, x: Tensor, head: int = 0, *, capacity: int = 0) -> Self:
        """Compute the function values of a chain's prior, by :class:`~pyro_radial.functional.PosteriorProcess`.

        Padded to ``capacity`` rows, shapes stay the same from task to task, and so does a compiled graph.
        """
        with under_head(chain, head):
            process = PosteriorProcess(chain, chain.prior)
        moments = list(map(process.marginals, x.split(ROWS)))
        mean = torch.cat([mean for mean, _ in moments])
        variance = torch.cat([variance for _, variance in moments])
        rows = max(len(x), capacity)
        return cls(
            head,
            _pad(x, rows),
            _pad(mean, rows),
            _pad(variance, rows),
            size=len(x),
        )

    def at(self, rows: Tensor | slice) -> Self:
        """Return the function values at some of the inputs."""
        x = self.x[rows]
        return self._replace(x=x, mean=self.mean[rows], variance=self.variance[rows], size=len(x))


def _pad(values: Tensor, rows: int) -> Tensor:
    """Return values with so many rows, where the added ones are zero."""
    return torch.cat([values, values.new_zeros(rows - len(values), *values.shape[1:])])


class FunctionChainELBO(TermsELBO):
    r"""Hold the functions at kept inputs where the last posterior had them, while a task is learned.

    .. math:: E_q[-\log p(y \mid w)] + \beta\, KL(q(w) \,\|\, p(w))
        + \lambda\, \frac{H M_h}{m} \sum_{n=1}^{m} \sum_o KL\big(q(f_{no}) \,\|\, q_0(f_{no})\big),

    with :math:`q(f_{no})` the normal of an output of the model under head h at the n-th of m kept inputs, linearized at
    the means of the guide, and :math:`q_0` that of the last posterior. Each loss draws m inputs from the :math:`M_h` of
    one head; the H heads take turns by ``step``. In expectation the sum is over all kept inputs. It is a regularizer,
    not a bound. ``terms`` has the sum under "f" in ``kl_by_site``, and the KL of the weights in
    ``weight_space_kl_by_site``.

    Source: Rudner, Bickford Smith, Feng, Teh and Gal (2022), "Continual Learning via Sequential Function-Space
    Variational Inference", without its covariances between points.

    :param memories: the function values at the kept inputs of each head.
    :param int num_particles: number of draws of the guide for one loss.
    :param float kl_weight: :math:`\lambda`.
    :param float weight_space_kl: :math:`\beta`, weight of the KL of all weights to their own prior; zero for none.
    :param int max_points: the largest number of inputs of one loss.
    :param kwargs: other arguments of :class:`~pyro_radial.TermsELBO`.
    :raises ValueError: naming the argument that does not fit.
    """

    def __init__(
        self,
        memories: Sequence[FunctionMemory],
        num_particles: int = 1,
        *,
        kl_weight: float = 10.0,
        weight_space_kl: float = 1.0,
        max_points: int = 200,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_particles, kl_weight=kl_weight, **kwargs)
        self.memories = tuple(memories)
        self.weight_space_kl = check_weight(weight_space_kl, "weight_space_kl")
        self.max_points = positive_count("max_points", max_points)
        # The number of inputs of each, as tensors that a graph can read.
        self._sizes = [
            torch.tensor(memory.size, device=memory.x.device) for memory in self.memories
        ]
        self._structures: dict[Any, Structure] = {}

    def _kls(self, run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the divergence of functions, times the particles that all terms sum over, and the KLs of weights."""
        if len(self.memories) > 1 and is_capturing():
            raise RuntimeError(
                "the heads of kept functions take turns, which a graph cannot record"
            )
        turn = run.step % len(self.memories)
        memory = self.memories[turn]
        size = self._sizes[turn]
        drawn = self._draw(memory, size)
        process = GuideProcess(run, FUNCTION_SITE, self._structures)
        with under_head(run.model_in_full_precision, memory.head):
            divergence = kl_of_marginals(process.marginals(drawn.x), (drawn.mean, drawn.variance))
        scale = self.num_particles * len(self.memories) / len(drawn.x) * size
        weights = self._site_kls(run) if self.weight_space_kl else {}
        return {FUNCTION_SITE: (scale * divergence).to(drawn.x.dtype)}, weights

    def _draw(self, memory: FunctionMemory, size: Tensor) -> FunctionMemory:
        """Take the functions at inputs drawn at random, or at all inputs if they are few."""
        if len(memory.x) <= self.max_points:
            return memory.at(slice(memory.size))
        # The shapes of a graph for all tasks must not depend on the number of rows.
        keys = torch.rand(len(memory.x), device=memory.x.device)
        is_padding = torch.arange(len(memory.x), device=memory.x.device) >= size
        order = keys.masked_fill(is_padding, 2.0).argsort()
        return memory.at(order[: min(self.max_points, memory.size)])


def remember_functions(
    chain: PriorChain, coreset: Coreset, task: Task, loss: TermsELBO, seed: int
) -> FunctionChainELBO:
    """Make the loss of a task that holds the functions of earlier tasks, at inputs that a coreset chooses.

    :param chain: the chain before the task.
    :param coreset: which inputs, and the weight of the functions.
    :param task: the task to learn.
    :param loss: the stream's own loss; its ``kl_weight`` becomes the weight of the KL of weights.
    :param seed: seed of the choice of inputs.
    :raises ValueError: naming the task, if its inputs do not fit or the chain has no functions to keep.
    """
    if coreset.inputs == "kept":
        inputs_by_head = chain.coresets.inputs_by_head(task)
    else:
        x = task.train[0]
        if num_rows(x) > coreset.size:
            x = choose_inputs(coreset, task, seed)[0]
        inputs_by_head = {int(stored.head): x for stored in chain.coresets.tasks}
    device = device_of(chain)
    memories: list[FunctionMemory] = []
    with prefix_errors(f"coreset must have functions to keep before task {task.name!r}"):
        for head, x in inputs_by_head.items():
            # The rows of 1, 2, 4, ... tasks, so that a graph serves several tasks.
            capacity = coreset.size << ((len(x) - 1) // coreset.size).bit_length()
            memories.append(FunctionMemory.of(chain, x.to(device), head, capacity=capacity))
    return FunctionChainELBO(
        memories,
        loss.num_particles,
        kl_weight=coreset.weight,  # type: ignore[arg-type]
        weight_space_kl=loss.weight_at(0),
        max_points=coreset.max_points,  # type: ignore[arg-type]
        vectorize_particles=loss.vectorize_particles,
        strict_kl=loss.strict_kl,
    )
