# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Take one training step of a multilayer perceptron with each library."""

import importlib.util
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pyro
import torch
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from benchmarks.uncertainty._lenet import lenet
from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    BayesianModule,
    CompiledSVI,
    SupervisedModel,
    TermsELBO,
)
from pyro_radial.nn import likelihoods

NUM_DATA = 60_000
INPUTS, CLASSES = 784, 10
STDDEV = 0.01

Step = Callable[[], Any]


class Problem(NamedTuple):
    """The hidden layers, the rows of a batch, and how many draws of the weights a step takes."""

    hidden: tuple[int, ...] = (200, 200, 200, 200)
    batch: int = 32
    particles: int = 1
    device: str = "cpu"
    #: Whether the network is the LeNet of :mod:`benchmarks.uncertainty._lenet`, on images.
    lenet: bool = False

    @property
    def sizes(self) -> list[int]:
        """Units from the inputs to the classes."""
        return [INPUTS, *self.hidden, CLASSES]

    def data(self) -> tuple[Tensor, Tensor]:
        """One batch."""
        torch.manual_seed(0)
        shape = (self.batch, 1, 28, 28) if self.lenet else (self.batch, INPUTS)
        return torch.randn(shape, device=self.device), torch.randint(CLASSES, (self.batch,), device=self.device)

    def network(self, linear: Callable[[int, int], nn.Module] = nn.Linear) -> nn.Sequential:
        """Layers of this kind with rectifiers between them."""
        if self.lenet:
            return lenet(0.0).to(self.device)
        layers = [layer for i, o in pairwise(self.sizes) for layer in (linear(i, o), nn.ReLU())]
        return nn.Sequential(*layers[:-1]).to(self.device)


def num_weights(problem: Problem) -> int:
    """Random weights, biases among them."""
    return sum((i + 1) * o for i, o in pairwise(problem.sizes))


def plain(problem: Problem, fused: bool) -> Step:
    """A deterministic network: forward, backward, Adam."""
    x, y = problem.data()
    net = problem.network()
    return _with_adam(net.parameters(), lambda: F.cross_entropy(net(x), y), fused)


def radial_loop(problem: Problem, fused: bool) -> Step:
    """A radial posterior written out for this network, with the closed KL to a standard normal."""
    x, y = problem.data()
    locs = [p.detach().clone().requires_grad_() for p in problem.network().parameters()]
    rhos = [torch.full_like(p, math.log(math.expm1(STDDEV))).requires_grad_() for p in locs]

    def loss() -> Tensor:
        kl, draws = torch.zeros((), device=problem.device), []
        for loc, rho in zip(locs, rhos, strict=True):
            scale, noise = F.softplus(rho), torch.randn_like(loc)
            draws.append(loc + scale * noise * (torch.randn((), device=problem.device).abs() / noise.norm()))
            kl = kl - scale.log().sum() + 0.5 * ((scale.square() / loc.numel()).sum() + loc.square().sum())
        hidden = x
        for weight, bias in zip(draws[:-2:2], draws[1:-2:2], strict=True):
            hidden = F.relu(F.linear(hidden, weight, bias))
        return NUM_DATA * F.cross_entropy(F.linear(hidden, draws[-2], draws[-1]), y) + kl

    return _with_adam([*locs, *rhos], loss, fused)


def torchbnn(problem: Problem, fused: bool) -> Step:
    """Of torchbnn."""
    import torchbnn

    x, y = problem.data()
    net = problem.network(lambda i, o: torchbnn.BayesLinear(0, 1.0, i, o))
    kl = torchbnn.BKLLoss(reduction="sum", last_layer_only=False)
    return _with_adam(net.parameters(), lambda: NUM_DATA * F.cross_entropy(net(x), y) + kl(net), fused)


def bayesian_torch(problem: Problem, fused: bool) -> Step:
    """Of bayesian-torch."""
    from bayesian_torch.layers import LinearReparameterization

    x, y = problem.data()
    net = problem.network(LinearReparameterization)

    def loss() -> Tensor:
        hidden, kl = x, torch.zeros((), device=problem.device)
        for layer in net:
            if isinstance(layer, nn.ReLU):
                hidden = layer(hidden)
            else:
                hidden, own = layer(hidden)
                kl = kl + own
        return NUM_DATA * F.cross_entropy(hidden, y) + kl

    return _with_adam(net.parameters(), loss, fused)


def blitz(problem: Problem, fused: bool) -> Step:
    """Of blitz."""
    from blitz.modules import BayesianLinear
    from blitz.utils import variational_estimator

    x, y = problem.data()
    make = variational_estimator(nn.Sequential)
    net = make(*problem.network(lambda i, o: BayesianLinear(i, o, prior_sigma_1=1.0))).to(problem.device)

    def loss() -> Tensor:
        value: Tensor = net.sample_elbo(x, y, F.cross_entropy, 1, complexity_cost_weight=1.0 / NUM_DATA)
        return value

    return _with_adam(net.parameters(), loss, fused)


def posteriors(problem: Problem, fused: bool) -> Step:
    """Of posteriors, whose optimizers are torchopt's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import posteriors as library
        import torchopt

    batch = problem.data()
    net = problem.network()

    def log_posterior(parameters: Any, batch: Any) -> tuple[Tensor, Tensor]:
        output = torch.func.functional_call(net, parameters, (batch[0],))
        prior = library.diag_normal_log_prob(parameters, normalize=False)
        return -F.cross_entropy(output, batch[1]) + prior / NUM_DATA, torch.tensor([])

    transform = library.vi.diag.build(
        log_posterior,
        torchopt.adam(lr=1e-3),
        temperature=1.0 / NUM_DATA,
        n_samples=problem.particles,
        init_log_sds=math.log(STDDEV),
    )
    state = transform.init({name: p.detach() for name, p in net.named_parameters()})

    def step() -> None:
        nonlocal state
        state, _ = transform.update(state, batch)

    return step


def _adam() -> Any:
    return pyro.optim.Adam({"lr": 1e-3})


def svi(
    problem: Problem,
    guide: Any,
    kind: Any = SVI,
    loss: Any = TraceMeanField_ELBO,
    noise: Any = "weights",
    optim: Callable[[], Any] = _adam,
) -> Step:
    """Pyro's SVI, or ours, by default with Pyro's Adam."""
    x, y = problem.data()
    made = _made(problem, guide, kind, loss, noise, optim)
    return lambda: made.step(x, y)


def _made(problem: Problem, guide: Any, kind: Any, loss: Any, noise: Any, optim: Any) -> Any:
    pyro.clear_param_store()
    model = _model(problem, noise)
    elbo = loss(num_particles=problem.particles, vectorize_particles=problem.particles > 1)
    made = kind(model, guide(model), optim(), elbo)
    if isinstance(made, CompiledSVI):
        made.graphs.compile_now = True
    return made


def bytes_per_weight(problem: Problem) -> float:
    """What a radial posterior, its gradients and its optimizer hold between two steps."""
    made = _made(problem, AutoRadial, RECORDED, TermsELBO, "weights", _adam)
    for _ in range(3):
        made.step(*problem.data())
    optimizer: Any = made.optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = [value for own in optimizer.state.values() for value in own.values() if isinstance(value, Tensor)]
    held = {t.data_ptr(): t.nbytes for t in (*parameters, *(p.grad for p in parameters if p.grad is not None), *state)}
    return sum(held.values()) / num_weights(problem)


def eager(problem: Problem, guide: Any) -> Step:
    """The loss as a module, and one fused Adam, as ``fit`` takes its steps."""
    x, y = problem.data()
    pyro.clear_param_store()
    model = _model(problem)
    elbo = TermsELBO(problem.particles, vectorize_particles=problem.particles > 1, strict_kl=True)
    module = elbo(model, guide(model))
    module(x, y)
    return _with_adam(module.parameters(), lambda: module(x, y), True)


def _model(problem: Problem, noise: Any = "weights") -> SupervisedModel:
    bnn = BayesianModule(problem.network())
    return SupervisedModel(
        bnn, likelihoods.Categorical(num_data=NUM_DATA), local_reparameterization=noise == "local"
    ).to(problem.device)


def _with_adam(parameters: Any, loss: Callable[[], Tensor], fused: bool) -> Step:
    optimizer = Adam(parameters, lr=1e-3, fused=fused)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def available(names: Sequence[str]) -> list[str]:
    """Those that can run here; a line says what is missing for the others."""
    found = []
    for name in names:
        library = MODULES.get(name.split(",")[0])
        if library is None or importlib.util.find_spec(library) is not None:
            found.append(name)
        else:
            print(f"{name}: skipped, since it is not installed")
    return found


RECORDED = partial(CompiledSVI, compile=False)
PLAIN = "plain"
MODULES = {
    "torchbnn": "torchbnn",
    "bayesian-torch": "bayesian_torch",
    "blitz": "blitz",
    "posteriors": "posteriors",
}
#: The step of each, by name: a function of the problem.
CONTENDERS: dict[str, Callable[[Problem], Step]] = {
    PLAIN: partial(plain, fused=False),
    "plain, fused Adam": partial(plain, fused=True),
    "radial, written by hand": partial(radial_loop, fused=False),
    "radial, written by hand, fused Adam": partial(radial_loop, fused=True),
    "torchbnn": partial(torchbnn, fused=False),
    "torchbnn, fused Adam": partial(torchbnn, fused=True),
    "bayesian-torch": partial(bayesian_torch, fused=False),
    "bayesian-torch, fused Adam": partial(bayesian_torch, fused=True),
    "blitz": partial(blitz, fused=False),
    "blitz, fused Adam": partial(blitz, fused=True),
    "posteriors": partial(posteriors, fused=False),
    "Pyro's AutoNormal": partial(svi, guide=AutoNormal),
    "AutoRadial, SVI": partial(svi, guide=AutoRadial),
    "AutoRadial, eager": partial(eager, guide=AutoRadial),
    "AutoRadial, recorded": partial(svi, guide=AutoRadial, kind=RECORDED, loss=TermsELBO),
    "AutoRadial, compiled": partial(svi, guide=AutoRadial, kind=CompiledSVI, loss=TermsELBO),
    "AutoRadial, local noise, compiled": partial(
        svi, guide=AutoRadial, kind=CompiledSVI, loss=TermsELBO, noise="local"
    ),
    "AutoMeanField, SVI": partial(svi, guide=AutoMeanField),
    "AutoMeanField, eager": partial(eager, guide=AutoMeanField),
    "AutoMeanField, compiled": partial(svi, guide=AutoMeanField, kind=CompiledSVI, loss=TermsELBO),
    "AutoMeanField, local noise, compiled": partial(
        svi, guide=AutoMeanField, kind=CompiledSVI, loss=TermsELBO, noise="local"
    ),
}
#: As ``fit`` trains it: one scale for a tensor, and SGD with momentum.
ON_LENET_ALONE: dict[str, Callable[[Problem], Step]] = {
    "AutoRadial, predictive widths, compiled": partial(
        svi,
        guide=partial(AutoRadial, widths="predictive"),
        kind=CompiledSVI,
        loss=TermsELBO,
        optim=partial(pyro.optim.SGD, {"lr": 1e-6, "momentum": 0.9}),
    )
}
PEERS = [name for name in CONTENDERS if name.split(",")[0] in (*MODULES, "radial", "Pyro's AutoNormal")]
OURS = [name for name in CONTENDERS if name.startswith("Auto")]
