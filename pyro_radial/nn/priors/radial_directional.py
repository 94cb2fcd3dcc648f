# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A prior that gives each row or column of a weight tensor a direction on the sphere and a sparse radius."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_radial._pyro.checks import check_choice, positive_float
from pyro_radial.distributions.half_cauchy import half_cauchy_factors, half_cauchy_value
from pyro_radial.distributions.numerics import append_dims
from pyro_radial.distributions.von_mises_fisher import HypersphericalUniform
from pyro_radial.distributions.wrappers import to_like
from pyro_radial.nn.priors.normal import FanIn

Side = Literal["row", "column"]

_PREFIXES: dict[Side, str] = {"row": "", "column": "column_"}
_GLOBAL_RADIUS = ".global_radius"
SIDES: dict[str, tuple[Side, ...]] = {
    "row": ("row",),
    "column": ("column",),
    "double": ("row", "column"),
}

Grouping = Literal["row", "column", "double"]


class RadiusSites(NamedTuple):
    """The names of a half-Cauchy radius: of its deterministic site and of the two factors of its square."""

    radius: str
    gamma: str
    inverse_gamma: str

    @classmethod
    def of(cls, radius: str) -> "RadiusSites":
        """Return the names for a deterministic site."""
        return cls(radius, f"{radius}_gamma", f"{radius}_inverse_gamma")


class TensorSites(NamedTuple):
    """The names of the sites that :class:`RadialDirectionalPrior` makes for a weight tensor."""

    parameter: str

    @property
    def global_radius(self) -> RadiusSites:
        """The names of the sites of the tensor's radius."""
        return RadiusSites.of(self.parameter + _GLOBAL_RADIUS)

    def direction(self, side: Side) -> str:
        """Return the name of the site with the directions of its rows or columns."""
        return f"{self.parameter}.{_PREFIXES[side]}direction"

    def local_radius(self, side: Side) -> RadiusSites:
        """Return the names of the sites of the radii of its rows or columns."""
        return RadiusSites.of(f"{self.parameter}.{_PREFIXES[side]}local_radius")

    @classmethod
    def with_global_radius(cls, site: str) -> "TensorSites | None":
        """Return the tensor whose global radius has this gamma site; None for any other site."""
        suffix = RadiusSites.of(_GLOBAL_RADIUS).gamma
        return cls(site.removesuffix(suffix)) if site.endswith(suffix) else None


class _Site(NamedTuple):
    """A site with its distribution, and its initial value in a guide."""

    name: str
    distribution: Any
    initial_value: Tensor

    @classmethod
    def of(cls, name: str, each: Any, initial_value: Tensor) -> "_Site":
        """Return a site whose elements all have one distribution."""
        return cls(
            name, each.expand(initial_value.shape).to_event(initial_value.dim()), initial_value
        )

    def sample(self) -> Tensor:
        return pyro.sample(
            self.name,
            self.distribution,
            infer={"initial_value": self.initial_value},  # type: ignore[arg-type]
        )


class RadialDirectionalPrior:
    r"""Give each row or column of a weight tensor a direction and a sparse radius, and the tensor a radius.

    .. math:: w_r = s\, z_r\, u_r, \qquad s \sim C^+(\gamma), \quad z_r \sim C^+(1), \quad u_r
        \text{ uniform on the unit sphere,}

    with the half-Cauchy distribution :math:`C^+`, under which a few groups are large and the rest vanish. Each radius
    is the square root of a gamma times an inverse-gamma variable; these two are sites, so that a
    :class:`~pyro_radial.AutoRadialDirectional` guide has every KL in closed form.

    A row is the weights of one output, flattened over inputs and kernel positions; a column is those of one input.
    ``"double"`` multiplies both kinds, :math:`W_{ij} = s\, z_i u_{ij}\, c_j v_{ji}`. Groups of one element have a
    standard normal instead of a direction. Parameters of one dim, and those that a mapping of groupings leaves out, are
    normal, as under :class:`FanIn`.

    The sites of the tensor ``0.weight`` are ``0.weight.direction``, ``0.weight.local_radius_gamma``,
    ``0.weight.local_radius_inverse_gamma`` and the two of ``0.weight.global_radius``; sites of columns begin with
    ``column_``. The radii are deterministic sites.

    Source: Oh, Adamczewski and Park (2019), "Radial and Directional Posteriors for Bayesian Neural Networks", eq. 7
    and 14 to 18, with corrections: the radius is :math:`\sqrt{\alpha\beta}`, not its square; two groupings multiply
    parts of the weights, as in their code, not densities; directions are uniform instead of centered on the posterior.

    :param grouping: "row", "column" or "double" for all weight tensors, or a mapping from their names to these.
    :param float global_scale: :math:`\gamma`, the median of a tensor's radius; smaller is sparser.
    :param float bias_scale: the standard deviation of parameters of one dim.
    :raises ValueError: for another grouping, or a scale that is not positive and finite; in a network, for the grouping
        of an unknown parameter; when it samples, naming the parameter, for a parameter without dims.

    Example::

        >>> from torch import nn
        >>> from pyro_radial.nn import BayesianModule
        >>> bnn = BayesianModule(nn.Linear(3, 2), RadialDirectionalPrior("row"))
        >>> trace = pyro.poutine.trace(bnn).get_trace(torch.zeros(1, 3))
        >>> trace.nodes["weight.direction"]["value"].shape, trace.nodes["weight.local_radius"]["value"].shape
        (torch.Size([2, 3]), torch.Size([2]))
    """

    def __init__(
        self,
        grouping: Grouping | Mapping[str, Grouping] = "row",
        global_scale: float = 1.0,
        bias_scale: float = 1.0,
    ) -> None:
        for grouping_name in grouping.values() if isinstance(grouping, Mapping) else (grouping,):
            check_choice("grouping", grouping_name, tuple(SIDES))
        self.grouping = grouping
        self.global_scale = positive_float("global_scale", global_scale)
        self.bias_scale = bias_scale
        self._normal = FanIn(bias_scale=bias_scale)
        self._sites_by_parameter: dict[str, tuple[Tensor, dict[str, _Site]]] = {}

    def setup(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Raise a ValueError if a grouping names a parameter that is not among these."""
        names = list(dict(named_parameters))
        unknown = (
            []
            if isinstance(self.grouping, str)
            else [name for name in self.grouping if name not in names]
        )
        if unknown:
            raise ValueError(
                f"grouping must name random parameters, which are {names}, got {unknown}"
            )

    def sample_parameter(self, name: str, parameter: Tensor) -> Tensor:
        """Sample the sites of one parameter; each starts a guide at the network's own weights."""
        grouping = self._grouping_of(name, parameter)
        if grouping is None:
            normal = self._normal(name, parameter)
            return _Site.of(name, to_like(normal, parameter), parameter).sample()
        sites_parameter, sites = self._sites_by_parameter.get(name, (None, {}))
        # A network that was moved or cast has new tensors.
        if sites_parameter is not parameter:
            sites = self._make(name, parameter, grouping)
            self._sites_by_parameter[name] = parameter, sites
        names = TensorSites(name)
        radius = _sample_radius(names.global_radius, sites)
        weight = append_dims(radius, parameter.dim())
        for side in SIDES[grouping]:
            directions = sites[names.direction(side)].sample()
            radii = _sample_radius(names.local_radius(side), sites)
            weight = weight * _in_layout(directions * radii.unsqueeze(-1), side, parameter.shape)
        return weight

    def _grouping_of(self, name: str, parameter: Tensor) -> Grouping | None:
        asked_for = isinstance(self.grouping, Mapping) and name in self.grouping
        if parameter.dim() == 0 or (parameter.dim() == 1 and asked_for):
            raise ValueError(
                f"parameter {name!r} must have rows and columns under a RadialDirectionalPrior, got shape "
                f"{tuple(parameter.shape)}: leave it out with a mapping of groupings or with select"
            )
        if isinstance(self.grouping, Mapping):
            return self.grouping.get(name)
        return self.grouping if parameter.dim() > 1 else None

    @torch.no_grad()
    def _make(self, name: str, parameter: Tensor, grouping: Grouping) -> dict[str, _Site]:
        """Return the sites of a weight tensor, by name."""
        names = TensorSites(name)
        sides = SIDES[grouping]
        tensor_sites: list[_Site] = []
        global_radius = parameter.new_ones(())
        # Tensors whose product, element by element, is the parameter, in equal shares.
        root = parameter.abs().sqrt()
        factors = (parameter,) if len(sides) == 1 else (parameter.sign() * root, root)
        for side, factor in zip(sides, factors, strict=True):
            groups = factor if side == "row" else factor.transpose(0, 1)
            norm, directions = _polar(groups.flatten(1))
            typical = norm.log().mean().exp()
            global_radius = global_radius * typical
            tensor_sites.append(
                _Site(names.direction(side), _direction_prior(directions), directions)
            )
            tensor_sites += _factors(names.local_radius(side), 1.0, norm / typical)
        tensor_sites += _factors(names.global_radius, self.global_scale, global_radius)
        return {site.name: site for site in tensor_sites}


def _sample_radius(names: RadiusSites, sites: Mapping[str, _Site]) -> Tensor:
    """Sample the factors of a half-Cauchy radius, and record the radius."""
    gamma = sites[names.gamma]
    radius = half_cauchy_value(gamma.sample(), sites[names.inverse_gamma].sample())
    return pyro.deterministic(names.radius, radius, event_dim=gamma.initial_value.dim())


def _in_layout(groups: Tensor, side: Side, shape: torch.Size) -> Tensor:
    """Return rows or columns ``[*draws, groups, n]`` in the layout of the parameter."""
    draws = groups.shape[:-2]
    if side == "row":
        return groups.reshape(draws + shape)
    columns = groups.reshape(*draws, shape[1], shape[0], *shape[2:])
    return columns.transpose(len(draws), len(draws) + 1)


def _direction_prior(directions: Tensor) -> Any:
    """Return the prior of directions ``[groups, n]``, or of the groups of one element, which have none."""
    groups, size = directions.shape
    each: Any = (
        dist.Normal(0.0, 1.0).expand((1,)).to_event(1) if size == 1 else HypersphericalUniform(size)
    )
    return to_like(each, directions).expand((groups,)).to_event(1)


def _factors(names: RadiusSites, scale: float, radius: Tensor) -> list[_Site]:
    """Return the sites of the two factors of a half-Cauchy radius's square; ``radius`` is its initial value."""
    gamma, inverse_gamma = half_cauchy_factors(radius.new_tensor(scale))
    # The most probable factors, in log space, whose product is the squared radius.
    inverse = 1.0 + (radius / scale).square()
    return [
        _Site.of(names.gamma, gamma, radius.square() / inverse),
        _Site.of(names.inverse_gamma, inverse_gamma, inverse),
    ]


def _polar(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return norms and directions; a group of zeros gets a small norm and equal elements."""
    norm = torch.linalg.vector_norm(groups, dim=-1)
    least = 1e-6 * torch.where(norm.max() > 0, norm.max(), 1.0)
    anywhere = torch.full_like(groups, groups.shape[-1] ** -0.5)
    direction = torch.where(
        (norm > least).unsqueeze(-1), groups / norm.clamp(min=least).unsqueeze(-1), anywhere
    )
    return norm.clamp(min=least), direction
