# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Several guides, trained one after another from starts of their own, that predict as one."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import check_flag, non_negative_integer, optional, path_of, positive_count
from pyro_radial._pyro.naming import stored_in
from pyro_radial._pyro.random_numbers import noise_of, one_at_a_time, seeded, seeded_elsewhere
from pyro_radial.infer.prediction.predict import predict
from pyro_radial.infer.prediction.prediction import Predictions, joined
from pyro_radial.infer.training.fit import FitResult, fit
from pyro_radial.nn.bayesian_module import BayesianModule, submodules
from pyro_radial.nn.modules import device_of
from pyro_radial.nn.named_likelihoods import NamedLikelihoods

__all__ = ["Ensemble"]


class Ensemble:
    r"""Train several guides and predict with their equal mixture.

    .. math:: p(y \mid x) = \frac1M \sum_{m=1}^M E_{q_m(w)}[p(y \mid x, w)].

    With point estimates (:class:`~pyro_radial.infer.autoguide.families.Delta`) this is a deep ensemble.

    Source: Lakshminarayanan, Pritzel and Blundell (2017), "Simple and Scalable Predictive Uncertainty Estimation using
    Deep Ensembles", section 2.4, without adversarial examples.

    :param make: a function of an integer seed that returns a new model and its guide. Python's, NumPy's and torch's
        random numbers are seeded with the same integer.
    :param int size: M, the number of members.
    :param int seed: the seed from which the members' seeds are made.
    :raises ValueError: for an argument out of range.

    Example::

        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
        >>> from pyro_radial.nn import likelihoods
        >>> def make(seed):
        ...     net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
        ...     model = SupervisedModel(BayesianModule(net), likelihoods.Categorical())
        ...     return model, AutoRadial(model)
        >>> x, y = torch.randn(64, 2), torch.randint(3, (64,))
        >>> ensemble = Ensemble(make, size=3)
        >>> results = ensemble.fit((x, y), epochs=2, progress=False)
        >>> ensemble.predict(x, num_samples=4).samples.shape
        torch.Size([12, 64, 3])
    """

    def __init__(self, make: Callable[[int], Any], size: int = 5, *, seed: int = 0) -> None:
        if not callable(make):
            raise ValueError(f"make must be a function from a seed to a model and its guide, got {type(make).__name__}")
        self.make, self.size = make, positive_count("size", size)
        self.seed = non_negative_integer("seed", seed)
        self._trained: list[_Member] = []

    @property
    def members(self) -> list[tuple[Callable[..., Any], nn.Module]]:
        """The model and the guide of each trained member."""
        return [(member.model, member.guide) for member in self._trained]

    def fit(
        self, data: Any, *, checkpoint: str | Path | None = None, progress: bool = True, **settings: Any
    ) -> list[FitResult]:
        """Make and train every member by :func:`~pyro_radial.fit`.

        :param data: as for ``fit``.
        :param checkpoint: a folder for the members' checkpoints; a second call with it continues where this one ended.
        :param bool progress: whether to show a progress bar.
        :param settings: other arguments of ``fit``, except ``seed``. Each member gets its own copy of a ``loss``.
        :returns: the result of each member's training.
        :raises ValueError: if ``make`` does not return a new model and guide, or the likelihoods differ, and as
            ``fit`` does; a note on the error names the member, and the members before it are kept.
        """
        if "seed" in settings:
            raise ValueError(f"settings must not have a seed, which the ensemble gives, got {settings['seed']!r}")
        check_flag("progress", progress)
        folder = optional(path_of, "checkpoint", checkpoint)
        members = [_Member(self.make, noise_of(self.seed, index)) for index in range(self.size)]
        _check_own(members)
        _check_alike("likelihood", [_described(getattr(member.model, "likelihood", None)) for member in members])
        results, self._trained = [], []
        for index, member in enumerate(tqdm(members, unit="member", disable=not progress)):
            own = {"loss": copy.deepcopy(settings["loss"])} if "loss" in settings else {}
            path = None if folder is None else folder / f"member_{index}.pt"
            own |= {"seed": member.seed, "checkpoint": path, "progress": False}
            try:
                with member.apart():
                    results.append(fit(member.model, member.guide, data, **{**settings, **own}))
            except Exception as error:
                error.add_note(f"raised while training member {index} of {self.size} (seed {member.seed})")
                raise
            self._trained.append(member)
        return results

    def predict(self, x: Any, num_samples: int = 64, chunk_size: int = 1024, **options: Any) -> Any:
        """Draw from all members by :func:`~pyro_radial.predict`, whose arguments it takes, with equal numbers of draws.

        :param int num_samples: draws of each member; one is enough for point estimates.
        :returns: a prediction with samples ``[M * num_samples, N, ...]``, member by member.
        :raises RuntimeError: before training.
        :raises ValueError: if the members' outputs differ in shape.
        """
        if not self._trained:
            raise RuntimeError("the members must be trained before they predict; call fit first")
        positive_count("num_samples", num_samples)
        draws = []
        for member in self._trained:
            with member.in_own_store():
                draws.append(predict(member.model, member.guide, x, num_samples, chunk_size, **options))
        _check_alike("shape of outputs", [_shapes(draw) for draw in draws])
        return joined(draws)


class _Member:
    """A model and its guide, with their own part of Pyro's parameter store, where names repeat between members."""

    def __init__(self, make: Callable[[int], Any], seed: int) -> None:
        self.seed = seed
        self._store: Any = {"params": {}, "constraints": {}}
        self.model: Any = None
        self.guide: Any = None
        with self.apart():
            made = make(seed)
        if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], nn.Module)):
            got = tuple(type(part).__name__ for part in made) if isinstance(made, tuple) else type(made).__name__
            raise ValueError(f"make must return a model and its guide, an nn.Module, got {got}")
        self.model, self.guide = made

    @contextmanager
    def apart(self) -> Iterator[None]:
        """In its own store, with random numbers from its seed."""
        device = torch.get_default_device() if self.model is None else device_of(self.guide, self.model)
        with self.in_own_store(), seeded(self.seed, device), seeded_elsewhere(self.seed):
            yield

    @contextmanager
    def in_own_store(self) -> Iterator[None]:
        with one_at_a_time(), stored_in(self._store):
            yield


def _check_own(members: list[_Member]) -> None:
    """Raise a ValueError if members share a module, and warn if they start alike."""
    modules = [part for member in members for part in (member.model, member.guide) if isinstance(part, nn.Module)]
    if len(set(modules)) < len(modules):
        raise ValueError("make must return a new model and a new guide for each seed, got the same for two members")
    first, *others = map(_start, members)
    if first and any(len(other) == len(first) and all(map(torch.equal, first, other)) for other in others):
        warnings.warn("make returned equal networks for two seeds; let it make new ones from its seed", stacklevel=3)


def _start(member: _Member) -> list[Tensor]:
    tensors = [*member.guide.state_dict().values(), *getattr(member.model, "state_dict", dict)().values()]
    for part in submodules(member.model, member.guide):
        tensors += part.one_value_each({}).values() if isinstance(part, BayesianModule) else ()
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


def _described(likelihood: Any) -> str:
    """The settings of a likelihood that all members must share, which excludes the noise of the draws."""
    if isinstance(likelihood, NamedLikelihoods):
        return str({name: _described(part) for name, part in likelihood.by_name.items()})
    skipped = {"training", *getattr(likelihood, "noise_sites", {})}
    found = {name: value for name, value in getattr(likelihood, "__dict__", {}).items() if name not in skipped}
    plain = {n: v for n, v in found.items() if isinstance(v, bool | int | float | str) and not n.startswith("_")}
    return f"{type(likelihood).__name__}({', '.join(f'{name}={value!r}' for name, value in plain.items())})"


def _shapes(draw: Any) -> str:
    parts = draw.values() if isinstance(draw, Predictions) else [draw]
    return ", ".join(str(tuple(part.samples.shape[2:])) for part in parts)


def _check_alike(what: str, found: list[str]) -> None:
    for index, other in enumerate(found):
        if other != found[0]:
            raise ValueError(
                f"make must give all members one {what}, got {found[0]} for member 0 and {other} for member {index}"
            )
