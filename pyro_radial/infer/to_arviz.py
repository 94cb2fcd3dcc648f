# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Posterior, prior and pointwise log-likelihood as ArviZ's data tree; needs the extra ``arviz``."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyro.poutine as poutine
import torch
from pyro.distributions import MaskedDistribution, Unit
from pyro.distributions.util import scale_and_mask
from pyro.infer import MCMC
from torch import Tensor

from pyro_radial._pyro.checks import positive_count
from pyro_radial._pyro.compat import is_deterministic, is_subsample, own_mask, tree_map
from pyro_radial._pyro.random_numbers import one_at_a_time
from pyro_radial._pyro.types import Node
from pyro_radial.distributions.wrappers import WRAPPERS, leaf
from pyro_radial.infer.prediction.guide_draws import PosteriorSamples, check_has_parameters
from pyro_radial.nn.modules import evaluating

if TYPE_CHECKING:
    from xarray import DataTree


@torch.no_grad()
def to_arviz(
    posterior: Callable[..., object] | MCMC | Mapping[str, Tensor],
    model: Callable[..., object],
    *args: object,
    num_samples: int = 1000,
    coords: Mapping[str, Any] | None = None,
    dims: Mapping[str, Sequence[str]] | None = None,
    **kwargs: object,
) -> "DataTree":
    """Convert a posterior to the data tree that ArviZ's summaries, comparisons and plots take.

    It has the groups ``posterior``, ``posterior_predictive``, ``log_likelihood`` (of each observation, without the
    scale of a mini-batch), ``prior``, ``prior_predictive``, ``observed_data`` and ``constant_data`` (the other tensors
    among the model's arguments). Values computed by ``pyro.deterministic`` are with the latent sites. Dimensions have
    the names of the model's plates. Modules run in evaluation mode.

    Observations under a mask, such as missing targets, are left out. A site that has some, as ``"y"``, has its other
    observations in one dimension ``"y_id"``, whose labels are their places among all. A row with some targets missing
    stays, and these targets are NaN in ``observed_data``.

    Draws of a guide are independent, so ``r_hat`` and the effective sample size say nothing about how good the guide
    is. The shape parameters that ``loo`` warns about do.

    :param posterior: a trained guide, Pyro's ``MCMC`` after its run, or a mapping from all latent sites to S samples
        of each, ``[S, *shape]``.
    :param model: the Pyro model.
    :param args: the model's arguments, with all rows and the targets.
    :param int num_samples: the number of draws from a guide, and from the prior.
    :param coords: labels by dimension, such as ``{"genes": names}``.
    :param dims: names of dimensions by site or argument, where those of plates are not enough.
    :param kwargs: the model's arguments by name.
    :returns: an ``xarray.DataTree``, as ``arviz_base.from_dict`` makes it.
    :raises ImportError: without ArviZ.
    :raises ValueError: for a guide without parameters, samples that do not fit the model, a model that observes
        nothing, or one that draws a mini-batch of its rows.

    Example::

        >>> import pyro, pyro.distributions as dist
        >>> from pyro_radial import AutoMeanField
        >>> def model(x, y):
        ...     slope = pyro.sample("slope", dist.Normal(0., 1.))
        ...     with pyro.plate("rows", len(x)):
        ...         pyro.sample("y", dist.Normal(slope * x, 0.5), obs=y)
        >>> x = torch.linspace(-1., 1., 20)
        >>> guide = AutoMeanField(model)
        >>> guide.setup(x, 2. * x)
        >>> tree = to_arviz(guide, model, x, 2. * x, num_samples=100)
        >>> tree.log_likelihood["y"].dims, tree.posterior["slope"].shape
        (('chain', 'draw', 'rows'), (1, 100))
    """
    try:
        from arviz_base import from_dict
    except ImportError as error:
        raise ImportError("to_arviz needs ArviZ: pip install 'pyro-radial[arviz]'") from error
    positive_count("num_samples", num_samples)
    guide, num_chains, num_draws = _guide_of(posterior, num_samples)
    draws = []
    prior = []
    with one_at_a_time(), evaluating(model, guide):
        trace = poutine.trace(model).get_trace(*args, **kwargs)
        latent, observed = _sites(trace)
        if not observed:
            raise ValueError(
                f"model must observe a site, got {sorted(latent)} without a value; are targets missing from args?"
            )
        names = _name_dims(latent | observed)
        is_observed = {name: _observed_elements(site) for name, site in observed.items()}
        for _ in range(num_draws):
            drawn = poutine.trace(guide).get_trace(*args, **kwargs)
            _check_fits(drawn.nodes, latent)
            draws.append(_run(poutine.replay(model, drawn), args, kwargs))
        for _ in range(num_samples):
            prior.append(_run(model, args, kwargs))
    data = {name: site["value"] for name, site in observed.items()}
    groups = {
        "posterior": _chains("latent", draws, num_chains),
        "posterior_predictive": _chains("predicted", draws, num_chains),
        "log_likelihood": _chains("log_likelihood", draws, num_chains),
        "prior": _chains("latent", prior, 1),
        "prior_predictive": _chains("predicted", prior, 1),
        "observed_data": dict(data),
        "constant_data": _constant_data(model, args, kwargs, data, is_observed),
    }
    labels = dict(coords or {})
    for name, elements in is_observed.items():
        if not bool(elements.all()):
            row_dims = elements.dim() - observed[name]["fn"].event_dim
            rows = elements.reshape(*elements.shape[:row_dims], -1).any(-1)
            names[name][: rows.dim()] = [f"{name}_id"]
            labels[f"{name}_id"] = rows.flatten().nonzero()[:, 0].tolist()
            for group in ("posterior_predictive", "log_likelihood", "prior_predictive"):
                groups[group][name] = groups[group][name][:, :, rows]
            values = data[name][rows]
            is_missing = ~elements[rows]
            if bool(is_missing.any()):
                values = values.double().masked_fill(is_missing, torch.nan)
            groups["observed_data"][name] = values
    filled = {group: values for group, values in groups.items() if values}
    arrays = tree_map(lambda value: value.numpy(force=True), filled)
    return from_dict(arrays, coords=labels, dims=names | dict(dims or {}))


def _guide_of(posterior: Any, num_samples: int) -> tuple[Callable[..., object], int, int]:
    """Return a function that samples the posterior, the number of chains, and the number of draws in all."""
    num_chains = 1
    if isinstance(posterior, MCMC):
        num_chains = posterior.num_chains
        posterior = posterior.get_samples()
    if not isinstance(posterior, Mapping):
        check_has_parameters("posterior", posterior)
        return posterior, num_chains, num_samples
    samples = PosteriorSamples(posterior)
    return samples, num_chains, len(samples)


def _sites(trace: poutine.Trace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the latent and computed sites of a model, and its observed ones, by name."""
    latent = {}
    observed = {}
    for name, site in trace.nodes.items():
        of_model = site["type"] == "sample" and not is_subsample(site)
        if not of_model or isinstance(leaf(site["fn"]), Unit):
            continue
        if site["is_observed"] and not is_deterministic(site):
            observed[name] = site
        else:
            latent[name] = site
    return latent, observed


def _run(
    model: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, dict[str, Tensor]]:
    """Run the model once, and return what it has at its sites."""
    latent, observed = _sites(poutine.trace(model).get_trace(*args, **kwargs))
    log_likelihood = {}
    predicted = {}
    for name, site in observed.items():
        log_prob = site["fn"].log_prob(site["value"])
        log_likelihood[name] = scale_and_mask(log_prob, mask=site["mask"])
        predicted[name] = site["fn"].sample(
            log_prob.shape[: log_prob.dim() - len(site["fn"].batch_shape)]
        )
    return {
        "latent": {name: site["value"] for name, site in latent.items()},
        "log_likelihood": log_likelihood,
        "predicted": predicted,
    }


def _observed_elements(site: Node) -> Tensor:
    """Return which elements of an observed value no mask covers, of the model or within the distribution."""
    layer = site["fn"]
    elements = torch.ones_like(site["value"], dtype=torch.bool)
    masks = [(site["mask"], layer.event_dim)]
    while isinstance(layer, WRAPPERS):
        if isinstance(layer, MaskedDistribution):
            masks.append((own_mask(layer), layer.event_dim))
        layer = layer.base_dist
    for mask, event_dim in masks:
        if mask is not None:
            elements &= torch.as_tensor(mask, device=elements.device)[(..., *[None] * event_dim)]
    return elements


def _check_fits(drawn: Mapping[str, Node], latent: Mapping[str, Node]) -> None:
    """Raise a ValueError naming a latent site of the model that the posterior lacks or has in another shape."""
    for name, site in latent.items():
        if site["is_observed"]:
            continue
        expected = tuple(site["value"].shape)
        got = tuple(drawn[name]["value"].shape) if name in drawn else "none"
        if got != expected:
            raise ValueError(
                f"posterior must have draws of shape {expected} of the model's latent site '{name}', got {got}"
            )


def _name_dims(sites: Mapping[str, Node]) -> dict[str, list[str | None]]:
    """Return the names of each site's dimensions: those of its plates, and None for others."""
    dims = {}
    for name, site in sites.items():
        shape = site["value"].shape
        event_dim = site["fn"].event_dim
        if is_deterministic(site) and event_dim == len(shape):
            # The default of pyro.deterministic, also inside a plate.
            event_dim = 0
        names: list[str | None] = [None] * len(shape)
        for frame in site["cond_indep_stack"]:
            if frame.full_size not in (None, frame.size):
                raise ValueError(
                    f"args must have all rows of the plate '{frame.name}', got {frame.size} of {frame.full_size}"
                )
            axis = -1 if frame.dim is None else len(shape) - event_dim + frame.dim
            if axis >= 0 and shape[axis] == frame.size:
                names[axis] = frame.name
        dims[name] = names
    return dims


def _constant_data(
    model: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    data: Mapping[str, Tensor],
    is_observed: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the tensors among the model's arguments that it does not observe, by name."""
    signature = inspect.signature(getattr(model, "forward", model))
    constant = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        if isinstance(value, Tensor) and not any(
            value.numel() == target.numel()
            and torch.equal(value.reshape(target.shape).to(target)[elements], target[elements])
            for target, elements in zip(data.values(), is_observed.values(), strict=True)
        ):
            constant[name] = value
    return constant


def _chains(
    group: str, runs: Sequence[Mapping[str, Mapping[str, Tensor]]], num_chains: int
) -> dict[str, Tensor]:
    """Return what runs of the model have at each site, ``[chains, draws, *shape]``."""
    stacked = {}
    for name in runs[0][group]:
        joined = torch.stack([run[group][name] for run in runs])
        stacked[name] = joined.unflatten(0, (num_chains, -1))
    return stacked
