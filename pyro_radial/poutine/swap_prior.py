# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Replace the priors of latent sites."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from pyro.distributions import Delta
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_radial._pyro.compat import is_subsample
from pyro_radial._pyro.types import Message, Model
from pyro_radial.distributions.wrappers import expand_copy, leaf, mask_of, on_support
from pyro_radial.nn.under_priors import UnderPriors

# The most elements that are drawn to compare two distributions.
_NUM_CHECKED = 100_000

#: Entry of ``infer`` at a site with a swapped prior.
SWAPPED = {"has_swapped_prior": True}


class SwapPriorMessenger(Messenger):
    """Replaces the distribution of latent sites; use it through :func:`swap_prior`.

    :param Mapping priors: distributions by site name.
    :param set swapped: sites that fit their new prior and are not compared again; it is updated.
    :param required: sites that a run of the model must have.
    :param set observed: takes the plates of each observed site.
    """

    def __init__(
        self,
        priors: Mapping[str, Distribution],
        swapped: set[str] | None = None,
        required: Iterable[str] = (),
        observed: set[frozenset[object]] | None = None,
    ) -> None:
        super().__init__()
        self.priors = dict(priors)
        self.swapped: set[str] = set() if swapped is None else swapped
        self.required = set(required)
        self.observed = observed

    def _pyro_sample(self, msg: Message) -> None:
        name = msg["name"]
        if (
            self.observed is not None
            and msg["is_observed"]
            and not isinstance(leaf(msg["fn"]), Delta)
        ):
            self.observed.add(frozenset(msg["cond_indep_stack"]))
        if name not in self.priors or msg["is_observed"] or is_subsample(msg):
            return
        if name not in self.swapped:
            check_new_prior(name, self.priors[name], msg["fn"])
            self.swapped.add(name)
        prior = on_support(_expand_to_site(name, self.priors[name], msg["fn"]), msg["fn"].support)
        try:
            mask = mask_of(msg["fn"])
        except ValueError as error:
            raise ValueError(
                f"the prior of site '{name}' masks single elements of its event; a new prior cannot take that over: "
                f"{error}"
            ) from None
        msg["fn"] = prior if mask is None else prior.mask(mask)
        msg["infer"] = {**msg["infer"], **SWAPPED}

    def check_required(self) -> None:
        """Raise a ValueError naming the required sites that no run of the model had."""
        if missing := sorted(self.required - self.swapped):
            raise ValueError(f"priors must name latent sites of the model, got {missing}")


class _Swapped(UnderPriors):
    """A model under new priors, which must all have found their site by the end of a run."""

    def __init__(self, model: Model, priors: Mapping[str, Distribution]) -> None:
        super().__init__(model)
        self.messenger = SwapPriorMessenger(priors, required=priors)

    def priors(self) -> SwapPriorMessenger:
        return self.messenger


def swap_prior(model: Model, priors: Mapping[str, Any]) -> nn.Module:
    """Wrap a model so that some latent sites have other priors; everything else stays, including masks and scales.

    Wrap only the model: around a guide or a whole step of ``SVI`` the handler would replace the posterior. The result
    is a plain ``nn.Module`` with the model's parameters. Wrappers nest; the outermost prior applies. Each prior is
    compared with the one it replaces when it is first used.

    :param model: a Pyro model, a function or an ``nn.Module``.
    :param Mapping priors: distributions by site name, each with the site's ``event_shape`` and a ``batch_shape`` that
        expands to the site's.
    :returns: the model under its new priors.
    :raises ValueError: naming the argument, if ``model`` is a guide or a value of ``priors`` is not a distribution;
        when it runs, naming the site, for another shape or support, a prior with zero density where the old one has
        its mass, or a name that is not a latent site of the model.

    Example::

        >>> import pyro, pyro.distributions as dist
        >>> def model():
        ...     return pyro.sample("w", dist.Normal(0., 1.).expand([3]).to_event(1))
        >>> elsewhere = swap_prior(model, {"w": dist.Normal(torch.full((3,), 100.), 1.).to_event(1)})
        >>> bool((elsewhere() > 50).all())
        True
    """
    if is_guide(model):
        raise ValueError(
            "model must not be a guide, whose distributions are the posterior; wrap the model and make the guide "
            "from the result"
        )
    for name, prior in priors.items():
        if not isinstance(prior, TorchDistributionMixin):
            raise ValueError(
                f"the prior of site '{name}' must be a Pyro distribution, got {type(prior).__name__}"
            )
    return _Swapped(model, priors)


def is_guide(model: object) -> bool:
    """Return whether this is an autoguide, or a handler or module around one."""
    if isinstance(model, partial):
        return any(map(is_guide, (model.func, *model.args)))
    return isinstance(model, nn.Module) and any(
        isinstance(component, AutoGuide) for component in model.modules()
    )


def _expand_to_site(name: str, prior: Distribution, replaced: Distribution) -> Any:
    try:
        return expand_copy(prior, replaced.batch_shape)
    except (RuntimeError, ValueError):
        raise ValueError(
            f"the new prior of site '{name}' has batch shape {tuple(prior.batch_shape)}, which does not expand to "
            f"the site's {tuple(replaced.batch_shape)}; a site in a plate over data belongs to its rows and has none"
        ) from None


@torch.no_grad()
def check_new_prior(name: str, prior: Any, replaced: Any) -> None:
    """Raise a ValueError naming the site if samples show that a prior has another shape or support.

    Torch's random state stays as it is.
    """
    if prior.event_shape != replaced.event_shape:
        raise ValueError(
            f"the new prior of site '{name}' has event shape {tuple(prior.event_shape)}, the site's is "
            f"{tuple(replaced.event_shape)}"
        )
    distribution = _expand_to_site(name, prior, replaced)
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(cuda):
        # Only on the CPU: a seed for all devices would initialize unused ones.
        torch.default_generator.manual_seed(0)
        number = torch.Size([max(1, min(64, _NUM_CHECKED // max(1, replaced.shape().numel())))])
        if not bool(replaced.support.check(distribution.sample(number)).all()):
            raise ValueError(
                f"the new prior of site '{name}' has values outside of the site's support, {replaced.support}"
            )
        try:
            typical = replaced.sample(number)
        except NotImplementedError:
            # An improper prior has nothing but its support.
            return
        if not bool(distribution.support.check(typical).all()) or _has_zero_density(
            distribution, typical
        ):
            raise ValueError(
                f"the new prior of site '{name}', {type(prior).__name__}, has zero density at values that the site "
                "can take: no data could ever lead there"
            )


def _has_zero_density(distribution: Distribution, values: Tensor) -> bool:
    """Return whether any value has density zero, and not because rounding took its preimage to infinity."""
    while isinstance(inner := leaf(distribution), torch.distributions.TransformedDistribution):
        for transform in reversed(inner.transforms):
            values = transform.inv(values)
        distribution = inner.base_dist
    return bool((distribution.log_prob(values.nan_to_num(0.0, 0.0, 0.0)) == -torch.inf).any())
