# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of functions from a trained guide."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer.autoguide import AutoGuide, AutoGuideList
from pyro.poutine import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_radial._checks import positive_count
from pyro_radial.infer.data import as_inputs, device_of, dtype_of, evaluating, move, num_rows, take
from pyro_radial.infer.prediction import Prediction
from pyro_radial.infer.random_state import seeded
from pyro_radial.nn.likelihood import FUNCTION_SITE
from pyro_radial.poutine import one_at_a_time

__all__ = ["free_memory", "predict"]


@torch.no_grad()
def predict(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    x: Any,
    num_samples: int = 64,
    chunk_size: int = 1024,
    *,
    function_site: str = FUNCTION_SITE,
    progress: bool = False,
) -> Prediction:
    """Draw functions from the guide and evaluate them at any number of inputs.

    The draws do not depend on ``chunk_size``: a draw's weights, also those that the guide leaves to the prior, are
    kept while it passes over the inputs. Modules run in evaluation mode and are left in the mode they were in. Several
    threads may predict at once, see :func:`~pyro_radial.poutine.one_at_a_time`.

    :param model: a Pyro model ``model(x)`` that records the function's values at a deterministic site.
    :param guide: its trained guide.
    :param x: inputs ``[N, ...]``, a tuple or a dict of tensors of N rows each, arrays of NumPy, or a ``Dataset`` or
        ``DataLoader`` of such, with or without targets, which gives predictions in the dataset's order.
    :param int num_samples: S, the number of functions.
    :param int chunk_size: inputs in one pass, which bounds the memory of a pass.
    :param str function_site: the name of that site.
    :param bool progress: whether to show a progress bar.
    :returns: a :class:`Prediction` with samples ``[S, N, ...]``.
    :raises ValueError: for NaN or infinity in x, a number below one, an autoguide without parameters, a model without
        the function site, or a guide with sites inside a plate (they belong to their rows) when x needs several
        chunks.
    :raises MemoryError: with the estimate, if the draws would not fit into free memory.

    Example::

        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, predict
        >>> from pyro_radial.nn import likelihoods
        >>> model = SupervisedModel(BayesianModule(nn.Linear(4, 3)), likelihoods.Categorical(num_data=100))
        >>> guide = AutoRadial(model)
        >>> guide.setup(torch.randn(2, 4), torch.tensor([0, 2]))
        >>> draws = predict(model, guide, torch.randn(5, 4), num_samples=8)
        >>> draws.samples.shape, draws.mean.shape, draws.mutual_information.shape
        (torch.Size([8, 5, 3]), torch.Size([5, 3]), torch.Size([5]))
    """
    x = as_inputs(x, "predict: x", dtype_of(guide, model))
    positive_count("predict: num_samples", num_samples)
    positive_count("predict: chunk_size", chunk_size)
    _check_has_parameters(guide)
    likelihood = getattr(model, "likelihood", None)
    device = device_of(guide, model)
    chunks = [slice(start, start + chunk_size) for start in range(0, num_rows(x), chunk_size)]
    samples: Tensor | None = None
    noise: dict[str, list[Tensor]] = {}
    bar = tqdm(total=num_samples * len(chunks), desc="predict", unit="pass", disable=not progress)
    with bar:
        for draw in range(num_samples):
            with one_at_a_time(), evaluating(model, guide):
                drawn = poutine.trace(guide).get_trace(move(take(x, chunks[0]), device))
                _check_global(drawn, len(chunks))
                # What the model samples, targets too, has a seed of its own, so that it moves no draw of the guide.
                with seeded(int(torch.randint(2**62, ())), device):
                    for rows in chunks:
                        inputs = move(take(x, rows), device)
                        trace = poutine.trace(poutine.replay(model, trace=drawn)).get_trace(inputs)
                        values = _function_values(trace, function_site, num_rows(inputs))
                        if samples is None:
                            samples = _allocate(num_samples, num_rows(x), values)
                        samples[draw, rows] = values
                        _keep_global(drawn, trace)
                        bar.update()
                for argument, site in getattr(likelihood, "noise_sites", {}).items():
                    noise.setdefault(argument, []).append(_value(trace, site).reshape(1))
    assert samples is not None
    return Prediction(samples, likelihood, {name: torch.stack(values) for name, values in noise.items()})


def _check_has_parameters(guide: Any) -> None:
    """Without targets a new autoguide would take them for latent."""
    for part in guide.modules() if isinstance(guide, nn.Module) else ():
        if isinstance(part, AutoGuide) and not isinstance(part, AutoGuideList) and part.prototype_trace is None:
            raise ValueError(
                f"predict: guide must have its parameters, got a {type(part).__name__} without any yet; train it, or "
                "run it once on inputs and targets: guide(x, y)"
            )


def _keep_global(drawn: Trace, trace: Trace) -> None:
    """Lets a draw keep what the model sampled for it outside of plates, such as weights that the guide leaves out."""
    for name, site in trace.iter_stochastic_nodes():
        if name not in drawn and not site["cond_indep_stack"] and not site_is_subsample(site):
            drawn.add_node(name, **site)


def _function_values(trace: Trace, function_site: str, num_points: int) -> Tensor:
    if function_site not in trace.nodes:
        raise ValueError(
            f"predict: function_site must be a site of the model, got '{function_site}', which it has not; record the "
            f'function\'s values with pyro.deterministic("{function_site}", values)'
        )
    values = _value(trace, function_site)
    if values.shape[:1] != (num_points,):
        raise ValueError(
            f"predict: site '{function_site}' must have a row for each of {num_points} inputs, got shape "
            f"{tuple(values.shape)}"
        )
    return values


def _value(trace: Trace, name: str) -> Tensor:
    value = trace.nodes[name]["value"]
    assert isinstance(value, Tensor)
    return value


def _check_global(guide_trace: Trace, num_chunks: int) -> None:
    """A draw of a site inside a plate belongs to the rows it was made for, so it cannot serve a second chunk."""
    for name, site in guide_trace.iter_stochastic_nodes():
        if num_chunks > 1 and site["cond_indep_stack"]:
            raise ValueError(
                f"predict: chunk_size must be all rows, since site '{name}' of the guide is inside a plate, got "
                f"{num_chunks} chunks"
            )


def _allocate(num_samples: int, num_points: int, values: Tensor) -> Tensor:
    """Room for all draws, or a refusal that says how much they would need."""
    shape = (num_samples, num_points, *values.shape[1:])
    needed, free = math.prod(shape) * values.element_size(), free_memory(values.device)
    if free is not None and needed > free:
        raise MemoryError(
            f"predict: {num_samples} draws at {num_points} inputs, {list(shape)}, need {needed / 2**30:.1f} GiB on "
            f"{values.device}, where {free / 2**30:.1f} GiB are free; ask for fewer draws or fewer inputs at a time"
        )
    return values.new_empty(shape)


def free_memory(device: torch.device) -> int | None:
    """The memory that can be allocated on a device.

    :returns: bytes, or None where the system does not say.
    """
    if device.type == "cuda":
        # What torch has reserved and does not use is free for torch, although not for others.
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kibibytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return kibibytes[0] * 1024 if kibibytes else None
