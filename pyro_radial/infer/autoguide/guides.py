# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Guides with a family for each site: radial, mean-field, and radial and directional."""

from collections.abc import Callable, Mapping

from pyro_radial._pyro.checks import non_negative_integer, optional, positive_float, warn
from pyro_radial._pyro.types import Model, Node
from pyro_radial.distributions.constraints import is_on_sphere
from pyro_radial.infer.autoguide.families.directional import VonMisesFisher
from pyro_radial.infer.autoguide.families.family import Families, Family
from pyro_radial.infer.autoguide.families.normal import Normal
from pyro_radial.infer.autoguide.families.radial import Radial
from pyro_radial.infer.autoguide.initialization import init_to_network
from pyro_radial.infer.autoguide.per_site import ELBO_WIDTHS, AutoPerSite, Widths


class AutoRadial(AutoPerSite):
    r"""Guide with one :class:`~pyro_radial.distributions.RadialNormal` for each latent site.

    The whole event shares one radius, so the distance of a draw from the mean does not grow with the number of weights,
    as it does in mean field. Against factorized normal priors the KL has a closed form.

    One radius suits weights that act together. For a large site of local variables, such as the topics of every
    document, use ``families={"local": families.Normal()}`` or ``event_dim={"local": 1}`` instead: with one radius a
    hidden Markov model fits worse (2,105 nats against 2,015).

    Source: Farquhar, Osborne and Gal (2020), "Radial Bayesian Neural Networks", section 3.

    :param model: a Pyro model with continuous latent sites; on constrained ones it uses a pushforward.
    :param init_loc_fn: a per-site init function. The default starts at the weights of a
        :class:`~pyro_radial.nn.BayesianModule`'s network, and elsewhere as Pyro's ``AutoNormal`` does.
    :param float init_scale: the initial scale of every element, the paper's sigma.
    :param float init_stddev: instead, the initial marginal standard deviation sigma / sqrt(D) in unconstrained space;
        by default 0.01 at sites of a network and 0.1 at others.
    :param event_dim: how many of a site's last dimensions share one radius, as a number or a mapping by site; 1 means
        one radius for each row of a matrix. The default is the whole event.
    :param str widths: "elbo" or "predictive", as in :class:`~pyro_radial.AutoMeanField`.
    :param families: other families for some sites: a mapping from site names, or regular expressions searched in them,
        to a :class:`~pyro_radial.infer.autoguide.families.Family`, or a function of the name and the site that returns
        a family or None.
    :param create_plates: an optional function of the model's arguments that returns the plates to subsample with.
    :raises ValueError: for an init that is not positive and finite, for both inits, for an ``event_dim`` out of range
        or of an unknown site, and, naming the site, for a discrete latent site or a wrong choice in ``families``.

    Example::

        >>> import pyro, torch, pyro.distributions as dist
        >>> from pyro.infer import SVI, TraceMeanField_ELBO
        >>> def model(x, y):
        ...     w = pyro.sample("w", dist.Normal(0., 1.).expand([3]).to_event(1))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("y", dist.Normal(x @ w, 0.1), obs=y)
        >>> x, guide = torch.randn(50, 3), AutoRadial(model)
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), TraceMeanField_ELBO())
        >>> losses = [svi.step(x, x @ torch.tensor([1., -2., 0.5])) for _ in range(200)]
        >>> losses[-1] < losses[0]
        True
    """

    def __init__(
        self,
        model: Model,
        *,
        init_loc_fn: Callable[..., object] = init_to_network,
        init_scale: float | None = None,
        init_stddev: float | None = None,
        event_dim: int | Mapping[str, int] | None = None,
        widths: Widths = ELBO_WIDTHS,
        families: Families | None = None,
        create_plates: Callable[..., object] | None = None,
    ) -> None:
        self._radial = Radial(init_stddev, init_scale=init_scale)
        super().__init__(
            model,
            init_loc_fn=init_loc_fn,
            init_stddev=init_stddev,
            widths=widths,
            families=families,
            create_plates=create_plates,
        )
        self._event_dim_by_site = dict(event_dim) if isinstance(event_dim, Mapping) else {}
        for name, dims in self._event_dim_by_site.items():
            non_negative_integer(f"event_dim of site {name!r}", dims)
        of_all = None if isinstance(event_dim, Mapping) else event_dim
        self._event_dim = optional(non_negative_integer, "event_dim", of_all)

    def default_family(self, name: str, site: Node) -> Family:
        """Return a radial normal with the ``event_dim`` of this site."""
        return Radial(
            init_scale=self._radial.init_scale,
            event_dim=self._event_dim_by_site.get(name, self._event_dim),
            shared_scale=self.has_shared_scales,
        )

    def _setup_prototype(self, *args: object, **kwargs: object) -> None:
        super()._setup_prototype(*args, **kwargs)
        site_event_dims = {name: site.event_dim for name, site in self._site.items()}
        event_dim = self._event_dim or 0
        largest = max(site_event_dims.values(), default=event_dim)
        if event_dim > largest:
            raise ValueError(
                f"event_dim must be at most {largest}, the most event dimensions of a site, got {event_dim}"
            )
        for name, dims in self._event_dim_by_site.items():
            if name not in site_event_dims:
                raise ValueError(
                    f"event_dim names '{name}', but the sites are {sorted(site_event_dims)}"
                )
            if dims > site_event_dims[name]:
                raise ValueError(
                    f"event_dim must be at most {site_event_dims[name]} for site '{name}', got {dims}"
                )
        elements = {
            name: family.elements_per_radius(self._site[name])
            for name, family in self._families.items()
            if isinstance(family, Radial)
        }
        if {*elements.values()} == {1}:
            warn(
                f"AutoRadial: every site ({', '.join(elements)}) has one element per event, so this is plain "
                "mean field; is .to_event(...) missing on the model's weights?"
            )


class AutoMeanField(AutoPerSite):
    r"""Guide with an independent normal for each element of each latent site.

    It is the posterior of Pyro's ``AutoNormal``, but sampled directly on each site's support, so that
    :class:`~pyro.infer.TraceMeanField_ELBO` finds the analytic KL and is correct on constrained sites.

    The usual tricks for larger networks (Farquhar, Osborne and Gal 2020, section 4.1.2) are options: a tiny initial
    width (``init_stddev=1e-3``), means trained first (``FitOptions(mean_only_epochs=10)``), early stopping
    (``FitOptions(patience=5)`` and a validation), and a smaller KL weight (``loss=TermsELBO(kl_weight=0.1)``, which is
    then not a bound).

    With ``widths="elbo"`` each element has a scale, which follows the gradient of the loss. With
    ``widths="predictive"`` a site has one scale, of shape ``[1, 1]`` for a weight matrix, so the guide is a ball around
    the mean network at the memory of the means. :func:`~pyro_radial.fit` finds it by the score of predictions on rows
    that the means do not see; other loops leave it at its start. In a plate each row has its own scale. The loss is
    then still a bound on the evidence, but not the best one that the family has.

    :param model: a Pyro model with continuous latent sites.
    :param init_loc_fn: a per-site init function; the default is that of
        :class:`~pyro_radial.infer.autoguide.AutoRadial`.
    :param float init_stddev: the initial standard deviation of every element in unconstrained space; by default 0.01 at
        sites of a network, which carry their initial value, and 0.1 at others.
    :param float init_scale: Pyro's name for the same.
    :param str widths: "elbo" or "predictive": what the scales are trained for.
    :param families: other families for some sites, as in :class:`~pyro_radial.infer.autoguide.AutoRadial`.
    :param create_plates: an optional function of the model's arguments that returns the plates to subsample with.
    :raises ValueError: for an init that is not positive and finite, for both inits, and, naming the site, for a
        discrete latent site or a family that does not fit.

    Example::

        >>> import pyro, pyro.distributions as dist
        >>> def model():
        ...     pyro.sample("rate", dist.LogNormal(0., 1.).expand([2]).to_event(1))
        >>> guide = AutoMeanField(model, widths="predictive")
        >>> guide.setup()
        >>> guide.posterior()["rate"].sample().shape, guide.scales.rate.shape
        (torch.Size([2]), torch.Size([1]))
    """

    def __init__(
        self,
        model: Model,
        *,
        init_loc_fn: Callable[..., object] = init_to_network,
        init_stddev: float | None = None,
        init_scale: float | None = None,
        widths: Widths = ELBO_WIDTHS,
        families: Families | None = None,
        create_plates: Callable[..., object] | None = None,
    ) -> None:
        if init_scale is not None:
            if init_stddev is not None:
                raise ValueError("give init_scale or init_stddev, not both")
            init_stddev = positive_float("init_scale", init_scale)
        super().__init__(
            model,
            init_loc_fn=init_loc_fn,
            init_stddev=init_stddev,
            widths=widths,
            families=families,
            create_plates=create_plates,
        )

    def default_family(self, name: str, site: Node) -> Family:
        """Return a factorized normal."""
        return Normal(shared_scale=self.has_shared_scales)


class AutoRadialDirectional(AutoPerSite):
    r"""Guide with a von Mises-Fisher distribution on directions, log-normals on positive sites, and normals elsewhere.

    With the prior :class:`~pyro_radial.nn.priors.RadialDirectionalPrior` every KL has a closed form. Other models with
    continuous latent sites work too.

    A direction's mean is a free vector, normalized. Under a uniform prior a group costs
    :math:`\kappa A(\kappa) + \log C(\kappa) + S` nats, with the ratio A of Bessel functions and the log-area S of the
    sphere. With one shared concentration :math:`\kappa` every group pays for the sharpest; with
    ``shared_concentration=False`` a group that is not needed can become uniform at no cost.

    Source: Oh, Adamczewski and Park (2019), "Radial and Directional Posteriors for Bayesian Neural Networks", eq. 10.

    :param model: a Pyro model with continuous latent sites.
    :param init_loc_fn: a per-site init function; the default is that of :class:`~pyro_radial.AutoRadial`.
    :param float init_stddev: the initial marginal standard deviation of the other sites in unconstrained space; by
        default 0.01 at sites of a network, which carry their initial value, and 0.1 at others.
    :param float init_mean_cosine: A, the initial E[mu . x] of every direction, between 0 and 1 (0.9 in the paper). It
        sets :math:`\kappa` to :math:`A (n - A^2) / (1 - A^2)` in n dimensions (Banerjee et al. 2005, eq. 4.4).
    :param bool shared_concentration: one concentration for the whole site, or one for each group.
    :param families: other families for some sites, as in :class:`~pyro_radial.AutoRadial`.
    :param create_plates: an optional function of the model's arguments that returns the plates to subsample with.
    :raises ValueError: for an argument out of range and, naming the site, for a discrete latent site.

    Example::

        >>> import torch
        >>> from torch import nn
        >>> from pyro_radial import BayesianModule
        >>> from pyro_radial.nn.priors import RadialDirectionalPrior
        >>> bnn = BayesianModule(nn.Linear(3, 2), RadialDirectionalPrior("row"))
        >>> guide = AutoRadialDirectional(bnn)
        >>> guide.setup(torch.zeros(1, 3))
        >>> guide.posterior()["weight.direction"].base_dist
        VonMisesFisherStable(loc: torch.Size([2, 3]), concentration: torch.Size([2]))
    """

    def __init__(
        self,
        model: Model,
        *,
        init_loc_fn: Callable[..., object] = init_to_network,
        init_stddev: float | None = None,
        init_mean_cosine: float = 0.9,
        shared_concentration: bool = True,
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
        self._direction: Family = VonMisesFisher(init_mean_cosine, shared_concentration)

    def default_family(self, name: str, site: Node) -> Family:
        """Return the family for the support of the site: the sphere, or another space."""
        return self._direction if is_on_sphere(site["fn"].support) else Normal()
