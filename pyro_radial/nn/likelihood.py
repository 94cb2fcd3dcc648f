# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What all likelihoods share: the plate over data, the scale N/B and the checks of targets."""

from collections.abc import Mapping
from typing import Any

import pyro
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyro_radial._pyro.checks import positive_count
from pyro_radial._pyro.naming import UniquelyNamed
from pyro_radial.nn.bayesian_module import submodules

__all__ = ["FUNCTION_SITE", "Likelihood", "check_values", "full_precision", "is_target", "set_num_data"]

#: The deterministic site that records the network's output, the values of a function.
FUNCTION_SITE = "f"

TARGET: Any = {"is_target": True}


def is_target(site: Mapping[str, Any]) -> bool:
    """Whether a site holds the targets of a likelihood, observed or not; guides have no such site."""
    return bool(site["infer"] and site["infer"].get("is_target", False))


class Likelihood(UniquelyNamed):
    """Base class: a distribution of targets ``y`` given a network's output ``f``.

    It makes the plate over data, ``"data"`` at dim -1. With targets of B of the N training points it scales their
    log-likelihood by N/B, so that a loss is that of the whole data set. Without ``num_data``, :func:`~pyro_radial.fit`
    and :func:`~pyro_radial.continual.train_stream` set N to the number of rows they train on; before that N = B, as
    under ``pyro.plate("data", len(y))``. Give ``num_data`` if you train on mini-batches with your own ``SVI``.

    The deterministic site ``"f"`` records the output ``[*draws, B, *outputs]``; the site ``"y"`` holds the targets.

    A subclass defines :meth:`observation` and :meth:`inverse_link` and may override :meth:`noise`,
    :meth:`target_shape` and :meth:`predictive_entropy`.

    :param int num_data: N, the number of training points; by default the number that :func:`~pyro_radial.fit` is given.
    :param int event_dim: the number of dims of ``f``, from the right, that belong to one data point: 1 for a network
        that returns ``[B, K]``, 0 for one that returns ``[B]``.
    :raises ValueError: naming the argument that is out of range.
    """

    #: Whether the targets are discrete, so that :meth:`predictive_entropy` has a closed form.
    is_discrete: bool = False
    #: For each argument of :meth:`observation` besides ``f``, the deterministic site that records it.
    noise_sites: dict[str, str] = {}
    #: The least number of dims of one output.
    min_event_dim: int = 0

    def __init__(self, num_data: int | None = None, event_dim: int = 1) -> None:
        super().__init__()
        self.num_data = num_data
        if isinstance(event_dim, bool) or not isinstance(event_dim, int) or event_dim < self.min_event_dim:
            raise ValueError(f"event_dim must be an integer >= {self.min_event_dim}, got {event_dim!r}")
        self.event_dim = event_dim

    @property
    def num_data(self) -> int | None:
        """N, as given, or as the latest training has set it; None before that."""
        return self._found if self._given is None else self._given

    @num_data.setter
    def num_data(self, num_data: int | None) -> None:
        self._given = None if num_data is None else positive_count("num_data", num_data)
        self._found: int | None = None

    def train_on(self, num_data: int, who: str) -> None:
        """Set N to the number of training points; raise a ValueError if another number was given."""
        if self._given not in (None, num_data):
            raise ValueError(
                f"{who}: num_data of the likelihood must be the number of training points, got "
                f"num_data={self._given} for {num_data} rows; make the likelihood without num_data, or, if the rows "
                f"are only a part of the data, call fit(..., options=FitOptions(num_data={self._given}))"
            )
        self._found = num_data

    def forward(self, f: Tensor, y: Tensor | None = None) -> Tensor:
        """Record ``f`` and observe or sample ``y``.

        :param torch.Tensor f: the network's output, ``[*draws, B, *outputs]``.
        :param torch.Tensor y: the targets, ``[B, *target]``, or None to sample them.
        :returns: the value of the site ``"y"``.
        :raises ValueError: naming the argument whose shape, dtype or number does not fit.
        """
        f = self.function_values(f)
        size = f.shape[-1 - self.event_dim]
        num_data = size
        if y is not None:
            y = self.check_target(f, y)
            num_data = self.num_data or size
            if size > num_data:
                origin = "" if self._given else " from the latest fit; set the likelihood's num_data"
                raise ValueError(
                    f"num_data must be at least {size}, the number of targets in y, got {num_data}{origin}"
                )
        noise = self.noise(f)
        index = torch.arange(size, device=f.device)
        with pyro.plate("data", num_data, subsample=index, dim=-1):
            f = pyro.deterministic(FUNCTION_SITE, f, event_dim=self.event_dim)
            return pyro.sample("y", self.observation(f, **noise), obs=y, infer=TARGET)

    def observation(self, f: Tensor, **noise: Tensor) -> TorchDistributionMixin:
        """Make the distribution of the targets.

        :param torch.Tensor f: ``[*draws, B, *outputs]``.
        :param noise: the values that :meth:`noise` returns, broadcastable with ``[*draws, B]``.
        :returns: a distribution of batch shape ``[*draws, B]``.
        """
        raise NotImplementedError

    def inverse_link(self, f: Tensor) -> Tensor:
        """The mean of the targets for outputs ``[..., B, *outputs]``; for classes, their probabilities."""
        raise NotImplementedError

    def noise(self, f: Tensor) -> dict[str, Tensor]:
        """Sample or read what the distribution needs besides ``f``; nothing by default.

        :param torch.Tensor f: the network's output, only for its dtype and device.
        :returns: keyword arguments of :meth:`observation`.
        """
        return {}

    def predictive_entropy(self, mean: Tensor) -> Tensor:
        """The entropy of the discrete distribution with the given mean, in nats, summed over the outputs.

        :param torch.Tensor mean: an average of :meth:`inverse_link` over draws, ``[..., N, *outputs]``.
        :returns: a tensor ``[..., N]``.
        :raises NotImplementedError: for targets that are not discrete and finite.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no closed-form predictive entropy: the predictive distribution is a mixture "
            "over draws, and its entropy is known only for targets with finitely many values"
        )

    def target_shape(self, f: Tensor) -> torch.Size:
        """The shape that targets must have, ``[B, *target]``."""
        return f.shape[f.dim() - 1 - self.event_dim :]

    def function_values(self, f: Tensor) -> Tensor:
        """Check an output and return what the site ``"f"`` records: the output, in float32 under autocast."""
        self.check_output(f)
        return full_precision(f)

    def check_output(self, f: Tensor) -> None:
        """Raise a ValueError naming ``f`` if it cannot be the output of a network for this likelihood."""
        if f.dim() < 1 + self.event_dim:
            raise ValueError(
                f"f must have a dim for the data and {self.event_dim} more (event_dim) at site {FUNCTION_SITE!r}, "
                f"got shape {tuple(f.shape)}"
            )
        if f.shape[-1 - self.event_dim] == 0:
            raise ValueError(f"f must have at least one row at site {FUNCTION_SITE!r}, got shape {tuple(f.shape)}")

    def check_target(self, f: Tensor, y: Tensor) -> Tensor:
        """The targets in the dtype and shape of this distribution, or a ValueError that names ``y``."""
        self.check_target_dtype(y)
        wanted = self.target_shape(f)
        if y.shape == wanted[:-1] and wanted[1:] == (1,):
            # [B] stands for [B, 1]: broadcasting would silently make it [B, B].
            y = y.unsqueeze(-1)
        if y.shape != wanted:
            raise ValueError(
                f"y must have shape {tuple(wanted)} for site 'y', since the network's output has shape "
                f"{tuple(f.shape)}, got {tuple(y.shape)}"
            )
        self.check_target_values(f, y)
        return y.to(f.dtype)

    def check_target_dtype(self, y: Tensor) -> None:
        """Raise a ValueError naming ``y`` if it is complex or boolean."""
        if y.is_complex() or y.dtype == torch.bool:
            raise ValueError(f"y must hold real numbers for site 'y', got {y.dtype}")

    def check_target_values(self, f: Tensor, y: Tensor) -> None:
        """Raise a ValueError naming ``y`` and a value out of range; by default all numbers are allowed."""


def full_precision(f: Tensor) -> Tensor:
    """A network's output in float32 under autocast, where densities need it as torch's own losses do."""
    short = torch.is_autocast_enabled(f.device.type) and f.dtype in (torch.float16, torch.bfloat16)
    return f.float() if short else f


def check_values(allowed: Tensor, y: Tensor, wanted: str) -> None:
    """Raise a ValueError with the first target that is out of range, if Pyro's validation is on.

    :param torch.Tensor allowed: which elements of ``y`` are in range.
    :param torch.Tensor y: the targets.
    :param str wanted: the range, in words.
    """
    if pyro.settings.get("validate_distributions_pyro") and not bool(allowed.all()):
        place = tuple((~allowed).nonzero()[0].tolist())
        raise ValueError(f"y must hold {wanted} for site 'y', got {y[place].item()} at {list(place)}")


def set_num_data(model: Any, num_data: int, who: str) -> None:
    """Set N of each likelihood in a model; raise a ValueError if another number was given."""
    for likelihood in submodules(model):
        if isinstance(likelihood, Likelihood):
            likelihood.train_on(num_data, who)
