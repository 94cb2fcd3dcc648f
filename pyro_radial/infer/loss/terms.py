# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The terms of a loss: what training and diagnosis report."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyro_radial._pyro.compat import register_pytree_node, tree_map


@dataclass(frozen=True)
class LossTerms:
    """A loss in its terms: 0-d tensors in nats, for the whole data set; those that a loss reports are detached.

    ``loss = negative_log_likelihood + kl_weight * kl``, and at each site ``kl = cross_entropy - entropy`` if the
    guide's distribution has an entropy. Losses that compare functions may add ``weight_space_kl_weight *
    weight_space_kl``, the KL of the weights.

    :param float kl_weight: the weight of the KL in the loss; a 0-d tensor while a graph is recorded.
    :param nll_by_site: the negative log-likelihood of each observed site.
    :param kl_by_site: the KL of each latent site, without the weight.
    :param entropies: a function that returns :attr:`entropy_by_site`.
    :param int num_data: N, the size of the plates around the observations, or None without a plate.
    :param sampled_kl: for each site with a sampled KL, why it has no closed form.
    """

    kl_weight: Any
    nll_by_site: dict[str, Tensor]
    kl_by_site: dict[str, Tensor]
    entropies: Callable[[], dict[str, Tensor]]
    num_data: int | None
    sampled_kl: dict[str, str] = field(default_factory=dict)
    weight_space_kl_weight: float = 0.0
    weight_space_kl_by_site: dict[str, Tensor] = field(default_factory=dict)

    @property
    def entropy_by_site(self) -> dict[str, Tensor]:
        """The entropy of each latent site with an entropy in the guide."""
        return self.entropies()

    @property
    def negative_log_likelihood(self) -> Tensor:
        """The sum over observed sites."""
        return _total(self.nll_by_site)

    @property
    def kl(self) -> Tensor:
        """The sum over latent sites, without its weight."""
        return _total(self.kl_by_site)

    @property
    def weight_space_kl(self) -> Tensor:
        """The KL of the weights in a loss that compares functions, without its weight; zero in others."""
        return _total(self.weight_space_kl_by_site)

    @property
    def loss(self) -> Tensor:
        """The value of the loss."""
        of_functions = _add_kl(self.negative_log_likelihood, self.kl_weight, self.kl)
        return _add_kl(of_functions, self.weight_space_kl_weight, self.weight_space_kl)

    @property
    def entropy(self) -> Tensor | None:
        """The guide's entropy, or None if a site has none."""
        by_site = self.entropy_by_site
        return _total(by_site) if by_site.keys() == self.kl_by_site.keys() else None

    @property
    def cross_entropy(self) -> Tensor | None:
        """E[-log p(w)] under the guide, or None if a site has no entropy."""
        entropy = self.entropy
        return None if entropy is None else self.kl + entropy

    def per_datum(self) -> "LossTerms":
        """Return the same terms divided by N, with ``num_data=1``; a ValueError if no observation is in a plate."""
        if self.num_data is None:
            raise ValueError(
                "per_datum: observations must be in a plate, got none, so the number of data is unknown"
            )
        return replace(average([self], self.num_data), num_data=1)

    def map(self, function: Callable[[Tensor], Tensor]) -> "LossTerms":
        """Return the same terms with a function applied to each tensor."""
        mapped: LossTerms = tree_map(function, self)
        return replace(mapped, kl_weight=self.kl_weight, entropies=self.entropies)

    def not_finite(self) -> list[str]:
        """Return in words which terms are NaN or infinite; reads each term on the host."""
        kinds = (
            ("log-likelihood", self.nll_by_site),
            ("KL", self.kl_by_site),
            ("weight-space KL", self.weight_space_kl_by_site),
        )
        descriptions = []
        for kind, by_site in kinds:
            for name, value in by_site.items():
                if not bool(torch.isfinite(value)):
                    descriptions.append(f"{kind} of site '{name}'")
        return descriptions


def _flatten(terms: LossTerms) -> tuple[list[object], object]:
    """Return the tensors of terms, and what is the same in each step."""
    by_site: list[object] = [terms.nll_by_site, terms.kl_by_site, terms.weight_space_kl_by_site]
    return by_site, (terms.num_data, terms.sampled_kl, terms.weight_space_kl_weight)


def _unflatten(by_site: Iterable[Any], fixed: tuple[Any, Any, Any]) -> LossTerms:
    """Return the terms with these tensors; the weight of the KL and the entropies are those of one evaluation."""
    nll_by_site, kl_by_site, weight_space_kl_by_site = by_site
    return LossTerms(1.0, nll_by_site, kl_by_site, dict, *fixed, weight_space_kl_by_site)


# A graph returns terms as a tree of tensors.
register_pytree_node(LossTerms, _flatten, _unflatten)


def average(particles: Sequence[LossTerms], num_particles: int) -> LossTerms:
    """Return the mean over particles; a pass with vectorized particles holds the sum over all of them."""
    reference = particles[0]
    if len(particles) == num_particles == 1:
        return reference
    sampled_kl: dict[str, str] = {}
    for terms in particles:
        sampled_kl |= terms.sampled_kl
    return LossTerms(
        reference.kl_weight,
        _sum_and_divide([p.nll_by_site for p in particles], num_particles),
        _sum_and_divide([p.kl_by_site for p in particles], num_particles),
        lambda: _sum_and_divide([p.entropy_by_site for p in particles], num_particles),
        reference.num_data,
        sampled_kl,
        reference.weight_space_kl_weight,
        _sum_and_divide([p.weight_space_kl_by_site for p in particles], num_particles),
    )


def as_tensor(number: float | Tensor) -> Tensor:
    """Return a number as a tensor. ``torch.as_tensor`` alone would move a tensor to the default device."""
    return number if isinstance(number, Tensor) else torch.as_tensor(number)


def _total(by_site: Mapping[str, Tensor]) -> Tensor:
    """Return the sum over sites."""
    return as_tensor(sum(by_site.values()))


def _add_kl(negative_log_likelihood: Tensor, kl_weight: float | Tensor, kl: Tensor) -> Tensor:
    """Return the negative log-likelihood plus the weighted KL.

    A weight of zero leaves out the KL, which is infinite at the pole of a radial prior. A tensor is not read.
    """
    if not isinstance(kl_weight, Tensor) and not kl_weight:
        return negative_log_likelihood
    return negative_log_likelihood + kl_weight * kl


def _sum_and_divide(by_site: Sequence[Mapping[str, Tensor]], number: int) -> dict[str, Tensor]:
    """Return the sum over the mappings, site by site, divided by a number."""
    result = {}
    for name in by_site[0]:
        result[name] = as_tensor(sum(each[name] for each in by_site)) / number
    return result
