# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Run a guide with every latent site at the center of its distribution."""

from typing import Any

import pyro.distributions as dist
from pyro.poutine.guide import GuideMessenger
from pyro.poutine.messenger import Messenger

from pyro_radial._pyro.compat import is_deterministic, is_subsample
from pyro_radial._pyro.types import Guide, Message
from pyro_radial.distributions.moments import center
from pyro_radial.poutine.local_reparameterization import draw_after_all


class MeanOnlyMessenger(Messenger):
    """Replaces each latent site by a ``Delta`` at its distribution's center; see :func:`mean_only`."""

    def __init__(self, no_targets: bool = False) -> None:
        super().__init__()
        self._no_targets = no_targets

    def _pyro_sample(self, msg: Message) -> None:
        if is_subsample(msg):
            return
        # Computed and auxiliary sites are observed, and hold no data.
        is_data = msg["is_observed"] and not (
            is_deterministic(msg) or msg["infer"].get("is_auxiliary", False)
        )
        if self._no_targets and (is_data or msg["infer"].get("is_target", False)):
            raise ValueError(
                f"mean_only: guide must be a guide, got a model, with targets at site '{msg['name']}'; pass its guide"
            )
        if msg["done"] or msg["is_observed"]:
            return
        try:
            value = center(msg["fn"])
        except ValueError as error:
            raise ValueError(
                f"mean_only: the distribution of site '{msg['name']}', {error}"
            ) from None
        draw_after_all(msg)
        msg["fn"] = dist.Delta(value, event_dim=msg["fn"].event_dim)
        msg["value"], msg["done"] = value, True


def mean_only(guide: Guide | None = None) -> Any:
    """Run a guide without noise: each latent site is at its mean (the mean's image on constrained sites).

    A site becomes a ``Delta``, so the loss is that of a point estimate, ``-log p(y | loc) - log p(loc)``. It is finite,
    although a radial density has a pole at its mean, and has no gradient for scales. With ``TermsELBO(kl_weight=0.)``
    only the likelihood remains, to train means first (Farquhar, Osborne and Gal 2020, appendix D).

    :param guide: a guide to wrap; without one, a context manager for the guides that run inside it.
    :raises ValueError: naming the site, for a discrete distribution, or if a model is passed instead of a guide.

    Example::

        >>> import pyro
        >>> from pyro_radial import AutoRadial
        >>> guide = AutoRadial(lambda: pyro.sample("w", dist.Normal(0., 1.).expand([3]).to_event(1)))
        >>> bool((mean_only(guide)()["w"] == guide.median()["w"]).all())
        True
    """
    if guide is None:
        return MeanOnlyMessenger()
    # A guide within this handler runs the model itself.
    return MeanOnlyMessenger(no_targets=not isinstance(guide, GuideMessenger))(guide)
