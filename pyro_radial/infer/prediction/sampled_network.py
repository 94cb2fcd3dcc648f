# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws of a guide as one plain module, to serve."""

import copy
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyro_radial._pyro.checks import positive_count
from pyro_radial._pyro.compat import tree_map
from pyro_radial._pyro.one_at_a_time import one_at_a_time
from pyro_radial._pyro.random_state import seeded
from pyro_radial.infer.prediction.guide_draws import GuideDraws, check_global, check_sites
from pyro_radial.infer.prediction.prediction import Prediction
from pyro_radial.infer.training.data import as_inputs, device_of, dtype_of, evaluating, move, num_rows, take
from pyro_radial.nn.functional_net import FunctionalNet
from pyro_radial.nn.likelihood import full_precision
from pyro_radial.nn.model_network import ModelNetwork, network_of
from pyro_radial.nn.supervised import inputs_of

__all__ = ["SampledNetwork"]


class SampledNetwork(nn.Module):
    """S draws of a network's parameters, kept, as one plain module: what a trained posterior is served as.

    A call evaluates all draws, some at a time by :func:`torch.vmap`, and returns what the network returns with a first
    dim of S. The draws are those of :func:`~pyro_radial.predict` with the same random seed, and :meth:`predict` gives
    the same :class:`~pyro_radial.infer.Prediction`; but they are drawn once, and no Pyro runs in a call. So any number
    of threads may call it at once, and it goes through :func:`torch.compile` and :func:`torch.export.export`, the
    result of which needs neither this library nor Pyro. To export with the number of rows left open, as in the example,
    a network of convolutions needs ``batching = "loop"``; ``nn.LSTM`` and its like are exported, but not compiled. Both
    are tested with torch 2.13; 2.7 cannot export a ``vmap``.

    All tensors are buffers: the random parameters in ``draws``, of shape ``[S, *shape]``; what is not random, once, in
    ``shared``; the noise of the likelihood, ``[S, 1]``, in ``noise``. They follow ``to``, and the ``state_dict`` of one
    loads into another of the same model, number and guide's structure. Nothing of them is shared with the model, and
    training that goes on does not change them. The network computes in evaluation mode whatever mode this is in.

    :param model: a :class:`~pyro_radial.SupervisedModel` of a :class:`~pyro_radial.BayesianModule`, also under a
        :class:`~pyro_radial.PriorChain` or :func:`~pyro_radial.poutine.swap_prior`; or a ``BayesianModule``, which a
        model written by hand calls.
    :param guide: its trained guide; random parameters that it leaves out are drawn from the model's priors.
    :param int num_samples: how many draws, S.
    :param int chunk_size: draws in one ``vmap``, which bounds the memory of a call (chosen by
        ``benchmarks/guides/prediction_cost.py``: fewer are slower at few inputs, many more at many).
    :param x: inputs for a guide that takes any, a row or two, as :func:`~pyro_radial.predict` takes them; by default
        the guide is called without arguments.
    :raises ValueError: for another model, a number below one, an autoguide without parameters, a guide with sites
        inside a plate, or one whose sites are not the model's, as after ``use_head``.

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

    num_samples: int
    chunk_size: int

    @torch.no_grad()
    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        num_samples: int = 64,
        chunk_size: int = 8,
        *,
        x: Any = None,
    ) -> None:
        super().__init__()
        self.num_samples = positive_count("num_samples", num_samples)
        self.chunk_size = positive_count("chunk_size", chunk_size)
        network = network_of(model)
        # In a tuple, or it would be a part of this module, and what is trained in it a parameter of ours.
        self._likelihood = (network.likelihood,)
        args = () if x is None else (move(as_inputs(x, "x", dtype_of(guide, model)), device_of(guide, model)),)
        draws, noise, idle = _draw(model, guide, network, num_samples, args)
        # No modules of ours, so that a call is of tensors alone; threads have one each, since a call changes it.
        self._functional = network.bnn.computation()
        self._unused: list[FunctionalNet] = []
        saved = {*draws, *noise, *idle, *network.bnn.net.state_dict()}
        self.draws, self._draw_names = _as_buffers(draws, saved)
        self.shared, self._shared_names = _as_buffers({**network.bnn.fixed_tensors(), **idle}, saved)
        self.noise, self._noise_names = _as_buffers(noise, saved)

    @property
    def likelihood(self) -> Any:
        """What describes the observations, or None."""
        return self._likelihood[0]

    @property
    def batching(self) -> str:
        """How draws are run: ``"vmap"``, or ``"loop"`` where the network cannot be batched; may be set."""
        return self._functional.batching

    @batching.setter
    def batching(self, batching: str) -> None:
        if batching not in ("vmap", "loop"):
            raise ValueError(f'batching must be "vmap" or "loop", got {batching!r}')
        self._functional.batching = batching
        self._unused.clear()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network for every draw.

        :param args: the network's inputs.
        :param kwargs: those given by name.
        :returns: what the network returns, with tensors of shape ``[S, ...]``.
        """
        drawn, shared = _tensors(self.draws, self._draw_names), _tensors(self.shared, self._shared_names)
        run = self._traced if torch.compiler.is_compiling() else self._eager
        outputs = []
        for start in range(0, self.num_samples, self.chunk_size):
            chunk = {name: tensor[start : start + self.chunk_size] for name, tensor in drawn.items()}
            outputs.append(run(shared, chunk, args, kwargs))
        return tree_map(_joined, *outputs)

    @torch.no_grad()
    def predict(self, x: Any, chunk_size: int = 1024) -> Prediction:
        """The draws at any number of inputs, as :func:`~pyro_radial.predict` gives them.

        :param x: inputs ``[N, ...]``, a tuple or a dict of tensors of N rows each, arrays of NumPy, or a ``Dataset``
            or ``DataLoader`` of such.
        :param int chunk_size: inputs in one pass, which bounds the memory of a pass.
        :returns: a :class:`~pyro_radial.infer.Prediction` with samples ``[S, N, ...]``.
        :raises ValueError: for NaN or infinity in x, a number below one, or a network whose output is not one tensor
            with a row for each input.
        """
        x = as_inputs(x, "x", dtype_of(self))
        positive_count("chunk_size", chunk_size)
        number, samples = num_rows(x), None
        for start in range(0, number, chunk_size):
            rows = slice(start, min(start + chunk_size, number))
            args, kwargs = inputs_of(move(take(x, rows), device_of(self)))
            values = self(*args, **kwargs)
            if not isinstance(values, Tensor) or values.shape[1:2] != (rows.stop - start,):
                got = tuple(values.shape[1:]) if isinstance(values, Tensor) else type(values).__name__
                raise ValueError(
                    f"the network must return a tensor with a row for each of {rows.stop - start} inputs, got {got}"
                )
            values = full_precision(values)
            if samples is None:
                samples = values.new_empty(self.num_samples, number, *values.shape[2:])
            samples[:, rows] = values
        assert samples is not None
        return Prediction(samples, self.likelihood, dict(_tensors(self.noise, self._noise_names)))

    def extra_repr(self) -> str:
        """The number of draws, for printing."""
        return f"num_samples={self.num_samples}, chunk_size={self.chunk_size}"

    def _eager(self, shared: Any, drawn: Any, args: Any, kwargs: Any) -> Any:
        try:
            functional = self._unused.pop()
        except IndexError:
            functional = copy.deepcopy(self._functional)
        try:
            return functional.many(shared, drawn, args, kwargs)
        finally:
            if functional.batching == "loop":
                self._functional.batching = "loop"
            self._unused.append(functional)

    def _traced(self, shared: Any, drawn: Any, args: Any, kwargs: Any) -> Any:
        """The same in words that a compiler follows."""
        skeleton = self._functional.skeleton

        def one(draw: Mapping[str, Tensor]) -> Any:
            return functional_call(skeleton, {**shared, **draw}, args, kwargs)

        # The fused paths of attention have no batching rule; a compiler follows the switch of one of them alone.
        attends = any(isinstance(module, nn.MultiheadAttention) for module in skeleton.modules())
        if self.batching == "vmap" and not attends:
            with sdpa_kernel(SDPBackend.MATH):
                return vmap(one, randomness="different")(drawn)
        number = len(next(iter(drawn.values())))
        outputs = [one({name: tensor[index] for name, tensor in drawn.items()}) for index in range(number)]
        return tree_map(_stacked, *outputs)


def _draw(
    model: Any, guide: Any, network: ModelNetwork, num_samples: int, args: tuple[Any, ...]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """All draws of the parameters in use, and of the noise, ``[S, ...]``; and the values of idle parameters."""
    guide_draws = GuideDraws(guide)
    device = device_of(guide, model)
    in_use = set(network.bnn.sites_in_use)
    draws: dict[str, Tensor] = {}
    noise: dict[str, Tensor] = {}
    idle: dict[str, Tensor] = {}
    for number in range(num_samples):
        # In the order of predict, so that the same seed gives the same draws.
        with one_at_a_time(), evaluating(model, guide):
            drawn = guide_draws.draw(*args)
            check_global(drawn, "guide must be of the network alone", "draws that belong to their rows")
            with seeded(int(torch.randint(2**62, ())), device):
                draw = network.draw(drawn)
        if number == 0:
            check_sites(drawn, draw.trace)
            idle = {name: value.clone() for name, value in draw.parameters.items() if name not in in_use}
            kept = {name: value for name, value in draw.parameters.items() if name in in_use}
            draws = {name: value.new_empty(num_samples, *value.shape) for name, value in kept.items()}
            noise = {name: value.new_empty(num_samples, *value.shape) for name, value in draw.noise.items()}
        for stack, values in ((draws, draw.parameters), (noise, draw.noise)):
            for name, tensor in stack.items():
                tensor[number] = values[name]
    return draws, noise, idle


def _as_buffers(tensors: Mapping[str, Tensor], saved: set[str]) -> tuple[nn.Module, tuple[str, ...]]:
    """Modules nested as the names are, that hold the tensors as buffers, and the names."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_buffer(leaf, tensor, persistent=name in saved)
    return root, tuple(tensors)


def _tensors(root: nn.Module, names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: attrgetter(name)(root) for name in names}


def _joined(*leaves: Any) -> Any:
    return torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]


def _stacked(*leaves: Any) -> Any:
    return torch.stack(leaves) if isinstance(leaves[0], Tensor) else leaves[0]
