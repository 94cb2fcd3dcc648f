# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The KL of one latent site, in closed form where there is one and else from its sample."""

from typing import Any

from pyro.distributions import Delta
from pyro.distributions.util import scale_and_mask
from pyro.infer.util import is_validation_enabled
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import kl_divergence

from pyro_radial.distributions.wrappers import leaf
from pyro_radial.poutine.local_reparameterization import check_drawn

__all__ = ["RecordDistribution", "analytic_kl", "own_distribution", "sampled_kl"]


class RecordDistribution(Messenger):
    """Keeps the distribution that a sample statement has at this place among the handlers.

    A plate of particles repeats each distribution. With one of these inside it, under "own_distribution", and one
    outside, under "repeated_distribution", :func:`analytic_kl` finds a KL that all particles share once.

    :param str key: the entry of the site to keep it under.
    """

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def _pyro_sample(self, msg: Any) -> None:
        msg[self.key] = msg["fn"]


def analytic_kl(name: str, guide_site: Any, model_trace: Trace, guide_trace: Trace) -> Tensor | str:
    """The scaled and masked KL of a latent site, summed, or why it must be sampled.

    :param str name: the name of the site.
    :param guide_site: the site in the run of the guide.
    :param model_trace: a run of the model on that of the guide.
    :param guide_trace: the run of the guide.
    :returns: a 0-d tensor in nats, or the reason in words.
    :raises NotImplementedError: naming the site, if the guide's distribution cannot be reparameterized.
    """
    model_site: Any = model_trace.nodes.get(name)
    if is_validation_enabled() and not guide_site["fn"].has_rsample:
        raise NotImplementedError(
            f"RadialELBO: guide must have a reparameterized sampler at site '{name}', got "
            f"{type(leaf(guide_site['fn'])).__name__}"
        )
    if model_site is None:
        return "an auxiliary site of the guide, whose log-density is sampled"
    if isinstance(leaf(guide_site["fn"]), Delta):
        # Exact given its value; Pyro's own rule forgets the log-density of the Delta.
        return _log_prob_sum(name, guide_trace) - _log_prob_sum(name, model_trace)
    if not _same(guide_site["scale"], model_site["scale"]):
        return "scaled differently in the model and the guide"
    if not _same(guide_site["mask"], model_site["mask"]):
        return "masked differently in the model and the guide"
    try:
        kl = kl_divergence(own_distribution(guide_site), own_distribution(model_site))
    except NotImplementedError:
        q, p = (type(leaf(site["fn"])).__name__ for site in (guide_site, model_site))
        return f"without a closed-form KL from {q} to {p}"
    kl = scale_and_mask(kl, scale=guide_site["scale"], mask=guide_site["mask"])
    return kl.expand(guide_site["fn"].batch_shape).sum()


def sampled_kl(name: str, model_trace: Trace, guide_trace: Trace) -> Tensor:
    """The KL of a latent site estimated from its sample; for an auxiliary site of the guide its log-density.

    :returns: a 0-d tensor in nats, without bias.
    :raises ValueError: naming the site, for one without a sample, under local reparameterization.
    """
    site: Any = guide_trace.nodes[name]
    check_drawn(name, site, "RadialELBO: prior must have a KL in closed form")
    score_parts = site["fn"].score_parts(site["value"], *site["args"], **site["kwargs"])
    entropy_term: Tensor = score_parts.scale_and_mask(site["scale"], site["mask"]).entropy_term.sum()
    return entropy_term - _log_prob_sum(name, model_trace) if name in model_trace.nodes else entropy_term


def own_distribution(site: Any) -> Any:
    """A site's distribution before the plate of the particles repeated it, unless a handler has replaced it.

    A KL of distributions that all particles share is one KL, not as many.
    """
    return site["own_distribution"] if site["fn"] is site.get("repeated_distribution") else site["fn"]


def _log_prob_sum(name: str, trace: Trace) -> Tensor:
    trace.compute_log_prob(lambda site_name, _: site_name == name)
    log_prob: Tensor = trace.nodes[name]["log_prob_sum"]
    return log_prob


def _same(a: Any, b: Any) -> bool:
    """Whether two scales or masks are equal, without looking into a tensor's values."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
