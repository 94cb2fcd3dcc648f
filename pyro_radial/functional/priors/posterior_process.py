# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The functions of a posterior as a prior: a Gaussian process from the linearized network."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import LowRankMultivariateNormal, MultivariateNormal

from pyro_radial._pyro.types import Model
from pyro_radial.functional.priors.function_prior import FunctionPrior, check_points
from pyro_radial.nn.likelihoods import FUNCTION_SITE
from pyro_radial.nn.linearized.linearization import (
    CovarianceBlock,
    Linearization,
    Structure,
    undisturbed,
)
from pyro_radial.nn.linearized.site_moments import SiteMoments, site_moments, sites_of_network
from pyro_radial.nn.modules import dtype_of
from pyro_radial.poutine.swap_prior import is_guide


class PosteriorProcess(FunctionPrior):
    r"""The functions of a model linearized at the mean of a posterior, under that posterior.

    With the posterior's mean :math:`\mu` and covariance :math:`\Sigma`, and the Jacobian J of the function in the
    weights at :math:`\mu`,

    .. math:: f^X \sim \mathcal N\big(f_\mu(X),\ J(X)\, \Sigma\, J(X)^T\big),

    which is exact for a model that is linear in its weights. For a radial or mean-field posterior :math:`\Sigma` holds
    the marginal variances, for a ``MultivariateNormal`` the full covariance. Outputs count as independent, as in all
    priors on functions. :meth:`marginals` goes layer by layer through linear layers; :meth:`moments` holds the Jacobian
    of all points.

    The model is copied if it is a module, and stays in evaluation mode. The moments of the posterior are buffers in
    ``state_dict()``. With a :class:`~pyro_radial.nn.MultiHead`, ``use_head(process, head)`` selects the head.

    Source: Rudner, Bickford Smith, Feng, Teh and Gal (2022), "Continual Learning via Sequential Function-Space
    Variational Inference".

    :param model: a Pyro model that records its function values at a deterministic site, or a
        :class:`~pyro_radial.nn.BayesianModule`. Sites that the function does not depend on need no posterior.
    :param posterior: distributions with means and variances by site name, such as ``guide.posterior()``, or one
        ``MultivariateNormal`` or ``LowRankMultivariateNormal`` of all weights in the network's order, such as
        ``guide.get_posterior()`` of Pyro's ``AutoMultivariateNormal`` or of
        :func:`~pyro_radial.functional.function_space_laplace`.
    :param str function_site: the deterministic site of the function values.
    :raises ValueError: naming the argument or the site that does not fit: a site of the network without mean or
        variance, moments that are not finite, a posterior that is a point; when called, for no points, and for a
        function that cannot be differentiated.

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

    def __init__(self, model: Model, posterior: Any, function_site: str = FUNCTION_SITE) -> None:
        super().__init__()
        if not callable(model) or is_guide(model):
            raise ValueError(f"model must be a Pyro model and no guide, got {type(model).__name__}")
        needed = sites_of_network(model)
        if isinstance(posterior, Mapping):
            mean, blocks = site_moments(posterior, needed)
        else:
            mean, blocks = _joint_moments(posterior, needed, dtype_of(model))
        self.model: Any = copy.deepcopy(model) if isinstance(model, nn.Module) else model
        self.function_site = function_site
        self._sites = tuple(mean)
        # The sites of each block, and whether it is full and has a factor.
        self._blocks = tuple((b.sites, b.is_full, b.factor is not None) for b in blocks)
        self._structures: dict[tuple[object, ...], Structure] = {}
        self.means = _buffers(list(mean.values()))
        self.covariances = _buffers([block.covariance for block in blocks])
        self.factors = _buffers([block.factor for block in blocks if block.factor is not None])
        self.requires_grad_(False)
        self.eval()

    @property
    def linearization(self) -> Linearization:
        """The linearized model, which shares the buffers."""
        means = dict(zip(self._sites, self.means.buffers(), strict=True))
        factors = self.factors.buffers()
        blocks = []
        for (sites, is_full, has_factor), covariance in zip(
            self._blocks, self.covariances.buffers(), strict=True
        ):
            factor = next(factors) if has_factor else None
            blocks.append(CovarianceBlock(sites, covariance, is_full, factor))
        return Linearization(self.model, means, blocks, self.function_site, self._structures)

    def train(self, mode: bool = True) -> "PosteriorProcess":
        """Keep the copy in evaluation mode."""
        return super().train(False)

    def marginals(self, x: Tensor, num_outputs: int | None = None) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each function value, ``[N, O]``, in the network's dtype, differentiable in ``x``.

        :param int num_outputs: O, by default the network's own.
        :raises ValueError: naming the argument that does not fit.
        """
        return self._function_moments(Linearization.marginals, x, num_outputs)

    def moments(self, x: Tensor, num_outputs: int | None = None) -> tuple[Tensor, Tensor]:
        """Return mean ``[N, O]`` and covariances ``[O, N, N]`` in float64, differentiable in ``x``.

        The arguments are those of :meth:`marginals`.
        """
        return self._function_moments(Linearization.moments, x, num_outputs)

    def extra_repr(self) -> str:
        """Return the sites, for printing."""
        return f"sites={self._sites}"

    def _function_moments(
        self,
        moments: Callable[[Linearization, Tensor], tuple[Tensor, Tensor]],
        x: Tensor,
        num_outputs: int | None,
    ) -> tuple[Tensor, Tensor]:
        """Return moments of the linearized function, whose parameters no handler and no store sees."""
        check_points(x)
        with undisturbed():
            mean, spread = moments(self.linearization, x.to(next(iter(self.means.buffers()))))
        if num_outputs not in (None, mean.shape[-1]):
            raise ValueError(
                f"num_outputs must be {mean.shape[-1]}, the network's, got {num_outputs}"
            )
        return mean, spread


def _buffers(tensors: list[Tensor]) -> nn.Module:
    """Return a module that holds copies of tensors, in order."""
    module = nn.Module()
    for position, tensor in enumerate(tensors):
        module.register_buffer(
            str(position), tensor.detach().clone(memory_format=torch.contiguous_format)
        )
    return module


@torch.no_grad()
def _joint_moments(
    posterior: object, needed: Mapping[str, torch.Size], dtype: torch.dtype
) -> SiteMoments:
    """Return the moments of one normal distribution of all elements of the sites, in their order."""
    if not isinstance(posterior, MultivariateNormal | LowRankMultivariateNormal):
        raise ValueError(
            "posterior must be distributions by site name, as guide.posterior() returns, or one MultivariateNormal of "
            f"all weights, got {type(posterior).__name__}"
        )
    sizes = list(map(math.prod, needed.values()))
    if not needed or posterior.mean.shape != (sum(sizes),):
        raise ValueError(
            f"posterior must be of the {sum(sizes)} weights of sites {list(needed)}, or be given by site name, got one "
            f"of shape {tuple(posterior.mean.shape)}"
        )
    if not bool(posterior.mean.isfinite().all() & posterior.variance.isfinite().all()):
        raise ValueError("posterior must have a finite mean and covariance, got NaN or infinity")
    mean = {
        name: values.reshape(shape).to(dtype)
        for values, (name, shape) in zip(posterior.mean.split(sizes), needed.items(), strict=True)
    }
    sites = tuple(needed)
    if isinstance(posterior, LowRankMultivariateNormal):
        factor = posterior.cov_factor.to(dtype)
        return mean, [CovarianceBlock(sites, posterior.cov_diag.to(dtype), factor=factor)]
    return mean, [CovarianceBlock(sites, posterior.covariance_matrix.to(dtype), is_full=True)]
