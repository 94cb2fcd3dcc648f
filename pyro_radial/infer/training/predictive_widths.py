# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Widths of a posterior that are found by the score of its predictions on rows that the means do not see."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam

from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial._pyro.types import Batch, Guide, Model
from pyro_radial.infer.autoguide import AutoPerSite
from pyro_radial.infer.autoguide.per_site import LocScaleSite
from pyro_radial.infer.data import Rows, move
from pyro_radial.infer.loss.elbo import observed_sites, traces_of
from pyro_radial.infer.prediction.predict import predict
from pyro_radial.infer.step.evaluation import LossEvaluation
from pyro_radial.nn.bayesian_module import modules_of
from pyro_radial.nn.likelihoods import Categorical
from pyro_radial.nn.modules import evaluating

# A training has about so many steps of widths. Each takes so many draws of the weights for so many rows. Its rate, in
# log(width), falls to zero along a line. They were chosen in trials on 8,000 images, with one seed each.
NUM_STEPS, NUM_DRAWS, NUM_ROWS, RATE = 500, 8, 256, 0.05
# In short runs there are fewer, because so many steps of the means come between two of them.
LEAST_INTERVAL = 5
# The first share, and the least size of means that it is taken of, because biases may start at zero.
FIRST_SHARE, LEAST_SIZE = 0.2, 0.01
# Early gradients count less, because the means that they belong to have gone.
BETAS = (0.9, 0.99)
# The share of the rows that are set aside if there is no validation.
HELD_OUT_SHARE = 0.1
# With fewer rows their noise decides.
FEWEST_ROWS = 20


def has_predictive_widths(guide: nn.Module) -> bool:
    """Return whether the scales of a guide, or of a part of it, are to be found by predictions."""
    return any(part.has_shared_scales for part in modules_of(AutoPerSite, guide))


def hold_out(rows: Rows, validation: Rows | None, seed: int) -> tuple[Rows, Rows]:
    """Return the rows for the means and those for the widths: the validation, or a tenth that is set aside.

    :raises ValueError: if there are too few rows, or if the validation holds the rows of the data.
    """
    if validation is not None:
        if validation.same_as(rows):
            raise ValueError(
                "validation must hold other rows than data, because it decides how wide the posterior is; leave it out "
                "to set a tenth of the data aside"
            )
        return rows, validation
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed), device="cpu")
    number = round(HELD_OUT_SHARE * len(rows))
    if number < FEWEST_ROWS:
        raise ValueError(
            f"data must have at least {round(FEWEST_ROWS / HELD_OUT_SHARE)} rows for a guide with widths='predictive', "
            f"which sets a tenth aside, got {len(rows)}; use widths='elbo', or give a validation"
        )
    return rows.subset(order[number:]), rows.subset(order[:number])


def negative_score(model: Model, guide: Guide, x: Batch, y: Batch) -> Tensor:
    """Return minus the mean over rows of the log predictive density of some draws, 0-d."""
    of_draws: list[Tensor] = []
    for _ in range(NUM_DRAWS):
        trace, _ = traces_of(model, guide, x, y)
        log_prob: Any = 0.0
        for site in observed_sites(trace).values():
            log_prob = log_prob + site["fn"].log_prob(site["value"])
        of_draws.append(log_prob)
    return math.log(NUM_DRAWS) - torch.stack(of_draws).logsumexp(0).mean()


class PredictiveWidths:
    r"""Move the scales of a guide along the gradient of the score of its predictions on held-out rows.

    With K draws w of the guide, a batch B of these rows has the score

    .. math:: \frac1{|B|} \sum_{n \in B} \log \frac1K \sum_{k=1}^K p(y_n \mid x_n, w_k).

    The standard deviation of a site is a share of the root mean square of its means. Shares are trained, and start at a
    fifth wherever the guide has its scales.

    :param evaluate: a function of a loss, inputs and targets, which evaluates the loss and its gradients by all trained
        parameters.
    :param rows: the held-out rows; a step draws the batch B from them.
    :param int steps: the number of steps of the means in the whole training.
    :param int num_data: the number of training rows; the model takes no larger batch.
    """

    def __init__(
        self,
        model: Model,
        guide: nn.Module,
        evaluate: Callable[..., LossEvaluation],
        rows: Rows,
        device: torch.device,
        steps: int,
        num_data: int,
    ) -> None:
        self._model = model
        self._guide = guide
        self._evaluate = evaluate
        self._rows = rows
        self._device = device
        self._steps = steps
        self._num_rows = min(NUM_ROWS, len(rows), num_data)
        # The guide of each site, with the name and the parameters of the site.
        self._sites: list[tuple[AutoPerSite, str, LocScaleSite]] = []
        for part in modules_of(AutoPerSite, guide):
            if part.has_shared_scales:
                for name, site in part.loc_scale_sites().items():
                    self._sites.append((part, name, site))
        self._log_shares = [
            torch.full_like(site.scale, math.log(FIRST_SHARE)) for _, _, site in self._sites
        ]
        self._optimizer = Adam(self._log_shares, lr=RATE, betas=BETAS)
        self._set_scales()
        if isinstance(getattr(model, "likelihood", None), Categorical):
            x, _ = rows.take(torch.tensor([0], device="cpu"))
            num_classes = predict(model, guide, x, num_samples=1).samples.shape[-1]
            if len(rows) < num_classes:
                raise ValueError(
                    f"{rows.name} must leave at least as many rows for the widths as there are classes, {num_classes}, "
                    f"got {len(rows)}"
                )

    def step(self, number: int) -> None:
        """Take a step if one is due after so many steps of the means.

        :raises FloatingPointError: naming the site, if a gradient of the score is not finite; no step is taken.
        """
        interval = max(LEAST_INTERVAL, self._steps // NUM_STEPS)
        if number % interval or number >= self._steps:
            return
        index = torch.randint(len(self._rows), (self._num_rows,), device="cpu")
        x, y = self._rows.take(index)
        scales = [site.scale.requires_grad_() for _, _, site in self._sites]
        try:
            with one_at_a_time(), evaluating(self._model, self._guide):
                evaluation = self._evaluate(
                    negative_score, move(x, self._device), move(y, self._device)
                )
        finally:
            # The loss of the means leaves them alone, also after an error.
            for scale in scales:
                scale.requires_grad_(False)
        parameters = evaluation.parameters.values()
        gradients = dict(zip(map(id, parameters), evaluation.gradients, strict=True))
        for log_share, (_, name, site) in zip(self._log_shares, self._sites, strict=True):
            gradient = gradients.get(id(site.scale))
            if gradient is not None and not gradient.isfinite().all():
                raise FloatingPointError(
                    f"not finite in step {number}: the score of predictions on held-out rows, for the scale of "
                    f"site '{name}'; try a smaller learning rate"
                )
            _, by_log_scale = site.constrained_scale()
            log_share.grad = None if gradient is None else gradient * by_log_scale
        self._optimizer.param_groups[0]["lr"] = RATE * (1.0 - number / self._steps)
        self._optimizer.step()
        self._set_scales()

    def _set_scales(self) -> None:
        """Set the scales to their shares of the present means."""
        for (guide, name, site), log_share in zip(self._sites, self._log_shares, strict=True):
            squares = site.loc.detach().square()
            shared = [dim for dim, size in enumerate(log_share.shape) if size == 1]
            size = squares.mean(shared, keepdim=True).sqrt() if shared else squares.sqrt()
            guide.set_stddevs({name: log_share.exp() * size.clamp_min(LEAST_SIZE)})

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training needs besides the guide's parameters."""
        return {
            "steps": self._steps,
            "optimizer": self._optimizer.state_dict(),
            "log_shares": [log_share.clone() for log_share in self._log_shares],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self._steps = state["steps"]
        self._optimizer.load_state_dict(state["optimizer"])
        for log_share, saved in zip(self._log_shares, state["log_shares"], strict=True):
            log_share.copy_(saved)
