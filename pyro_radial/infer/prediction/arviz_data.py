# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of functions as ArviZ holds them, for its plots, diagnostics and model comparison."""

import inspect
from typing import Any

import torch
from torch import Tensor

from pyro_radial.infer.prediction.prediction import Prediction

__all__ = ["to_arviz"]


def to_arviz(prediction: Prediction, y: Any = None) -> Any:
    """A prediction as an ``arviz.InferenceData``, from ArviZ 1.0 on an ``xarray.DataTree``.

    The group ``posterior`` has the variable ``f``, the values before the link, with the dims ``chain`` (of one),
    ``draw``, ``input`` and ``output`` (``output_0``, ``output_1``, ... where there are several), and the noise of the
    likelihood by its name. With a likelihood, ``posterior_predictive`` has a draw of the targets for each draw of the
    function, as ``y``, for predictive checks. With targets, ``observed_data`` has them, and ``log_likelihood`` their
    log-density under each draw: what ``arviz.loo`` and ``arviz.compare`` read.

    :param Prediction prediction: from :func:`~pyro_radial.predict` or an ensemble.
    :param torch.Tensor y: targets ``[N, *target]``, or an array of NumPy, or None.
    :raises ImportError: without ArviZ, which ``pip install pyro-radial[arviz]`` brings.
    :raises ValueError: for targets that do not fit, or for a prediction without a likelihood.

    Example::

        >>> import pytest
        >>> arviz = pytest.importorskip("arviz", reason="ArviZ is not installed")
        >>> tree = to_arviz(Prediction(torch.randn(50, 4, 1)))
        >>> dict(tree["posterior"]["f"].sizes)
        {'chain': 1, 'draw': 50, 'input': 4, 'output': 1}
    """
    try:
        import arviz
    except ImportError as error:
        raise ImportError("to_arviz needs ArviZ, which is not installed: pip install pyro-radial[arviz]") from error
    samples, likelihood = prediction.samples, prediction.likelihood
    noise = {name: values.reshape(len(values)) for name, values in prediction.noise.items()}
    groups = {"posterior": {"f": _chain(samples), **{name: _chain(values) for name, values in noise.items()}}}
    dims = {"f": ["input", *_names("output", samples.dim() - 2)]}
    if likelihood is not None:
        targets = prediction.sample_targets()
        groups["posterior_predictive"] = {"y": _chain(targets)}
        dims["y"] = ["input", *_names("target", targets.dim() - 2)]
    if y is not None:
        if likelihood is None:
            raise ValueError("to_arviz: y must be left out without a likelihood, which gives it a density, got targets")
        y = likelihood.check_target(samples, torch.as_tensor(y, device=samples.device))
        log_likelihood = likelihood.observation(samples, **prediction.noise).log_prob(y)
        groups |= {"log_likelihood": {"y": _chain(log_likelihood)}, "observed_data": {"y": _array(y)}}
    if "posterior" in inspect.signature(arviz.from_dict).parameters:
        return arviz.from_dict(**groups, dims=dims)
    # From 1.0 on.
    return arviz.from_dict(groups, dims=dims)


def _names(name: str, number: int) -> list[str]:
    return [name] if number == 1 else [f"{name}_{index}" for index in range(number)]


def _chain(values: Tensor) -> Any:
    """With a first dim of one chain."""
    return _array(values.unsqueeze(0))


def _array(values: Tensor) -> Any:
    return values.detach().cpu().numpy()
