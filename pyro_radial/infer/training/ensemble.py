# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Several guides, each from its own start, that are trained in one call and predict as one."""

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import non_negative_integer, positive_count
from pyro_radial.infer.prediction.prediction import Prediction
from pyro_radial.infer.training.checkpoint import State
from pyro_radial.infer.training.ensemble_member import Make, Member, Outcome, train_apart, train_in_process
from pyro_radial.infer.training.fit import FitResult
from pyro_radial.nn.likelihood import FUNCTION_SITE

__all__ = ["Ensemble"]

OWN_SETTINGS = {"seed": "Ensemble(make, seed=...)"}


class Ensemble:
    r"""Members that are trained one by one, and predict as one.

    The prediction is their equal mixture,

    .. math:: p(y \mid x) = \frac1M \sum_{m=1}^M E_{q_m(w)}[p(y \mid x, w)].

    A member is any model and guide that :func:`~pyro_radial.fit` trains: of plain networks, point estimates, they are a
    deep ensemble, and of radial or other guides an ensemble of posteriors. ``make`` makes each from its own seed, so
    from its own start.

    Source: Lakshminarayanan, Pritzel and Blundell (2017), "Simple and Scalable Predictive Uncertainty Estimation using
    Deep Ensembles", section 2.4; without their adversarial examples. Of radial guides: Farquhar, Osborne and Gal
    (2020), "Radial Bayesian Neural Networks", table 1.

    :param make: a function of an integer that returns a model and its guide, both new. Python's, NumPy's and torch's
        random numbers are seeded with that integer when it is called.
    :param int size: M, the number of members.
    :param int seed: what the seeds of all members are made from.
    :param str function_site: the deterministic site of the function's values in every model.
    :raises ValueError: for numbers out of range.

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
        >>> prediction = ensemble.predict(x, num_samples=4)
        >>> prediction.samples.shape, prediction.mean.shape
        (torch.Size([12, 64, 3]), torch.Size([64, 3]))

    ``torch.save(ensemble.state_dict(), path)`` keeps it; another takes it over once it has its parameters::

        >>> other = Ensemble(make, size=3)
        >>> other.setup(x[:2], y[:2])
        >>> other.load_state_dict(ensemble.state_dict())
    """

    def __init__(self, make: Make, size: int = 5, *, seed: int = 0, function_site: str = FUNCTION_SITE) -> None:
        if not callable(make):
            raise ValueError(
                f"Ensemble: make must be a function from a seed to a model and its guide, got {type(make).__name__}"
            )
        self.make, self.function_site = make, function_site
        self.size = positive_count("Ensemble: size", size)
        self.seed = non_negative_integer("Ensemble: seed", seed)
        self._made: list[Member] = []
        self._ready: dict[int, Member] = {}

    @property
    def members(self) -> list[tuple[Callable[..., Any], nn.Module]]:
        """Model and guide of each trained member."""
        return [(member.model, member.guide) for member in self._ready.values()]

    def setup(self, x: Any, y: Any) -> None:
        """Make the members and their parameters, untrained, as :meth:`load_state_dict` needs them.

        :param x: some inputs.
        :param y: their targets.
        :raises ValueError: for members of different models.
        """
        made = self._made_members()
        for member in made:
            member.set_up(x, y)
        self._take(made, x)

    def fit(
        self,
        data: Any,
        *,
        workers: int = 1,
        checkpoint: str | Path | None = None,
        progress: bool = True,
        **settings: Any,
    ) -> list[FitResult]:
        """Train every member, from its start, as :func:`~pyro_radial.fit` does.

        With ``checkpoint`` the call can be killed at any moment: the same call takes over the members that are done and
        resumes the others, those in the midst of it at their own last checkpoint.

        A member that fails leaves the others alone: these are trained and kept, and then the error is raised. If all
        fail, the first one's own is.

        :param data: of every member, as for :func:`~pyro_radial.fit`; each has an order of rows of its own.
        :param int workers: processes that train at once, through joblib, which is needed for more than one. What a
            member gets does not depend on it, but for rounding where the processes have other numbers of threads.
        :param checkpoint: a folder, with a checkpoint of each member in ``member_0.pt`` and so on.
        :param bool progress: whether to show how many members are done.
        :param settings: all others of :func:`~pyro_radial.fit`: ``epochs``, ``batch_size``, ``optim``, ``loss``, of
            which each member has a copy.
        :returns: a :class:`~pyro_radial.infer.FitResult` for each member.
        :raises ValueError: for numbers out of range, members of different models, and as :func:`~pyro_radial.fit` does
            where it does for all.
        :raises RuntimeError: naming the member, its seed and the cause, where some failed and others did not.
        :raises ImportError: for several workers without joblib.
        """
        workers = positive_count("Ensemble.fit: workers", workers)
        for name in OWN_SETTINGS.keys() & settings.keys():
            raise ValueError(f"Ensemble.fit: {name} must be given as {OWN_SETTINGS[name]}, got it as a setting of fit")
        made = self._made_members()
        few = [member.set_up_for(data, settings.get("num_data")) for member in made]
        self._take(made, few[0])
        folder = None if checkpoint is None else Path(checkpoint)
        jobs = [
            (self.make, index, self.seed, data, _settings_of_one(settings, folder and folder / f"member_{index}.pt"))
            for index in range(self.size)
        ]
        outcomes = _in_processes(jobs, workers) if min(workers, self.size) > 1 else _one_by_one(jobs)
        results: list[FitResult] = []
        errors: dict[int, Exception] = {}
        bar = tqdm(outcomes, "Ensemble.fit", self.size, unit="member", disable=not progress)
        for member, outcome in zip(made, bar, strict=True):
            if isinstance(outcome, Exception):
                errors[member.index] = outcome
                continue
            result, state = outcome
            member.load(state)
            results.append(result)
            self._ready[member.index] = member
        if errors:
            self._raise(errors)
        return results

    def predict(self, x: Any, num_samples: int = 64, chunk_size: int = 1024, *, progress: bool = False) -> Prediction:
        """Draws of all members, as many of each, as :func:`~pyro_radial.predict` makes them.

        Probabilities are averaged over members as over draws; so all that a prediction tells is of the mixture.

        :param x: inputs ``[N, ...]``, as there.
        :param int num_samples: draws of each member; one is enough for point estimates.
        :param int chunk_size: inputs in one pass.
        :param bool progress: whether to show progress bars.
        :returns: a :class:`~pyro_radial.infer.Prediction` with samples ``[M * num_samples, N, ...]``, member by member.
        :raises RuntimeError: before training.
        :raises ValueError: as :func:`~pyro_radial.predict` does.
        """
        if not self._ready:
            raise RuntimeError("Ensemble.predict: members must be trained, got none that is; call fit first")
        positive_count("Ensemble.predict: num_samples", num_samples)
        each = [
            member.predict(x, num_samples, chunk_size, self.function_site, progress) for member in self._ready.values()
        ]
        noise = {name: torch.cat([one.noise[name] for one in each]) for name in each[0].noise}
        return Prediction(torch.cat([one.samples for one in each]), each[0].likelihood, noise)

    def state_dict(self) -> State:
        """The trained members, in tensors and plain values: what ``torch.save`` takes and loads ``weights_only``."""
        return {"seed": self.seed, "members": {index: member.state() for index, member in self._ready.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the members of another ensemble of the same ``make`` and seed.

        :param state_dict: of that ensemble.
        :raises RuntimeError: before :meth:`setup`.
        :raises ValueError: for another seed, more members than there are, or a member of another model or guide.
        """
        if not self._made:
            raise RuntimeError("Ensemble.load_state_dict: members must have their parameters; call setup(x, y) first")
        if state_dict["seed"] != self.seed:
            raise ValueError(
                f"Ensemble.load_state_dict: seed must be that of the saved one, {state_dict['seed']}, got {self.seed}"
            )
        members: dict[int, State] = state_dict["members"]
        if max(members, default=-1) >= self.size:
            raise ValueError(
                f"Ensemble.load_state_dict: size must be at least {max(members) + 1}, as it was saved, got {self.size}"
            )
        for index, state in members.items():
            self._made[index].load(state)
        self._ready = {index: self._made[index] for index in members}

    def __len__(self) -> int:
        return self.size

    def _made_members(self) -> list[Member]:
        """All members, without parameters yet, if they have one likelihood."""
        made = [Member(self.make, index, self.seed) for index in range(self.size)]
        _check_alike("likelihood", [_described_likelihood(member) for member in made])
        return made

    def _take(self, made: list[Member], x: Any) -> None:
        """Take these members, untrained, if they have functions of one shape."""
        shapes = [str(member.output_shape(x, self.function_site)) for member in made]
        _check_alike(f"shape of site '{self.function_site}'", shapes)
        self._made, self._ready = made, {}

    def _raise(self, errors: dict[int, Exception]) -> None:
        """The first error by itself if all members failed; else one that names those that did."""
        first = next(iter(errors.values()))
        if len(errors) == self.size:
            raise first
        named = "; ".join(
            f"member {index} (seed {self._made[index].seed}): {type(error).__name__}: {error}"
            for index, error in errors.items()
        )
        raise RuntimeError(
            f"Ensemble.fit: {len(errors)} of {self.size} members failed to train, the others are kept: {named}"
        ) from first


def _settings_of_one(settings: dict[str, Any], checkpoint: Path | None) -> dict[str, Any]:
    # A loss counts the steps of its one training.
    own = {"loss": copy.deepcopy(settings["loss"])} if "loss" in settings else {}
    return {**settings, **own, "checkpoint": checkpoint}


def _one_by_one(jobs: list[tuple[Any, ...]]) -> Iterator[Outcome]:
    return (train_apart(*job) for job in jobs)


def _in_processes(jobs: list[tuple[Any, ...]], workers: int) -> Iterator[Outcome]:
    try:
        from joblib import Parallel, delayed
    except ImportError as error:
        raise ImportError(
            f"Ensemble.fit: workers={workers} needs joblib, which scikit-learn brings: pip install joblib"
        ) from error
    # As they come: those that are done are kept if a process dies.
    return iter(
        Parallel(n_jobs=workers, return_as="generator")(delayed(train_in_process)(os.getpid(), *job) for job in jobs)
    )


def _described_likelihood(member: Member) -> str:
    """What must be the same for draws of all members to be of one: all but the noise, which is drawn."""
    likelihood = getattr(member.model, "likelihood", None)
    noise = getattr(likelihood, "noise_sites", {})
    settings = [
        f"{name}={value!r}"
        for name, value in (vars(likelihood) if likelihood is not None else {}).items()
        if isinstance(value, bool | int | float | str) and not name.startswith("_") and name not in {"training", *noise}
    ]
    return f"{type(likelihood).__name__}({', '.join(settings)})"


def _check_alike(what: str, found: list[str]) -> None:
    for index, other in enumerate(found):
        if other != found[0]:
            raise ValueError(
                f"Ensemble: make must give all members one {what}, got {found[0]} for member 0 and {other} for member "
                f"{index}"
            )
