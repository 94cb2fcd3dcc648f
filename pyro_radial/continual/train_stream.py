# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Learning a stream of tasks, one posterior after the other."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import positive_count
from pyro_radial.continual.coresets import Coreset
from pyro_radial.continual.measures import AccuracyMatrix
from pyro_radial.continual.prior_chain import PriorChain
from pyro_radial.continual.stream_run import StreamRun
from pyro_radial.continual.streams import TaskStream
from pyro_radial.infer.autoguide import AutoRadial
from pyro_radial.infer.elbo import RadialELBO
from pyro_radial.infer.training.checkpoint import copied
from pyro_radial.infer.training.processes import num_processes
from pyro_radial.infer.training.sole_writer import sole_writer

__all__ = ["train_stream"]

PARTS = ("test", "validation")
# What the loop sets itself, or what would be the same for all tasks.
RESERVED = ("num_data", "seed", "checkpoint", "progress", "validation")


def train_stream(
    chain: PriorChain,
    stream: TaskStream,
    guide: Callable[[PriorChain], Any] | None = None,
    *,
    coreset: Coreset | None = None,
    first_task: Mapping[str, Any] | None = None,
    measure_on: str = "test",
    measure_all: bool = False,
    num_samples: int = 64,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    **fit_options: Any,
) -> AccuracyMatrix:
    """Learn the tasks of a stream in turn, and measure after each what is known of all so far.

    For each task a guide of the chain is trained by :func:`~pyro_radial.fit` and becomes the chain's prior, which also
    makes the predictions. In a network with several heads (:class:`~pyro_radial.nn.MultiHead`) each task uses its
    own: the others are neither trained nor penalized, unless functions under them are kept. A likelihood made without
    ``num_data`` takes each task's.

    Noise of gradients, and what a wide first prior leaves free, are forgotten first. A recipe against both is measured
    in ``benchmarks/continual/permuted_mnist.py``: local reparameterization,
    ``SupervisedModel(bnn, likelihood, local_reparameterization=True)``; a first prior near the scale of
    the initialization, ``BayesianModule(net, dist.Normal(0.0, 0.1))``, whose KL counts a tenth in the first task,
    ``first_task={"loss": RadialELBO(kl_weight=0.1)}``; and rates of their own for scales and means, 1e-2 and 3e-3
    in :func:`~pyro_radial.fit`'s ``optim``, that fall to zero with ``FitOptions(scheduler_interval="step")``.
    Where inputs may be kept, ``Coreset(use="functions")`` goes with ``loss=RadialELBO(kl_weight=0.3)``. With one head
    ``FitOptions(compile=True)`` takes less time: the graphs of the first two tasks serve all.

    :param PriorChain chain: around a :class:`~pyro_radial.SupervisedModel` of a classifier; at the end its
        prior is the last posterior.
    :param TaskStream stream: the tasks.
    :param guide: a function from the chain to a guide of it, called for each task, by default
        ``lambda chain: chain.guide(AutoRadial)``.
    :param Coreset coreset: rows to keep, to be trained on or to hold functions at; none by default.
    :param Mapping first_task: options of :func:`~pyro_radial.fit` for the first task, where they differ from those of
        the others.
    :param str measure_on: "test" or "validation".
    :param bool measure_all: measure each time on all tasks of the stream, and once before the first, which forward
        transfer needs.
    :param int num_samples: draws of the posterior for a prediction.
    :param int seed: of everything random here; the model is the caller's, so make it from a seed too.
    :param checkpoint: a folder. A run that is killed at any moment goes on from there when it is called again with
        the same model and settings, and ends bit for bit as if undisturbed.
    :param bool progress: whether to show progress.
    :param fit_options: passed to :func:`~pyro_radial.fit`, such as ``epochs``, ``batch_size``, ``optim`` and ``loss``.
    :returns: the accuracies, ``values[i, j]`` on task j after learning task i.
    :raises ValueError: naming the argument or the task: a task without the part to measure on, a coreset as large as
        its task, a network without the task's head, or a checkpoint of another model or other settings.

    Example::

        >>> from functools import partial
        >>> import torch
        >>> from pyro_radial import BayesianModule, SupervisedModel
        >>> from pyro_radial.nn import likelihoods
        >>> from pyro_radial.continual import class_split_stream
        >>> x = torch.eye(4).repeat(25, 1)
        >>> stream = class_split_stream((x, x.argmax(-1)), (x, x.argmax(-1)), multi_head=False)
        >>> model = SupervisedModel(BayesianModule(torch.nn.Linear(4, 4)), likelihoods.Categorical())
        >>> matrix = train_stream(PriorChain(model), stream, epochs=20, batch_size=50, progress=False,
        ...                       optim=partial(torch.optim.Adam, lr=0.1))
        >>> matrix.values.shape
        torch.Size([2, 2])
    """
    if measure_on not in PARTS:
        raise ValueError(f"train_stream: measure_on must be one of {PARTS}, got {measure_on!r}")
    positive_count("train_stream: num_samples", num_samples)
    if not isinstance(chain, PriorChain) or getattr(chain, "likelihood", None) is None:
        raise ValueError(
            f"train_stream: chain must be a PriorChain around a SupervisedModel, got {type(chain).__name__}"
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"train_stream: seed must be a non-negative integer, got {seed!r}")
    first_task = {} if first_task is None else dict(first_task)
    of_coreset = {} if coreset is None else coreset.fit_options
    given = {"fit_options": fit_options, "fit_options of the coreset": of_coreset, "first_task": first_task}
    for what, options in given.items():
        held = [name for name in RESERVED if name in options]
        held += ["num_data"] if getattr(options.get("options"), "num_data", None) is not None else []
        if held:
            raise ValueError(f"train_stream: {what} must leave to the stream what it decides, got {held}")
    if coreset is not None and coreset.use == "functions":
        _check_functions(fit_options)
    run = StreamRun(chain, stream, guide or _radial, coreset, measure_on, num_samples, seed, fit_options, first_task)
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and num_processes() > 1:
        raise ValueError(
            f"train_stream: checkpoint must be left out with several processes, which would all write it, got {path}"
        )
    settings = run.settings() | {"measure_all": measure_all}
    with sole_writer(None if path is None else path / "stream.pt"), _unchanged_on_refusal(chain):
        return _learned(run, path, settings, measure_all, progress)


def _learned(
    run: StreamRun, path: Path | None, settings: dict[str, Any], measure_all: bool, progress: bool
) -> AccuracyMatrix:
    """The accuracies at the end of a run, from where its checkpoint is."""
    stream = run.stream
    done, matrix = 0, AccuracyMatrix.empty(stream.names)
    if path is not None and (path / "stream.pt").exists():
        done, matrix = run.load(path, settings)
    else:
        if measure_all:
            matrix = AccuracyMatrix.empty(stream.names, torch.tensor(run.measure(-1, range(len(stream)))))
        if path is not None:
            # The settings and the chain of before the first task, to begin it again from.
            run.save(path, settings, 0, matrix)
    bar = tqdm(range(len(stream)), initial=done, desc="tasks", disable=not progress)
    with bar:
        for number in range(done, len(stream)):
            bar.set_postfix_str(stream.names[number])
            run.learn(number, None if path is None else path / f"task-{number}.pt")
            matrix = matrix.with_row(number, run.measure(number, range(len(stream) if measure_all else number + 1)))
            if path is not None:
                run.save(path, settings, number + 1, matrix)
            bar.update()
    return matrix


@contextmanager
def _unchanged_on_refusal(chain: PriorChain) -> Iterator[None]:
    """Leave the chain as it was where a task is refused."""
    before = copied(chain.state_dict())
    try:
        yield
    except ValueError:
        chain.load_state_dict(before)
        raise


def _check_functions(fit_options: Mapping[str, Any]) -> None:
    """Refuse what functions cannot be held with."""
    loss = fit_options.get("loss")
    if loss is not None and (type(loss) is not RadialELBO or callable(loss.kl_weight)):
        what = type(loss).__name__ + (" with a kl_weight that changes" if type(loss) is RadialELBO else "")
        raise ValueError(
            "train_stream: loss must be a RadialELBO of one kl_weight, that of the weights, where coreset keeps "
            f"functions, got {what}"
        )


def _radial(chain: PriorChain) -> Any:
    return chain.guide(AutoRadial)
