# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of a guide as one plain module, to serve them."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyro_radial._pyro.checks import check_choice, positive_count
from pyro_radial._pyro.compat import tree_leaves, tree_map
from pyro_radial._pyro.random_numbers import one_at_a_time, seeded
from pyro_radial._pyro.types import Batch, Guide, Model
from pyro_radial.infer.data import as_inputs, move, num_rows, take
from pyro_radial.infer.prediction.guide_draws import GuideDraws, check_global, check_sites
from pyro_radial.infer.prediction.prediction import (
    are_identical,
    make_prediction,
    warn_if_identical,
)
from pyro_radial.nn.fixed_tensors import place_below
from pyro_radial.nn.functional_net import FEW_ROWS, Arguments, FunctionalNet, loop
from pyro_radial.nn.likelihoods import full_precision
from pyro_radial.nn.modules import device_of, dtype_of, evaluating
from pyro_radial.nn.named_likelihoods import NamedLikelihoods
from pyro_radial.nn.supervised import ModelNetwork, for_likelihood, inputs_of, network_of

# Many rows of these take up to seven times as long under vmap as in a loop on a CPU, few rows a fifth to a half.
SLOW_UNDER_VMAP = (nn.Conv1d, nn.Conv2d)


class SampledNetwork(nn.Module):
    """Keep S draws of a network's parameters as one plain module, to serve a trained posterior.

    A call returns what the network returns with a first dim of S; see :attr:`batching` for how draws run. The draws are
    those of :func:`~pyro_radial.predict` with the same random seed, but no Pyro runs in a call. Any number of threads
    may call the module at once, and it goes through :func:`torch.compile` and :func:`torch.export.export`; the exported
    program needs neither this library nor Pyro. With an open number of rows it runs draws one after another, since most
    layers fix that number under vmap; for ``export(strict=True)``, set ``batching = "loop"`` yourself. ``nn.LSTM`` and
    the like can be exported, but not compiled.

    All tensors are buffers: the random parameters in ``draws``, ``[S, *shape]``; the rest of the network in ``shared``;
    the noise of the likelihood in ``noise``, ``[S, 1, ...]``. They are copies: training the model further does not
    change them. A ``state_dict`` loads into another SampledNetwork of the same model, S and guide. The network computes
    in evaluation mode, whatever mode this module is in.

    :param model: a :class:`~pyro_radial.SupervisedModel` of a :class:`~pyro_radial.BayesianModule`, also under a
        :class:`~pyro_radial.PriorChain` or :func:`~pyro_radial.poutine.swap_prior`; or a ``BayesianModule``.
    :param guide: its trained guide; random parameters that it leaves out are drawn from the model's priors.
    :param int num_samples: the number of draws, S.
    :param int chunk_size: the number of draws in one ``vmap``, which bounds the memory of a call.
    :param x: a row or two of inputs, for a guide that takes inputs.
    :raises ValueError: for another model, a number below one, an autoguide without parameters, a guide with sites
        inside a plate, or with sites of another model.

    Example::

        >>> import torch
        >>> from pyro_radial import AutoRadial, BayesianModule, SupervisedModel
        >>> from pyro_radial.nn import likelihoods
        >>> model = SupervisedModel(BayesianModule(nn.Linear(4, 3)), likelihoods.Categorical(num_data=100))
        >>> guide = AutoRadial(model)
        >>> guide.setup(torch.randn(2, 4), torch.tensor([0, 2]))
        >>> served = SampledNetwork(model, guide, num_samples=8)
        >>> x = torch.randn(5, 4)
        >>> served(x).shape, served.predict(x).mean.shape
        (torch.Size([8, 5, 3]), torch.Size([5, 3]))
        >>> rows = torch.export.Dim("rows", min=2)
        >>> exported = torch.export.export(served, (x,), dynamic_shapes={"args": ({0: rows},)})
        >>> torch.allclose(exported.module()(x[:2]), served(x[:2]), atol=1e-6)
        True
    """

    @torch.no_grad()
    def __init__(
        self,
        model: Callable[..., object],
        guide: Callable[..., object],
        num_samples: int = 64,
        chunk_size: int = 8,
        *,
        x: Any = None,
    ) -> None:
        super().__init__()
        self.num_samples = positive_count("num_samples", num_samples)
        self.chunk_size = positive_count("chunk_size", chunk_size)
        network = network_of(model)
        # In a tuple, so that it is not a submodule with parameters.
        self._likelihood = (network.likelihood,)
        args: tuple[Batch, ...] = ()
        if x is not None:
            args = (move(as_inputs(x, "x", dtype_of(guide, model)), device_of(guide, model)),)
        draws, noise, idle = _draw_parameters(model, guide, network, num_samples, args)
        # Not a submodule, since calls use the buffers. Each thread takes its own copy, since a call changes it.
        self._functional = network.bnn.computation()
        self._unused: list[FunctionalNet] = []
        self._are_few_rows_batched = False
        for layer in self._functional.skeleton.modules():
            if isinstance(layer, SLOW_UNDER_VMAP) and network.bnn.device.type == "cpu":
                self.batching = "loop"
                self._are_few_rows_batched = True
            if isinstance(layer, nn.TransformerEncoderLayer):
                # A compiler does not see that the fast path is off, but it sees that a layer with a hook has none.
                layer.register_forward_pre_hook(_no_change)
        saved = {*draws, *noise, *idle, *network.bnn.net.state_dict()}
        self.draws = _as_buffers(draws, saved)
        self.shared = _as_buffers({**network.bnn.fixed_tensors(), **idle}, saved)
        self.noise = _as_buffers(noise, saved)
        # The network computes in this mode, and an export asks for it.
        self.eval()

    @property
    def likelihood(self) -> Any:
        """The likelihood of the model, or None."""
        return self._likelihood[0]

    @property
    def batching(self) -> str:
        """How draws run: together by ``"vmap"``, or one after another in a ``"loop"``.

        It starts as ``"loop"`` where vmap cannot batch the network, and on a CPU for ``nn.Conv1d`` and ``nn.Conv2d``,
        which are slower under vmap with many rows; calls with at most eight rows still run under vmap there. You may
        set it for all calls, for example after a move to another device.
        """
        return self._functional.batching

    @batching.setter
    def batching(self, batching: str) -> None:
        check_choice("batching", batching, ("vmap", "loop"))
        self._functional.batching = batching
        self._are_few_rows_batched = False
        self._unused.clear()

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Call the network for every draw.

        :param args: the network's inputs.
        :param kwargs: inputs by name.
        :returns: what the network returns, with tensors of shape ``[S, ...]``.
        """
        drawn = _buffers_of(self.draws)
        shared = _buffers_of(self.shared)
        size, run = self.chunk_size, self._run_eager
        if torch.compiler.is_compiling():
            run = self._run_traced
        elif _has_few_rows((args, kwargs)):
            size = self.num_samples
        outputs = []
        for start in range(0, self.num_samples, size):
            some = slice(start, start + size)
            chunk = {name: tensor[some] for name, tensor in drawn.items()}
            outputs.append(run(shared, chunk, args, kwargs))
        return tree_map(
            lambda *chunks: torch.cat(chunks) if isinstance(chunks[0], Tensor) else chunks[0],
            *outputs,
        )

    @torch.no_grad()
    def predict(self, x: Any, chunk_size: int = 1024) -> Any:
        """Evaluate the draws at any number of inputs, as :func:`~pyro_radial.predict` does.

        :param x: inputs; see :func:`~pyro_radial.predict`.
        :param int chunk_size: the number of inputs in one pass, which bounds the memory of a pass.
        :returns: a prediction with ``samples`` of shape ``[S, N, ...]``, or a dict of such for named outputs.
        :raises ValueError: for NaN or infinity in x, a number below one, or a network whose output is not one tensor
            with a row for each input, or named outputs with likelihoods.
        """
        x = as_inputs(x, "x", dtype_of(self))
        positive_count("chunk_size", chunk_size)
        number = num_rows(x)
        samples: Any = None
        for start in range(0, number, chunk_size):
            rows = slice(start, min(start + chunk_size, number))
            args, kwargs = inputs_of(move(take(x, rows), device_of(self)))
            values = for_likelihood(self(*args, **kwargs), self.likelihood)
            named = isinstance(self.likelihood, NamedLikelihoods)
            for output in self.likelihood.function_values(values).values() if named else (values,):
                if not isinstance(output, Tensor) or output.shape[1:2] != (rows.stop - start,):
                    got = (
                        tuple(output.shape[1:])
                        if isinstance(output, Tensor)
                        else type(output).__name__
                    )
                    raise ValueError(
                        f"the network must return a tensor with a row for each of {rows.stop - start} inputs, got {got}"
                    )
            values = tree_map(full_precision, values)
            if samples is None:
                samples = tree_map(
                    lambda v: v.new_empty(self.num_samples, number, *v.shape[2:]), values
                )
            tree_map(lambda sample, v: sample[:, rows].copy_(v), samples, values)  # noqa: B023
        warn_if_identical(samples, lambda: all(map(are_identical, self.draws.buffers())))
        return make_prediction(samples, self.likelihood, _buffers_of(self.noise))

    def extra_repr(self) -> str:
        """Return the number of draws, for printing."""
        return f"num_samples={self.num_samples}, chunk_size={self.chunk_size}"

    def _run_eager(
        self,
        shared: dict[str, Tensor],
        drawn: dict[str, Tensor],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> Any:
        """Run some draws on a copy of the network that no other thread uses."""
        try:
            functional = self._unused.pop()
        except IndexError:
            functional = copy.deepcopy(self._functional)
        is_batched = self._are_few_rows_batched and _has_few_rows((args, kwargs))
        functional.batching = "vmap" if is_batched else self._functional.batching
        try:
            return functional.many(shared, drawn, Arguments(args, kwargs))
        finally:
            if functional.batching == "loop":
                self._functional.batching = "loop"
                self._are_few_rows_batched &= not is_batched
            self._unused.append(functional)

    def _run_traced(
        self,
        shared: dict[str, Tensor],
        drawn: dict[str, Tensor],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> Any:
        """Run some draws for a compiler."""
        skeleton = self._functional.skeleton

        def output_of(draw: Mapping[str, Tensor]) -> object:
            return functional_call(skeleton, {**shared, **draw}, args, kwargs)

        # Fused attention has no batching rule, and a compiler cannot follow the switch of its fast path.
        attends = any(isinstance(module, nn.MultiheadAttention) for module in skeleton.modules())
        # Most batching rules turn an open number of rows into the number of the example.
        if self.batching == "vmap" and not attends and not _has_open_size((args, kwargs)):
            with sdpa_kernel(SDPBackend.MATH):
                return vmap(output_of, randomness="different")(drawn)
        return loop(output_of, drawn)


def _draw_parameters(
    model: Model,
    guide: Guide,
    network: ModelNetwork,
    num_samples: int,
    args: tuple[Batch, ...],
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return all draws of the parameters in use and of the noise, ``[S, ...]``, and the values of idle parameters."""
    guide_draws = GuideDraws(guide)
    device = device_of(guide, model)
    in_use = set(network.bnn.sites_in_use)
    draws: dict[str, Tensor] = {}
    noise: dict[str, Tensor] = {}
    idle: dict[str, Tensor] = {}
    number = 0
    while number < num_samples:
        # In the order of predict, so that the same seed gives the same draws.
        with one_at_a_time(), evaluating(model, guide):
            block = guide_draws.block(num_samples - number, *args)
            check_global(
                block.sites, "guide must be of the network alone", "draws that belong to their rows"
            )
            for index, seed in enumerate(block.seeds):
                drawn = block.trace(index)
                with seeded(seed, device):
                    draw = network.draw(drawn)
                if number == 0:
                    check_sites(drawn, draw.trace)
                    for name, value in draw.parameters.items():
                        if name in in_use:
                            draws[name] = value.new_empty(num_samples, *value.shape)
                        else:
                            idle[name] = value.clone()
                    for name, value in draw.noise.items():
                        noise[name] = value.new_empty(num_samples, *value.shape)
                for stack, values in ((draws, draw.parameters), (noise, draw.noise)):
                    for name, tensor in stack.items():
                        tensor[number] = values[name]
                number += 1
    return draws, noise, idle


def _has_few_rows(inputs: object) -> bool:
    """Return whether the first tensor among a network's inputs has few rows; False while torch.jit traces."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf) <= FEW_ROWS
    return False


def _has_open_size(inputs: object) -> bool:
    """Return whether a size of a tensor is open while a compiler traces."""
    for tensor in tree_leaves(inputs):
        if isinstance(tensor, Tensor) and any(isinstance(n, torch.SymInt) for n in tensor.shape):
            return True
    return False


def _as_buffers(tensors: Mapping[str, Tensor], saved: set[str]) -> nn.Module:
    """Make modules nested by the tensors' names that hold them as buffers."""
    root = nn.Module()
    for name, tensor in tensors.items():
        owner, leaf = place_below(root, name)
        owner.register_buffer(leaf, tensor, persistent=name in saved)
    return root


def _buffers_of(root: nn.Module) -> dict[str, Tensor]:
    return dict(root.named_buffers(remove_duplicate=False))


def _no_change(layer: nn.Module, args: object) -> None:
    """Do nothing, as a hook of a layer."""
