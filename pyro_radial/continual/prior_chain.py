# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The posterior of one task as the prior of the next."""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoGuide,
    AutoGuideList,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions import Distribution, biject_to

from pyro_radial._pyro.checks import check_choice, positive_float, warn
from pyro_radial._pyro.compat import initial_scale, loc_and_scale
from pyro_radial._pyro.naming import UniquelyNamed, rename_tree, unique_name
from pyro_radial._pyro.types import Node
from pyro_radial.continual.coresets import StoredCoresets
from pyro_radial.distributions.constraints import is_real
from pyro_radial.distributions.moments import match_moments, moments
from pyro_radial.distributions.storage import StoredDistribution, StoredDistributions, describe
from pyro_radial.distributions.wrappers import (
    TRANSFORMED,
    Transformed,
    drop_repeats,
    elementary,
    leaf,
    map_leaf,
    pull_back,
    with_base,
)
from pyro_radial.infer.autoguide.initialization import init_to_network
from pyro_radial.infer.diagnose.diagnose import UNMOVED
from pyro_radial.nn.modules import device_of
from pyro_radial.nn.supervised import find_network
from pyro_radial.nn.under_priors import UnderPriors
from pyro_radial.poutine.swap_prior import (
    SwapPriorMessenger,
    check_new_prior,
    is_guide,
)

# Pyro's guides that are normal in unconstrained space.
NORMAL_GUIDES = (AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal)

# A smaller change of the scales is rounding in the map that keeps them positive.
ROUNDING = 1e-5

Exclude = str | Collection[str] | Callable[[str], bool] | None


class PriorChain(UnderPriors):
    r"""Chain posteriors as priors: after each task the posterior becomes the next prior.

    The chain runs the model with the priors in :attr:`prior` instead of the model's own. For N tasks this is Bayes'
    rule in N steps, each approximate only as far as its guide is.

    ``form="normal"``, the one to start with, chains the normal with the posterior's means and variances, element by
    element in unconstrained space. ``form="exact"`` chains the posterior itself: directions and gammas, which have no
    such normal, and radial posteriors. A radial prior holds a group of D means where it is until the likelihood's
    gradient exceeds 1.2533 (D - 1) in units of the prior's scale. It forgets little with one head for each task, more
    than the normal form with one head.

    ``weight`` says how often the data of each task but the first count in the next prior. Element by element, the
    precision :math:`\lambda` of a posterior under a prior of precision :math:`\lambda_0` becomes

    .. math:: \lambda_0 + \mathrm{weight} \cdot (\lambda - \lambda_0),

    unless it has fallen; the mean stays the posterior's. A chain of normals forgets where weights are correlated; a
    weight of two holds them better, and a large one leaves little to learn with. Below one, the precision is a decaying
    mean over all past posteriors. Counting data more than once is likelihood tempering, as in Generalized Variational
    Continual Learning; the default, one, is Bayes' rule.

    A fresh chain around the same model loads the ``state_dict()``, which has the priors, and the rows that
    :func:`~pyro_radial.continual.train_stream` keeps.

    Source: Nguyen et al. (2018), *Variational Continual Learning*, equation 3; for the weight, Loo, Swaroop and Turner
    (2021), *Generalized Variational Continual Learning*, and Kirkpatrick et al. (2017), *Overcoming catastrophic
    forgetting in neural networks*, equation 3.

    :param model: a Pyro model, a function or a module.
    :param str form: "normal" for the normal of the posterior's moments, "exact" for the posterior itself.
    :param float weight: how often data count in the next prior; other than one for the normal form alone.
    :raises ValueError: for a guide as model, another form or weight.

    Example::

        >>> import pyro
        >>> from pyro_radial import AutoRadial, TermsELBO
        >>> def model(x, y):
        ...     w = pyro.sample("w", dist.Normal(0., 1.).expand([2]).to_event(1))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("y", dist.Normal(x @ w, 0.1), obs=y)
        >>> chain = PriorChain(model)
        >>> for task in range(2):
        ...     x = torch.randn(20, 2)
        ...     guide = chain.guide(AutoRadial)
        ...     svi = pyro.infer.SVI(chain, guide, pyro.optim.Adam({"lr": 0.01}), TermsELBO(strict_kl=True))
        ...     losses = [svi.step(x, x.sum(-1)) for _ in range(100)]
        ...     chain.advance(guide)
        >>> chain.prior["w"].mean.shape
        torch.Size([2])
    """

    def __init__(
        self,
        model: Callable[..., object],
        form: Literal["normal", "exact"] = "normal",
        weight: float = 1.0,
    ) -> None:
        super().__init__(model)
        if not callable(model) or is_guide(model):
            raise ValueError(f"model must be a Pyro model, not a guide, got {type(model).__name__}")
        check_choice("form", form, ("normal", "exact"))
        self.form, self.weight = form, positive_float("weight", weight)
        if form == "exact" and weight != 1.0:
            raise ValueError(f"weight must be 1.0 with form='exact', got {weight}")
        self.chained = StoredDistributions()
        #: What a coreset keeps of each task of a stream.
        self.coresets = StoredCoresets()
        self._compared: set[str] = set()
        # Names that were given as they are: a run of the model shows whether it has such sites.
        self._unchecked_names: set[str] = set()
        # The plates of each observed site.
        self._observed: set[frozenset[Any]] = set()
        self.register_load_state_dict_post_hook(_report_unknown_sites)

    @property
    def prior(self) -> dict[str, Any]:
        """The last posteriors, which replace the model's own priors: ``{site: distribution}``, where the model is."""
        device = device_of(self.model, self.chained)
        if device_of(self.chained) != device:
            self.chained.to(device)
        return {name: self.chained[name] for name in self.chained}

    def priors(self) -> SwapPriorMessenger:
        """Return the handler that gives sites their chained priors; it refuses a site of another shape or support."""
        return SwapPriorMessenger(self.prior, self._compared, self._unchecked_names, self._observed)

    def guide(
        self, guide_type: Callable[..., AutoGuide], *, reset_scales: bool = False, **kwargs: Any
    ) -> Any:
        """Make a guide of this chain that starts at the chained prior.

        :param guide_type: a guide class such as :class:`~pyro_radial.AutoRadial` or another function of a model.
        :param bool reset_scales: start only the means at the prior, and the scales where the guide usually starts them.
            Small scales leave little noise to learn from; resetting them costs KL at first.
        :param kwargs: other arguments of the guide.
        :returns: ``guide_type(chain, **kwargs)``.
        """
        if not callable(guide_type) or isinstance(guide_type, nn.Module):
            raise ValueError(
                f"guide_type must be a guide class or a function of a model, got {guide_type!r}"
            )
        start = self.prior
        takes_init = (
            isinstance(guide_type, type)
            and "init_loc_fn" in inspect.signature(guide_type).parameters
        )
        if start and takes_init and not hasattr(guide_type, "start_at"):
            kwargs.setdefault("init_loc_fn", partial(_init_to_distributions, start))
        guide = guide_type(self, **kwargs)
        if isinstance(guide, PyroModule) and not isinstance(guide, UniquelyNamed):
            # Under its own name it would reuse the parameters of an earlier task's guide in Pyro's store.
            rename_tree(guide, f"{unique_name(type(self))}.{type(guide).__name__}")
        for library_guide in _library_guides(guide):
            library_guide.start_at(start, scales=not reset_scales)
        return guide

    def advance(self, guide: Any, exclude: Exclude = None) -> None:
        """Make a guide's posterior the prior from now on.

        The posterior is copied and frozen. Sites that the guide does not have, or has a point estimate of, keep their
        prior; a point estimate raises a warning, and so do scales that hardly moved from their start. A site in all
        plates of an observed site belongs to the rows of its task: it keeps its prior too, with a warning. Nothing
        changes if any site is refused.

        With Pyro's ``AutoMultivariateNormal`` and ``form="exact"`` each site keeps the covariance of its own event.
        Correlations between sites are lost, with a warning.

        :param guide: a trained guide with ``posterior()``, Pyro's ``AutoNormal``, ``AutoDiagonalNormal`` or
            ``AutoMultivariateNormal``, an ``AutoGuideList`` of such guides, or distributions by site name. A name that
            is not a site of the model raises a ValueError here or in the next run of the model.
        :param exclude: sites that keep their prior: a regular expression searched in the name, names, or a function of
            the name.
        :raises ValueError: for another guide; naming the site, for a guide that was never trained, a posterior that is
            a point, is not finite, cannot be stored or does not fit the site.
        :raises RuntimeError: for a guide without parameters.
        """
        _check_trained(guide)
        points: list[str] = []
        for library_guide in _library_guides(guide):
            points += library_guide.point_sites()
        posterior = posterior_of(guide)
        excluded = _match_names(exclude, posterior)
        learned = [name for name in posterior if name not in excluded]
        of_rows = [name for name in learned if self._is_of_rows(_site(guide, name))]
        for name in (*points, *of_rows, *excluded):
            posterior.pop(name, None)
        if not posterior:
            raise ValueError(
                "guide must have a site that is neither excluded nor a point estimate, got none"
            )
        network = find_network(self.model)
        plain = network is not None and network.bnn.has_plain_sites
        if network is not None and plain:
            wrong = posterior.keys() - network.sites
            if wrong:
                raise ValueError(
                    f"guide must have sites of the model, {sorted(network.bnn.sites)}, got {sorted(wrong)}"
                )
        self.chained.update(
            {
                name: self._store(name, distribution, _site(guide, name))
                for name, distribution in posterior.items()
            }
        )
        self._compared.clear()
        if isinstance(guide, Mapping) and not plain:
            self._unchecked_names |= posterior.keys()
        for subguide in _guides_in(guide) if self.form == "exact" else ():
            is_joint = isinstance(subguide, AutoMultivariateNormal) and _is_normal(subguide)
            if is_joint and len(list(_normals(subguide))) > 1:
                warn(
                    "the guide has correlations between sites, which the prior of each site cannot keep; put these "
                    "sites into one site, or use distributions of single sites"
                )
        if points:
            warn(
                f"the guide has point estimates of {points}; these sites keep their prior, because a point as a prior "
                "would give zero density to everything else"
            )
        if of_rows:
            warn(
                f"the sites {of_rows} are in the plates of observed sites, so they belong to the rows of "
                "this task and keep their prior; exclude them, or give guide.posterior() if the next task "
                "has the same rows"
            )

    def _is_of_rows(self, site: Node | None) -> bool:
        """Return whether a site is in all plates of an observed site, so that its values belong to rows of a task."""
        plates = site["cond_indep_stack"] if site else ()
        return any(observed and observed.issubset(plates) for observed in self._observed)

    def _store(self, name: str, distribution: object, site: Node | None) -> StoredDistribution:
        """Copy a posterior in the chain's form, or raise a ValueError that names the site."""
        if not isinstance(distribution, TorchDistributionMixin):
            raise ValueError(
                f"site '{name}' must have a Pyro distribution, got {type(distribution).__name__}"
            )
        if isinstance(leaf(distribution), dist.Delta):
            raise ValueError(
                f"the posterior of site '{name}' is a point, which as a prior gives zero density to everything else; "
                "exclude the site or use a guide with a density"
            )
        try:
            prior = distribution if self.form == "exact" else match_moments(distribution)
        except ValueError as error:
            raise ValueError(
                f"site '{name}': {error}; PriorChain(form='exact') takes it as it is"
            ) from error
        try:
            chained = None if self.weight == 1.0 else self.prior.get(name)
            if chained is not None:
                prior = map_leaf(partial(_multiply_gain, chained, self.weight), prior)
            stored = StoredDistribution(*describe(prior))
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"site '{name}': {error}") from error
        if site is not None:
            check_new_prior(name, stored.distribution, site["fn"])
        return stored

    def _load_from_state_dict(
        self, state_dict: object, prefix: str, *args: object, **kwargs: object
    ) -> None:
        # Loaded priors have not been compared with their sites yet.
        self._compared.clear()
        self._unchecked_names.clear()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def model_entries(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's own part of a chain's ``state_dict()``, which has the same shapes after each task."""
    return {
        name: value
        for name, value in state_dict.items()
        if not name.startswith(("chained.", "coresets."))
    }


def _report_unknown_sites(chain: PriorChain, keys: Any) -> None:
    """Add loaded priors of sites that the model does not have to the unexpected keys that torch reports."""
    network = find_network(chain.model)
    if network is not None and network.bnn.has_plain_sites:
        unknown = set(chain.chained) - network.sites
        keys.unexpected_keys.extend(f"prior of site '{name}'" for name in sorted(unknown))


def _multiply_gain(prior: Any, weight: float, posterior: Any) -> Any:
    """Multiply the gain of a normal posterior's precision over a prior, also under transforms."""
    prior = leaf(pull_back(prior, elementary(getattr(posterior, "transforms", ()))))
    if type(posterior) in TRANSFORMED:
        return with_base(
            posterior, map_leaf(partial(_multiply_gain, prior, weight), posterior.base_dist)
        )
    if not isinstance(prior, dist.Normal | dist.LogNormal):
        raise ValueError(
            f"weight must be 1.0 unless priors are normal under the posterior's transforms, got {weight}",
        )
    precision = drop_repeats(posterior.scale).square().reciprocal()
    gain = (precision - drop_repeats(prior.scale).square().reciprocal()).clamp_min(0.0)
    return type(posterior)(posterior.loc, (precision + (weight - 1.0) * gain).rsqrt())


def _init_to_distributions(distributions: Mapping[str, Distribution], site: Node) -> Tensor:
    """Start a site at the mean of its distribution in unconstrained space, or else as the network does."""
    if site["name"] not in distributions:
        return init_to_network(site)
    support = site["fn"].support
    transform = None if is_real(support) else biject_to(support)
    mean = moments(distributions[site["name"]], transform).mean
    if mean is None:
        return init_to_network(site)
    value = mean if transform is None else transform(mean)
    return value.expand(site["fn"].shape()).clone()


def _guides_in(guide: object) -> Iterator[Any]:
    """Yield the guides in a list of guides, or the guide itself."""
    if isinstance(guide, AutoGuideList):
        for subguide in guide:
            yield from _guides_in(subguide)
    else:
        yield guide


def _library_guides(guide: object) -> list[Any]:
    """Return the guides of this library, or that act like them, in a guide."""
    return [subguide for subguide in _guides_in(guide) if hasattr(subguide, "scale_change")]


@torch.no_grad()
def posterior_of(guide: object) -> dict[str, Distribution]:
    """Return ``{site: distribution}`` on each site's own support, detached from training; see ``advance``."""
    if isinstance(guide, Mapping):
        return dict(guide)
    posterior: dict[str, Distribution] = {}
    for subguide in _guides_in(guide):
        if hasattr(subguide, "posterior"):
            posterior |= subguide.posterior()
        elif _is_normal(subguide):
            for name, site, normal in _normals(subguide):
                support = site["fn"].support
                if not is_real(support):
                    normal = Transformed(
                        normal, [biject_to(support).with_cache()], validate_args=False
                    )
                posterior[name] = normal
        else:
            raise ValueError(
                "guide must have a method posterior(), as AutoRadial and AutoMeanField have, or be Pyro's AutoNormal, "
                f"AutoDiagonalNormal or AutoMultivariateNormal, got {type(subguide).__name__}; use one of these, or "
                "give its distributions by site name, {site: distribution}"
            )
    return posterior


@torch.no_grad()
def _scale_change(guide: object) -> Mapping[str, float]:
    """Return how far the scales of each site have moved from their start, as in ``AutoRadial.scale_change``."""
    if hasattr(guide, "scale_change"):
        return guide.scale_change()
    change: dict[str, float] = {}
    for name, _, normal in _normals(guide) if _is_normal(guide) else ():
        stddev = moments(normal).stddev
        if stddev is not None:
            ratio = stddev.double() / initial_scale(guide)
            change[name] = float(ratio.log().square().mean().sqrt())
    return change


def _is_normal(guide: object) -> bool:
    """Return whether this is one of three of Pyro's guides, or a subclass that samples in the same way."""
    return any(
        isinstance(guide, cls) and type(guide).forward is cls.forward for cls in NORMAL_GUIDES
    )


def _normals(guide: Any) -> Iterator[tuple[str, Node, Distribution]]:
    """Yield each site's name, the site, and its normal in unconstrained space."""
    if guide.prototype_trace is None:
        raise RuntimeError(f"{type(guide).__name__} has no parameters yet; train it first")
    joint = None if isinstance(guide, AutoNormal) else guide.get_posterior()
    position = 0
    for name, site in guide.prototype_trace.iter_stochastic_nodes():
        if joint is None:
            loc, scale = (tensor.detach().clone() for tensor in loc_and_scale(guide, name))
            yield name, site, dist.Normal(loc, scale).to_event(_event_dim(site, loc.dim()))
        else:
            # One vector for all sites, in the model's order.
            shape = biject_to(site["fn"].support).inverse_shape(site["value"].shape)
            elements = slice(position, position + shape.numel())
            yield name, site, _marginal(joint, elements, shape, _event_dim(site, len(shape)))
            position = elements.stop


def _event_dim(site: Node, unconstrained_dim: int) -> int:
    """Return the number of event dimensions in unconstrained space, where it may differ, as for a covariance."""
    return site["fn"].event_dim + unconstrained_dim - site["value"].dim()


def _marginal(joint: Any, elements: slice, shape: torch.Size, event_dim: int) -> Distribution:
    """Return the marginal of some elements of a normal on a vector, with a covariance for each event."""
    batch = shape[: len(shape) - event_dim]
    event = shape[len(shape) - event_dim :]
    loc = joint.mean[elements].clone()
    if not isinstance(joint, dist.MultivariateNormal) or event_dim == 0:
        stddev = joint.stddev[elements].clone()
        return dist.Normal(loc.view(shape), stddev.view(shape)).to_event(event_dim)
    rows = joint.scale_tril[elements].view(*batch, event.numel(), -1)
    # The covariance is rows @ rows.T; its factor by orthogonal transformations loses no digits.
    factor = torch.linalg.qr(rows.mT, mode="r").R.mT
    factor = factor * factor.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    normal = dist.MultivariateNormal(loc.view(*batch, -1), scale_tril=factor)
    reshape = dist.transforms.ReshapeTransform(torch.Size([event.numel()]), event)
    return normal if event_dim == 1 else dist.TransformedDistribution(normal, [reshape])


def _site(guide: object, name: str) -> Node | None:
    """Return the model's site of that name, or None if the guide does not know it."""
    for subguide in _guides_in(guide):
        trace = getattr(subguide, "prototype_trace", None)
        if trace is not None and name in trace.nodes:
            return trace.nodes[name]
    return None


def _check_trained(guide: object) -> None:
    """Raise a ValueError for scales that were never trained, and warn about scales that hardly moved."""
    if isinstance(guide, Mapping):
        return
    for subguide in _guides_in(guide):
        scale_change = _scale_change(subguide)
        if scale_change and all(change < ROUNDING for change in scale_change.values()):
            raise ValueError(
                f"guide must be trained: {type(subguide).__name__} was never trained: the scales of all its sites, "
                f"{sorted(scale_change)}, are where they started"
            )
        # A site that started at the chained prior and did not move still has what earlier tasks taught.
        at_prior = getattr(subguide, "scales_start_at_distribution", lambda name: False)
        # In later tasks, small rates of scales protect these; then a new head's scales move as little.
        least = ROUNDING if any(map(at_prior, scale_change)) else UNMOVED
        unmoved = [
            name for name, change in scale_change.items() if change < least and not at_prior(name)
        ]
        if unmoved:
            warn(
                f"the scales of {unmoved} never moved from their start. As a prior they show how the guide was "
                "initialized, not what the data taught; train longer or with a larger learning rate"
            )


def _match_names(exclude: Exclude, names: Collection[str]) -> list[str]:
    """Return the names that are excluded."""
    if callable(exclude):
        return list(filter(exclude, names))
    if isinstance(exclude, str):
        try:
            return [name for name in names if re.search(exclude, name)]
        except re.error as error:
            raise ValueError(
                f"exclude must be a valid regular expression, got {exclude!r} ({error})"
            ) from error
    return [] if exclude is None else list(exclude)
