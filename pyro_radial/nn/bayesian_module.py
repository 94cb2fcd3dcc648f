# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A plain network as a Pyro model: chosen parameters become sample sites."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import pyro
import torch
from pyro import poutine
from pyro.nn import pyro_method
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor, nn

from pyro_radial._pyro.naming import UniquelyNamed
from pyro_radial.distributions.wrappers import copy_wrappers
from pyro_radial.nn.fixed_tensors import FixedTensors, copy_tensor
from pyro_radial.nn.functional_net import (
    Arguments,
    FunctionalNet,
    Within,
    split_draws,
    unflatten,
)
from pyro_radial.nn.local.local_layers import LocalLayers, ParameterSites
from pyro_radial.nn.priors.normal import FanIn
from pyro_radial.nn.site_priors import (
    ParameterPrior,
    Select,
    check_net,
    select_parameters,
    site_priors,
)

Kind = TypeVar("Kind", bound=nn.Module)
DEFAULT_PRIOR = FanIn(3.0)


class BayesianModule(UniquelyNamed):
    """Make a plain network a Pyro model whose parameters are random.

    Each selected parameter of ``net`` is a sample site of the same name. A call samples all sites and then runs the
    network, so ``bnn(x)`` belongs *outside* a plate over data. ``net`` itself is read once and never changed: this
    module owns and trains copies of everything that is not random.

    The values of sites may have draws as leading dims, from vectorized particles or ``Predictive(parallel=True)``.
    Each output then has shape ``[*draws, *output.shape]``, as if the network had been called once per draw. One
    :func:`torch.func.vmap` runs all draws; networks that it cannot batch (``nn.LSTM``, ``nn.GRU``, ``nn.RNN``) run in a
    loop (see :attr:`batching`). In train mode only calls with a single draw update the running statistics of batch
    norm layers.

    A network may have a method ``uses_parameter(name) -> bool``. A parameter for which it returns False makes no site
    in a call and keeps its first value (see :class:`~pyro_radial.nn.MultiHead`).

    :param nn.Module net: a plain network; lazy layers must have run once.
    :param prior: the prior of the random parameters; by default
        :class:`FanIn(3.0) <pyro_radial.nn.priors.FanIn>`, a standard deviation of 3 over the root of a layer's inputs.
        Or one of

        - a distribution: shape ``()`` is expanded to each parameter, any other shape, ``batch_shape + event_shape``,
          must be the parameter's; it follows the parameter's dtype and device;
        - a mapping from site names to distributions, or a function of (name, parameter) that returns one;
        - an object with ``sample_parameter(name, parameter) -> tensor`` that makes its own sites (see
          :class:`~pyro_radial.nn.priors.RadialDirectionalPrior`); a module is registered here and trained.
    :param select: which parameters are random: a function of (name, parameter), a regular expression searched in the
        name, or None for all but frozen parameters and those of normalization layers.
    :raises ValueError: naming the argument or the site, for a prior or selection that does not fit the network.

    Example::

        >>> import pyro.distributions as dist
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> bnn = BayesianModule(net, prior=dist.Normal(0.0, 1.0))
        >>> bnn.sites
        ('0.weight', '0.bias', '2.weight', '2.bias')
        >>> with pyro.plate("draws", 4, dim=-1):
        ...     bnn(torch.zeros(5, 3)).shape
        torch.Size([4, 5, 2])
    """

    def __init__(self, net: nn.Module, prior: Any = DEFAULT_PRIOR, select: Select = None) -> None:
        super().__init__()
        check_net(net)
        selected = select_parameters(net, select)
        # The random parameters: the network's own values, where a guide may start, and their shapes. The values follow
        # .to() and are not part of the state.
        self._initial = {name: copy_tensor(parameter) for name, parameter in selected.items()}
        self._shapes = {name: parameter.shape for name, parameter in selected.items()}
        # The network: what it computes, with drawn parameters or with noise in their place, and its other tensors.
        self._functional = FunctionalNet(net)
        self._local = LocalLayers(self._functional.skeleton, self._shapes)
        random_ids = set(map(id, selected.values()))
        for original, module in zip(net.modules(), self.skeleton.modules(), strict=True):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                # A draw has a gradient in all its elements.
                module.sparse = module.sparse and id(original.weight) not in random_ids
        self._fixed = FixedTensors(net, self._shapes)
        self.net = self._fixed.root
        # A module becomes a submodule here, so its parameters are trained and known to Pyro.
        self.prior: Any = prior
        # The distribution of each parameter, or None for a prior that makes its own sites.
        self._site_priors: dict[str, Any] | None = None
        if not isinstance(prior, ParameterPrior):
            self._site_priors = site_priors(prior, self._initial)
        elif hasattr(prior, "setup"):
            prior.setup(self._initial.items())
        self.training = net.training

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "prior" and "_site_priors" in vars(self):
            raise AttributeError(
                "prior cannot be set; make a new BayesianModule(net, prior=...), or use swap_prior"
            )
        super().__setattr__(name, value)

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of the random parameters, in the network's order."""
        return tuple(self._shapes)

    @property
    def sites_in_use(self) -> tuple[str, ...]:
        """The names of the random parameters that the network uses now, and a call samples."""
        return tuple(filter(self._in_use, self._shapes))

    @property
    def skeleton(self) -> nn.Module:
        """The modules of the network, without tensors of their own; each has its own train or eval mode."""
        return self._functional.skeleton

    @property
    def device(self) -> torch.device:
        """The device of the random parameters."""
        return next(iter(self._initial.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first random parameter."""
        return next(iter(self._initial.values())).dtype

    @property
    def batching(self) -> str:
        """How several draws run: ``"vmap"``, or ``"loop"`` if vmap cannot batch the network."""
        return self._functional.batching

    @pyro_method
    def sample_parameters(self) -> dict[str, Tensor]:
        """Sample the random parameters; each site carries the network's value as ``infer["initial_value"]``.

        :returns: values ``[*draws, *parameter.shape]`` of all :attr:`sites` by name; the first value of a parameter
            that the network does not use.
        """
        return {
            name: self._sample(name) if self._in_use(name) else initial
            for name, initial in self._initial.items()
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Sample the parameters and call the network.

        :returns: the network's output, with the draws as leading dims.
        :raises ValueError: naming the site, for a value of another shape or with other draws than other sites.
        """
        self.check_store()
        with ParameterSites(self._shapes) as sites:
            values = self.sample_parameters()
        if sites.noises:
            sites.check(values)
            return self._local.output(
                self._output, self._fixed.untrained, values, sites, Arguments(args, kwargs)
            )
        return self.at(values, *args, **kwargs)

    @pyro_method
    def at(self, parameters: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        """Call the network at given values of the random parameters.

        :param Mapping parameters: values ``[*draws, *parameter.shape]`` by site; others have the network's first value.
        :returns: the network's output, with the draws as leading dims.
        :raises ValueError: naming the site, for a value of another shape.
        """
        draws = split_draws({**self._initial, **parameters}, self._shapes)
        return self._output(*draws, Arguments(args, kwargs))

    def one_value_each(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a value of each parameter's own shape: the given one, or the network's first value.

        Leading dims of size one are dropped; several draws raise a ValueError.
        """
        draws, shared, _ = split_draws(parameters, self._shapes)
        if draws:
            raise ValueError(
                f"parameters must have one value for each site, got draws of shape {draws}"
            )
        return {**self._initial, **shared}

    @property
    def has_plain_sites(self) -> bool:
        """Whether the value of a parameter's site is the parameter: the prior is a distribution for each site."""
        return self._site_priors is not None

    def _output(
        self,
        draws: tuple[int, ...],
        shared: dict[str, Tensor],
        drawn: dict[str, Tensor],
        inputs: Arguments,
        within: Within = nullcontext,
    ) -> Any:
        """Call the network with the values that :func:`split_draws` returns.

        :param within: makes the context of the call from the network's tensors; see :meth:`FunctionalNet.single`.
        """
        tensors = {**self._fixed.trained(), **self._fixed.untrained(), **shared}
        if draws:
            return unflatten(self._functional.many(tensors, drawn, inputs, within), draws)
        output = self._functional.single(tensors, inputs, within)
        self._fixed.keep_new_buffers(tensors)
        return output

    @pyro_method
    def to_module(self, draw: Mapping[str, Tensor]) -> nn.Module:
        """Make a plain network for one draw of the parameters, with copies of everything, in the current mode.

        :param Mapping draw: a value for each site in use, as ``guide()`` or ``guide.median()`` returns; for a prior
            that makes its own sites, values of these. Leading dims of size one are dropped, other entries ignored.
        :returns: a network of the same class as the one given.
        :raises ValueError: naming the site that is missing or has several draws.

        Example::

            >>> bnn = BayesianModule(nn.Linear(3, 1))
            >>> plain = bnn.to_module(bnn.sample_parameters())
            >>> type(plain).__name__, plain.weight.requires_grad
            ('Linear', True)
        """
        tensors = self.fixed_tensors()
        with torch.no_grad(), poutine.block():
            for name in self._shapes:
                tensors[name] = copy_tensor(self._value_in(name, draw))
        frozen = self._fixed.untrained()
        for name, _ in self.skeleton.named_parameters():
            tensors[name] = nn.Parameter(tensors[name], requires_grad=name not in frozen)
        net = self._functional.module(tensors)
        for module in net.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
        return net

    def computation(self) -> FunctionalNet:
        """Copy the network's computation, in evaluation mode."""
        functional = copy.deepcopy(self._functional)
        functional.skeleton.eval()
        return functional

    @torch.no_grad()
    def fixed_tensors(self) -> dict[str, Tensor]:
        """Copy the tensors that are not random, by name: trained parameters, frozen ones and buffers."""
        with poutine.block():
            tensors = {**self._fixed.trained(), **self._fixed.untrained()}
        return {name: copy_tensor(tensor) for name, tensor in tensors.items()}

    def train(self, mode: bool = True) -> "BayesianModule":
        """Set train or eval mode for this module and the network's computation."""
        super().train(mode)
        self.skeleton.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "BayesianModule":
        super()._apply(fn, recurse)
        self._initial = {name: fn(value) for name, value in self._initial.items()}
        if self._site_priors is not None:
            self._site_priors = site_priors(self.prior, self._initial)
        return self

    def _in_use(self, name: str) -> bool:
        uses_parameter = getattr(self.skeleton, "uses_parameter", None)
        return uses_parameter is None or bool(uses_parameter(name))

    def _sample(self, name: str) -> Tensor:
        initial = self._initial[name]
        if self._site_priors is None:
            return self.prior.sample_parameter(name, initial)
        # A copy, because some distributions of Pyro change themselves when a plate expands them.
        prior = copy_wrappers(self._site_priors[name])
        return pyro.sample(name, prior, infer={"initial_value": initial})  # type: ignore[arg-type]

    def _value_in(self, name: str, draw: Mapping[str, Tensor]) -> Tensor:
        """Return the value of a parameter in a draw, of the parameter's shape; one not in use keeps its first value."""
        value: Any = draw.get(name, self._initial[name])
        if name not in draw and self._in_use(name):
            # A prior may compute it from sites of other names.
            trace = poutine.trace(poutine.condition(self._sample, data=dict(draw))).get_trace(name)
            missing = prune_subsample_sites(trace).stochastic_nodes
            if missing:
                needs = "" if missing == [name] else f", which {name!r} needs"
                raise ValueError(
                    f"draw must hold a value for site {missing[0]!r}{needs}, got values for {list(draw)}"
                )
            value = trace.nodes["_RETURN"]["value"]
        shape = self._shapes[name]
        if value.numel() != shape.numel() or value.shape[value.dim() - len(shape) :] != shape:
            raise ValueError(
                f"draw must hold one value of site {name!r}, of shape {tuple(shape)}, got shape {tuple(value.shape)}"
            )
        return value.reshape(shape)


def check_fixed(
    bnn: BayesianModule, argument: str, tensors: Mapping[str, Tensor], sites: Collection[str] = ()
) -> None:
    """Raise a ValueError for tensors that the module's network lacks, or holds with other values.

    :param str argument: the name of the argument that holds the tensors, for the error.
    :param sites: names of sites, which may be among the tensors with any value.
    """
    fixed_tensors = bnn.fixed_tensors()
    network_names = bnn.skeleton.state_dict()
    differing = []
    for name, tensor in tensors.items():
        is_equal = name in network_names
        if name in fixed_tensors:
            is_equal = torch.equal(fixed_tensors[name], tensor.to(fixed_tensors[name]))
        if name not in sites and not is_equal:
            differing.append(name)
    if differing:
        raise ValueError(
            f"{argument} must have the buffers and fixed parameters that BayesianModule(net) has "
            f"copied, got other values of {differing}: make the model from the trained network"
        )


def submodules(*modules: object) -> Iterator[nn.Module]:
    """Yield all modules below these, parents first, among them the hidden networks of Bayesian modules."""
    for module in modules:
        if isinstance(module, nn.Module):
            for submodule in module.modules():
                yield submodule
                if isinstance(submodule, BayesianModule):
                    yield from submodule.skeleton.modules()


def modules_of(kind: type[Kind], *modules: object) -> list[Kind]:
    """Return the modules of a class among :func:`submodules`."""
    return [module for module in submodules(*modules) if isinstance(module, kind)]
