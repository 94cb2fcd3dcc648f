# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Hyper-parameters by marginal likelihood, on random subsets of the data."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import positive_count, positive_float

__all__ = ["maximize_marginal_likelihood", "trainable"]


def maximize_marginal_likelihood(
    log_marginal_likelihood: Callable[[Tensor, Tensor], Tensor],
    parameters: Sequence[Tensor],
    data: tuple[Tensor, Tensor],
    *,
    num_points: int,
    steps: int,
    lr: float,
    progress: bool,
) -> Tensor:
    """Climbs with Adam, each step on a random subset of at most ``num_points`` data.

    A subset's marginal likelihood is that of a smaller data set, no unbiased estimate of the whole one's: it is
    maximized per datum, so that its size does not change the step.

    :param log_marginal_likelihood: a function of points ``[N, D]`` and targets ``[N, O]``, a scalar in nats.
    :param parameters: what it is maximized in.
    :param data: all points and targets.
    :param int num_points: data in one step.
    :param int steps: steps of Adam.
    :param float lr: its learning rate.
    :param bool progress: whether to show a progress bar.
    :returns: the objective per datum and output before each step, ``[steps]``.
    :raises ValueError: naming the number that does not fit.
    """
    positive_count("num_points", num_points)
    positive_count("steps", steps)
    x, y = data
    optimizer = torch.optim.Adam(parameters, lr=positive_float("lr", lr), maximize=True)
    history = y.new_empty(steps)
    bar = tqdm(range(steps), desc="fit prior", unit="step", disable=not progress)
    for step in bar:
        rows = torch.randperm(len(x), device=x.device)[:num_points] if num_points < len(x) else slice(None)
        optimizer.zero_grad()
        objective = log_marginal_likelihood(x[rows], y[rows]) / y[rows].numel()
        objective.backward()
        optimizer.step()
        history[step] = objective.detach()
        if progress:
            bar.set_postfix(log_likelihood=f"{float(objective):.4f}", refresh=False)
    return history


@contextmanager
def trainable(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Parameters that require a gradient within this context, and have none after it."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
            parameter.grad = None
