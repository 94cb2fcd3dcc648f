# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The options of a training that few runs need."""

from dataclasses import dataclass

import torch

from pyro_radial._pyro.checks import (
    check_choice,
    non_negative_integer,
    optional,
    positive_count,
    positive_float,
)


@dataclass(frozen=True)
class FitOptions:
    """Options of :func:`~pyro_radial.fit` besides its arguments.

    :param int num_data: N, the number of data that the plate around the observations stands for; by default the rows
        of ``data``. Give it if the rows are only a part of the data.
    :param int patience: the number of epochs without a better validation after which training stops.
    :param int mean_only_epochs: the number of first epochs that train only the means, on the likelihood and without
        noise (Farquhar, Osborne and Gal 2020, appendix D).
    :param int accumulate: the number of parts that each batch is split into, to save memory. All parts see the same
        draw of the weights, so their gradients sum to the gradient of the whole batch. Batch norm in train mode and
        dropout differ from part to part.
    :param float clip_norm: the largest norm of all gradients together, as in ``torch.nn.utils.clip_grad_norm_``, for a
        loss in nats for the whole data set; no clipping by default.
    :param torch.dtype autocast: the dtype of the model's matrix products and convolutions under ``torch.autocast``:
        ``torch.bfloat16``. KLs, densities and validation are computed in full precision.
    :param bool compile: whether to replay compiled graphs of the loss, as :class:`~pyro_radial.CompiledSVI` does. Each
        shape of batch takes some seconds at first, and much less time afterwards. By default
        a CPU runs the program as it is. A GPU replays whole steps as CUDA graphs if there are 100 or more, and compiles
        these if there are 30,000 or more.
    :param str scheduler_interval: "epoch" or "step": when the scheduler takes a step. ``ReduceLROnPlateau`` needs
        "epoch".
    :param int checkpoint_every: the number of optimizer steps between checkpoints; by default one checkpoint per epoch.
    :raises ValueError: naming the option and its value, if the value is out of range.

    Example::

        >>> FitOptions(accumulate=4, clip_norm=10.0).accumulate
        4
    """

    num_data: int | None = None
    patience: int | None = None
    mean_only_epochs: int = 0
    accumulate: int = 1
    clip_norm: float | None = None
    autocast: torch.dtype | None = None
    compile: bool | None = None
    scheduler_interval: str = "epoch"
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        positive_count("accumulate", self.accumulate)
        non_negative_integer("mean_only_epochs", self.mean_only_epochs)
        for name in ("num_data", "patience", "checkpoint_every"):
            optional(positive_count, name, getattr(self, name))
        optional(positive_float, "clip_norm", self.clip_norm)
        if self.autocast not in (None, torch.bfloat16):
            raise ValueError(f"autocast must be torch.bfloat16, got {self.autocast!r}")
        check_choice("scheduler_interval", self.scheduler_interval, ("epoch", "step"))
