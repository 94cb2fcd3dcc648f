# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Samples of a posterior, such as those of MCMC, as a guide that goes through them."""

from collections.abc import Callable, Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_radial._pyro.random_state import seeded
from pyro_radial.infer.training.data import device_of, evaluating
from pyro_radial.nn.likelihood import is_target

__all__ = ["PosteriorSamples"]


class PosteriorSamples:
    """A guide whose first run gives the first sample of all sites, the second run the second one, and so on.

    :param samples: values ``[S, *shape]`` on the support of each site, as Pyro's ``MCMC.get_samples()`` gives them.
    :param str who: what errors call the caller.
    :raises ValueError: naming the site, for what is no such mapping, or numbers of samples that differ.

    Example::

        >>> guide = PosteriorSamples({"w": torch.arange(6.0).reshape(3, 2)}, "predict")
        >>> len(guide), guide()["w"], guide()["w"]
        (3, tensor([0., 1.]), tensor([2., 3.]))
    """

    def __init__(self, samples: Mapping[str, Tensor], who: str) -> None:
        for name, values in samples.items():
            if not isinstance(values, Tensor) or values.dim() == 0 or len(values) == 0:
                got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
                raise ValueError(f"{who}: the samples of site '{name}' must be a tensor [S, ...] of S draws, got {got}")
        numbers = {name: len(values) for name, values in samples.items()}
        if len({*numbers.values()}) != 1:
            raise ValueError(f"{who}: samples must have one number of draws for all sites, got {numbers}")
        self._samples, self._who = dict(samples), who
        self._number, self._done = next(iter(numbers.values())), 0

    def __len__(self) -> int:
        return self._number

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The next sample of every site; the arguments of the model are not used."""
        values = {name: values[self._done] for name, values in self._samples.items()}
        self._done += 1
        return {name: pyro.sample(name, dist.Delta(value, event_dim=value.dim())) for name, value in values.items()}

    def check(self, model: Callable[..., Any], x: Any) -> None:
        """Refuse samples of another model.

        :param model: a Pyro model ``model(x)``.
        :param x: some of its inputs.
        :raises ValueError: naming the site, for one that is no latent site of the model, or of another shape.
        """
        with seeded(0, device_of(model)), evaluating(model), torch.no_grad():
            trace = poutine.trace(model).get_trace(x)
        sites: dict[str, Any] = dict(trace.iter_stochastic_nodes())
        shapes = {
            name: tuple(site["value"].shape)
            for name, site in sites.items()
            if not (site_is_subsample(site) or is_target(site))
        }
        for name, values in self._samples.items():
            if name not in shapes:
                raise ValueError(
                    f"{self._who}: samples must be of latent sites of the model, which are {sorted(shapes)}, got some "
                    f"of '{name}'"
                )
            if tuple(values.shape[1:]) != shapes[name]:
                raise ValueError(
                    f"{self._who}: the samples of site '{name}' must have shape {('S', *shapes[name])}, got "
                    f"{tuple(values.shape)}; MCMC.get_samples() has the chains joined, unless group_by_chain=True"
                )
