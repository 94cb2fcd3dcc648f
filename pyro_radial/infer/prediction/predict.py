# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of functions from a trained guide, or from samples of a posterior."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_radial._pyro.checks import positive_count
from pyro_radial._pyro.one_at_a_time import one_at_a_time
from pyro_radial._pyro.random_state import seeded
from pyro_radial.infer.prediction.function_runs import ModelRuns, NetworkRuns, network_runs
from pyro_radial.infer.prediction.guide_draws import GuideDraws, check_global
from pyro_radial.infer.prediction.memory import allocate
from pyro_radial.infer.prediction.posterior_samples import PosteriorSamples
from pyro_radial.infer.prediction.prediction import Prediction
from pyro_radial.infer.training.data import as_inputs, device_of, dtype_of, move, num_rows, take
from pyro_radial.nn.likelihood import FUNCTION_SITE

__all__ = ["draw_functions", "predict"]

DEFAULT_NUM_SAMPLES = 64


def predict(
    model: Callable[..., Any],
    guide: Callable[..., Any] | Mapping[str, Tensor],
    x: Any,
    num_samples: int | None = None,
    chunk_size: int = 1024,
    *,
    function_site: str = FUNCTION_SITE,
    progress: bool = False,
) -> Prediction:
    """Draw functions from the guide and evaluate them at any number of inputs.

    The draws do not depend on ``chunk_size``: a draw's weights, also those that the guide leaves to the prior, are
    kept while it passes over the inputs. Modules run in evaluation mode and are left in the mode they were in. Several
    threads may predict at once; draws that are to be kept and served are a :class:`~pyro_radial.infer.SampledNetwork`.

    The parameters of a guide of this library are read once. Where the function is the output of a
    :class:`~pyro_radial.BayesianModule`, and that gives what the model gives for the first draw, the network alone runs
    for the others; any other guide or model runs whole for each draw. The draws are the same either way.

    In the place of a guide go samples of the posterior by site, such as those of Pyro's MCMC:
    ``predict(model, mcmc.get_samples(), x)`` has a draw for each, in their order. A site without samples is drawn from
    its prior, as with a guide that leaves it out and as in ``pyro.infer.Predictive``.

    :param model: a Pyro model ``model(x)`` that records the function's values at a deterministic site.
    :param guide: its trained guide, or a mapping from latent sites to S samples of each, ``[S, *shape]``.
    :param x: inputs ``[N, ...]``, a tuple or a dict of tensors of N rows each, arrays of NumPy, or a ``Dataset`` or
        ``DataLoader`` of such, with or without targets, which gives predictions in the dataset's order.
    :param int num_samples: S, the number of functions; 64 by default, and with samples all of them.
    :param int chunk_size: inputs in one pass, which bounds the memory of a pass.
    :param str function_site: the name of that site.
    :param bool progress: whether to show a progress bar.
    :returns: a :class:`Prediction` with samples ``[S, N, ...]``.
    :raises ValueError: for NaN or infinity in x, a number below one, an autoguide without parameters, a model without
        the function site, a guide of other sites than the model's, as after ``use_head``, or a guide with sites inside
        a plate (they belong to their rows) when x needs several chunks; naming the site, for samples of other sites,
        shapes or numbers.
    :raises MemoryError: with the estimate, if the draws would not fit into free memory.

    Example::

        >>> from torch import nn
        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, predict
        >>> from pyro_radial.nn import likelihoods
        >>> model = SupervisedModel(BayesianModule(nn.Linear(4, 3)), likelihoods.Categorical(num_data=100))
        >>> guide = AutoRadial(model)
        >>> guide.setup(torch.randn(2, 4), torch.tensor([0, 2]))
        >>> draws = predict(model, guide, torch.randn(5, 4), num_samples=8)
        >>> draws.samples.shape, draws.mean.shape, draws.mutual_information.shape
        (torch.Size([8, 5, 3]), torch.Size([5, 3]), torch.Size([5]))
    """
    if not isinstance(guide, Mapping):
        count = DEFAULT_NUM_SAMPLES if num_samples is None else num_samples
        return draw_functions(
            "predict", ModelRuns(model, guide, function_site), x, count, chunk_size, progress=progress
        )
    samples = PosteriorSamples(guide, "predict")
    if num_samples not in (None, len(samples)):
        raise ValueError(
            f"predict: num_samples must be left out with samples, of which there are {len(samples)}, got {num_samples}"
        )
    rows = as_inputs(x, "predict: x", dtype_of(model))
    positive_count("predict: chunk_size", chunk_size)
    samples.check(model, move(take(rows, slice(0, chunk_size)), device_of(model)))
    runs = ModelRuns(model, samples, function_site)
    return draw_functions("predict", runs, rows, len(samples), chunk_size, progress=progress)


@torch.no_grad()
def draw_functions(
    who: str,
    by_model: ModelRuns,
    x: Any,
    num_samples: int,
    chunk_size: int,
    *,
    by_network: bool = True,
    progress: bool = False,
) -> Prediction:
    """Draw functions as :func:`predict` does, from runs of a model.

    :param str who: what errors call the caller.
    :param ModelRuns by_model: of the model and its guide.
    :param x: inputs, as there.
    :param int num_samples: how many draws, S.
    :param int chunk_size: inputs in one pass.
    :param bool by_network: whether the network alone may run in the place of the model, where it gives the same.
    :param bool progress: whether to show a progress bar.
    :returns: a :class:`Prediction` with samples ``[S, N, ...]``.
    :raises ValueError: as there.
    :raises MemoryError: as there.
    """
    model, guide = by_model.model, by_model.guide
    x = as_inputs(x, f"{who}: x", dtype_of(guide, model))
    positive_count(f"{who}: num_samples", num_samples)
    positive_count(f"{who}: chunk_size", chunk_size)
    draws = GuideDraws(guide, who)
    device = device_of(guide, model)
    chunks = [slice(start, start + chunk_size) for start in range(0, num_rows(x), chunk_size)]
    samples: Tensor | None = None
    noise: dict[str, list[Tensor]] = {}
    runs: ModelRuns | NetworkRuns = by_model
    bar = tqdm(total=num_samples * len(chunks), desc=who, unit="pass", disable=not progress)
    with bar:
        for draw in range(num_samples):
            with one_at_a_time(), runs.mode():
                drawn = draws.draw(move(take(x, chunks[0]), device))
                if len(chunks) > 1:
                    check_global(drawn, f"{who}: chunk_size must be all rows", f"{len(chunks)} chunks")
                # What the model samples, targets too, has a seed of its own, so that it moves no draw of the guide.
                seed = int(torch.randint(2**62, ()))
                with seeded(seed, device):
                    runs.start(drawn)
                    for rows in chunks:
                        values = runs.values(move(take(x, rows), device))
                        if samples is None:
                            samples = allocate(who, num_samples, num_rows(x), values)
                        samples[draw, rows] = values
                        bar.update()
                for argument, value in runs.noise().items():
                    noise.setdefault(argument, []).append(value)
                if by_network and draw == 0 and num_samples > 1:
                    first = move(take(x, slice(0, 2)), device)
                    runs = network_runs(by_model, draws, drawn, first, seed) or by_model
    assert samples is not None
    likelihood = getattr(model, "likelihood", None)
    return Prediction(samples, likelihood, {name: torch.stack(values) for name, values in noise.items()})
