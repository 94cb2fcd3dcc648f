# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Draws as one plain module: the same predictions, from any thread, compiled, exported, saved and moved."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDelta
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from pyro_radial import AutoRadial, AutoRadialDirectional, BayesianModule, SupervisedModel, predict
from pyro_radial.infer import SampledNetwork
from pyro_radial.nn import MultiHead, likelihoods
from pyro_radial.nn.priors import RadialDirectionalPrior
from pyro_radial.poutine import swap_prior
from tests.helpers.devices import recent_compiler
from tests.helpers.files import through_a_file
from tests.helpers.networks import Net, adapted_encoder, encoder, is_added

ROWS, DRAWS = 6, 5
GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(ROWS, 4, generator=GENERATOR)
SEQUENCES = torch.randn(ROWS, 3, 4, generator=GENERATOR)
IMAGES = torch.randn(ROWS, 1, 6, 6, generator=GENERATOR)
IDS = torch.arange(ROWS) % 4


def attention():
    def call(net, x):
        queries = net.queries(x)[:, None]
        return net.output(scaled_dot_product_attention(queries, queries, queries)[:, 0].mean(1))

    return Net(call, queries=nn.Linear(4, 8), output=nn.Linear(8, 2))


def recurrent():
    layers = {"cell": nn.LSTM(4, 5, batch_first=True), "output": nn.Linear(5, 2)}
    return Net(lambda net, x: net.output(net.cell(x)[0][:, -1]), **layers)


class Mixed(nn.Module):
    """Two inputs, one of them ids."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(4, 3), nn.Linear(7, 2)
        self.register_buffer("shift", torch.tensor(0.5), persistent=False)

    def forward(self, ids, x):
        return self.linear(torch.cat([self.embedding(ids), x], -1)) + self.shift


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(48, 2)
    )


def heads():
    return MultiHead(nn.Linear(4, 3), [nn.Linear(3, 2), nn.Linear(3, 2)])


NETWORKS = {
    "mlp": (mlp, X),
    "batch norm and dropout": (convolutions, IMAGES),
    "heads": (heads, X),
    "inputs in order": (Mixed, (IDS, X)),
    "inputs by name": (Mixed, {"ids": IDS, "x": X}),
    "attention": (attention, SEQUENCES),
    "encoder": (encoder, SEQUENCES),
    "recurrent": (recurrent, SEQUENCES),
}
# The others run under vmap.
BATCHING = {"recurrent": "loop", "batch norm and dropout": "loop"}


def problem(net=mlp, x=X, prior=None, likelihood=None, guide=None, wrap=lambda model: model):
    pyro.set_rng_seed(0)
    likelihood = likelihood or likelihoods.Gaussian(precision_prior=dist.Gamma(6.0, 6.0))
    model = wrap(SupervisedModel(BayesianModule(net(), prior or dist.Normal(0.0, 1.0)), likelihood))
    guide = (guide or (lambda model: AutoRadial(model, init_stddev=0.3)))(model)
    categorical = isinstance(likelihood, likelihoods.Categorical)
    guide(x, torch.zeros(ROWS).long() if categorical else torch.zeros(ROWS, 2))
    return model, guide


def sampled(model, guide, seed=3, **kwargs):
    pyro.set_rng_seed(seed)
    return SampledNetwork(model, guide, DRAWS, **{"chunk_size": 2, **kwargs})


def call(module, x):
    if isinstance(x, dict):
        return module(**x)
    return module(*x) if isinstance(x, tuple) else module(x)


def assert_same_prediction(found, expected):
    """To rounding: matrices are multiplied several at a time."""
    torch.testing.assert_close(found.samples, expected.samples, rtol=1e-4, atol=1e-5)
    assert found.noise.keys() == expected.noise.keys()
    assert all(torch.equal(found.noise[name], value) for name, value in expected.noise.items())
    assert found.likelihood is expected.likelihood
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------------------- same predictions


@pytest.mark.parametrize("kind", NETWORKS)
def test_predictions_are_those_of_predict_with_the_same_seed(kind):
    net, x = NETWORKS[kind]
    model, guide = problem(net, x)
    served = sampled(model, guide)
    pyro.set_rng_seed(3)
    expected = predict(model, guide, x, DRAWS)
    assert_same_prediction(served.predict(x, chunk_size=4), expected)
    assert served.batching == BATCHING.get(kind, "vmap")
    assert call(served, x).shape == (DRAWS, ROWS, 2)
    assert float(expected.samples.std(0).min()) > 0
    assert not list(served.parameters())


def hidden(model):
    return AutoRadial(poutine.block(model, hide=["2.weight", "precision"]), init_stddev=0.3)


POSTERIORS = {
    "categorical": {"likelihood": likelihoods.Categorical()},
    "noise of each output": {"likelihood": likelihoods.Gaussian(scale=torch.tensor([0.3, 0.6]), learn_scale=True)},
    "learned noise": {"likelihood": likelihoods.Gaussian(scale=0.3, learn_scale=True)},
    "point estimate": {"guide": AutoDelta},
    "what the guide leaves out": {"guide": hidden},
    "several sites a parameter": {"prior": RadialDirectionalPrior("row"), "guide": AutoRadialDirectional},
    "swapped prior": {
        "wrap": lambda model: swap_prior(model, {"2.weight": dist.Normal(torch.full((2, 8), 9.0), 0.1).to_event(2)}),
        "guide": hidden,
    },
}


@pytest.mark.parametrize("kind", POSTERIORS)
def test_any_posterior_of_the_network_is_served(kind):
    model, guide = problem(**POSTERIORS[kind])
    served = sampled(model, guide)
    pyro.set_rng_seed(3)
    assert_same_prediction(served.predict(X), predict(model, guide, X, DRAWS))


def test_a_bayesian_module_is_served_without_a_likelihood():
    model, guide = problem()
    served = sampled(model.bnn, guide)
    assert torch.equal(served(X), sampled(model, guide)(X))
    assert served.predict(X).likelihood is None


def test_outputs_of_any_structure_have_the_draws_first():
    def call(net, x):
        return {"twice": 2 * net.linear(x), "parts": (net.linear(x), 3)}

    bnn = BayesianModule(Net(call, linear=nn.Linear(4, 2)))
    guide = AutoRadial(bnn, init_stddev=0.3)
    guide.setup(X)
    served = sampled(bnn, guide)
    outputs = served(X)
    assert torch.equal(outputs["twice"], 2 * outputs["parts"][0])
    assert outputs["parts"][0].shape == (DRAWS, ROWS, 2)
    assert outputs["parts"][1] == 3
    with pytest.raises(ValueError, match=r"the network must return a tensor with a row for each .* got dict"):
        served.predict(X)


# -------------------------------------------------------------------------------------------------- a plain module


def test_it_stays_as_it_is_while_the_model_is_trained_and_its_mode_set():
    model, guide = problem(convolutions, IMAGES)
    served = sampled(model, guide)
    before = served(IMAGES)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers(), *guide.parameters()]:
            tensor.add_(1.0 if tensor.is_floating_point() else 1)
    assert torch.equal(served.train()(IMAGES), before)
    assert torch.equal(served.eval()(IMAGES), before)


@pytest.mark.parametrize("kind", ["batch norm and dropout", "inputs in order"])
def test_a_state_dict_loads_into_another_of_the_same_structure(kind):
    net, x = NETWORKS[kind]
    model, guide = problem(net, x)
    served = sampled(model, guide)
    fresh = sampled(*problem(net, x), seed=8)
    assert not torch.equal(call(fresh, x), call(served, x))
    fresh.load_state_dict(through_a_file(served.state_dict()))
    assert torch.equal(call(fresh, x), call(served, x))
    assert torch.equal(fresh.predict(x).noise["scale"], served.predict(x).noise["scale"])
    # A buffer that the network does not save is not saved here.
    assert "shared.shift" not in served.state_dict()


# --------------------------------------------------------------------------------------------------------- threads


@pytest.mark.usefixtures("impatient_threads")
@pytest.mark.parametrize("kind", ["batch norm and dropout", "encoder", "recurrent"])
def test_eight_threads_get_the_answers_of_one(kind):
    net, x = NETWORKS[kind]
    served = sampled(*problem(net, x))
    inputs = [shifted(x, 0.1 * number) for number in range(8)]
    expected = [call(served, each) for each in inputs]
    # An LSTM's rounding depends on the thread on some processors; the inputs of threads differ by far more.
    same = partial(torch.allclose, rtol=1e-5, atol=1e-6) if kind == "recurrent" else torch.equal
    fastpath = torch.backends.mha.get_fastpath_enabled()
    barrier = threading.Barrier(8)

    def run(number):
        barrier.wait()
        with torch.no_grad():
            return [call(served, inputs[number]) for _ in range(5)], served.predict(inputs[number])

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, range(8)))
    for (calls, prediction), values in zip(results, expected, strict=True):
        assert all(same(found, values) for found in calls)
        assert same(prediction.samples, values)
    assert torch.backends.mha.get_fastpath_enabled() == fastpath
    assert served.batching == BATCHING.get(kind, "vmap")


def shifted(x, by):
    if isinstance(x, dict):
        return {name: shifted(part, by) for name, part in x.items()}
    if isinstance(x, tuple):
        return tuple(shifted(part, by) for part in x)
    return x + by if x.is_floating_point() else x


# ---------------------------------------------------------------------------------------------- compilers and export


def compiled(served, backend):
    torch.compiler.reset()
    return torch.compile(served, backend=backend, fullgraph=True)


@pytest.mark.parametrize("how", ["vmap", "compiled", "exported"])
@recent_compiler
def test_adapters_inside_the_fast_path_of_a_transformer_are_called(how):
    bnn = BayesianModule(adapted_encoder(), select=is_added)
    guide = AutoRadial(bnn, init_stddev=0.3)
    guide.setup(SEQUENCES)
    served = sampled(bnn.eval(), guide)
    added = served.draws.get_buffer("layer.linear1.added")
    # With gradients torch takes no fast path.
    expected = torch.stack([bnn.at({"layer.linear1.added": draw}, SEQUENCES) for draw in added]).detach()
    with torch.no_grad():
        run = served
        if how == "compiled":
            run = compiled(served, "aot_eager")
        elif how == "exported":
            run = torch.export.export(served, (SEQUENCES,)).module()
        torch.testing.assert_close(run(SEQUENCES), expected, rtol=1e-4, atol=1e-5)
    assert float(expected.std(0).min()) > 0


# From torch 2.15 on, a program with attention of its own warns that vmap loops over it.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", ["inputs by name", "attention", "recurrent"])
@recent_compiler
def test_the_exported_program_is_the_same(kind):
    net, x = NETWORKS[kind]
    served = sampled(*problem(net, x), chunk_size=3)
    args, kwargs = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), {})
    program = torch.export.export(served, args, kwargs)
    torch.testing.assert_close(program.module()(*args, **kwargs), call(served, x), rtol=1e-4, atol=1e-5)


LOADED = """
import sys
import torch
program = torch.export.load(sys.argv[1])
x, expected = torch.load(sys.argv[2], weights_only=True)
torch.testing.assert_close(program.module()(x), expected, rtol=1e-4, atol=1e-5)
print([name for name in sys.modules if name.partition(".")[0] in ("pyro", "pyro_radial")])
"""


@recent_compiler
def test_an_exported_file_needs_neither_us_nor_pyro(tmp_path):
    served = sampled(*problem())
    assert not any(module.training for module in served.modules())
    torch.export.save(torch.export.export(served, (X,)), tmp_path / "served.pt2")
    torch.save((X, served(X)), tmp_path / "expected.pt")
    command = [sys.executable, "-c", LOADED, str(tmp_path / "served.pt2"), str(tmp_path / "expected.pt")]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert output.strip() == "[]"


# --------------------------------------------------------------------------------------------------------- bad input


class OtherForward(SupervisedModel):
    def forward(self, x, y=None):
        return super().forward(2 * x, y)


def test_models_that_it_cannot_serve_are_named():
    model, guide = problem()
    other = OtherForward(model.bnn, model.likelihood)
    for unserved in (lambda x, y=None: None, nn.Linear(4, 2), other, nn.Sequential(model), poutine.block(model)):
        with pytest.raises(ValueError, match=r"model must be a SupervisedModel of a BayesianModule.* got"):
            SampledNetwork(unserved, guide)


def test_bad_guides_are_named():
    model, guide = problem()
    with pytest.raises(ValueError, match="guide must have its parameters, got AutoRadial"):
        SampledNetwork(model, AutoRadial(model))

    def local(*args):
        with pyro.plate("rows", 3):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match=r"guide must be of the network alone, since site 'z' .* is inside a plate"):
        SampledNetwork(model, local)
    served = sampled(model, guide)
    with pytest.raises(ValueError, match="batching must be"):
        served.batching = "both"
