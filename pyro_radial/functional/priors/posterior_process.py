# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The functions of a posterior as a prior: a process that is normal at any points, from a network linearized there."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial.distributions.wrappers import leaf, unmasked
from pyro_radial.functional.gaussian import gaussian_condition, gaussian_log_prob, gaussian_sample, gaussian_score
from pyro_radial.functional.layers import networks_in
from pyro_radial.functional.linearization import CovarianceBlock, Linearization, Structure
from pyro_radial.functional.priors.function_prior import FunctionPrior, check_points, check_targets, check_values
from pyro_radial.nn.likelihood import FUNCTION_SITE
from pyro_radial.poutine.swap_prior import is_guide

__all__ = ["PosteriorProcess", "moments_of", "site_moments"]

Moments = tuple[dict[str, Tensor], list[CovarianceBlock]]


class PosteriorProcess(FunctionPrior):
    r"""The functions of a model under a posterior, as those of the model linearized at the posterior's mean.

    With the posterior's mean :math:`\mu` and covariance :math:`\Sigma`, and the Jacobian J of the function in the
    weights at :math:`\mu`,

    .. math:: f^X \sim \mathcal N\big(f_\mu(X),\ J(X)\, \Sigma\, J(X)^T\big),

    which is exact for a model that is linear in its weights. Of a radial posterior, as of a mean-field one, it uses the
    marginal variances :math:`v_i`, so that an output has the variance :math:`\sum_i v_i J_i(x)^2`; of a
    ``MultivariateNormal`` the full covariance. :meth:`marginals` goes layer by layer where weights are those of linear
    layers, and :meth:`moments` holds the Jacobian of all points at once. Between points the covariances are those
    above; outputs are taken as independent, as by all priors on functions, though a common trunk makes them dependent.

    It stays as it is: the model is copied where it is a module, in evaluation mode, and the posterior's moments are
    buffers, which ``state_dict()`` holds and a process of the same model and kind of posterior loads. Of a
    :class:`~pyro_radial.nn.MultiHead` it is the function of the head in use, which ``use_head(process, head)`` changes.

    Source: Rudner, Bickford Smith, Feng, Teh and Gal (2022), "Continual Learning via Sequential Function-Space
    Variational Inference".

    :param model: a Pyro model that records its function's values at the site "f", such as a
        :class:`~pyro_radial.SupervisedModel` or a :class:`~pyro_radial.PriorChain`, or a
        :class:`~pyro_radial.nn.BayesianModule`. Sites on which the function does not depend need no posterior.
    :param posterior: distributions by site name, as ``guide.posterior()`` returns, normal, radial or any other with a
        mean and a variance for each element. Or one ``MultivariateNormal`` for all weights of a network, one site after
        another in the network's order, as ``AutoMultivariateNormal.get_posterior()`` is.
    :param str function_site: the deterministic site of the function's values.
    :raises ValueError: naming the argument or the site that does not fit: a site of the network without mean or
        variance, moments that are not finite, a posterior that is a point; when asked, for no points, and for a model
        whose function cannot be differentiated.

    Example::

        >>> from pyro_radial import AutoRadial, BayesianModule
        >>> bnn = BayesianModule(nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 2)))
        >>> guide = AutoRadial(bnn)
        >>> guide.setup(torch.zeros(2, 1))
        >>> process, x = PosteriorProcess(bnn, guide.posterior()), torch.rand(7, 1)
        >>> mean, variance = process.marginals(x)
        >>> mean.shape, variance.shape, process.moments(x)[1].shape
        (torch.Size([7, 2]), torch.Size([7, 2]), torch.Size([2, 7, 7]))
    """

    def __init__(self, model: Callable[..., Any], posterior: Any, function_site: str = FUNCTION_SITE) -> None:
        super().__init__()
        if not callable(model) or is_guide(model):
            raise ValueError(f"PosteriorProcess: model must be a Pyro model and no guide, got {type(model).__name__}")
        needed = _sites_of_network(model)
        try:
            if isinstance(posterior, Mapping):
                mean, blocks = site_moments(posterior, needed)
            else:
                mean, blocks = _joint_moments(posterior, needed)
        except ValueError as error:
            raise ValueError(f"PosteriorProcess: {error}") from None
        self.model: Any = copy.deepcopy(model) if isinstance(model, nn.Module) else model
        self.function_site = function_site
        self._sites = tuple(mean)
        self._blocks = tuple((block.sites, block.is_full) for block in blocks)
        self._structures: dict[Any, Structure] = {}
        self.means = _buffers([mean[site] for site in self._sites])
        self.covariances = _buffers([block.covariance for block in blocks])
        self.requires_grad_(False)
        self.eval()

    @property
    def linearization(self) -> Linearization:
        """The linearized model, on these very buffers."""
        blocks = zip(self._blocks, self.covariances.buffers(), strict=True)
        return Linearization(
            self.model,
            dict(zip(self._sites, self.means.buffers(), strict=True)),
            [CovarianceBlock(sites, covariance, is_full) for (sites, is_full), covariance in blocks],
            self.function_site,
            self._structures,
        )

    def train(self, mode: bool = True) -> "PosteriorProcess":
        """Leaves the copy in evaluation mode: it drops no units, and keeps running statistics as they are."""
        return super().train(False)

    def marginals(self, x: Tensor, num_outputs: int | None = None) -> tuple[Tensor, Tensor]:
        """Mean and variance of each function value, ``[N, O]``, in the network's dtype, differentiable in ``x``.

        :param int num_outputs: O, by default the network's own.
        :raises ValueError: naming the argument that does not fit.
        """
        with self._at(x) as points:
            mean, variance = self.linearization.marginals(points)
        self._check_outputs(mean, num_outputs)
        return mean, variance

    def moments(self, x: Tensor, num_outputs: int | None = None) -> tuple[Tensor, Tensor]:
        """Mean ``[N, O]`` and covariances ``[O, N, N]`` in float64, differentiable in ``x``.

        :param int num_outputs: O, by default the network's own.
        :raises ValueError: naming the argument that does not fit.
        """
        with self._at(x) as points:
            mean, covariance = self.linearization.moments(points)
        self._check_outputs(mean, num_outputs)
        return mean, covariance

    def score(self, f: Tensor, x: Tensor) -> Tensor:
        """The exact gradient of ``log p(f)`` in the function values ``[S, N, O]``, in their dtype.

        :raises ValueError: naming the argument that does not fit.
        """
        check_values(f, x)
        return gaussian_score(f, *self.moments(x, f.shape[-1]))

    def log_prob(self, f: Tensor, x: Tensor) -> Tensor:
        """The log-density of function values ``[S, N, O]``, ``[S]``, in their dtype.

        At more points than the network has weights, the covariances are singular but for what they get on their
        diagonals to have a Cholesky factor.

        :raises ValueError: naming the argument that does not fit.
        """
        check_values(f, x)
        return gaussian_log_prob(f, *self.moments(x, f.shape[-1]))

    def posterior(self, x: Tensor, y: Tensor, at: Tensor, observation_noise: float) -> tuple[Tensor, Tensor]:
        r"""The distribution of the function at points, given further observations with normal noise.

        It is the posterior of a network linearized at the old mean, exact for one that is linear in its weights, and
        needs no training: for Bayesian optimization, or to try what data would teach. N data cost :math:`N^3`.

        :param Tensor x: points ``[N, D]``.
        :param Tensor y: what was observed there, ``[N]`` or ``[N, O]``.
        :param Tensor at: points ``[M, D]``.
        :param float observation_noise: the standard deviation of the noise.
        :returns: mean ``[M, O]`` and covariances ``[O, M, M]`` in float64.
        :raises ValueError: naming the argument that does not fit.
        """
        y = check_targets(y, x)
        check_points(at)
        if at.shape[1:] != x.shape[1:]:
            raise ValueError(f"at must be points as wide as x, {list(x.shape[1:])}, got shape {list(at.shape)}")
        mean, covariance = self.moments(torch.cat([x, at.to(x)]), y.shape[-1])
        return gaussian_condition(mean, covariance, y, y.new_tensor(observation_noise).square())

    def extra_repr(self) -> str:
        """The sites, for printing."""
        return f"sites={self._sites}"

    def _sample(self, x: Tensor, num_samples: int, num_outputs: int) -> Tensor:
        return gaussian_sample(*self.moments(x, num_outputs), num_samples)

    @contextmanager
    def _at(self, x: Tensor) -> Iterator[Tensor]:
        """The points in the network's dtype, where its parameters are its own and seen by no one else."""
        check_points(x)
        try:
            with one_at_a_time(), poutine.block(), _FixedParameters():
                yield x.to(next(iter(self.means.buffers())))
        except ValueError as error:
            raise ValueError(f"PosteriorProcess: {error}") from error

    def _check_outputs(self, mean: Tensor, num_outputs: int | None) -> None:
        if num_outputs not in (None, mean.shape[-1]):
            raise ValueError(
                f"PosteriorProcess: num_outputs must be {mean.shape[-1]}, the network's, got {num_outputs}"
            )


class _FixedParameters(Messenger):
    """Gives parameters their values without gradient; those of modules do not get into Pyro's store at all."""

    def _pyro_param(self, msg: Any) -> None:
        initial = msg["args"][1] if len(msg["args"]) > 1 else None
        if isinstance(initial, nn.Parameter):
            msg["value"], msg["done"] = initial, True

    def _pyro_post_param(self, msg: Any) -> None:
        msg["value"] = msg["value"].detach()


def _sites_of_network(model: Any) -> dict[str, torch.Size]:
    """The shapes of the sites that a model's networks sample themselves, by name; none of a model without any."""
    return {
        name: parameter.shape
        for network in networks_in(model)
        for name, parameter in network.skeleton.named_parameters()
        if name in network.sites_in_use
    }


def _buffers(tensors: list[Tensor]) -> nn.Module:
    """A module that holds copies of tensors, in order."""
    module = nn.Module()
    for place, tensor in enumerate(tensors):
        module.register_buffer(str(place), tensor.detach().clone(memory_format=torch.contiguous_format))
    return module


def moments_of(site: str, distribution: Any) -> tuple[Tensor, CovarianceBlock] | None:
    """The mean of a site and its covariance, without a look at their values; None where one is not known."""
    distribution = unmasked(distribution)
    try:
        mean: Tensor = distribution.mean
        full = getattr(leaf(distribution), "covariance_matrix", None)
        if full is None:
            return mean, CovarianceBlock((site,), distribution.variance.expand(mean.shape))
    except (NotImplementedError, AttributeError):
        return None
    return mean, CovarianceBlock((site,), full.expand(*mean.shape, mean.shape[-1]), is_full=True)


@torch.no_grad()
def site_moments(posterior: Mapping[str, Any], needed: Mapping[str, torch.Size]) -> Moments:
    """Those of all sites that have them.

    :param posterior: distributions by site name.
    :param needed: the shapes of the sites that must have them.
    :raises ValueError: naming the site of one that has none or other than finite ones; for a posterior that is a point.
    """
    found = {name: moments_of(name, distribution) for name, distribution in posterior.items()}
    known = {name: moments for name, moments in found.items() if moments is not None}
    for name, shape in needed.items():
        if name not in known:
            got = "none" if name not in posterior else f"a {type(leaf(posterior[name])).__name__}"
            raise ValueError(f"posterior must have a mean and a variance at site '{name}', got {got}")
        if known[name][0].shape != shape:
            raise ValueError(
                f"posterior must have shape {tuple(shape)} at site '{name}', got {tuple(known[name][0].shape)}"
            )
    for name, (mean, block) in known.items():
        if not bool(mean.isfinite().all() & block.covariance.isfinite().all()):
            raise ValueError(f"posterior must have a finite mean and variance at site '{name}', got NaN or infinity")
    blocks = [block for _, block in known.values()]
    if not any(bool((block.covariance != 0).any()) for block in blocks):
        raise ValueError(
            f"posterior must have variances, got {'a point' if known else 'none'} at {sorted(posterior)}: its "
            "functions are one function; use a guide such as AutoRadial or AutoMeanField"
        )
    return {name: mean for name, (mean, _) in known.items()}, blocks


@torch.no_grad()
def _joint_moments(posterior: Any, needed: Mapping[str, torch.Size]) -> Moments:
    """Those of all sites together.

    :param posterior: one normal distribution of all elements of these sites, in this order.
    :param needed: the sites' shapes.
    :raises ValueError: for any other.
    """
    if not isinstance(posterior, MultivariateNormal):
        raise ValueError(
            "posterior must be distributions by site name, as guide.posterior() returns, or one MultivariateNormal of "
            f"all weights, got {type(posterior).__name__}"
        )
    sizes = [math.prod(shape) for shape in needed.values()]
    if not needed or posterior.mean.shape != (sum(sizes),):
        raise ValueError(
            f"posterior must be of the {sum(sizes)} weights of sites {list(needed)}, or be given by site name, got one "
            f"of shape {tuple(posterior.mean.shape)}"
        )
    if not bool(posterior.mean.isfinite().all() & posterior.covariance_matrix.isfinite().all()):
        raise ValueError("posterior must have a finite mean and covariance, got NaN or infinity")
    parts = posterior.mean.split(sizes)
    mean = {name: part.reshape(shape) for part, (name, shape) in zip(parts, needed.items(), strict=True)}
    return mean, [CovarianceBlock(tuple(needed), posterior.covariance_matrix, is_full=True)]
