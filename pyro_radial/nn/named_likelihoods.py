# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A likelihood for each named output of a network, and targets that are missing."""

from collections.abc import Mapping
from typing import Any

from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_radial._pyro.checks import prefix_errors
from pyro_radial._pyro.types import Message
from pyro_radial.nn.likelihoods import FUNCTION_SITE, Likelihood, check_any_observed


class NamedLikelihoods(nn.Module):
    """Observe each output of a network under its own likelihood.

    The sites and the plate of an output have its name in front, as in ``"energy.f"``, ``"energy.y"`` and
    ``"energy.data"``. Targets may be missing, as for any :class:`~pyro_radial.nn.likelihoods.Likelihood`.

    :param Mapping likelihoods: a :class:`~pyro_radial.nn.likelihoods.Likelihood` for each output, by name.
    :raises ValueError: naming ``likelihood``, for no entries, other names or values, or one object under two names.
    """

    def __init__(self, likelihoods: Mapping[str, Likelihood]) -> None:
        super().__init__()
        if not likelihoods or len({id(likelihood) for likelihood in likelihoods.values()}) < len(
            likelihoods
        ):
            raise ValueError(
                f"likelihood must have an object of its own for each name, got {dict(likelihoods)}"
            )
        try:
            self.by_name: Any = nn.ModuleDict(likelihoods)
        except KeyError as error:
            raise ValueError(
                f"likelihood must have names without a dot, got {list(likelihoods)}: {error}"
            ) from None

    def forward(
        self, f: Mapping[str, Tensor], y: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Record all outputs and observe or sample all targets, by name."""
        f = self.function_values(f)
        targets = {} if y is None else self.read_target(f, y)
        result = {}
        for name, likelihood in self.by_name.items():
            with prefix_errors(f"output {name!r}"), _Prefixed(name):
                result[name] = likelihood(f[name], *targets.get(name, ()))
        return result

    def function_values(self, f: object) -> dict[str, Tensor]:
        """Check a network's outputs and return what the sites of the functions record."""
        if not isinstance(f, Mapping) or f.keys() != self.by_name.keys():
            got = list(f) if isinstance(f, Mapping) else type(f).__name__
            raise ValueError(
                f"the network of bnn must return a dict with outputs {list(self.by_name)}, got {got}"
            )
        result = {}
        for name, likelihood in self.by_name.items():
            with prefix_errors(f"output {name!r}"):
                result[name] = likelihood.function_values(f[name])
        return result

    def read_target(self, f: Mapping[str, Tensor], y: object) -> dict[str, tuple[Tensor, Tensor]]:
        """Return each output's targets and which are observed, as :meth:`Likelihood.read_target` does."""
        if not isinstance(y, Mapping) or y.keys() != self.by_name.keys():
            got = list(y) if isinstance(y, Mapping) else type(y).__name__
            raise ValueError(
                f"y must be a dict with targets for {list(self.by_name)}, NaN if missing, got {got}"
            )
        observed = {
            name: ~likelihood.is_missing(y[name]) for name, likelihood in self.by_name.items()
        }
        check_any_observed(observed.values())
        targets = {}
        for name, likelihood in self.by_name.items():
            with prefix_errors(f"output {name!r}"):
                targets[name] = likelihood.read_target(f[name], y[name], observed[name])
        return targets

    @property
    def noise_sites(self) -> dict[str, str]:
        """For each other argument of a distribution, as in ``"energy.scale"``, the site that records it."""
        sites = {}
        for name, likelihood in self.by_name.items():
            for argument, site in likelihood.noise_sites.items():
                sites[f"{name}.{argument}"] = f"{name}.{site}"
        return sites

    def noise(self, f: Tensor) -> dict[str, Tensor]:
        """Sample or read the noise of each output; see :meth:`Likelihood.noise`."""
        noise = {}
        for name, likelihood in self.by_name.items():
            with _Prefixed(name):
                output_noise = likelihood.noise(f)
            for argument, value in output_noise.items():
                noise[f"{name}.{argument}"] = value
        return noise


def function_sites(likelihood: object, function_site: str) -> Any:
    """Return the site that records a model's function, or a dict of sites by the names of the outputs."""
    if isinstance(likelihood, NamedLikelihoods) and function_site == FUNCTION_SITE:
        return {name: f"{name}.{FUNCTION_SITE}" for name in likelihood.by_name}
    return function_site


class _Prefixed(Messenger):
    """Puts the name of an output before the names of all sites."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _pyro_sample(self, msg: Message) -> None:
        msg["name"] = f"{self._name}.{msg['name']}"
