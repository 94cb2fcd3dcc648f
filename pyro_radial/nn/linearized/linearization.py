# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A model's function linearized in its weights: a Gaussian process, from their means and covariances."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.func import vjp, vmap

from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial._pyro.types import Message, Model
from pyro_radial.nn.bayesian_module import BayesianModule, modules_of
from pyro_radial.nn.functional_net import WITHOUT_ADVICE_ON_LOOPS, loop
from pyro_radial.nn.likelihoods import FUNCTION_SITE
from pyro_radial.nn.linearized.layers import (
    LinearLayer,
    layerwise_terms,
    linear_layers,
    num_chunks,
)
from pyro_radial.nn.linearized.site_function import SiteFunction

# Numbers in the Jacobian of a chunk of rows: a tenth of a gigabyte in float32.
MAX_JACOBIAN = 2**25


class CovarianceBlock(NamedTuple):
    """The covariance of sites that are independent of all others."""

    #: More than one if they depend on each other; flattened one after another.
    sites: tuple[str, ...]
    #: The variances, of the site's shape; or covariances ``[*batch, D, D]`` for a site of shape ``[*batch, D]``.
    covariance: Tensor
    is_full: bool = False
    #: A factor ``[P, R]``; its product with its transpose is added to the variances.
    factor: Tensor | None = None

    @property
    def is_diagonal(self) -> bool:
        """Whether it has only variances."""
        return not self.is_full and self.factor is None

    def times(self, jacobian: Tensor) -> Tensor:
        """Return the product of rows ``[..., P]`` and the covariance."""
        if self.is_diagonal:
            return jacobian * self.covariance.flatten()
        if self.factor is not None:
            by_factor = (jacobian @ self.factor) @ self.factor.mT
            return jacobian * self.covariance.flatten() + by_factor
        rows = jacobian.unflatten(-1, self.covariance.shape[:-1]).unsqueeze(-2)
        return (rows @ self.covariance).flatten(-self.covariance.dim())

    def between(self, jacobian: Tensor) -> Tensor:
        """Return the covariances between rows ``[..., N, P]``, in float64."""
        jacobian = jacobian.double()
        covariance = self.covariance.double()
        if self.is_full:
            return self._replace(covariance=covariance).times(jacobian) @ jacobian.mT
        product: Tensor = _Gram.apply(jacobian, covariance.flatten())
        if self.factor is None:
            return product
        projected = jacobian @ self.factor.double()
        return product + projected @ projected.mT


class _Gram(torch.autograd.Function):
    r"""Rows J and variances v to :math:`J\,diag(v) J^T`, with one product in the gradient, since it is symmetric."""

    generate_vmap_rule = True

    @staticmethod
    def forward(jacobian: Tensor, variance: Tensor) -> Tensor:
        return (jacobian * variance) @ jacobian.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        jacobian, variance = ctx.saved_tensors
        product = (gradient + gradient.mT) @ jacobian
        by_row = (product * jacobian).flatten(0, -2).sum(0)
        return product * variance, 0.5 * by_row


class Structure(NamedTuple):
    """The sites that a function depends on, the layers that contain all of them, and the shape of a row's values."""

    sites: tuple[str, ...]
    #: None if other layers than linear ones and convolutions hold some of the sites.
    layers: tuple[LinearLayer, ...] | None
    shape: tuple[int, ...]

    @property
    def num_outputs(self) -> int:
        """O, the number of its values for each input."""
        return math.prod(self.shape)


class Linearization:
    r"""A model's function, linear in its weights w around their means :math:`\mu`, with covariance :math:`\Sigma`.

    .. math:: f(x) \approx f_\mu(x) + J(x) (w - \mu), \qquad J(x) = \partial f_w(x) / \partial w\, |_{w = \mu},

    so the function values have mean :math:`f_\mu(x)` and covariances :math:`J(x) \Sigma J(x')^T`. This is exact for a
    model that is linear in its weights, and differentiable in means, covariances and points, through the Jacobian too.

    Marginal moments go layer by layer if all weights are those of linear layers and convolutions that are called once
    with a vector or an image for each input; linear layers then need no Jacobian. Other functions take vector-Jacobian
    products of chunks of rows. A row of the function must depend only on its own input, so modules must be in
    evaluation mode.

    Source: Rudner, Bickford Smith, Feng, Teh and Gal (2022), "Continual Learning via Sequential Function-Space
    Variational Inference".

    :param mean: the means of sites, by name.
    :param blocks: the covariance of the same sites.
    :param structures: keeps what :meth:`structure` finds, for several linearizations of one model.
    """

    def __init__(
        self,
        model: Model,
        mean: Mapping[str, Tensor],
        blocks: Sequence[CovarianceBlock],
        function_site: str = FUNCTION_SITE,
        structures: dict[tuple[object, ...], Structure] | None = None,
    ) -> None:
        self.function = SiteFunction(model, function_site)
        self.mean = dict(mean)
        self.blocks = tuple(blocks)
        self._networks = modules_of(BayesianModule, model)
        self._structures = {} if structures is None else structures

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each function value, ``[N, O]``, in the network's dtype.

        :raises ValueError: for a function that cannot be differentiated, or that depends on a site without moments.
        """
        # A product with itself has a cheaper gradient than a square.
        return self._by_chunk(
            x,
            lambda jacobian, variance: ((jacobian * jacobian) @ variance.unsqueeze(-1)).squeeze(-1),
            lambda jacobian, block: (block.times(jacobian) * jacobian).sum(-1),
        )

    def joint_marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean ``[N, O]`` and covariance ``[N, O, O]`` of the outputs for each input, in the network's dtype.

        :raises ValueError: see :meth:`marginals`.
        """
        return self._by_chunk(
            x,
            lambda jacobian, variance: (jacobian * variance.unsqueeze(1)) @ jacobian.mT,
            lambda jacobian, block: block.times(jacobian) @ jacobian.mT,
        )

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean ``[N, O]`` and covariances of each output over points, ``[O, N, N]``, in float64.

        The Jacobian of all N points is held at once: N O numbers for each weight.
        """
        mean, jacobian = self._whole_jacobian(x)
        total: Any = 0.0
        for block in _merge_diagonal(self._blocks_of(self.structure(x).sites)):
            total = total + block.between(_join_sites(jacobian, block.sites).transpose(0, 1))
        return mean.double(), total

    def jacobian(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return values ``[N, O]`` and their Jacobian ``[N, O, P]`` in all sites, in order, in the network's dtype.

        :raises ValueError: see :meth:`marginals`.
        """
        mean, jacobian = self._whole_jacobian(x)
        return mean, _join_sites(jacobian, self.mean)

    def structure(self, x: Tensor) -> Structure:
        """Return what the function depends on; look once for each shape of an input and each head in use."""
        key = (x.shape[1:], *(network.sites_in_use for network in self._networks))
        if key not in self._structures:
            known_sites, unknown_sites = self.function.dependence(self.mean, x[:1])
            if unknown_sites:
                raise ValueError(
                    f"posterior must have a mean and a variance at site '{unknown_sites[0]}' of the model, on which "
                    f"the function depends, got them for {sorted(self.mean)}"
                )
            layers = None
            if all(block.is_diagonal for block in self._blocks_of(known_sites)):
                layers = linear_layers(self.function, known_sites, self.mean, x[:1])
            with torch.no_grad():
                shape = tuple(self.function.values(self.mean, x[:1]).shape[1:])
            self._structures[key] = Structure(known_sites, layers, shape)
        return self._structures[key]

    def _by_chunk(
        self,
        x: Tensor,
        of_term: Callable[[Tensor, Tensor], Tensor],
        of_block: Callable[[Tensor, CovarianceBlock], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return the mean ``[N, O]`` and the variance or covariance, computed for a chunk of rows at a time.

        The covariance is a sum over layers, if the structure has them, or else over blocks of sites.

        :param of_term: from a layer's Jacobian ``[n, O, R]`` and variances ``[n or 1, R]`` to its part of the sum.
        :param of_block: from a Jacobian ``[n, O, P]`` in the sites of a block, and the block, to its part of the sum.
        """
        structure = self.structure(x)
        means: list[Tensor] = []
        sums: list[Any] = []
        if structure.layers is not None:
            variance = {block.sites[0]: block.covariance for block in self.blocks}
            for rows in x.tensor_split(
                num_chunks(structure.layers, variance, structure.num_outputs, len(x))
            ):
                with _differentiable():
                    mean, terms = layerwise_terms(
                        self.function, structure.layers, self.mean, variance, rows
                    )
                means.append(mean)
                sums.append(sum(of_term(*term) for term in terms))
        else:
            blocks = self._blocks_of(structure.sites)
            for mean, jacobian in self._jacobians(x):
                means.append(mean)
                sums.append(sum(of_block(_join_sites(jacobian, b.sites), b) for b in blocks))
        return torch.cat(means), torch.cat(sums)

    def _blocks_of(self, sites: Sequence[str]) -> list[CovarianceBlock]:
        return [block for block in self.blocks if set(sites) & set(block.sites)]

    def _whole_jacobian(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the values ``[N, O]`` and, by site, the Jacobians ``[N, O, P]`` of all rows at once."""
        means, jacobians = zip(*self._jacobians(x), strict=True)
        whole = {}
        for site in self.mean:
            whole[site] = torch.cat([jacobian[site] for jacobian in jacobians])
        return torch.cat(means), whole

    def _jacobians(self, x: Tensor) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield for each chunk of rows the values ``[n, O]`` and, by site, the Jacobians ``[n, O, P]``.

        The Jacobian in a site that the function does not use is zero.
        """
        num_outputs = self.structure(x).num_outputs
        size = num_outputs * sum(mean.numel() for mean in self.mean.values())
        batched = all(network.batching == "vmap" for network in self._networks)
        each: Callable[..., Any] = partial(vmap, randomness="different") if batched else _loop_over

        def differentiate_row(row: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            def values(mean: dict[str, Tensor]) -> Tensor:
                return self.function(mean, row.unsqueeze(0)).squeeze(0)

            output, pull = vjp(values, self.mean)  # type: ignore[misc]
            eye = torch.eye(num_outputs, dtype=output.dtype, device=output.device)
            (jacobian,) = pull(eye[0]) if num_outputs == 1 else each(pull)(eye)
            return output, {
                site: site_jacobian.reshape(num_outputs, -1)
                for site, site_jacobian in jacobian.items()
            }

        for rows in x.split(max(1, MAX_JACOBIAN // size)):
            with _differentiable():
                chunk = each(differentiate_row)(rows)
            yield chunk


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run functions in a block where no handler and no store sees their parameters, one thread at a time."""
    with one_at_a_time(), poutine.block(), _FixedParameters():
        yield


class _FixedParameters(Messenger):
    """Gives parameters their values without gradient, and keeps those of modules out of Pyro's store."""

    def _pyro_param(self, msg: Message) -> None:
        initial = msg["args"][1] if len(msg["args"]) > 1 else None
        if isinstance(initial, nn.Parameter):
            msg["value"] = initial
            msg["done"] = True

    def _pyro_post_param(self, msg: Message) -> None:
        msg["value"] = msg["value"].detach()


@contextmanager
def _differentiable() -> Iterator[None]:
    """Raise a ValueError that names the model if torch cannot differentiate its network inside the block."""
    try:
        with WITHOUT_ADVICE_ON_LOOPS:
            yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ValueError(
            "model must have a network that torch.func can differentiate for each row by itself, got one that it "
            f"cannot: {str(error).strip().splitlines()[0]}"
        ) from error


def _merge_diagonal(blocks: Sequence[CovarianceBlock]) -> list[CovarianceBlock]:
    """Join all diagonal blocks to one, for one product instead of many."""
    diagonal = [block for block in blocks if block.is_diagonal]
    if len(diagonal) < 2:
        return list(blocks)
    nondiagonal = [block for block in blocks if not block.is_diagonal]
    sites: list[str] = []
    variances = []
    for block in diagonal:
        sites += block.sites
        variances.append(block.covariance.flatten())
    return [CovarianceBlock(tuple(sites), torch.cat(variances)), *nondiagonal]


def _loop_over(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Map a function over rows by a loop, for networks that ``vmap`` cannot batch."""
    return lambda rows: loop(lambda draw: function(draw["row"]), {"row": rows})


def _join_sites(jacobian: Mapping[str, Tensor], sites: Iterable[str]) -> Tensor:
    """Concatenate the Jacobians in these sites, ``[n, O, P]``."""
    return torch.cat([jacobian[site] for site in sites], -1)
