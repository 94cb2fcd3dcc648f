# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A network and a likelihood as one Pyro model, and how to find and call the network of such a model."""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pyro.poutine as poutine
import torch
from pyro.nn import PyroModule
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_radial._pyro.checks import check_types
from pyro_radial._pyro.compat import has_hooks
from pyro_radial._pyro.types import Batch, Message, Node
from pyro_radial.nn.bayesian_module import BayesianModule, modules_of
from pyro_radial.nn.functional_net import Arguments
from pyro_radial.nn.likelihoods import FUNCTION_SITE, Likelihood, is_target
from pyro_radial.nn.local.local_layers import AskForLocalReparameterization
from pyro_radial.nn.named_likelihoods import NamedLikelihoods
from pyro_radial.nn.under_priors import UnderPriors


class SupervisedModel(nn.Module):
    """The Pyro model ``y ~ likelihood(bnn(x))``, for any guide, :class:`~pyro.infer.SVI` and
    :class:`~pyro.infer.Predictive`.

    Its sites are those of ``bnn``, by the same names, and ``"f"`` and ``"y"`` of the likelihood.

    A network with several outputs returns them in a dict. ``likelihood`` and the targets are then dicts of the same
    names, :func:`~pyro_radial.predict` returns a prediction for each, and the sites are ``"name.f"`` and ``"name.y"``.
    Targets may be missing, NaN, or -100 among labels: they add nothing, and a mini-batch keeps its scale N/B.
    If the output has an attribute ``logits``, as in models of `transformers`, a single likelihood takes the logits.

    :param PyroModule bnn: a :class:`~pyro_radial.nn.BayesianModule`, or another model that returns the output of a
        network as a tensor ``[*draws, B, *outputs]``, or a dict of such.
    :param likelihood: one of :mod:`pyro_radial.nn.likelihoods`, or a dict with one for each output.
    :param bool local_reparameterization: whether guides of this library leave the weights undrawn, and the network
        draws the outputs of its layers for each row instead. This applies to calls with targets, that is to losses and
        training; predictions use drawn weights. See :func:`~pyro_radial.poutine.local_reparameterization`.
    :raises ValueError: naming the argument of another type, or sites of ``bnn`` with names of the likelihood's sites.

    Example::

        >>> import torch
        >>> from pyro_radial.nn import BayesianModule, likelihoods
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=60_000))
        >>> model(torch.zeros(7, 4)).shape
        torch.Size([7])
    """

    # A plain module: a PyroModule would put its own name before every site.

    def __init__(
        self, bnn: PyroModule, likelihood: Any, *, local_reparameterization: bool = False
    ) -> None:
        super().__init__()
        if not isinstance(bnn, PyroModule):
            raise ValueError(
                f"bnn must be a BayesianModule, got {type(bnn).__name__}: wrap a plain network as BayesianModule(net)"
            )
        if isinstance(likelihood, Mapping):
            likelihood = NamedLikelihoods(likelihood)
        else:
            check_types(Likelihood, likelihood=likelihood)
        shared_names = set(getattr(bnn, "sites", ())) & likelihood_names(likelihood)
        if shared_names:
            raise ValueError(
                f"bnn must not have sites with names of the likelihood's sites, got {sorted(shared_names)}: rename "
                "these parameters, or wrap the network as torch.nn.Sequential(net), which prefixes all names"
            )
        if local_reparameterization and not isinstance(bnn, BayesianModule):
            raise ValueError(
                f"bnn must be a BayesianModule for local_reparameterization=True, got {type(bnn).__name__}"
            )
        self.bnn = bnn
        self.likelihood = likelihood
        self.local_reparameterization = local_reparameterization

    def forward(self, x: Any, y: Any = None) -> Any:
        """Run the model.

        :param x: the network's input, or a tuple or a dict of its inputs.
        :param y: the targets, a dict of such for named outputs, or None to sample them.
        :returns: the targets, given or sampled.
        :raises ValueError: naming the layer, if the network fails, or if its output does not fit the likelihood.
        """
        if self.local_reparameterization:
            with AskForLocalReparameterization(_has_targets, _has_targets(x, y)) as request:
                f = self.output(x)
            request.check(self.bnn.sites_in_use)
        else:
            f = self.output(x)
        return self.likelihood(f, y)

    def output(self, x: Any, parameters: Mapping[str, Tensor] | None = None) -> Any:
        """Call the network.

        :param x: the network's input; see :meth:`forward`.
        :param Mapping parameters: values of the random parameters by name; None to sample them.
        :returns: a tensor ``[*draws, B, *outputs]``, or a dict of such.
        :raises ValueError: naming the layer, if the network fails, or if its output is not one tensor for a likelihood.
        """
        args, kwargs = inputs_of(x)
        try:
            f = (
                self.bnn(*args, **kwargs)
                if parameters is None
                else self.bnn.at(parameters, *args, **kwargs)
            )
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"the network of bnn{self._dtype()} failed{find_layer(error)}, given {describe_inputs(x)}: {error}"
            ) from error
        f = for_likelihood(f, self.likelihood)
        if not isinstance(f, Tensor) and isinstance(self.likelihood, Likelihood):
            raise ValueError(
                f"the network of bnn must return one tensor, got {type(f).__name__}: "
                "wrap it in a module that picks the output, or give a dict with a likelihood for each output"
            )
        return f

    def _dtype(self) -> str:
        return (
            f", in {self.bnn.dtype} on {self.bnn.device},"
            if isinstance(self.bnn, BayesianModule)
            else ""
        )


class WeightedRows(nn.Module):
    """The model of targets that come with weights: a row of weight 2 counts like two equal rows.

    :param SupervisedModel model: the model, which stays as it is and makes the predictions.
    """

    def __init__(self, model: SupervisedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Batch, y: tuple[Tensor, Tensor]) -> Any:
        """Run the model on inputs and a pair: targets, and a positive weight for each row."""
        targets, weights = y
        f = self.model.output(x)
        with _ScaledTargets(weights):
            return self.model.likelihood(f, targets)


class _ScaledTargets(Messenger):
    """Multiply the log density of each row's targets by its weight, and that of no other site."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = weights

    def _pyro_sample(self, msg: Message) -> None:
        if is_target(msg):
            msg["scale"] = msg["scale"] * self.weights


def inputs_of(x: object) -> Arguments:
    """Return the arguments of a network for these inputs: a tuple in order, a dict by name."""
    if isinstance(x, dict):
        return Arguments((), x)
    return Arguments(x if isinstance(x, tuple) else (x,), {})


def for_likelihood(f: object, likelihood: object) -> Any:
    """Return the part of a network's output that a likelihood takes: the logits, if they are named; else all."""
    return getattr(f, "logits", f) if isinstance(likelihood, Likelihood) else f


def read_noise(noise_sites: Mapping[str, str], nodes: Mapping[str, Node]) -> dict[str, Tensor]:
    """Return the noise of a likelihood in a run of its model, by argument of ``observation``.

    It is ``[1]``, or ``[1, *outputs]`` with a number for each output.
    """
    noise = {}
    for argument, site in noise_sites.items():
        value = nodes[site]["value"]
        noise[argument] = value.reshape(1) if value.numel() == 1 else value.unsqueeze(0)
    return noise


def _has_targets(x: object = None, y: object = None) -> bool:
    """Return whether a call has targets, as that of a loss does."""
    return y is not None


def likelihood_names(likelihood: object) -> set[str]:
    """Return the names that a likelihood gives to sites and its plate."""
    if isinstance(likelihood, NamedLikelihoods):
        names: set[str] = set()
        for name, output_likelihood in likelihood.by_name.items():
            names.update(f"{name}.{site_name}" for site_name in likelihood_names(output_likelihood))
        return names
    names = {FUNCTION_SITE, "y", "data", *getattr(likelihood, "noise_sites", {}).values()}
    if getattr(likelihood, "precision_prior", None) is not None:
        names.add("precision")
    return names


def describe_inputs(x: object) -> str:
    """Return the shapes, dtypes and devices of a network's inputs, for an error."""
    inputs = inputs_of(x)
    shown = []
    for name, value in (*(("x", value) for value in inputs.args), *inputs.kwargs.items()):
        if isinstance(value, Tensor):
            shown.append(f"{name} of shape {list(value.shape)}, {value.dtype} on {value.device}")
        else:
            shown.append(f"{name} of type {type(value).__name__}")
    return ", ".join(shown)


def find_layer(error: Exception) -> str:
    """Return the innermost layer of the network that an error comes from, by its name in the network."""
    names: dict[nn.Module, str] = {}
    description = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if not isinstance(module, nn.Module) or isinstance(
            module, SupervisedModel | BayesianModule
        ):
            continue
        if not names:
            names = {submodule: name for name, submodule in module.named_modules()}
        if names.get(module):
            description = f" in '{names[module]}', {type(module).__name__}({module.extra_repr()})"
    return description


class NetworkDraw(NamedTuple):
    """The parameters, noise and trace that one draw of the guide gives a network."""

    #: The values of the random parameters, by name, each of its parameter's shape.
    parameters: dict[str, Tensor]
    #: The noise of the likelihood, by argument of ``observation``, ``[1]`` or ``[1, *outputs]``.
    noise: dict[str, Tensor]
    #: The sites of the model that were sampled or replayed.
    trace: poutine.Trace


class ModelNetwork:
    """The network of a model, to call without running the model: the network's output is the model's function.

    :param entry: the :class:`~pyro_radial.SupervisedModel` that calls the network, or the network itself.
    :param wrappers: the models around it that change its priors, outermost first.
    """

    def __init__(
        self, entry: SupervisedModel | BayesianModule, wrappers: list[UnderPriors]
    ) -> None:
        self._entry = entry
        self.wrappers = wrappers
        self.bnn: BayesianModule = entry if isinstance(entry, BayesianModule) else entry.bnn  # type: ignore[assignment]
        #: The distribution of the targets, or None.
        self.likelihood: Any = getattr(entry, "likelihood", None)
        #: For each argument of the likelihood's ``observation`` besides ``f``, the site that records it.
        self.noise_sites: dict[str, str] = getattr(self.likelihood, "noise_sites", {})
        for module in (self.bnn, *modules_of(Likelihood, self.likelihood)):
            module.check_store()

    @property
    def sites(self) -> set[str]:
        """The names of the network's parameters, and those that the likelihood gives."""
        return {*self.bnn.sites, *likelihood_names(self.likelihood)}

    def sample_parameters(self) -> dict[str, Tensor]:
        """Sample the parameters as a run of the model does, but not the likelihood's noise."""
        with self._priors():
            return self.bnn.sample_parameters()

    def draw(self, drawn: poutine.Trace) -> NetworkDraw:
        """Return parameters and noise for a draw of the guide; other sites are drawn from the model's priors."""
        with poutine.trace() as capture, poutine.replay(trace=drawn), self._priors():
            parameters = self.bnn.sample_parameters()
            if self.noise_sites:
                self.likelihood.noise(torch.zeros(1, dtype=self.bnn.dtype, device=self.bnn.device))
        noise = read_noise(self.noise_sites, capture.trace.nodes)
        return NetworkDraw(self.bnn.one_value_each(parameters), noise, capture.trace)

    def read_draws(
        self, values: Mapping[str, Tensor], number: int, drawn: poutine.Trace
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        """Return the parameters and the noise of draws of a guide, or None if they are not all there.

        Noise is ``[n, 1]``, or ``[n, 1, *outputs]`` with a number for each output.

        :param values: the values ``[n, *shape]`` of the guide's sites in n draws.
        :param number: n.
        :param drawn: the trace of one of them.
        """
        names = self.bnn.sites_in_use
        if not self.bnn.has_plain_sites or not {*names} <= values.keys():
            return None
        noise: dict[str, Tensor] = {}
        if {*self.noise_sites.values()} <= values.keys():
            for argument, site in self.noise_sites.items():
                one_each = values[site].numel() == number
                noise[argument] = (
                    values[site].reshape(number, 1) if one_each else values[site].unsqueeze(1)
                )
        else:
            draw = self.draw(drawn)
            sampled = {name for name, _ in draw.trace.iter_stochastic_nodes()}
            if not sampled <= {*self.bnn.sites}:
                return None
            # Noise that nobody samples is the same in all draws.
            noise = {name: value.expand(number, *value.shape) for name, value in draw.noise.items()}
        return {name: values[name] for name in names}, noise

    def __call__(self, x: object, parameters: Mapping[str, Tensor]) -> Any:
        """Return the model's function at given values of the random parameters: the network's output."""
        if isinstance(self._entry, SupervisedModel):
            return self._entry.likelihood.function_values(self._entry.output(x, parameters))
        args, kwargs = inputs_of(x)
        return self.bnn.at(parameters, *args, **kwargs)

    def copy_of_function(self) -> "NetworkCopy":
        """Return the function of a SupervisedModel, computed by a copy of its network in evaluation mode."""
        return NetworkCopy(self.bnn, self.likelihood)

    @contextmanager
    def _priors(self) -> Iterator[None]:
        with ExitStack() as stack:
            for wrapper in self.wrappers:
                stack.enter_context(wrapper.priors())
            yield


class NetworkCopy:
    """The function of a SupervisedModel, computed by a copy of its network in evaluation mode."""

    def __init__(self, bnn: BayesianModule, likelihood: Any) -> None:
        self._bnn = bnn
        self._likelihood = likelihood
        self._functional = bnn.computation()
        self._fixed = bnn.fixed_tensors()

    def __call__(self, x: object, parameters: Mapping[str, Tensor]) -> Any:
        """Return the function at one value of each random parameter."""
        tensors = {**self._fixed, **self._bnn.one_value_each(parameters)}
        f = for_likelihood(self._functional.single(tensors, inputs_of(x)), self._likelihood)
        return self._likelihood.function_values(f)

    def runs_draws_together(self, num_rows: int) -> bool:
        """Return whether many draws at once take less time at so many rows than one after another."""
        return self._functional.runs_draws_together(num_rows)

    def many(self, x: object, draws: Mapping[str, Tensor]) -> Any:
        """Return the function at n values ``[n, *shape]`` of each random parameter, ``[n, ...]``."""
        shared = {**self._fixed, **self._bnn.one_value_each({})}
        f = self._functional.many(shared, draws, inputs_of(x), is_slowness_told=False)
        return self._likelihood.function_values(for_likelihood(f, self._likelihood))


def find_network(model: Any) -> ModelNetwork | None:
    """Find the network of a model from the types of its parts, or None if the model must run to compute its function.

    A model has a network if it is a ``BayesianModule`` or a :class:`~pyro_radial.SupervisedModel` of one, also under a
    :class:`~pyro_radial.PriorChain` or :func:`~pyro_radial.poutine.swap_prior`, without an overridden ``forward`` and
    without hooks.
    """
    wrappers: list[UnderPriors] = []
    while isinstance(model, UnderPriors):
        if not _behaves_as(model, UnderPriors):
            return None
        wrappers.append(model)
        model = model.model
    if isinstance(model, SupervisedModel):
        plain = (
            _behaves_as(model, SupervisedModel)
            and _behaves_as(model.bnn, BayesianModule)
            and not has_hooks(model.likelihood)
            and all(
                _behaves_as(likelihood, Likelihood)
                for likelihood in modules_of(Likelihood, model.likelihood)
            )
        )
    else:
        plain = _behaves_as(model, BayesianModule)
    return ModelNetwork(model, wrappers) if plain else None


def network_of(model: object) -> ModelNetwork:
    """Find the network of a model, or raise a ValueError."""
    network = find_network(model)
    if network is None:
        raise ValueError(
            "model must be a SupervisedModel of a BayesianModule, also under a PriorChain or swap_prior, or a "
            "BayesianModule, with the library's own forward methods and without hooks, got "
            f"{getattr(model, '__name__', type(model).__name__)}; predict(model, guide, x) takes any model, and for a "
            "model written by hand you can pass its BayesianModule here"
        )
    return network


def _behaves_as(module: object, cls: type[nn.Module]) -> bool:
    """Return whether calling a module does what the class does: nothing is overridden, and there are no hooks."""
    if not isinstance(module, cls) or "forward" in vars(module) or has_hooks(module):
        return False
    methods = ("__call__", "forward", *CALLED_METHODS.get(cls, ()))
    return all(getattr(type(module), name) is getattr(cls, name) for name in methods)


# The methods that a forward method of ours calls.
CALLED_METHODS: dict[type[nn.Module], tuple[str, ...]] = {
    SupervisedModel: ("output",),
    Likelihood: ("function_values",),
}
