# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Local reparameterization in a network: which layers compute with noise, a call in which they do, and its handlers."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_radial._pyro.checks import warn
from pyro_radial._pyro.compat import is_differentiated, tree_leaves, tree_map_only
from pyro_radial._pyro.types import Message
from pyro_radial.nn.functional_net import BATCH_NORMS, Arguments, split_draws, unchanged_on_error
from pyro_radial.nn.local.unit_noise import (
    ASKS,
    LAYERS,
    NOISE,
    PARAMETER,
    Parameter,
    UnitNoise,
    noisy_output,
)

PARAMETERS = ("weight", "bias")
#: The function that reads a tensor's dtype, as ``__torch_function__`` sees it.
DTYPE_OF = vars(torch._C.TensorBase)["dtype"].__get__
#: The fields of a noise that are tensors; their names follow that of its site.
NOISE_FIELDS = ("loc", "scale")


class _NotLocalError(Exception):
    """A call has found that the parameters of a layer must be drawn.

    Its arguments are the name of the layer, empty for all layers, and the reason.
    """


class LocalLayers:
    """The layers that can compute with noise; see :func:`~pyro_radial.poutine.local_reparameterization`."""

    def __init__(self, skeleton: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
        self._skeleton = skeleton
        # The shapes of the network's random parameters.
        self._shapes = shapes
        # The reasons that calls have found, by layer, and the sites that a warning has named.
        self._call_reasons: dict[str, str] = {}
        self._warned_sites: set[str] = set()
        self._has_checked_rows = False
        self._reasons = _find_reasons(skeleton)

    def output(
        self,
        run: Callable[..., Any],
        fixed: Callable[[], Mapping[str, Tensor]],
        values: Mapping[str, Tensor],
        sites: "ParameterSites",
        inputs: Arguments,
    ) -> Any:
        """Run the network with noise at the sites that a guide left undrawn, and draw those that need a draw.

        A call may find that more of them need a draw. It then changes nothing, and the network runs again.

        :param run: calls the network: ``run(draws, shared, drawn, inputs, within)``.
        :param fixed: returns the tensors that a call of the network may write into.
        :param values: a value for each parameter; those of undrawn sites do not matter.
        :param sites: has the noise of the undrawn sites.
        """
        first_input = _first_tensor(inputs)
        rows = 0 if first_input is None or first_input.dim() == 0 else len(first_input)
        while True:
            reasons = self._reasons_of(sites.noises)
            local = dict(sites.noises)
            site_values = dict(values)
            for name in reasons:
                site_values[name] = local.pop(name).draw(sites.shapes[name])
            for name in local:
                del site_values[name]
            split = _split_noise(site_values, local, sites.shapes, self._shapes)
            try:
                with unchanged_on_error(lambda: fixed().values()):
                    output = run(*split, inputs, partial(self._within, local, rows))
                    if local:
                        _check_rows(output, len(split[0]), rows)
                        self._check_first_dim(rows, inputs)
            except _NotLocalError as error:
                layer, reason = error.args
                self._call_reasons[layer] = reason
            else:
                break
        unwarned = {
            site: reason for site, reason in reasons.items() if site not in self._warned_sites
        }
        if unwarned:
            named = "; ".join(f"{site}: {reason}" for site, reason in unwarned.items())
            warn(
                f"local reparameterization: these parameters are drawn for all rows at once: {named}"
            )
            self._warned_sites |= unwarned.keys()
        return output

    def _check_first_dim(self, rows: int, inputs: Arguments) -> None:
        """Raise a _NotLocalError unless one more row of inputs gives one more row of outputs; look only once."""
        if self._has_checked_rows:
            return
        self._has_checked_rows = True

        def longer(tensor: Tensor) -> Tensor:
            size = (rows + 1, *tensor.shape[1:]) if tensor.shape[:1] == (rows,) else tensor.shape
            return torch.empty(size, dtype=tensor.dtype, device="meta")

        try:
            # On the meta device: computes shapes only, without random numbers.
            args, kwargs = tree_map_only(Tensor, longer, inputs)
            output = copy.deepcopy(self._skeleton).eval()(*args, **kwargs)
        except Exception:
            # A network that reads values or has a fixed number of rows cannot tell.
            return
        _check_rows(output, 0, rows + 1)

    def _reasons_of(self, sites: Iterable[str]) -> dict[str, str]:
        """Return, by site, why its parameter must be drawn in this call."""
        for name, module in self._skeleton.named_modules():
            if isinstance(module, BATCH_NORMS) and (module.training or module.running_mean is None):
                return dict.fromkeys(sites, f"batch norm '{name}' in train mode mixes rows")
        for_all = self._call_reasons.get("", "")
        reasons = {}
        for site in sites:
            layer = site.rpartition(".")[0]
            reason = self._reasons.get(site) or self._call_reasons.get(layer, for_all)
            if reason:
                reasons[site] = reason
        return reasons

    @contextmanager
    def _within(
        self, noises: Mapping[str, UnitNoise], rows: int, tensors: dict[str, Tensor]
    ) -> Iterator[None]:
        """Let the layers of undrawn parameters compute with noise during a call on ``rows`` rows.

        ``tensors`` also has the tensors of the noises, which are removed. A _NotLocalError from
        the call means that the network uses a parameter in another way.
        """
        parameters: dict[str, Parameter] = dict(tensors)
        for site, noise in noises.items():
            loc = tensors.pop(f"{site}.loc")
            scale = tensors.pop(f"{site}.scale")
            parameters[site] = replace(noise, loc=loc, scale=scale)
            tensors[site] = _ParameterStandIn.of(
                site, self._skeleton.get_parameter(site), loc.dtype
            )
        tensors.pop("", None)
        # Tied parameters have one site, with the first name.
        named = (*self._skeleton.named_parameters(), *self._skeleton.named_buffers())
        names = {id(tensor): name for name, tensor in named}
        calls = []
        for name in dict.fromkeys(site.rpartition(".")[0] for site in noises):
            layer: Any = self._skeleton.get_submodule(name)
            weight = parameters.get(names[id(layer.weight)])
            bias = parameters.get(names[id(layer.bias)]) if layer.bias is not None else None
            call = _Call(name, layer, rows, weight, bias)
            calls.append(call)
            # A function: copying the network would copy a method together with its object.
            layer.forward = lambda input, call=call: call.output(input)
        try:
            yield
        finally:
            for call in calls:
                call.is_over = True
                del call.layer.forward


@dataclass
class _Call:
    """One call of a network, at one of its layers."""

    name: str
    layer: Any
    rows: int
    weight: Parameter
    bias: Parameter
    is_called: bool = False
    is_over: bool = False

    def output(self, input: Tensor) -> Tensor:
        # With activation checkpointing a layer runs again in the backward pass, when the call is over.
        if self.is_called and not self.is_over:
            raise _NotLocalError(self.name, "its layer is called more than once")
        self.is_called = True
        if is_differentiated(input):
            raise _NotLocalError(
                self.name,
                "its input is differentiated, and noise for each row has another gradient",
            )
        dims = LAYERS[type(self.layer)]
        expected = input.dim() >= 2 if dims == 1 else input.dim() == dims
        if not expected or len(input) != self.rows:
            raise _NotLocalError(
                self.name,
                f"its layer's input, {list(input.shape)}, has no row for each of {self.rows} rows",
            )
        return noisy_output(self.layer, input, self.weight, self.bias)


class _ParameterStandIn(Tensor):
    """Stands in for a layer's parameter; any use of it outside the layer raises a _NotLocalError.

    Reading its dtype is allowed, because adapters of `peft` do so.
    """

    site: str
    drawn_dtype: torch.dtype

    @classmethod
    def of(cls, site: str, parameter: Tensor, drawn_dtype: torch.dtype) -> "_ParameterStandIn":
        stand_in = parameter.detach().as_subclass(cls)
        stand_in.site = site
        stand_in.drawn_dtype = drawn_dtype
        return stand_in

    @classmethod
    def __torch_function__(
        cls,
        func: object,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        stand_in = next((arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, cls)), None)
        if stand_in is not None and func == DTYPE_OF:
            return stand_in.drawn_dtype
        layer = "" if stand_in is None else stand_in.site.rpartition(".")[0]
        raise _NotLocalError(layer, "it is used outside of its layer")


def _find_reasons(skeleton: nn.Module) -> dict[str, str]:
    """Return, by site, why its parameter must be drawn in every call; other parameters may stay undrawn."""
    names: dict[int, list[str]] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    reasons = {}
    for site, *tied_names in names.values():
        layer, _, leaf = site.rpartition(".")
        module = skeleton.get_submodule(layer)
        if type(module) not in LAYERS or leaf not in PARAMETERS or "forward" in vars(module):
            reasons[site] = f"{type(module).__name__} has no local reparameterization"
        elif any(leaf_name in vars(module) for leaf_name in PARAMETERS):
            reasons[site] = (
                "its layer has a weight or bias that is neither a parameter nor a buffer"
            )
        elif tied_names:
            reasons[site] = f"it is the same as {tied_names[0]}"
    return reasons


def _first_tensor(nested: object) -> Tensor | None:
    return next((leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)), None)


def _check_rows(output: object, draws: int, rows: int) -> None:
    """Raise a _NotLocalError unless a network's output has a row for each row of its input."""
    output_tensor = _first_tensor(output)
    if output_tensor is None or output_tensor.shape[draws : draws + 1] != (rows,):
        raise _NotLocalError("", "the network's output has no row for each row of its input")


def _split_noise(
    values: Mapping[str, Tensor],
    noises: Mapping[str, UnitNoise],
    site_shapes: Mapping[str, torch.Size],
    shapes: Mapping[str, torch.Size],
) -> tuple[tuple[int, ...], dict[str, Tensor], dict[str, Tensor]]:
    """Split draws as :func:`~pyro_radial.nn.functional_net.split_draws` does, where some sites have noise and no value.

    ``site_shapes`` are the shapes that their values would have. Their noises are among the tensors, as ``site.loc`` and
    ``site.scale``. Since draws may share these, a tensor of N elements under the empty name counts the draws.
    """
    tensors = dict(values)
    tensor_shapes = dict(shapes)
    lead: tuple[int, ...] = ()
    for name, noise in noises.items():
        shape = shapes[name]
        sizes = site_shapes[name][: len(site_shapes[name]) - len(shape)]
        lead = tuple(size for size in sizes if size != 1) or lead
        for field in NOISE_FIELDS:
            tensor = getattr(noise, field)
            if tensor.shape != shape:
                tensor = tensor.expand(site_shapes[name])
            tensors[f"{name}.{field}"] = tensor
            tensor_shapes[f"{name}.{field}"] = shape
    if lead:
        tensors[""] = next(iter(noises.values())).loc.new_zeros(lead)
        tensor_shapes[""] = torch.Size()
    return split_draws(tensors, tensor_shapes)


class ParameterSites(Messenger):
    """Marks the sites of a network's parameters, and collects noise and shapes of those that a guide left undrawn."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._values: dict[str, Tensor] = {}
        self.noises: dict[str, UnitNoise] = {}
        self.shapes: dict[str, torch.Size] = {}

    def _pyro_sample(self, msg: Message) -> None:
        if msg["name"] in self._names:
            msg["infer"] = {**msg["infer"], PARAMETER: True}

    def _pyro_post_sample(self, msg: Message) -> None:
        name = msg["name"]
        noise = msg["infer"].get(NOISE)
        if noise is not None and name in self._names:
            self.noises[name] = noise
            self.shapes[name] = msg["fn"].shape()
            self._values[name] = msg["value"]

    def check(self, values: dict[str, Tensor]) -> None:
        """Raise a ValueError naming an undrawn site from which the prior computes a parameter."""
        for name, value in self._values.items():
            if values[name] is not value:
                raise ValueError(
                    f"local_reparameterization: prior must return the value of site {name!r} as it is, "
                    "got one that is computed from it, which needs a draw"
                )


class AskForLocalReparameterization(Messenger):
    """Asks guides for local reparameterization in calls of a model with targets.

    ``asks`` is a function from the arguments of a call to whether it asks, ``is_asking`` whether the current call does.
    """

    def __init__(self, asks: Callable[..., bool], is_asking: bool) -> None:
        super().__init__()
        self._asks = asks
        self._is_asking = is_asking
        self._asked_sites: set[str] = set()

    def _pyro_sample(self, msg: Message) -> None:
        if msg["infer"].get(PARAMETER):
            msg["infer"] = {**msg["infer"], ASKS: self._asks}
            self._asked_sites.add(msg["name"])

    def _pyro_post_sample(self, msg: Message) -> None:
        # A guide's site brings its own ``infer``; without a guide the model's is still there.
        infer = msg["infer"]
        if (
            self._is_asking
            and msg["name"] in self._asked_sites
            and ASKS not in infer
            and NOISE not in infer
        ):
            raise ValueError(
                f"guide must leave site {msg['name']!r} undrawn under local_reparameterization=True, "
                "got a draw; take a guide of this library, or wrap your own guide as "
                "local_reparameterization(guide, sites=...) if its sites are normal or radial"
            )

    def check(self, sites: Collection[str]) -> None:
        """Raise a ValueError naming a parameter that has no site of its own."""
        missing = [name for name in sites if name not in self._asked_sites]
        if missing:
            raise ValueError(
                f"prior must have site {missing[0]!r} for local_reparameterization=True, "
                "got one that computes the parameter from other sites"
            )
