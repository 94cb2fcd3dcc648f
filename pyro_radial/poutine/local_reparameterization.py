# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draw noise for the outputs of layers, for each row, instead of drawing weights."""

import math
from collections.abc import Collection
from typing import Any, NoReturn, Self

import torch
from pyro.distributions.score_parts import ScoreParts
from pyro.poutine.messenger import Messenger

from pyro_radial._pyro.compat import is_subsample
from pyro_radial._pyro.types import Guide, Message, Node
from pyro_radial.nn.local.unit_noise import NOISE, OFFER, unit_noise


class LocalReparameterizationMessenger(Messenger):
    """Leaves sites undrawn if the guide offers their noise, or if they are among ``sites``."""

    def __init__(self, sites: Collection[str] = ()) -> None:
        super().__init__()
        self.sites = frozenset(sites)

    def _pyro_sample(self, msg: Message) -> None:
        if msg["done"] or msg["is_observed"] or is_subsample(msg) or NOISE in msg["infer"]:
            return
        offer = msg["infer"].get(OFFER, unit_noise if msg["name"] in self.sites else None)
        if offer is None:
            return
        noise = offer(msg["name"], msg["fn"])
        msg["infer"] = {**msg["infer"], NOISE: noise}
        if noise is not None:
            # Infinity cannot pass for a draw. Not done, so that plates still expand the distribution.
            msg["value"] = noise.loc.new_full((), math.inf).expand(noise.loc.shape)
            density = msg["log_prob"] = msg["log_prob_sum"] = _NoDensity(msg["name"])
            msg["score_parts"] = ScoreParts(density, 0, density)  # type: ignore[arg-type]

    def _pyro_post_sample(self, msg: Message) -> None:
        if isinstance(msg.get("log_prob"), _NoDensity):
            msg["log_prob"].shape = msg["fn"].batch_shape


class _Wrapped(LocalReparameterizationMessenger):
    """Leaves sites of one guide undrawn, and raises a ValueError if the guide has none to leave."""

    def __enter__(self) -> Self:
        self._undrawn: dict[str, bool] = {}
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        missing = sorted(self.sites - self._undrawn.keys())
        if args[0] is None and missing:
            raise ValueError(
                f"local_reparameterization: sites must be latent sites of the guide, got {missing}"
            )
        if args[0] is None and not any(self._undrawn.values()):
            raise ValueError(
                "local_reparameterization: guide must offer the noise of a network's weights, as AutoRadial and "
                f"AutoMeanField do, got a guide with the sites {sorted(self._undrawn)}; if your own guide has "
                "normal or radial sites, name them: local_reparameterization(guide, sites=bnn.sites)"
            )

    def _pyro_sample(self, msg: Message) -> None:
        super()._pyro_sample(msg)
        self._undrawn[msg["name"]] = NOISE in msg["infer"]


class _NoDensity:
    """Takes the place of a site's log-density, and raises a ValueError when a loss uses it."""

    shape = torch.Size()

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueError(
            f"local_reparameterization: the loss must have the KL of site '{self._name}' in closed form, got one "
            "that evaluates densities at draws, and nothing is drawn; use TermsELBO or TraceMeanField_ELBO instead of "
            "Trace_ELBO, and priors with a closed-form KL"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = _refuse


def local_reparameterization(guide: Guide | None = None, *, sites: Collection[str] = ()) -> Any:
    r"""Draw the noise of each layer's outputs for each row of a batch, instead of drawing the weights.

    A :class:`~pyro_radial.nn.BayesianModule` under such a guide computes each layer with the means of its weights and
    adds the noise that drawn weights would give the outputs, independently for each row. The expectations of the loss
    and its gradient do not change; their variance falls. Closed-form KLs stay as they are.

    - ``nn.Linear`` on vectors a is exact, jointly over its outputs. With :math:`v_j^2 = \sum_i \sigma_{ji}^2 a_i^2` and
      standard normals z, a normal posterior gives :math:`\mu_j \cdot a + v_j z_j`. A radial one with D elements gives
      :math:`\mu_j \cdot a + r\, v_j z_j / \sqrt{\sum_k z_k^2 + s}` with :math:`s \sim \chi^2(D - \mathrm{out})` and a
      half-normal r; with a radius for each row, each output has its own :math:`r_j` and
      :math:`s_j \sim \chi^2(\mathrm{in} - 1)` instead of r and the sum.
    - ``nn.Linear`` on more dims and ``nn.Conv1d``, ``2d`` and ``3d`` share one direction among rows; each row has its
      own random signs (Wen et al. 2018, "Flipout") and radii. Each row is exact, but rows are not independent.
    - All other layers, tied weights, layers that are called twice, and networks with batch norm in train mode use drawn
      weights; a warning names them once.

    Each row of the output must depend only on its own row of the input. Predictions need whole functions, so pass them
    the guide itself. ``SupervisedModel(..., local_reparameterization=True)`` applies this handler in losses, and in
    ``fit``.

    Source: Kingma, Salimans and Welling (2015), "Variational dropout and the local reparameterization trick", eq. 6.

    :param guide: a guide of this library, or another guide with its ``sites``; without one, a context manager for the
        guides that run inside it.
    :param sites: the normal or radial sites of your own guide that are parameters of a network.
    :raises ValueError: when it runs, naming the site, for an unsupported posterior or a loss that evaluates densities
        at draws, such as :class:`~pyro.infer.Trace_ELBO`, or for a guide without such sites.

    Example::

        >>> import pyro
        >>> from torch import nn
        >>> from pyro_radial import AutoRadial, BayesianModule, TermsELBO, SupervisedModel
        >>> from pyro_radial.nn import likelihoods
        >>> model = SupervisedModel(BayesianModule(nn.Linear(3, 1)), likelihoods.Gaussian())
        >>> guide = AutoRadial(model)
        >>> svi = pyro.infer.SVI(model, local_reparameterization(guide), pyro.optim.Adam({"lr": 0.01}), TermsELBO())
        >>> loss = svi.step(torch.randn(8, 3), torch.randn(8, 1))
    """
    messenger = _Wrapped(sites)
    return messenger if guide is None else messenger(guide)


def draw_after_all(msg: Message) -> None:
    """Undo that a site was left undrawn, so that a handler can give it a value."""
    if not is_drawn(msg):
        msg["infer"] = {**msg["infer"], NOISE: None}
        for name in ("log_prob", "log_prob_sum", "score_parts"):
            del msg[name]


def is_drawn(site: Node) -> bool:
    """Return whether a site has a value, and was not left undrawn."""
    return site["infer"].get(NOISE) is None


def check_drawn(name: str, site: Node, needs: str) -> None:
    """Raise a ValueError that begins with ``needs`` if a site was left undrawn."""
    if not is_drawn(site):
        raise ValueError(
            f"{needs}, got site '{name}', which local reparameterization leaves undrawn"
        )
