# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One loss in its named terms."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor

__all__ = ["LossTerms", "average", "entropies", "entropy_parts", "total", "weighted"]


@dataclass(frozen=True)
class LossTerms:
    """One loss in its terms: detached 0-d tensors in nats, for the whole data set unless taken per datum.

    ``loss = negative_log_likelihood + kl_weight * kl``, and site by site ``kl = cross_entropy - entropy`` wherever
    the guide's distribution has an entropy. A loss of functions may have the KL of their weights besides, as
    ``weight_space_kl_weight * weight_space_kl``.

    :param float kl_weight: the weight of the KL in the loss; a 0-d tensor while a graph is recorded.
    :param nll_by_site: the negative log-likelihood of each observation.
    :param kl_by_site: the KL of each latent site, without the weight.
    :param entropies: makes :attr:`entropy_by_site`, which few ask for.
    :param int num_data: N, the size of the plates around the observations, or None without any.
    :param sampled_kl: the sites whose KL is estimated from samples, and for each why it has no closed form.
    :param float weight_space_kl_weight: the weight of the KL of the weights of functions to their own prior.
    :param weight_space_kl_by_site: that KL, without the weight.
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
        """The entropy of each latent site whose distribution in the guide has one."""
        return self.entropies()

    @property
    def negative_log_likelihood(self) -> Tensor:
        """Of all observations."""
        return total(self.nll_by_site)

    @property
    def kl(self) -> Tensor:
        """Of all latent sites, without its weight."""
        return total(self.kl_by_site)

    @property
    def weight_space_kl(self) -> Tensor:
        """Of the weights of functions to their own prior, without its weight; zero where the loss does without."""
        return total(self.weight_space_kl_by_site)

    @property
    def loss(self) -> Tensor:
        """The value of the loss."""
        of_functions = weighted(self.negative_log_likelihood, self.kl_weight, self.kl)
        return weighted(of_functions, self.weight_space_kl_weight, self.weight_space_kl)

    @property
    def entropy(self) -> Tensor | None:
        """The guide's entropy, or None where a site's distribution has none."""
        by_site = self.entropy_by_site
        return total(by_site) if by_site.keys() == self.kl_by_site.keys() else None

    @property
    def cross_entropy(self) -> Tensor | None:
        """E[-log p(w)] under the guide, or None where a site's distribution has no entropy."""
        entropy = self.entropy
        return None if entropy is None else self.kl + entropy

    def per_datum(self) -> "LossTerms":
        """The same terms divided by N.

        :returns: terms with ``num_data=1``.
        :raises ValueError: if no observation is in a plate.
        """
        number = self.num_data
        if number is None:
            raise ValueError("per_datum: observations must be in a plate, got none, so the number of data is unknown")
        return LossTerms(
            self.kl_weight,
            _divided([self.nll_by_site], number),
            _divided([self.kl_by_site], number),
            lambda: _divided([self.entropy_by_site], number),
            num_data=1,
            sampled_kl=self.sampled_kl,
            weight_space_kl_weight=self.weight_space_kl_weight,
            weight_space_kl_by_site=_divided([self.weight_space_kl_by_site], number),
        )

    def not_finite(self) -> list[str]:
        """The terms that are NaN or infinite, in words; a host-device synchronization for each term."""
        named = [(f"log-likelihood of site '{name}'", value) for name, value in self.nll_by_site.items()]
        named += [(f"KL of site '{name}'", value) for name, value in self.kl_by_site.items()]
        named += [(f"weight-space KL of site '{name}'", value) for name, value in self.weight_space_kl_by_site.items()]
        return [name for name, value in named if not bool(torch.isfinite(value))]


def total(by_site: Mapping[str, Tensor]) -> Tensor:
    """The sum over sites."""
    return torch.as_tensor(sum(by_site.values()))


def weighted(negative_log_likelihood: Tensor, kl_weight: float | Tensor, kl: Tensor) -> Tensor:
    """The sum; a weight of zero leaves the KL out altogether, for at the pole of a radial prior it is infinite.

    A tensor is a weight other than zero, and not looked at.
    """
    if not isinstance(kl_weight, Tensor) and not kl_weight:
        return negative_log_likelihood
    return negative_log_likelihood + kl_weight * kl


def average(particles: Sequence[LossTerms], num_particles: int) -> LossTerms:
    """The mean over particles.

    :param particles: the terms of each pass; that of a vectorized trace holds the sum over all of its particles.
    :param int num_particles: the number of particles in all passes together.
    """
    first = particles[0]
    return LossTerms(
        first.kl_weight,
        _divided([p.nll_by_site for p in particles], num_particles),
        _divided([p.kl_by_site for p in particles], num_particles),
        lambda: _divided([p.entropy_by_site for p in particles], num_particles),
        first.num_data,
        {name: reason for p in particles for name, reason in p.sampled_kl.items()},
        first.weight_space_kl_weight,
        _divided([p.weight_space_kl_by_site for p in particles], num_particles),
    )


def entropy_parts(site: Mapping[str, Any]) -> dict[str, Any]:
    """What an entropy needs of a site; its value, a copy of all weights, is let go."""
    return {key: site[key] for key in ("fn", "scale", "mask")}


@torch.no_grad()
def entropies(sites: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """The scaled entropy of each site whose distribution has one.

    :param sites: of each site its :func:`entropy_parts`.
    """
    result = {}
    for name, site in sites.items():
        try:
            entropy = scale_and_mask(site["fn"].entropy(), scale=site["scale"], mask=site["mask"])
            result[name] = entropy.expand(site["fn"].batch_shape).sum()
        except (NotImplementedError, AttributeError):
            continue
    return result


def _divided(by_site: Sequence[Mapping[str, Tensor]], number: int) -> dict[str, Tensor]:
    """The sum over the mappings, site by site, divided by a number."""
    return {name: torch.as_tensor(sum(d[name] for d in by_site)) / number for name in by_site[0]}
