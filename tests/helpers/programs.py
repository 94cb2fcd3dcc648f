# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Pyro programs of many kinds, and what their steps give: with Pyro's ``SVI``, or with ``CompiledSVI``."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.contrib.gp.kernels import RBF
from pyro.distributions.transforms import iterated, planar
from pyro.infer import (
    ELBO,
    SVI,
    EnergyDistance,
    RenyiELBO,
    ReweightedWakeSleep,
    Trace_ELBO,
    Trace_MMD,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    TraceTailAdaptive_ELBO,
    TraceTMC_ELBO,
)
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal, AutoNormalizingFlow
from pyro.nn import PyroModule
from torch import Tensor, nn

from benchmarks.guides._examples.program import Program, evaluated
from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    AutoRadialDirectional,
    BayesianModule,
    CompiledSVI,
    FunctionalELBO,
    PriorChain,
    SupervisedModel,
    TermsELBO,
)
from pyro_radial.functional import GaussianKL, GaussianProcess, SteinKL, UniformBox
from pyro_radial.infer.compiler.cache import Graphs
from pyro_radial.infer.step.evaluation import Mode
from pyro_radial.nn import likelihoods
from tests.helpers import local_reparameterization
from tests.helpers.networks import WithForce

ROWS, NUM_DATA = 16, 100
X, Y = torch.linspace(-1.0, 1.0, 20), torch.linspace(-2.0, 3.0, 20)
#: With a little momentum, the optimizer's state is the gradient, and what is left of those before.
SMALL_STEPS = {"lr": 1e-4, "momentum": 0.1}


class ResidualNet(nn.Module):
    """Two convolutions with batch norm, the second around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, channels, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(channels)
        self.last = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        """The logits ``[B, 3]`` of images ``[B, 1, H, W]``."""
        hidden = torch.relu(self.first_norm(self.first(x)))
        hidden = torch.relu(hidden + self.second_norm(self.second(hidden)))
        logits: Tensor = self.last(hidden.mean((-1, -2)))
        return logits


class Attention(nn.Module):
    """A transformer's layer over three tokens of four numbers, with dropout."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(5, 12)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.layer(self.lift(x).unflatten(-1, (3, 4))).flatten(1))


class CallCounter(nn.Module):
    """A layer that assigns a buffer at each call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.linear(x)


def mlp(outputs: int = 3) -> nn.Module:
    """One hidden layer on five inputs."""
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, outputs))


def labels() -> tuple[Tensor, Tensor]:
    """Inputs and classes."""
    return torch.randn(ROWS, 5), torch.randint(3, (ROWS,))


def classifier(make_guide: Callable[..., Any], loss: ELBO, make_net: Any = None) -> Program:
    """A network with three classes; recording takes time for each operation, so it has one layer."""
    model = SupervisedModel(
        BayesianModule(nn.Linear(5, 3) if make_net is None else make_net()), likelihoods.Categorical(num_data=NUM_DATA)
    )
    return Program(model, make_guide(model), loss, labels())


def in_double() -> Program:
    """A network in double precision."""
    model, guide, loss, (x, y) = classifier(AutoRadial, TermsELBO())
    return Program(model.double(), guide, loss, (x.double(), y))


def residual() -> Program:
    """Convolutions, and batch norm in train mode."""
    model = SupervisedModel(BayesianModule(ResidualNet(2)), likelihoods.Categorical(num_data=NUM_DATA))
    return Program(model, AutoRadial(model), TermsELBO(), (torch.randn(ROWS, 1, 6, 6), torch.randint(3, (ROWS,))))


def regression(make_guide: Callable[..., Any], loss: ELBO, net: Any = None) -> Program:
    """A network with one output, under noise of which nothing is known."""
    model = SupervisedModel(BayesianModule(net or nn.Linear(5, 1)), likelihoods.Gaussian(num_data=NUM_DATA))
    x = torch.randn(ROWS, 5)
    return Program(model, make_guide(model), loss, (x, x[:, :1].sin()))


def forces() -> Program:
    """A network whose second output is the gradient of the first by its input."""
    observed = {"energy": likelihoods.Gaussian(scale=0.1), "force": likelihoods.Gaussian(scale=0.2)}
    net = WithForce(nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)))
    model = SupervisedModel(BayesianModule(net), observed)
    x = torch.linspace(-1.0, 1.0, 10).reshape(5, 2)
    return Program(model, AutoMeanField(model), TermsELBO(), (x, {"energy": x[:, :1], "force": x.cos()}))


def local_noise() -> Program:
    """A network with noise for each row in the place of weights."""
    model = local_reparameterization.regression()
    guide = local_reparameterization.GUIDES["radial rows"](model)
    return Program(model, guide, TermsELBO(strict_kl=True), (local_reparameterization.X, local_reparameterization.Y))


def chain(form: Any) -> Program:
    """The second task of a chain."""
    model, _, _, args = classifier(AutoRadial, TermsELBO())
    priors = chained(model, form, args)
    return Program(priors, priors.guide(AutoRadial), TermsELBO(strict_kl=True), args)


def chained(model: Any, form: Any, args: tuple[Tensor, ...]) -> PriorChain:
    """A model whose prior is a posterior with means and scales of its own."""
    priors = PriorChain(model, form=form)
    first = AutoRadial(priors, init_stddev=0.05)
    first.setup(*args)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    priors.advance(first)
    return priors


def regression_with_temperature(x: Tensor, y: Tensor) -> None:
    """Written by hand: a parameter of the model's own, and a plate that subsamples."""
    temperature = pyro.param("temperature", torch.tensor(0.5), constraint=dist.constraints.positive)
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([5, 3]).to_event(2))
    with pyro.plate("data", len(x), subsample_size=len(x) // 2) as rows:
        pyro.sample("y", dist.Categorical(logits=(x[rows] @ w) / temperature), obs=y[rows])


def by_hand() -> Program:
    """The same with Pyro's guide and loss."""
    return Program(regression_with_temperature, AutoNormal(regression_with_temperature), Trace_ELBO(), labels())


def functional(divergence: Any, guide: Any) -> Program:
    """A prior on functions."""
    process = GaussianProcess(lambda a, b: torch.exp(-0.5 * torch.cdist(a, b).square()))
    box = UniformBox([-2.0] * 5, [2.0] * 5, num_points=6)
    # A normal distribution of functions needs more weights than points.
    return regression(guide, FunctionalELBO(process, box, divergence=divergence, num_functions=60), mlp(1))


def function_around_a_network() -> Program:
    """A network with batch norm in a model that is a function under a handler, in which it must be found."""
    net = BayesianModule(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)))

    def model(x, y):
        logits = net(x)
        with pyro.plate("data", 40, subsample=torch.arange(len(x))):
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    return Program(pyro.poutine.scale(model, scale=0.5), AutoRadial(model), TermsELBO(), labels())


def line(x, y):
    """A line with two weights."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(w[..., 0] * x + w[..., 1], 0.5), obs=y)


def nothing(*args):
    """A guide of a model without latent sites."""


def of_loss(make_loss: Callable[[], Any]) -> Program:
    """The line under a loss of Pyro's."""
    return Program(line, AutoMeanField(line), make_loss(), (X, Y))


def of_model(model: Any, guide: Any = AutoMeanField, *args: Tensor) -> Program:
    """A model of a line under Pyro's loss."""
    return Program(model, guide if guide is nothing else guide(model), Trace_ELBO(), args or (X, Y))


class Tied(PyroModule):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = PyroModule[nn.Linear](1, 1), PyroModule[nn.Linear](1, 1)
        self.b.weight = self.a.weight

    def forward(self, x, y):
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(self.b(torch.tanh(self.a(x[:, None])))[:, 0], 1.0), obs=y)


class StoredParameter(nn.Module):
    """Decipher of scvi-tools keeps the value of a parameter so."""

    def forward(self, x):
        self.theta = pyro.param("theta", torch.ones(()), constraint=dist.constraints.positive)
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(w, self.theta), obs=x)


def mixture(x):
    """Two components around one location, which are summed over."""
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        which = pyro.sample("which", dist.Categorical(torch.tensor([0.3, 0.7])), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(torch.stack([loc, -loc])[which], 1.0), obs=x)


def enumerated() -> Program:
    """A sum over discrete sites."""
    guide = AutoNormal(pyro.poutine.block(mixture, hide=["which"]))
    return Program(mixture, guide, TraceEnum_ELBO(max_plate_nesting=1), (X,))


def gamma(x):
    """The gradient of a power of a draw has a closed form."""
    scale = pyro.sample("scale", dist.InverseGamma(2.0, 2.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(0.0, scale), obs=x)


def guide_of_gamma(x):
    """Its guide."""
    rate = pyro.param("rate", torch.ones(()), constraint=dist.constraints.positive)
    pyro.sample("scale", dist.InverseGamma(2.0, rate))


def summed_parameters(x):
    """Two parameters whose gradients share memory, each by a sum that repeats one number."""
    a, b = pyro.param("a", torch.zeros(3)), pyro.param("b", torch.zeros(3))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal((a + b).sum(), 1.0), obs=x)


PARTICLES = {"num_particles": 3, "vectorize_particles": True, "max_plate_nesting": 1}

#: Programs that are graphs.
PROGRAMS: dict[str, Callable[[], Program]] = {
    "AutoRadial, TermsELBO": partial(classifier, AutoRadial, TermsELBO(strict_kl=True), mlp),
    "AutoNormal, TraceMeanField_ELBO": partial(classifier, AutoNormal, TraceMeanField_ELBO()),
    "AutoMultivariateNormal, Trace_ELBO": partial(classifier, AutoMultivariateNormal, Trace_ELBO()),
    "AutoRadialDirectional": partial(classifier, AutoRadialDirectional, TermsELBO()),
    "two particles, looped": partial(classifier, AutoRadial, TermsELBO(2)),
    "four particles, vectorized": partial(classifier, AutoRadial, TermsELBO(4, vectorize_particles=True)),
    "double precision": in_double,
    "residual net with batch norm": residual,
    "attention with dropout": partial(classifier, AutoRadial, TermsELBO(), Attention),
    "assigned buffer": partial(classifier, AutoRadial, TermsELBO(), CallCounter),
    "function around a network": function_around_a_network,
    "learned noise": partial(regression, AutoRadial, TermsELBO()),
    "gradient by the input": forces,
    "local reparameterization": local_noise,
    "pyro.param and subsampling": by_hand,
    "PriorChain, normal": partial(chain, "normal"),
    "PriorChain, exact": partial(chain, "exact"),
    "FunctionalELBO": partial(functional, None, AutoRadial),
    "FunctionalELBO, SteinKL": partial(functional, SteinKL(), AutoRadial),
    "FunctionalELBO, GaussianKL": partial(functional, GaussianKL(), AutoMultivariateNormal),
    "TraceEnum_ELBO": enumerated,
    "TraceGraph_ELBO": partial(of_loss, partial(TraceGraph_ELBO, num_particles=2)),
    "TraceTMC_ELBO": partial(of_loss, partial(TraceTMC_ELBO, max_plate_nesting=1)),
    "TraceTailAdaptive_ELBO": partial(of_loss, partial(TraceTailAdaptive_ELBO, **PARTICLES)),
    "Trace_MMD": partial(of_loss, partial(Trace_MMD, kernel=RBF(1), num_particles=2, max_plate_nesting=1)),
    "EnergyDistance": partial(of_loss, partial(EnergyDistance, num_particles=2, max_plate_nesting=2)),
    "retain_graph": partial(of_loss, partial(Trace_ELBO, retain_graph=True)),
    "function as a loss": partial(of_loss, lambda: lambda *args: Trace_ELBO().differentiable_loss(*args)),
    "tied weights": lambda: of_model(Tied(), nothing),
    "planar flow": partial(of_model, line, lambda model: AutoNormalizingFlow(model, partial(iterated, 2, planar))),
    "attribute set to a parameter": lambda: of_model(StoredParameter(), AutoMeanField, X),
    "power of a draw": lambda: Program(gamma, guide_of_gamma, TraceMeanField_ELBO(), (X,)),
    "gradients in one memory": partial(of_model, summed_parameters, nothing, X + 1.0),
}
#: Losses that compute their gradients themselves, so their programs run as they are.
EAGER_LOSSES: dict[str, Callable[[], Program]] = {
    "RenyiELBO": partial(of_loss, partial(RenyiELBO, alpha=0.5, **PARTICLES)),
    "ReweightedWakeSleep": partial(of_loss, partial(ReweightedWakeSleep, **PARTICLES)),
}


def prepared(make: Callable[[], Program]) -> Program:
    """A program in the same state at every call: its parameters exist, and noise starts from one seed."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    program = make()
    # Some losses find the nesting of plates in their first run.
    eager_svi(program).loss_and_grads(program.model, program.guide, *program.args)
    for tensor in (*parameter_names(program), *tensors_in(program.args)):
        tensor.grad = None
    pyro.set_rng_seed(1)
    return program


def eager_svi(program: Program) -> SVI:
    """Pyro's steps."""
    return SVI(program.model, program.guide, pyro.optim.SGD(SMALL_STEPS), program.loss)


def compiled_svi(program: Program, *, compile: bool = True) -> CompiledSVI:
    """Our steps, with an optimizer that a CUDA graph can run."""
    optim = partial(torch.optim.SGD, fused=True, **SMALL_STEPS)
    return CompiledSVI(program.model, program.guide, optim, program.loss, compile=compile)


def recorded_svi(program: Program) -> CompiledSVI:
    """Our steps on graphs as they are recorded."""
    return compiled_svi(program, compile=False)


def parameter_names(program: Program) -> dict[Tensor, str]:
    """The parameters of Pyro's store, and those of modules that it does not know."""
    # Guides of one class have names of their own in the store.
    stored = pyro.get_param_store().named_parameters()
    named = {parameter: re.sub(r"_[0-9]+", "", name) for name, parameter in stored}
    for module in (program.model, program.guide):
        if isinstance(module, nn.Module):
            for name, parameter in module.named_parameters():
                named.setdefault(parameter, name)
    return named


def tensors_in(args: tuple[Any, ...]) -> list[Tensor]:
    """The arguments that are tensors."""
    return [argument for argument in args if isinstance(argument, Tensor)]


def outcome(svi: Any, program: Program, loss: Any) -> dict[str, Tensor]:
    """What a step leaves: the loss and its terms, the gradients, buffers, and the state of torch's generator."""
    outcome = {"loss": torch.as_tensor([float(part) for part in (loss if isinstance(loss, tuple) else (loss,))])}
    names = parameter_names(program)
    trained: dict[Tensor, Any] = {}
    for optimizer in svi.optim.optim_objs.values() if isinstance(svi, SVI) else [svi.optimizer]:
        trained |= optimizer.state
    for parameter, state in trained.items():
        outcome[f"gradient of {names[parameter]}"] = state["momentum_buffer"].clone()
    # The optimizer does not train these, so their gradients are the user's.
    names |= dict.fromkeys(tensors_in(program.args), "an argument")
    for tensor in names.keys() - trained.keys():
        if tensor.grad is not None:
            outcome[f"gradient left at {names[tensor]}"] = tensor.grad.clone()
    if isinstance(program.model, nn.Module):
        for name, buffer in program.model.named_buffers():
            outcome[f"buffer {name}"] = buffer.clone()
    if isinstance(program.loss, TermsELBO):
        terms = program.loss.terms
        for kind in ("nll_by_site", "kl_by_site"):
            for site, value in getattr(terms, kind).items():
                outcome[f"{kind} {site}"] = torch.as_tensor(value).clone()
    return outcome | {"state of the generator": torch.get_rng_state()}


def take_steps(svi: Any, program: Program, number: int = 6) -> list[dict[str, Tensor]]:
    """The outcomes of steps, each on the noise after the one before."""
    return [outcome(svi, program, svi.step(*program.args)) for _ in range(number)]


def assert_same_steps(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]], tolerance: float = 1e-4):
    """Compare each number of each step, relative to its norm, or to a part of the largest one."""
    assert len(found) == len(expected)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True), 1):
        assert ours.keys() == theirs.keys(), (step, ours.keys() ^ theirs.keys())
        assert torch.equal(ours.pop("state of the generator"), theirs["state of the generator"]), step
        norms = {name: float(value.double().norm()) for name, value in theirs.items() if name in ours}
        least = 1e-3 * max(filter(math.isfinite, norms.values()))
        for name, value in ours.items():
            same = (value == theirs[name]) | (value.isnan() & theirs[name].isnan())
            error = float((value.double() - theirs[name].double()).masked_fill(same, 0.0).norm())
            assert error <= tolerance * max(norms[name], least), (step, name, error, norms[name])


class Graphed:
    """A loss by graphs, as a function of the arguments: returns it, and each parameter with its gradient."""

    def __init__(self, model, guide, loss, *, compile_now=False, **settings):
        self.model, self.guide, self.loss = model, guide, loss
        self.graphs = Graphs(**settings)
        self.graphs.compile_now = compile_now
        self.latest = None

    def __call__(self, args, kwargs=None, *, gradients=True):
        assert not kwargs
        self.latest = evaluated(Program(self.model, self.guide, self.loss, args), self.graphs, gradients=gradients)
        return self.latest.loss, self.latest.parameters_with_gradients()

    @property
    def programs(self):
        return self.graphs.programs

    @property
    def eager_reasons(self):
        return self.graphs.eager_reasons

    @property
    def parameters(self):
        return self.latest.parameters

    @property
    def replayed(self):
        return self.latest.mode != Mode.AS_IT_IS
