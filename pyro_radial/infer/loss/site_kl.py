# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The KL of a latent site: in closed form where there is one, else estimated from the guide's draw."""

from typing import Any

from pyro.distributions import Delta
from pyro.distributions.util import scale_and_mask
from pyro.infer.util import is_validation_enabled
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from pyro_radial._pyro.types import Message, Node
from pyro_radial.distributions.kl import kl_by_cross_entropy
from pyro_radial.distributions.wrappers import leaf, remove_masks
from pyro_radial.poutine.local_reparameterization import check_drawn


def analytic_kl(name: str, model_trace: Trace, guide_trace: Trace) -> Tensor | str:
    """Return the scaled and masked KL of a latent site in nats, or in words why it must be sampled."""
    guide_site: Node = guide_trace.nodes[name]
    model_site: Node | None = model_trace.nodes.get(name)
    if is_validation_enabled() and not guide_site["fn"].has_rsample:
        raise NotImplementedError(
            f"guide must have a reparameterized sampler at site '{name}', got {type(leaf(guide_site['fn'])).__name__}"
        )
    if model_site is None:
        return "an auxiliary site of the guide, whose log-density is sampled"
    if isinstance(leaf(guide_site["fn"]), Delta):
        # Exact given its value; Pyro's own rule forgets the log-density of the Delta.
        return _log_prob_sum(name, guide_trace) - _log_prob_sum(name, model_trace)
    scale_in_guide = guide_site["scale"]
    scale = model_site["scale"]
    if not _same(guide_site["mask"], model_site["mask"]):
        return "masked differently in the model and the guide"
    q = own_distribution(guide_site)
    p = own_distribution(model_site)
    # Torch's registry has Pyro's rule for two masked normals, which is wrong for different masks.
    are_masked = _is_masked_normal(q) and _is_masked_normal(p)
    try:
        kl = kl_by_cross_entropy(q, p) if are_masked else kl_divergence(q, p)
    except NotImplementedError:
        return f"without a closed-form KL from {type(leaf(q)).__name__} to {type(leaf(p)).__name__}"
    kl = scale_and_mask(kl, scale=scale, mask=guide_site["mask"])
    if not _same(scale_in_guide, scale):
        # E[a log q - b log p] = b KL - (a - b) H(q); tensors may be equal.
        try:
            entropy = q.entropy()
        except NotImplementedError:
            return "scaled differently in the model and the guide, without a closed-form entropy"
        kl = kl - scale_and_mask(entropy, scale=scale_in_guide - scale, mask=guide_site["mask"])
    return kl.expand(guide_site["fn"].batch_shape).sum()


def estimate_kl(name: str, model_trace: Trace, guide_trace: Trace) -> Tensor:
    """Estimate the KL of a latent site without bias, or return the log-density of an auxiliary site of the guide."""
    site: Node = guide_trace.nodes[name]
    check_drawn(name, site, "prior must have a KL in closed form")
    score_parts = site["fn"].score_parts(site["value"], *site["args"], **site["kwargs"])
    score_parts = score_parts.scale_and_mask(site["scale"], site["mask"])
    log_density: Tensor = score_parts.entropy_term.sum()
    if name not in model_trace.nodes:
        return log_density
    return log_density - _log_prob_sum(name, model_trace)


class RecordDistribution(Messenger):
    """Record under a key the distribution of each sample statement at this place among the handlers.

    One recorder inside and one outside of a plate of particles serve :func:`own_distribution`.
    """

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def _pyro_sample(self, msg: Message) -> None:
        msg[self.key] = msg["fn"]


def own_distribution(site: Node) -> Any:
    """Return a site's distribution before particles repeated it, unless a handler has replaced it since."""
    if site["fn"] is site.get("repeated_distribution"):
        return site["own_distribution"]
    return site["fn"]


def is_auxiliary(site: Node) -> bool:
    """Return whether a guide marks a site as one that the model does not have."""
    return bool((site["infer"] or {}).get("is_auxiliary", False))


def _is_masked_normal(distribution: Any) -> bool:
    return isinstance(leaf(distribution), Normal) and remove_masks(distribution) is not distribution


def _log_prob_sum(name: str, trace: Trace) -> Tensor:
    trace.compute_log_prob(lambda site_name, _: site_name == name)
    return trace.nodes[name]["log_prob_sum"]


def _same(a: object, b: object) -> bool:
    """Return whether two scales or masks are equal; tensors are compared by identity."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
