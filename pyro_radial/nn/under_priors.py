# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A model under other priors, as predictions know it."""

from typing import Any

from torch import nn

from pyro_radial._pyro.types import Model


class UnderPriors(nn.Module):
    """Base class of a model that runs under other priors. A subclass defines :meth:`priors`.

    Everything else is the model's own, so that a prediction may sample the parameters of its network under
    :meth:`priors` without running the model.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def priors(self) -> Any:
        """Return the handler that changes the priors of sites, and nothing else.

        Its ``check_required`` raises an error if a run of the model lacked a site.
        """
        raise NotImplementedError

    @property
    def likelihood(self) -> Any:
        """The likelihood of the model, for predictions."""
        return self.model.likelihood  # type: ignore[attr-defined]

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the model under the priors."""
        with self.priors() as messenger:
            result = self.model(*args, **kwargs)
        messenger.check_required()
        return result
