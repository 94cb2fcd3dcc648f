# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A normal posterior in which the weights of a layer, or of a whole network, are correlated."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.distributions import TorchDistribution, constraints
from pyro.nn.module import PyroParam
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import Distribution, transform_to

from pyro_radial._pyro.checks import check_types, optional, positive_count
from pyro_radial._pyro.compat import stored_name
from pyro_radial._pyro.types import Message, Model, Node
from pyro_radial.distributions.constraints import is_real
from pyro_radial.infer.autoguide.families.family import Families, Family, LocScale, Site
from pyro_radial.infer.autoguide.families.normal import Normal
from pyro_radial.infer.autoguide.guides import AutoMeanField
from pyro_radial.infer.autoguide.initialization import carries_initial_value, init_to_network
from pyro_radial.nn.bayesian_module import BayesianModule, modules_of
from pyro_radial.nn.last_layer import LastLayerFinder, parameter_names
from pyro_radial.nn.linearized.linearization import CovarianceBlock

#: The most numbers in the factor of a covariance: a quarter of a gigabyte in float32.
MAX_FACTOR = 2**26
#: The standard deviation that an element keeps for itself in a covariance that is only a factor, as a share.
OWN_SHARE = 1e-5


class _Part(Family):
    """A part of a normal vector: the parameters of a factorized normal, with scales as units."""

    def initial(self, site: Site, value: Tensor) -> dict[str, PyroParam]:
        """Return the value, and one unit for all elements."""
        return Normal().initial(site, value)

    def initial_at(
        self, site: Site, value: Tensor, distribution: Distribution, spread: bool
    ) -> dict[str, PyroParam]:
        """Return the distribution's mean and, as the units, its standard deviations, if they are known."""
        return Normal().initial_at(site, value, distribution, spread)

    def local_noise(self, name: str, distribution: Distribution) -> None:
        """Raise a ValueError, because the outputs of a layer have covariances over inputs."""
        raise ValueError(
            f"local_reparameterization: site '{name}' must have independent elements, got AutoCorrelated"
        )

    def distribution(self, site: Site, *, loc: Tensor, scale: Tensor) -> TorchDistribution:  # type: ignore[override]
        """Return a normal as wide as the units; the guide knows the widths."""
        return Normal().distribution(site, loc=loc, scale=scale)


class AutoCorrelated(AutoMeanField):
    r"""Guide with a normal posterior in which the weights of the last layer, or of all layers, are correlated.

    A factorized posterior cannot hold the width of smooth functions between data and beyond them; this one can. With
    all correlated elements in one vector w,

    .. math:: w = \mu + s \odot (F z + d \odot \epsilon), \qquad z \in R^r,\ \epsilon \in R^P \text{ standard normal,}

    with locations :math:`\mu`, units s, a factor F ``[P, r]`` and the share d of an element's own noise. Other sites
    are independent normals, as in :class:`~pyro_radial.AutoMeanField`. For a full covariance leave the rank out.

    :class:`~pyro_radial.functional.LinearizedKL` and ``predict(..., method="linearized")`` take the covariance in
    closed form. ``posterior()`` has the marginals of sites, and a :class:`~pyro_radial.PriorChain` keeps only these.
    The KL to a prior of the weights is estimated from draws.

    Source: Ong, Nott and Smith (2018), "Gaussian variational approximation with a factor covariance structure", eq. 2.

    :param model: a Pyro model with continuous latent sites.
    :param sites: "last layer" for the weight and bias of the linear layer at the network's end, "network" for all
        sites of networks, or the names of real-valued sites outside of plates. In plates and on other supports
        :class:`~pyro_radial.infer.autoguide.families.MultivariateNormal` correlates the elements of an event.
    :param int rank: r, at most the number P of correlated elements, which is the default.
    :param init_loc_fn: a per-site init function; the default is that of :class:`~pyro_radial.AutoRadial`.
    :param float init_stddev: the initial standard deviation of every element, as in
        :class:`~pyro_radial.AutoMeanField`.
    :param families: families of sites that are not correlated.
    :param create_plates: an optional function of the model's arguments that returns the plates to subsample with.
    :raises ValueError: for an argument out of range; once the model has run, for sites that the model does not have,
        a network that does not end with a random linear layer, a rank above P, or a factor that is too large.

    Example::

        >>> from torch import nn
        >>> from pyro_radial import BayesianModule
        >>> bnn = BayesianModule(nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)))
        >>> guide = AutoCorrelated(bnn)
        >>> guide.setup(torch.zeros(2, 1))
        >>> guide.correlated, guide.covariance().shape
        (('2.weight', '2.bias'), torch.Size([21, 21]))
    """

    factor: Any
    own: Any

    def __init__(
        self,
        model: Model,
        *,
        sites: Literal["last layer", "network"] | Collection[str] = "last layer",
        rank: int | None = None,
        init_loc_fn: Callable[..., object] = init_to_network,
        init_stddev: float | None = None,
        families: Families | None = None,
        create_plates: Callable[..., object] | None = None,
    ) -> None:
        super().__init__(
            model,
            init_loc_fn=init_loc_fn,
            init_stddev=init_stddev,
            families=families,
            create_plates=create_plates,
        )
        check_types(Collection, sites=sites)
        if isinstance(sites, str) and sites not in ("last layer", "network"):
            raise ValueError(
                f"sites must be 'last layer', 'network' or names of sites, got {sites!r}"
            )
        self._wanted = sites if isinstance(sites, str) else tuple(sites)
        self._rank = optional(positive_count, "rank", rank)
        #: The names of the correlated sites, in the order of the vector; empty before the guide has parameters.
        self.correlated: tuple[str, ...] = ()
        #: Whether the covariance fits the linearized network alone, so that draws of the weights are of no use.
        self.linear_only = False
        # Finds the last layer while the model runs for the first time.
        self._last = LastLayerFinder()

    def default_family(self, name: str, site: Node) -> Family:
        """Return a part of the vector, or a factorized normal."""
        return _Part() if self._is_wanted(name, site) else super().default_family(name, site)

    def _setup_prototype(self, *args: object, **kwargs: object) -> None:
        self.correlated = ()
        self._last = LastLayerFinder()
        networks = modules_of(BayesianModule, poutine.unwrap(self.model))
        with ExitStack() as stack:
            if len(networks) == 1:
                stack.enter_context(self._last.watching(networks[0].skeleton))
            super()._setup_prototype(*args, **kwargs)
        correlated = []
        size = 0
        for name, family in self._families.items():
            if isinstance(family, _Part):
                correlated.append(name)
                size += self._site[name].shape.numel()
        self._check_sites(correlated)
        rank = size if self._rank is None else self._rank
        if rank > size:
            raise ValueError(
                f"rank must be at most {size}, the elements of sites {correlated}, got {rank}"
            )
        if rank * size > MAX_FACTOR:
            got = "a full covariance" if self._rank is None else rank
            raise ValueError(
                f"rank must be at most {MAX_FACTOR // size} for the {size} elements of {len(correlated)} sites, got "
                f"{got}"
            )
        like = self._trained_tensor("loc", correlated[0])
        # Half of each variance is an element's own at the start.
        own = torch.full((size,), 0.5, dtype=like.dtype, device=like.device).sqrt()
        self.factor = PyroParam(
            torch.randn(size, rank).to(like) / (2.0 * rank) ** 0.5, constraints.real
        )
        self.own = PyroParam(own, constraints.softplus_positive)
        self.correlated = tuple(correlated)

    def _check_sites(self, correlated: Sequence[str]) -> None:
        """Raise a ValueError if the model lacks the wanted sites, or if they are constrained or in a plate."""
        if isinstance(self._wanted, str):
            if not correlated:
                what = "networks"
                if self._wanted == "last layer":
                    what = "a network that ends with a random linear layer"
                raise ValueError(
                    f"model must have {what} for sites={self._wanted!r}, got sites {sorted(self._site)}"
                )
        elif not correlated or not set(self._wanted) <= set(self._site):
            raise ValueError(f"sites must be among {sorted(self._site)}, got {list(self._wanted)}")
        prototypes = dict(self._latent_sites())
        for name in correlated:
            if prototypes[name]["cond_indep_stack"] or self._site[name].transform is not None:
                raise ValueError(
                    f"sites must be real-valued and outside of plates, got '{name}'; AutoMeanField(model, "
                    f"families={{'{name}': families.MultivariateNormal()}}) correlates the elements of each of its "
                    "events, so make what is correlated one site with an event"
                )

    def _is_wanted(self, name: str, site: Node) -> bool:
        if self._wanted == "network":
            return carries_initial_value(site) and is_real(site["fn"].support)
        if self._wanted == "last layer":
            return self._last.place is not None and name in parameter_names(self._last.place)
        return name in self._wanted

    def forward(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """Sample every latent site; takes the arguments of the model."""
        self.check_store()
        self.setup(*args, **kwargs)
        loc, factor, variance = self._moments()
        # In double precision, because a covariance that is almost only a factor is nearly singular.
        vector = dist.LowRankMultivariateNormal(
            loc.double(), factor.double(), variance.double(), validate_args=False
        )
        drawn = pyro.sample(
            f"_{stored_name(self)}_latent", vector, infer={"is_auxiliary": True}
        ).to(loc)
        values = {}
        for name, part in self._split(drawn).items():
            values[name] = part.reshape(drawn.shape[:-1] + self._site[name].shape)
        with _Given(values):
            return super().forward(*args, **kwargs)

    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean ``[P]`` of the vector, and factor ``[P, R]`` and variances ``[P]`` of its covariance."""
        locs = []
        scales = []
        for name in self.correlated:
            parameters = self._parameters_of(name)
            locs.append(parameters["loc"].flatten())
            scales.append(parameters["scale"].flatten())
        loc = torch.cat(locs)
        scale = torch.cat(scales)
        return loc, scale.unsqueeze(-1) * self.factor, (scale * self.own).square()

    def _split(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the elements of each correlated site, ``[..., numel]``, in a vector ``[..., P]``."""
        sizes = [self._site[name].shape.numel() for name in self.correlated]
        return dict(zip(self.correlated, vector.split(sizes, -1), strict=True))

    def _stddevs(self) -> dict[str, Tensor]:
        """Return the marginal standard deviations of the correlated sites, in their shapes."""
        _, factor, variance = self._moments()
        stddevs = self._split((factor.square().sum(-1) + variance).sqrt())
        return {name: stddev.reshape(self._site[name].shape) for name, stddev in stddevs.items()}

    @torch.no_grad()
    def covariance(self) -> Tensor:
        """Return the covariance ``[P, P]`` of the correlated elements, one site of ``correlated`` after another."""
        self._require_setup("covariance")
        _, factor, variance = self._moments()
        return factor @ factor.mT + variance.diag()

    @torch.no_grad()
    def set_factor(self, factor: Tensor) -> None:
        """Set the covariance of the correlated elements to a product.

        :param Tensor factor: the factor ``[P, r]`` of :math:`F F^T`, in the order of :meth:`covariance`. Each element
            also gets noise of its own, 1e-5 times its standard deviation.
        :raises ValueError: for another shape, or a factor that is not finite or zero.
        """
        self._require_setup("set_factor")
        check_types(Tensor, factor=factor)
        if factor.shape != self.factor.shape:
            raise ValueError(
                f"factor must have shape {list(self.factor.shape)}, got {list(factor.shape)}"
            )
        units = torch.linalg.vector_norm(factor, dim=-1)
        if not bool(units.isfinite().all() & (units > 0).any()):
            raise ValueError("factor must be finite and not zero, got NaN, infinity or only zeros")
        units = units.clamp_min(OWN_SHARE * units.max())
        for name, part in self._split(units).items():
            scale = self._trained_tensor("scale", name)
            scale.copy_(
                transform_to(LocScale.scale_constraint).inv(part.reshape(scale.shape).to(scale))
            )
        self.factor_unconstrained.copy_(factor / units.unsqueeze(-1))
        self.own = torch.full_like(self.own, OWN_SHARE)

    @torch.no_grad()
    def posterior(self) -> dict[str, dist.Distribution]:
        """Return the posterior as ``{site: distribution}``; correlated sites get their marginals."""
        result: dict[str, Any] = super().posterior()
        _, factor, variance = (part.detach().clone() for part in self._moments())
        block = CovarianceBlock(self.correlated, variance, factor=factor)
        for name, stddev in self._stddevs().items():
            normal = dist.Normal(result[name].mean, stddev, validate_args=False)
            result[name] = normal.to_event(self._site[name].event_dim)
            # What linearizes a network reads it; elsewhere the marginal counts.
            result[name].joint = block
        return result

    def _site_quantiles(self, name: str, levels: list[float]) -> Tensor:
        if name not in self.correlated:
            return super()._site_quantiles(name, levels)
        loc = self._parameters_of(name)["loc"]
        return Normal().quantiles(self._site[name], levels, loc=loc, scale=self._stddevs()[name])


class _Given(Messenger):
    """Put sites at values, each with its own event dimensions."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._values = values

    def _pyro_sample(self, msg: Message) -> None:
        if msg["name"] in self._values:
            msg["fn"] = dist.Delta(self._values[msg["name"]], event_dim=msg["fn"].event_dim)
