# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The posterior as the next prior."""

import inspect
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Literal

from pyro.distributions import Delta
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule
from torch.distributions import biject_to

from pyro_radial._pyro.naming import UniquelyNamed, rename_tree, unique_name
from pyro_radial.continual.guide_posterior import parts, posterior_of, scale_change
from pyro_radial.continual.stored_distributions import StoredDistribution, StoredDistributions
from pyro_radial.distributions.constraints import is_real
from pyro_radial.distributions.moments import moment_matched, moments
from pyro_radial.distributions.wrappers import leaf
from pyro_radial.infer.autoguide.initialization import init_to_network
from pyro_radial.infer.diagnose import UNMOVED
from pyro_radial.poutine.swap_prior import SwapPriorMessenger, UnderPriors, check_prior, is_guide

__all__ = ["PriorChain"]

FORMS = ("normal", "exact")

# Below it, a change of the scales is the rounding of the map that keeps them positive.
ROUNDING = 1e-5

Exclude = str | Collection[str] | Callable[[str], bool] | None


class PriorChain(UnderPriors):
    r"""A model whose prior becomes the posterior of what it learned last: variational continual learning.

    It runs the model with the priors of :attr:`prior` in the place of the model's own; before the first
    :meth:`advance` there are none, and it is the model itself. For N tasks this is Bayes' rule in N steps, each
    approximate only as far as its guide is (Nguyen et al. 2018, "Variational Continual Learning", eq. 3).

    ``form="normal"`` chains the normal of the posterior's means and variances, element by element in unconstrained
    space, which a normal posterior is itself. Each element holds its own mean and its own scale. This is the form for
    tasks that share what they learn, and the one to begin with: radial guides then do as well as mean field.

    ``form="exact"`` chains the posterior as it is, whatever it is: directions and gammas, which have no such normal,
    and radial posteriors, with the term of their KL that Farquhar, Osborne and Gal (2020), appendix C, leave out;
    ``RadialELBO(strict_kl=True)`` accepts it. A radial prior of D elements holds means by a cone: a group of them stays
    exactly where it is until the likelihood's gradient exceeds 1.2533 (D - 1) in units of the prior's scale. So it
    forgets little where what tasks share need not move, as with a head a task on a trunk that has learned enough. But
    the scales of a group it holds by their radius, and no more firmly with more elements: once the means are a distance
    d away, in the same units, its KL is least with all scales larger by the factor r with

    .. math:: r\,(r^2 - 1) = \sqrt{\pi / 2}\,(D - 1)\, d,

    6 for 784 elements that each moved by a fifth of their standard deviation, where that of a normal prior is least at
    one. Scales grow from task to task, and what they say of earlier tasks fades: with one head, and gradients that have
    little noise (:func:`~pyro_radial.poutine.local_reparameterization`), it forgets far more than the normal form.
    Smaller groups (``event_dim``) lessen that without ending it; scales that start anew (``reset_scales``) grow again.

    A plain module: parameters of the model's own stay visible to optimizers, site names are the model's, and a chain of
    a chain works, the outer one's priors holding. The priors are buffers, and what to make of them is extra state;
    ``torch.load(weights_only=True)`` reads the ``state_dict()``, and a fresh chain around the same model loads it.

    :param model: a Pyro model, a function or a module.
    :param str form: "normal" for the normal of the posterior's moments, "exact" for the posterior itself.
    :raises ValueError: for a guide as model, or another form.

    Example::

        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro_radial import AutoRadial, RadialELBO
        >>> def model(x, y):
        ...     w = pyro.sample("w", dist.Normal(0., 1.).expand([2]).to_event(1))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("y", dist.Normal(x @ w, 0.1), obs=y)
        >>> chain = PriorChain(model)
        >>> for task in range(2):
        ...     x = torch.randn(20, 2)
        ...     guide = chain.guide(AutoRadial)
        ...     svi = pyro.infer.SVI(chain, guide, pyro.optim.Adam({"lr": 0.01}), RadialELBO(strict_kl=True))
        ...     losses = [svi.step(x, x.sum(-1)) for _ in range(100)]
        ...     chain.advance(guide)
        >>> chain.prior["w"].mean.shape
        torch.Size([2])
    """

    def __init__(
        self,
        model: Callable[..., Any],
        form: Literal["normal", "exact"] = "normal",
    ) -> None:
        super().__init__(model)
        if not callable(model) or is_guide(model):
            raise ValueError(f"PriorChain: model must be a Pyro model and no guide, got {type(model).__name__}")
        if form not in FORMS:
            raise ValueError(f"PriorChain: form must be one of {FORMS}, got {form!r}")
        self.form = form
        self.chained = StoredDistributions()
        self._compared: set[str] = set()

    @property
    def prior(self) -> dict[str, Any]:
        """The last posteriors, in the place of the model's own priors: ``{site: distribution}``."""
        return self.chained.as_dict()

    def priors(self) -> SwapPriorMessenger:
        """The handler that gives sites their chained priors; it raises a ValueError naming a site that has changed."""
        return SwapPriorMessenger(self.prior, self._compared)

    def model_state(self) -> dict[str, Any]:
        """What of ``state_dict()`` is the model's own, and so has the same shapes after each task."""
        return {name: value for name, value in self.state_dict().items() if not name.startswith("chained.")}

    def guide(self, guide_type: Callable[..., AutoGuide], *, reset_scales: bool = False, **kwargs: Any) -> Any:
        """A guide of this chain that starts at the chained prior.

        :param guide_type: a guide class such as :class:`~pyro_radial.AutoRadial` or another function of a model.
        :param bool reset_scales: start the scales where the guide starts them, and only the means at the prior.
            A posterior whose scales have become small leaves little noise to learn from; resetting costs KL at first.
        :param kwargs: what else the guide takes.
        :returns: ``guide_type(chain, **kwargs)``.
        """
        start = self.prior
        takes_init = isinstance(guide_type, type) and "init_loc_fn" in inspect.signature(guide_type).parameters
        if start and takes_init and not hasattr(guide_type, "start_at"):
            kwargs.setdefault("init_loc_fn", partial(_init_to_distributions, start, init_to_network))
        guide = guide_type(self, **kwargs)
        if isinstance(guide, PyroModule) and not isinstance(guide, UniquelyNamed):
            # Under its own name it would take over what the guide of an earlier task left in Pyro's store.
            rename_tree(guide, f"{unique_name(type(self))}.{type(guide).__name__}")
        for part in _own_parts(guide):
            part.start_at(start, scales=not reset_scales)
        return guide

    def advance(self, guide: Any, exclude: Exclude = None) -> None:
        """Make a guide's posterior the prior from now on.

        The posterior is copied and frozen; sites that the guide does not have, or has a point estimate of, keep the
        prior they had, the latter with a warning. Nothing changes if any site is refused. Warns of scales that hardly
        moved from where the guide starts them.

        :param guide: a trained guide with ``posterior()``, Pyro's ``AutoNormal`` or ``AutoDiagonalNormal``, an
            ``AutoGuideList`` of such, or distributions by site name.
        :param exclude: sites that keep their prior: a regular expression searched in the name, names, or a function of
            the name.
        :raises ValueError: for another guide; naming the site, for a guide that was never trained, a posterior that is
            a point, is not finite, cannot be stored or does not fit the site.
        :raises RuntimeError: for a guide without parameters.
        """
        _check_trained(guide)
        leaves_out = _matcher(exclude)
        points = _point_sites(guide)
        try:
            distributions = posterior_of(guide)
        except ValueError as error:
            raise ValueError(f"PriorChain.advance: {error}") from None
        posterior = {
            name: distribution
            for name, distribution in distributions.items()
            if name not in points and not leaves_out(name)
        }
        if not posterior:
            raise ValueError("PriorChain.advance: the guide has no site that is not excluded or a point estimate")
        stored = {name: self._store(name, distribution, _site(guide, name)) for name, distribution in posterior.items()}
        self.chained.update(stored)
        self._compared.clear()
        if points:
            warnings.warn(
                f"PriorChain.advance: the guide has point estimates of {points}, which keep the prior they had: a "
                "point as a prior would give zero density to everything else",
                stacklevel=2,
            )

    def _store(self, name: str, distribution: Any, site: Any) -> StoredDistribution:
        if not isinstance(distribution, TorchDistributionMixin):
            raise ValueError(
                f"PriorChain.advance: site '{name}' has no Pyro distribution but {type(distribution).__name__}"
            )
        if isinstance(leaf(distribution), Delta):
            raise ValueError(
                f"PriorChain.advance: the posterior of site '{name}' is a point, which as a prior gives zero density "
                "to everything else; exclude the site or use a guide with a density"
            )
        try:
            stored = StoredDistribution.of(self._in_form(distribution))
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"PriorChain.advance: site '{name}': {error}") from error
        if site is not None:
            check_prior(name, stored.distribution, site["fn"])
        return stored

    def _in_form(self, distribution: Any) -> Any:
        if self.form == "exact":
            return distribution
        try:
            return moment_matched(distribution)
        except ValueError as error:
            raise ValueError(f"{error}; PriorChain(form='exact') takes it as it is") from error

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        # What is loaded has not been compared with its sites yet.
        self._compared.clear()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _init_to_distributions(
    distributions: Mapping[str, Any], fallback: Callable[..., Any], site: Mapping[str, Any] | None = None
) -> Any:
    """A Pyro init function: the mean of a site's distribution in unconstrained space, where it has one."""
    if site is None:
        return partial(_init_to_distributions, distributions, fallback)
    transform = None if is_real(site["fn"].support) else biject_to(site["fn"].support)
    distribution = distributions.get(site["name"])
    mean = None if distribution is None else moments(distribution, transform).mean
    if mean is None:
        return fallback(site)
    value = mean if transform is None else transform(mean)
    return value.expand(site["fn"].shape()).clone()


def _own_parts(guide: Any) -> list[Any]:
    """The parts that are guides of this library, or act like them."""
    return [part for part in parts(guide) if hasattr(part, "scale_change")]


def _point_sites(guide: Any) -> list[str]:
    return [name for part in _own_parts(guide) for name in part.point_sites()]


def _site(guide: Any, name: str) -> Any:
    """The site of the model that a guide was made for, where the guide knows it."""
    for part in parts(guide):
        trace = getattr(part, "prototype_trace", None)
        if trace is not None and name in trace.nodes:
            return trace.nodes[name]
    return None


def _check_trained(guide: Any) -> None:
    """Refuse scales that were never trained, and warn of those that hardly moved."""
    for part in [] if isinstance(guide, Mapping) else parts(guide):
        change = scale_change(part)
        if change and all(moved < ROUNDING for moved in change.values()):
            raise ValueError(
                f"PriorChain.advance: {type(part).__name__} was never trained: the scales of all its sites, "
                f"{sorted(change)}, are where they started"
            )
        # Where a site started at the chained prior, what it says if it stays is what the earlier tasks taught.
        at_prior = getattr(part, "scales_start_at_distribution", lambda name: False)
        unmoved = [name for name, moved in change.items() if moved < UNMOVED and not at_prior(name)]
        if unmoved:
            warnings.warn(
                f"PriorChain.advance: the scales of {unmoved} never moved from their start. As a prior they say how "
                "the guide was initialized, not what the data taught; train longer or with a larger learning rate",
                stacklevel=3,
            )


def _matcher(exclude: Exclude) -> Callable[[str], bool]:
    if exclude is None:
        return lambda name: False
    if callable(exclude):
        return exclude
    if isinstance(exclude, str):
        try:
            pattern = re.compile(exclude)
        except re.error as error:
            raise ValueError(f"exclude is no valid regular expression: {exclude!r} ({error})") from error
        return lambda name: pattern.search(name) is not None
    names = frozenset(exclude)
    return lambda name: name in names
