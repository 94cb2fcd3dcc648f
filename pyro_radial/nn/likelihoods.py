# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Likelihoods: the distribution of the targets given the output of a network."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroParam, pyro_method
from torch import Tensor

from pyro_radial._pyro.checks import (
    check_types,
    positive_count,
    positive_float,
    proper_fraction,
    warn,
)
from pyro_radial._pyro.naming import UniquelyNamed
from pyro_radial.distributions.counts import StableNegativeBinomial, StablePoisson
from pyro_radial.distributions.numerics import append_dims
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.nn.site_priors import Following

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "NegativeBinomial",
    "Poisson",
    "ZeroInflated",
]

#: The deterministic site that records the network's output, the values of a function.
FUNCTION_SITE = "f"

#: The label that stands for a missing one, as in torch's losses; other missing targets are NaN.
MISSING_LABEL = -100

TARGET: Any = {"is_target": True}


def is_target(site: Mapping[str, Any]) -> bool:
    """Return whether a site holds the targets of a likelihood, observed or not; guides have no such site."""
    return bool(site["infer"] and site["infer"].get("is_target", False))


class Likelihood(UniquelyNamed):
    r"""Base class: a distribution of targets ``y`` given a network's output ``f``.

    It makes the plate over data, ``"data"`` at dim -1. With targets of B of the N training points it scales their
    log-likelihood by N/B, so that a loss is that of the whole data set. Without ``num_data``, :func:`~pyro_radial.fit`
    and :func:`~pyro_radial.continual.train_stream` set N to the number of rows they train on; before that N = B, as
    under ``pyro.plate("data", len(y))``. Give ``num_data`` if you train on mini-batches with your own ``SVI``.

    The deterministic site ``"f"`` records the output ``[*draws, B, *outputs]``; the site ``"y"`` holds the targets.

    A target that is NaN, or a label that is -100, is missing: it adds nothing to the log-likelihood. The scale stays
    N/B, so a mini-batch is an unbiased estimate of the sum over all observed targets.

    .. math:: \log p(y \mid f) = \sum_{k:\ y_k\ \mathrm{observed}} \log p(y_k \mid f)

    A subclass defines :meth:`observation` and :meth:`inverse_link` and may override :meth:`noise`,
    :meth:`target_shape` and :meth:`predictive_entropy`.

    :param int num_data: N, the number of training points; by default the number that :func:`~pyro_radial.fit` is given.
    :param int event_dim: the number of dims of ``f``, from the right, that belong to one data point: 1 for a network
        that returns ``[B, K]``, 0 for one that returns ``[B]``.
    :raises ValueError: naming the argument that is out of range.
    """

    #: For each argument of :meth:`observation` besides ``f``, the deterministic site that records it.
    noise_sites: dict[str, str] = {}
    #: The least number of dims of one output.
    min_event_dim: int = 0

    def __init__(self, *, num_data: int | None = None, event_dim: int = 1) -> None:
        super().__init__()
        self.num_data = num_data
        if event_dim < self.min_event_dim:
            raise ValueError(
                f"event_dim must be an integer >= {self.min_event_dim}, got {event_dim!r}"
            )
        self.event_dim = event_dim
        #: What is wrong with the end of the network, in words; None before a run with gradients, and if all is well.
        self.repeated_link: str | None = None

    @property
    def num_data(self) -> int | None:
        """N, as given, or as the latest training has set it; None before that."""
        return (
            self._trained_num_data if self._declared_num_data is None else self._declared_num_data
        )

    @num_data.setter
    def num_data(self, num_data: int | None) -> None:
        self._declared_num_data = None if num_data is None else positive_count("num_data", num_data)
        self._trained_num_data: int | None = None

    def train_on(self, num_data: int) -> None:
        """Set N to the number of training points; raise a ValueError if another number was given."""
        if self._declared_num_data not in (None, num_data):
            raise ValueError(
                f"num_data of the likelihood must be the number of training points, got "
                f"num_data={self._declared_num_data} for {num_data} rows; make the likelihood without num_data, or, if "
                f"the rows are only a part of the data, call fit(..., options=FitOptions(num_data="
                f"{self._declared_num_data}))"
            )
        self._trained_num_data = num_data

    def end_training(self, num_data: int) -> None:
        """Set N to the number of all rows, also of those that the training set aside, if no number was given."""
        self._trained_num_data = num_data

    def forward(self, f: Tensor, y: Tensor | None = None, observed: Tensor | None = None) -> Tensor:
        """Record ``f`` and observe or sample ``y``.

        :param torch.Tensor f: the network's output, ``[*draws, B, *outputs]``.
        :param torch.Tensor y: the targets, ``[B, *target]``, or None to sample them.
        :param torch.Tensor observed: whether each target counts, of the shape of ``y``; by default all that are not
            missing do.
        :returns: the value of the site ``"y"``.
        :raises ValueError: naming the argument whose shape, dtype or number does not fit.
        """
        self.check_store()
        if self.repeated_link is None:
            self._look_for_repeated_link(f)
        f = self.function_values(f)
        size = f.shape[-1 - self.event_dim]
        num_data = size
        if y is not None:
            y, observed = self.read_target(f, y, observed)
            num_data = self.num_data or size
            if size > num_data:
                origin = (
                    ""
                    if self._declared_num_data
                    else " from the latest fit; set the likelihood's num_data"
                )
                raise ValueError(
                    f"num_data must be at least {size}, the number of targets in y, got {num_data}{origin}"
                )
        noise = self.noise(f)
        with pyro.plate("data", num_data, subsample=torch.arange(size, device=f.device), dim=-1):
            f = pyro.deterministic(FUNCTION_SITE, f, event_dim=self.event_dim)
            targets = self.observation(f, **noise)
            if observed is not None:
                targets = masked(targets, observed)
            return pyro.sample("y", targets, obs=y, infer=TARGET)

    def _look_for_repeated_link(self, f: Tensor) -> None:
        """Warn, once, if the network ends in a function that this likelihood applies itself, such as a softmax."""
        argument, own_links = LINKS.get(type(self).observation, ("", ()))
        last = _last_function(f)
        if last in own_links:
            self.repeated_link = (
                f"The network ends in {last}, but the likelihood {type(self).__name__} takes {argument} at site "
                f"{FUNCTION_SITE!r} and applies such a function itself, so predictions stay in a narrow range. Leave "
                "the last function out of the network."
            )
            warn(self.repeated_link)

    def observation(self, f: Tensor, **noise: Tensor) -> TorchDistributionMixin:
        """Make the distribution of the targets.

        :param torch.Tensor f: ``[*draws, B, *outputs]``.
        :param noise: the values that :meth:`noise` returns, broadcastable with ``[*draws, B]``.
        :returns: a distribution of batch shape ``[*draws, B]``.
        """
        raise NotImplementedError

    def inverse_link(self, f: Tensor) -> Tensor:
        """Return the mean of the targets for outputs ``[..., B, *outputs]``; for classes, their probabilities."""
        raise NotImplementedError

    def noise(self, f: Tensor) -> dict[str, Tensor]:
        """Sample or read what the distribution needs besides ``f``; nothing by default.

        :param torch.Tensor f: the network's output, only for its dtype and device.
        :returns: keyword arguments of :meth:`observation`.
        """
        return {}

    def predictive_entropy(self, mean: Tensor) -> Tensor:
        """Return the entropy of the discrete distribution with the given mean, in nats, summed over the outputs.

        :param torch.Tensor mean: an average of :meth:`inverse_link` over draws, ``[..., N, *outputs]``.
        :returns: a tensor ``[..., N]``.
        :raises NotImplementedError: for targets that are not discrete and finite.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no closed-form predictive entropy: the predictive distribution is a mixture "
            "over draws, and its entropy is known only for targets with finitely many values"
        )

    def target_shape(self, f: Tensor) -> torch.Size:
        """Return the shape that targets must have, ``[B, *target]``."""
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
                f"got shape {tuple(f.shape)}; pass a single row as x[None]"
            )
        if f.shape[-1 - self.event_dim] == 0:
            raise ValueError(
                f"f must have at least one row at site {FUNCTION_SITE!r}, got shape {tuple(f.shape)}"
            )

    def is_missing(self, y: Tensor) -> Tensor:
        """Return whether each target is missing: NaN."""
        return y.isnan()

    def read_target(
        self, f: Tensor, y: Tensor, observed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the targets as :meth:`check_target` does, with zeros for unobserved ones, and which are observed.

        :param torch.Tensor observed: which targets count; by default all that are not missing.
        :raises ValueError: naming ``y`` or ``observed``; also if all targets are missing.
        """
        if observed is None:
            observed = ~self.is_missing(y)
            check_any_observed([observed])
        elif observed.dtype != torch.bool or observed.numel() != y.numel():
            self.check_target(f, y)  # Perhaps the mistake is in y.
            raise ValueError(
                f"observed must hold a bool for each target, of shape {tuple(y.shape)}, got {observed.dtype} of shape "
                f"{tuple(observed.shape)}"
            )
        # Even where it is masked, the density at NaN has a gradient of NaN.
        y = self.check_target(f, y.masked_fill(~observed.reshape(y.shape), 0))
        return y, observed.reshape(y.shape)

    def check_target(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the targets in the dtype and shape of this distribution, or raise a ValueError that names ``y``.

        Targets must not be missing here.
        """
        self.check_target_dtype(y)
        expected_shape = self.target_shape(f)
        if y.shape == expected_shape[:-1] and expected_shape[1:] == (1,):
            # [B] stands for [B, 1]: broadcasting would silently make it [B, B].
            y = y.unsqueeze(-1)
        if y.shape != expected_shape:
            raise ValueError(
                f"y must have shape {tuple(expected_shape)} for site 'y', since the network's output has shape "
                f"{tuple(f.shape)}, got {tuple(y.shape)}{self._event_dim_advice(f, y)}"
            )
        self.check_target_values(f, y)
        return y.to(f.dtype)

    def _event_dim_advice(self, f: Tensor, y: Tensor) -> str:
        """Return the end of an error that advises a larger ``event_dim`` where that would fit, else an empty string."""
        num_dims = f.dim() - 1
        if self.event_dim >= num_dims or y.shape[:1] != f.shape[:1]:
            return ""
        return f"; if each row of the output belongs to one data point, set event_dim={num_dims} in the likelihood"

    def check_target_dtype(self, y: Tensor) -> None:
        """Raise a ValueError naming ``y`` if it is complex or boolean."""
        if y.is_complex() or y.dtype == torch.bool:
            raise ValueError(f"y must hold real numbers for site 'y', got {y.dtype}")

    def check_target_values(self, f: Tensor, y: Tensor) -> None:
        """Raise a ValueError naming ``y`` and a value out of range; by default all numbers are allowed."""


class Categorical(Likelihood):
    r"""One of K classes, with probabilities ``softmax(f)``.

    ``f`` is ``[*draws, B, K]`` and ``y`` holds ``B`` integers from 0 to K-1. The classes are always the last dim: for
    many labels per point, as with ``event_dim=3``, ``f`` is ``[B, H, W, K]`` and ``y`` is ``[B, H, W]``.

    A label of -100, the ``ignore_index`` of torch's losses, is missing, such as the padding of a text. With tokens,
    ``event_dim=2``, the number of data counts rows, so the loss is that of whole texts. Predictions know no targets:
    their entropy and mutual information are sums over all labels.

    :param int num_data: see :class:`Likelihood`.
    :param int event_dim: see :class:`Likelihood`; the classes count as one dim.

    Example::

        >>> Categorical(num_data=100).inverse_link(torch.tensor([[0.0, 0.0]]))
        tensor([[0.5000, 0.5000]])
    """

    min_event_dim = 1

    def is_missing(self, y: Tensor) -> Tensor:
        """Return whether each label is missing: -100."""
        # In uint8, -100 would be the label 156.
        return y.long() == MISSING_LABEL

    def observation(self, f: Tensor, **noise: Tensor) -> TorchDistributionMixin:
        """Return the categorical distribution with logits ``f``."""
        return dist.Categorical(logits=f).to_event(self.event_dim - 1)

    def inverse_link(self, f: Tensor) -> Tensor:
        """Return the probabilities of the classes."""
        return f.softmax(-1)

    def predictive_entropy(self, mean: Tensor) -> Tensor:
        r""":math:`-\sum_k p_k \log p_k`, summed over the labels of a point."""
        return _sum_last(torch.special.entr(mean), self.event_dim)

    def target_shape(self, f: Tensor) -> torch.Size:
        """``[B]``, or ``[B, *labels]``."""
        return super().target_shape(f)[:-1]

    def check_target(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the labels, or raise a ValueError that names ``y``."""
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise ValueError(
                f"y must hold integer labels for site 'y', got {y.dtype}"
                f"{self._of_one_hot(f, y) or '; if these are labels, pass y.long()'}"
            )
        if y.shape != self.target_shape(f):
            raise ValueError(
                f"y must have shape {tuple(self.target_shape(f))} for site 'y', since the network's output has "
                f"shape {tuple(f.shape)} with the classes last, got {tuple(y.shape)}"
                f"{self._of_one_hot(f, y) or self._event_dim_advice(f, y)}"
            )
        self.check_target_values(f, y)
        return y

    def _of_one_hot(self, f: Tensor, y: Tensor) -> str:
        return (
            "; if the labels are one-hot, pass y.argmax(-1)"
            if y.shape == super().target_shape(f)
            else ""
        )

    def check_target_values(self, f: Tensor, y: Tensor) -> None:
        """Raise a ValueError naming ``y`` for a label out of range."""
        number = f.shape[-1]
        # One output may be meant for the second of two classes.
        binary = " (two take two outputs, or likelihoods.Bernoulli)" if number == 1 else ""
        allowed = (y >= 0) & (y < number)
        check_values(allowed, y, f"labels from 0 to {number - 1}, of {number} classes{binary},")


class Bernoulli(Likelihood):
    r"""Zero or one, independently for each output: ``y`` is one with probability ``sigmoid(f)``.

    :param int num_data: see :class:`Likelihood`.
    :param int event_dim: see :class:`Likelihood`.

    Example::

        >>> Bernoulli(num_data=100).predictive_entropy(torch.tensor([[0.5], [1.0]]))
        tensor([0.6931, 0.0000])
    """

    def observation(self, f: Tensor, **noise: Tensor) -> TorchDistributionMixin:
        """Return the Bernoulli distribution with logits ``f``."""
        return dist.Bernoulli(logits=f).to_event(self.event_dim)

    def inverse_link(self, f: Tensor) -> Tensor:
        """Return the probability of a one."""
        return f.sigmoid()

    def predictive_entropy(self, mean: Tensor) -> Tensor:
        r""":math:`-p \log p - (1-p) \log (1-p)`, summed over the outputs."""
        return _sum_last(torch.special.entr(mean) + torch.special.entr(1 - mean), self.event_dim)

    def check_target_dtype(self, y: Tensor) -> None:
        """Raise a ValueError naming ``y`` if it is complex."""
        if y.is_complex():
            raise ValueError(f"y must hold zeros and ones for site 'y', got {y.dtype}")

    def check_target_values(self, f: Tensor, y: Tensor) -> None:
        """Raise a ValueError naming ``y`` for a number that is neither zero nor one."""
        check_values((y == 0) | (y == 1), y, "zeros and ones")


class Gaussian(Likelihood):
    r"""Real numbers with a noise level: :math:`y_k \sim N(f_k, \sigma_k^2)` for each output.

    The noise level is fixed at ``scale``, one number for all outputs or a tensor with one for each. With
    ``learn_scale`` it is a parameter that starts there. With ``precision_prior`` it is random and the same for all
    outputs: :math:`\sigma = \tau^{-1/2}` with :math:`\tau` the site ``"precision"``, for example under the
    ``Gamma(6, 6)`` of Hernández-Lobato and Adams (2015), "Probabilistic Backpropagation". The deterministic site
    ``"noise_scale"`` records it, in the units of ``y``.

    :param int num_data: see :class:`Likelihood`.
    :param int event_dim: see :class:`Likelihood`.
    :param scale: the noise's standard deviation, or its first value, a number or a tensor ``[*outputs]``; 1 by default.
    :param bool learn_scale: whether to train it.
    :param precision_prior: a distribution of shape ``()`` on the positive numbers, for :math:`1/\sigma^2`.
    :raises ValueError: naming an argument out of range, or given together with ``precision_prior``; in a call, naming
        ``scale`` if its shape is not that of the outputs.

    Example::

        >>> likelihood = Gaussian(num_data=100, scale=torch.tensor([0.1, 2.0]))
        >>> f = torch.zeros(5, 2)
        >>> likelihood.observation(f, **likelihood.noise(f)).stddev[0]
        tensor([0.1000, 2.0000])
    """

    noise_sites = {"scale": "noise_scale"}

    def __init__(
        self,
        *,
        num_data: int | None = None,
        event_dim: int = 1,
        scale: float | Tensor | None = None,
        learn_scale: bool = False,
        precision_prior: TorchDistributionMixin | None = None,
    ) -> None:
        super().__init__(num_data=num_data, event_dim=event_dim)
        self.precision_prior: Following | None = None
        self._scale_shape = torch.Size()
        if precision_prior is not None:
            if scale is not None or learn_scale:
                raise ValueError(
                    "precision_prior must be given alone, got scale or learn_scale too"
                )
            _check_positive_scalar("precision_prior", precision_prior)
            self.precision_prior = Following(precision_prior)
            return
        first_scale: Any = 1.0 if scale is None else scale
        if isinstance(first_scale, Tensor):
            self._scale_shape = first_scale.shape
        if self._scale_shape.numel() == 1:
            first_scale = positive_float("scale", first_scale)
        else:
            first_scale = _positive_numbers("scale", first_scale)
        if learn_scale:
            # last_layer_laplace asks whether the scale was trained.
            self._first_scale = first_scale
            self.scale: Any = PyroParam(torch.as_tensor(first_scale), constraints.softplus_positive)
        elif isinstance(first_scale, Tensor):
            self.register_buffer("scale", first_scale, persistent=False)
        else:
            self.scale = first_scale

    def check_output(self, f: Tensor) -> None:
        """Raise a ValueError naming ``f``, or ``scale`` if it does not have a number for each output."""
        super().check_output(f)
        outputs = f.shape[f.dim() - self.event_dim :]
        if self._scale_shape not in ((), outputs):
            raise ValueError(
                f"scale must be one number or have the shape {tuple(outputs)} of the outputs of one row at site "
                f"{FUNCTION_SITE!r}, got {tuple(self._scale_shape)}"
            )

    def observation(self, f: Tensor, **noise: Tensor) -> TorchDistributionMixin:
        """Return the normal distribution around ``f``; ``scale`` is ``[*draws, B]`` or ``[*draws, B, *outputs]``."""
        scale = noise["scale"]
        if self._scale_shape.numel() == 1:
            scale = append_dims(scale, self.event_dim)
        return dist.Normal(f, scale).to_event(self.event_dim)

    def inverse_link(self, f: Tensor) -> Tensor:
        """``f`` itself."""
        return f

    @pyro_method
    def noise(self, f: Tensor) -> dict[str, Tensor]:
        """Return the standard deviation as ``scale``, of shape ``()``, ``[*outputs]`` or that of the draws."""
        if self.precision_prior is not None:
            scale = pyro.sample("precision", self.precision_prior(f)).rsqrt()
        else:
            scale = _like(f, self.scale)
        return {"scale": pyro.deterministic("noise_scale", scale)}


class HeteroscedasticGaussian(Likelihood):
    r"""Real numbers with their own noise level: the network returns locations and scales.

    .. math:: y_k \sim N(f_k, \sigma_k^2), \qquad \sigma_k = \mathrm{softplus}(f_{K+k}) + \mathrm{floor}

    The last dim of ``f`` has 2K elements, K locations and then K raw scales; ``y`` is ``[B, K]``. The floor bounds the
    density at points that the network fits exactly.

    :param int num_data: see :class:`Likelihood`.
    :param int event_dim: see :class:`Likelihood`; at least 1.
    :param float floor: the least standard deviation, in the units of ``y``.

    Example::

        >>> HeteroscedasticGaussian(num_data=100).inverse_link(torch.tensor([[1.0, 2.0, 0.0, 0.0]]))
        tensor([[1., 2.]])
    """

    min_event_dim = 1

    def __init__(
        self, *, num_data: int | None = None, event_dim: int = 1, floor: float = 1e-3
    ) -> None:
        super().__init__(num_data=num_data, event_dim=event_dim)
        self.floor = positive_float("floor", floor)

    def observation(self, f: Tensor, **noise: Tensor) -> TorchDistributionMixin:
        """Return the normal distribution with the locations and scales in ``f``."""
        loc, raw = f.chunk(2, -1)
        scale = torch.nn.functional.softplus(raw) + self.floor
        return dist.Normal(loc, scale).to_event(self.event_dim)

    def inverse_link(self, f: Tensor) -> Tensor:
        """Return the locations, ``[..., K]``."""
        return f.chunk(2, -1)[0]

    def target_shape(self, f: Tensor) -> torch.Size:
        """``[B, ..., K]``."""
        shape = super().target_shape(f)
        return torch.Size((*shape[:-1], shape[-1] // 2))

    def check_output(self, f: Tensor) -> None:
        """Raise a ValueError naming ``f`` if the size of its last dim is odd."""
        super().check_output(f)
        if f.shape[-1] % 2:
            raise ValueError(
                f"f must end in a dim of even size at site {FUNCTION_SITE!r}, locations and then raw scales, "
                f"got shape {tuple(f.shape)}"
            )


class Poisson(Likelihood):
    r"""Counts, independently for each output: :math:`y \sim \mathrm{Poisson}(\exp f)`.

    :param int num_data: see :class:`Likelihood`.
    :param int event_dim: see :class:`Likelihood`.

    Example::

        >>> Poisson(num_data=100).inverse_link(torch.zeros(1, 1))
        tensor([[1.]])
    """

    def observation(self, f: Tensor, **noise: Tensor) -> TorchDistributionMixin:
        """Return the Poisson distribution with log rate ``f``."""
        return StablePoisson(f.exp()).to_event(self.event_dim)

    def inverse_link(self, f: Tensor) -> Tensor:
        """Return the rate."""
        return f.exp()

    def check_target_values(self, f: Tensor, y: Tensor) -> None:
        """Raise a ValueError naming ``y`` for a number that is not a count."""
        check_values((y >= 0) & (y == y.round()), y, "counts, 0, 1, 2, ...,")


class NegativeBinomial(Poisson):
    r"""Counts that vary more than Poisson ones, such as reads of genes, with one concentration r for all outputs.

    .. math:: y \sim \mathrm{NegativeBinomial}, \qquad E[y] = e^f, \qquad \mathrm{Var}[y] = e^f + e^{2f} / r

    A large r comes close to :class:`Poisson`. The concentration is a parameter; with ``learn_concentration=False`` it
    stays as given. The deterministic site ``"concentration"`` records it.

    :param int num_data: see :class:`Likelihood`.
    :param int event_dim: see :class:`Likelihood`.
    :param float concentration: r, or its first value.
    :param bool learn_concentration: whether to train it.
    :raises ValueError: naming an argument out of range.

    Example::

        >>> likelihood = NegativeBinomial(concentration=2.0)
        >>> likelihood.observation(torch.zeros(1, 1), concentration=torch.tensor(2.0)).variance
        tensor([[1.5000]])
    """

    noise_sites = {"concentration": "concentration"}

    def __init__(
        self,
        *,
        num_data: int | None = None,
        event_dim: int = 1,
        concentration: float = 1.0,
        learn_concentration: bool = True,
    ) -> None:
        super().__init__(num_data=num_data, event_dim=event_dim)
        self.concentration: Any = positive_float("concentration", concentration)
        if learn_concentration:
            self.concentration = PyroParam(
                torch.tensor(self.concentration), constraints.softplus_positive
            )

    def observation(self, f: Tensor, **noise: Tensor) -> TorchDistributionMixin:
        """Return the negative binomial with log mean ``f``; ``concentration`` broadcasts with ``[*draws, B]``."""
        concentration = append_dims(noise["concentration"], self.event_dim)
        logits = f - concentration.log()
        return StableNegativeBinomial(concentration, logits=logits).to_event(self.event_dim)

    @pyro_method
    def noise(self, f: Tensor) -> dict[str, Tensor]:
        """Return the concentration, of shape ``()``."""
        return {"concentration": pyro.deterministic("concentration", _like(f, self.concentration))}


class ZeroInflated(Likelihood):
    r"""Counts with more zeros than a Poisson or a negative binomial has, such as visits of which many cannot happen.

    .. math:: p(y \mid f) = \pi\, [y = 0] + (1 - \pi)\, p_0(y \mid f), \qquad E[y] = (1 - \pi)\, e^f

    The gate :math:`\pi`, the same for all outputs, is the probability of an extra zero. It is a parameter; with
    ``learn_gate=False`` it stays as given. The deterministic site ``"gate"`` records it. If the network explains the
    zeros as small means, the gate goes to zero.

    Source: Lambert (1992), "Zero-Inflated Poisson Regression, with an Application to Defects in Manufacturing".

    :param Poisson likelihood: :math:`p_0`, a :class:`Poisson` or :class:`NegativeBinomial`, whose ``num_data`` and
        ``event_dim`` hold here.
    :param float gate: :math:`\pi`, or its first value, between zero and one.
    :param bool learn_gate: whether to train it.
    :raises ValueError: naming an argument out of range, or a likelihood that is not one of counts.

    Example::

        >>> likelihood = ZeroInflated(Poisson(), gate=0.25)
        >>> f = torch.zeros(1, 1)
        >>> likelihood.observation(f, **likelihood.noise(f)).log_prob(torch.zeros(1, 1)).exp()
        tensor([0.5259], grad_fn=<ExpBackward0>)
    """

    def __init__(self, likelihood: Poisson, *, gate: float = 0.1, learn_gate: bool = True) -> None:
        # NegativeBinomial is one too.
        check_types(Poisson, likelihood=likelihood)
        super().__init__(num_data=likelihood.num_data, event_dim=likelihood.event_dim)
        self.likelihood = likelihood
        self.noise_sites = {"gate": "gate", **likelihood.noise_sites}
        self.gate: Any = proper_fraction("gate", gate)
        if learn_gate:
            self.gate = PyroParam(torch.tensor(self.gate), constraints.unit_interval)

    def observation(self, f: Tensor, **noise: Tensor) -> TorchDistributionMixin:
        """Return the counts of the likelihood with extra zeros; ``gate`` broadcasts with ``[*draws, B]``."""
        gate = append_dims(noise.pop("gate"), self.event_dim)
        counts = leaf(self.likelihood.observation(f, **noise))
        return dist.ZeroInflatedDistribution(counts, gate=gate).to_event(self.event_dim)

    def inverse_link(self, f: Tensor) -> Tensor:
        """Return the mean with the extra zeros."""
        return (1 - _like(f, self.gate).detach()) * self.likelihood.inverse_link(f)

    @pyro_method
    def noise(self, f: Tensor) -> dict[str, Tensor]:
        """Return the gate, of shape ``()``, and the noise of the likelihood."""
        gate = pyro.deterministic("gate", _like(f, self.gate))
        return {"gate": gate, **self.likelihood.noise(f)}

    def check_target_values(self, f: Tensor, y: Tensor) -> None:
        """Raise a ValueError naming ``y`` for a number that is not a count."""
        self.likelihood.check_target_values(f, y)


#: By the way that a likelihood makes its distribution: what it takes, and functions that no network should end in, by
#: torch's names. A logarithm of probabilities is as good as logits to a softmax.
LINKS: dict[Callable[..., object], tuple[str, tuple[str, ...]]] = {
    Categorical.observation: ("logits", ("Softmax", "Sigmoid")),
    Bernoulli.observation: ("logits", ("Sigmoid", "Softmax", "LogSigmoid", "LogSoftmax")),
    HeteroscedasticGaussian.observation: ("raw scales", ("Softplus", "Exp")),
    Poisson.observation: ("the logarithm of the mean", ("Softplus", "Exp")),
    NegativeBinomial.observation: ("the logarithm of the mean", ("Softplus", "Exp")),
    ZeroInflated.observation: ("the logarithm of the mean", ("Softplus", "Exp")),
}
# These only move numbers or change their dtype. Of joined tensors, the last one is looked at.
MOVES = re.compile(
    "(Unsafe)?View|Reshape|(Reshape)?Alias|(Uns|S)queeze|Select|Slice|Expand|T|Transpose|Permute|Clone|ToCopy|Cat|Stack"
)


def _last_function(f: Tensor) -> str | None:
    """Return torch's name of the function that computed a network's output, or None without gradients."""
    node: Any = f.grad_fn
    while node is not None:
        name = re.sub(r"Backward\d*$", "", type(node).__name__)
        if not MOVES.fullmatch(name):
            return name
        node = node.next_functions[-1][0]
    return None


def masked(distribution: Any, observed: Tensor) -> Any:
    """Leave out the densities of targets that are not observed; dependent targets are left out together."""
    dims = 0
    if isinstance(distribution, dist.Independent):
        dims = distribution.reinterpreted_batch_ndims
        distribution = distribution.base_dist
    if distribution.event_dim:
        observed = observed.flatten(-distribution.event_dim).all(-1)
    return distribution.mask(observed).to_event(dims)


def _like(f: Tensor, number: float | Tensor) -> Tensor:
    """Return a number with the dtype and device of an output."""
    if isinstance(number, Tensor):
        return number.to(f.device, f.dtype)
    return torch.full((), number, dtype=f.dtype, device=f.device)


def _sum_last(values: Tensor, dims: int) -> Tensor:
    return values.sum(tuple(range(-dims, 0))) if dims else values


def full_precision(f: Tensor) -> Tensor:
    """Return a network's output in float32 under autocast, where densities need it as torch's own losses do."""
    short = torch.is_autocast_enabled(f.device.type) and f.dtype in (torch.float16, torch.bfloat16)
    return f.float() if short else f


def check_values(allowed: Tensor, y: Tensor, description: str) -> None:
    """Raise a ValueError with the first target that is not allowed, if Pyro's validation is on."""
    if pyro.settings.get("validate_distributions_pyro") and not bool(allowed.all()):
        index = tuple((~allowed).nonzero()[0].tolist())
        raise ValueError(
            f"y must hold {description} for site 'y', got {y[index].item()} at {list(index)}"
        )


def check_any_observed(masks: Iterable[Tensor]) -> None:
    """Raise a ValueError if no target of a batch is observed, if Pyro's validation is on."""
    if pyro.settings.get("validate_distributions_pyro") and not any(
        bool(observed.any()) for observed in masks
    ):
        raise ValueError(
            "y must hold at least one target in each batch, got only missing ones; leave out such rows"
        )


def _positive_numbers(argument: str, numbers: Tensor) -> Tensor:
    """Return a copy as real numbers, or raise a ValueError naming the argument if one is not positive and finite."""
    if not numbers.numel() or not bool(((numbers > 0) & numbers.isfinite()).all()):
        raise ValueError(f"{argument} must hold positive finite numbers, got {numbers.tolist()}")
    return numbers.detach() * 1.0


def _check_positive_scalar(argument: str, distribution: TorchDistributionMixin) -> None:
    """Raise a ValueError that names the argument, unless it is a distribution of one positive number."""
    if distribution.shape() != torch.Size():
        raise ValueError(f"{argument} must have shape (), got {tuple(distribution.shape())}")
    lower = getattr(distribution.support, "lower_bound", None)
    if lower is None or lower < 0:
        raise ValueError(
            f"{argument} must be a distribution of positive numbers, got one with support {distribution.support}"
        )
