# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Everything on a pretend accelerator gives what it gives on the CPU; ``test_devices.py`` runs this file.

See :mod:`tests.devices.pretend` for what the device cannot see. With ``PYRO_RADIAL_DEVICE=cuda`` the device is a GPU
that draws the CPU's random numbers.
"""

import copy
import functools
import inspect
import os
import warnings
from contextlib import nullcontext
from functools import partial

import pyro
import pyro.infer
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, TraceMeanField_ELBO
from torch import Tensor, nn
from torch.distributions import kl_divergence

from pyro_radial import (
    AutoRadial,
    BayesianModule,
    FitOptions,
    PriorChain,
    SupervisedModel,
    TermsELBO,
    diagnose,
    fit,
    predict,
)
from pyro_radial.compression import mean_network, prune
from pyro_radial.continual import Coreset, train_stream
from pyro_radial.distributions.moments import center
from pyro_radial.distributions.wrappers import to_like
from pyro_radial.infer import SampledNetwork, last_layer_laplace
from pyro_radial.nn import MultiHead, likelihoods
from pyro_radial.poutine import local_reparameterization
from pyro_radial.sklearn import BayesianRegressor
from pyro_radial.testing.guides import constrained_model
from tests.devices import host_noise, pretend
from tests.golden.programs import all_programs, run
from tests.helpers.runs import run_on
from tests.tables import DISTRIBUTIONS, GUIDES
from tutorials.streams import class_split_stream

GPU = os.environ.get("PYRO_RADIAL_DEVICE") == "cuda"
(host_noise if GPU else pretend).start()
CPU, DEVICE = torch.device("cpu"), torch.device("cuda" if GPU else pretend.NAME, 0)
ROWS = 12
ADAM = partial(torch.optim.Adam, lr=0.01)
FIT = {"epochs": 2, "batch_size": 6, "optim": ADAM, "seed": 3, "progress": False}


# On a GPU, operators of the library draw by the GPU's own generator, and eigenvectors have other signs.
DRAWN_ELSEWHERE = {
    *("RadialNormalMatrix", "RadialNormalPerRow", "RadialNormalPair", "VonMisesFisherToUniform"),
    *("VonMisesFisherCircle", "VonMisesFisherVector", "AutoRadial-exact", "AutoRadialPerRowMixed-exact"),
    *("last_layer_laplace", "last_layer_laplace, kronecker"),
}


@pytest.fixture(autouse=True)
def comparable(request):
    if GPU and request.node.name.partition("[")[2].removesuffix("]") in DRAWN_ELSEWHERE:
        pytest.skip("draws other numbers on a GPU")


def tensors_in(value):
    """All tensors and numbers of a nested value, as tensors."""
    if isinstance(value, dict):
        value = [part for name, part in value.items() if not name.endswith("extra_state")]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [value if isinstance(value, Tensor) else torch.as_tensor(value)]


def assert_same(case, rtol=1e-4, atol=1e-5):
    """A function of a device gives the same numbers on both devices, and tensors of that device."""
    outcomes = []
    for device in (CPU, DEVICE):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        with host_noise.HostNoise() if GPU else nullcontext():
            found = tensors_in(case(device))
        assert {tensor.device for tensor in found if tensor.dim()} <= {device}
        outcomes.append([tensor.detach().cpu().double() for tensor in found])
    assert outcomes[0]
    for expected, got in zip(*outcomes, strict=True):
        # Tensors of equal values may have other strides, and so sums of another order.
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def on_both_devices(case):
    """Make a test of a function of a device, and of further arguments."""

    @functools.wraps(case)
    def test(**arguments):
        assert_same(partial(case, **arguments))

    signature = inspect.signature(case)
    test.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return test


def regression_data(device, outputs=2):
    x = torch.randn(ROWS, 3)
    return x.to(device), torch.randn(ROWS, outputs).to(device)


def data(device):
    x = torch.randn(ROWS, 3)
    return x.to(device), (x[:, 0] > 0).long().to(device)


def mlp(outputs=2):
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs))


def classifier(device, net=None, **kwargs):
    net = mlp() if net is None else net
    return SupervisedModel(BayesianModule(net, **kwargs), likelihoods.Categorical(num_data=ROWS)).to(device)


def values(*modules):
    return [module.state_dict() for module in modules]


def steps(model, guide, loss, *args, number=2):
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss)
    return [svi.step(*args) for _ in range(number)]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name):
    row = DISTRIBUTIONS[name]

    def moved(distribution, device):
        return to_like(distribution, torch.zeros((), device=device))

    def case(device):
        q, p = (make and moved(make(torch.float32), device) for make in (row.make, row.kl_to))
        found = [q.sample(), q.log_prob(q.sample((3,))), q.mean, q.variance, q.expand((2, *q.batch_shape)).sample()]
        found += [kl_divergence(q, p)] if p is not None else []
        return found + ([q.rsample()] if q.has_rsample else [])

    assert_same(case)


def default_device_of(device):
    return nullcontext() if device == CPU else torch.device(device)


# The losses of compiled steps are read when they are used.
@pytest.mark.parametrize("name", sorted(all_programs().keys() - {"compiled_steps"}))
def test_programs_of_tests_golden_on_a_default_device(name):
    """Losses, priors, handlers, functions, chains, scores: all that they make is on the device."""
    outcomes = []
    for device in (CPU, DEVICE):
        with default_device_of(device), host_noise.HostNoise() if GPU else nullcontext():
            outcomes.append(run(all_programs()[name]))
    for result, expected in outcomes[0].items():
        torch.testing.assert_close(outcomes[1][result].cpu(), expected, rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", GUIDES)
@on_both_devices
def test_guides(device, name):
    model, batch = classifier(device), data(device)
    guide = GUIDES[name](model)
    results = [steps(model, guide, TermsELBO(3, vectorize_particles=True), *batch), values(guide)]
    posterior = {site: (center(q), q.sample()) for site, q in guide.posterior().items()}
    twin = copy.deepcopy(guide)
    twin.load_state_dict(guide.state_dict())
    results += [guide(*batch), guide.median(*batch), posterior, twin(*batch), guide.scale_change()]
    results.append(Predictive(model, guide=guide, num_samples=2)(batch[0])["f"])
    # The outputs of a layer with a covariance of its weights depend on each other.
    if name not in ("AutoMeanFieldFullCovariance", "AutoMeanFieldLowRank"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Some families fall back to weights.
            results += steps(model, local_reparameterization(guide), TermsELBO(), *batch, number=1)
    return results


@pytest.mark.parametrize("guide", GUIDES)
@on_both_devices
def test_guides_of_functions(device, guide):
    # The priors of the model have numbers, which torch puts on its default device.
    with torch.device(device):
        posterior = GUIDES[guide](constrained_model)
        return steps(constrained_model, posterior, TermsELBO()), values(posterior)


LIKELIHOODS = {
    "Bernoulli": (likelihoods.Bernoulli, 1, lambda y: (y[:, :1] > 0).float()),
    "Categorical": (likelihoods.Categorical, 2, lambda y: (y[:, 0] > 0).long()),
    "Gaussian": (likelihoods.Gaussian, 2, lambda y: y),
    "HeteroscedasticGaussian": (likelihoods.HeteroscedasticGaussian, 4, lambda y: y),
    "NegativeBinomial": (likelihoods.NegativeBinomial, 1, lambda y: y[:, :1].abs().round()),
    "Poisson": (likelihoods.Poisson, 1, lambda y: y[:, :1].abs().round()),
    "ZeroInflated": (
        lambda: likelihoods.ZeroInflated(likelihoods.NegativeBinomial()),
        1,
        lambda y: y[:, :1].abs().round(),
    ),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihoods(name):
    kind, outputs, target = LIKELIHOODS[name]

    def case(device):
        x, y = regression_data(CPU)
        y = target(y)
        model = SupervisedModel(BayesianModule(mlp(outputs)), kind()).to(device)
        guide = AutoRadial(model)
        result = fit(model, guide, (x, y), validation=(x, y), **FIT)
        drawn = predict(model, guide, x, num_samples=3)
        found = [values(guide, model), result.history[-1]["loss"], result.history[-1]["validation_nll"]]
        return [*found, drawn.samples, drawn.mean, drawn.log_prob(y)]

    assert_same(case)


NETS = {
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 3, padding=1), nn.Flatten(), nn.ReLU(), nn.Linear(6, 2)
    ),
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)),
    "dropout": lambda: nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 2)),
    "layer norm": lambda: nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2)),
}


@pytest.mark.parametrize("net", NETS)
@on_both_devices
def test_networks(device, net):
    model, batch = classifier(device, net=NETS[net]()), data(device)
    guide = AutoRadial(model)
    results = [steps(model, guide, TermsELBO(), *batch), values(guide, model)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Batch norm mixes rows, so some weights have no local noise.
        return [*results, steps(model, local_reparameterization(guide), TermsELBO(), *batch), values(guide, model)]


FITS = {
    "schedule of Pyro's optimizer": {
        "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        "optim": pyro.optim.ClippedAdam({"lr": 0.01}),
    },
    "plateau": {
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau,
        "loss": TermsELBO(2, vectorize_particles=True, max_plate_nesting=1),
    },
    "momentum": {"optim": partial(torch.optim.SGD, lr=1e-4, momentum=0.9), "callback": lambda record: True},
    "validation": {"validation": "data", "options": FitOptions(patience=1, mean_only_epochs=1)},
    "parts, clipped": {"options": FitOptions(accumulate=3, clip_norm=1.0, num_data=50)},
    "bfloat16": {"options": FitOptions(autocast=torch.bfloat16)},
    "DataLoader": {"data": lambda rows: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), 6)},
    "arrays": {"data": lambda rows: tuple(array.numpy() for array in rows)},
}


@pytest.mark.parametrize("name", FITS)
def test_fit(name):
    def case(device):
        given = dict(FITS[name])
        rows = data(CPU)
        read = given.pop("data", lambda rows: rows)(rows)
        if "validation" in given:
            given["validation"] = rows
        model = SupervisedModel(BayesianModule(mlp()), likelihoods.Categorical()).to(device)
        guide = AutoRadial(model)
        result = fit(model, guide, read, **{**FIT, **given})
        return values(model, guide), [record["loss"] for record in result.history]

    # The device ignores autocast.
    assert_same(case, **({"rtol": 1e-2, "atol": 1e-3} if name == "bfloat16" else {}))


@on_both_devices
def test_fit_resumes_from_a_checkpoint(device, tmp_path):
    kept, ends = tmp_path / device.type, []
    for epochs in (1, 2):
        pyro.set_rng_seed(0)
        model = classifier(device)
        guide = AutoRadial(model)
        fit(model, guide, data(CPU), **{**FIT, "epochs": epochs}, checkpoint=kept)
        ends = values(model, guide)
    return ends


@pytest.mark.parametrize(("guide", "form"), [*((guide, "exact") for guide in GUIDES), ("AutoRadial", "normal")])
@on_both_devices
def test_chains(device, guide, form):
    chain, results = PriorChain(classifier(device), form), []
    for _ in range(2):
        posterior = chain.guide(GUIDES[guide])
        fit(chain, posterior, data(CPU), **FIT)
        chain.advance(posterior, exclude="nothing")
        results.append((values(posterior), predict(chain, posterior, data(CPU)[0], num_samples=2).samples))
    twin = PriorChain(classifier(device), form)
    twin.load_state_dict(chain.state_dict())
    return results, {name: (center(q), center(twin.prior[name])) for name, q in chain.prior.items()}


@pytest.mark.parametrize("coreset", [Coreset(6, fit_options={"epochs": 1}), Coreset(6, use="functions")])
def test_streams(coreset):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(24) % 4
    rows = 3.0 * torch.eye(4)[y] + 0.3 * torch.randn(24, 4, generator=generator), y
    stream = class_split_stream(rows, rows, multi_head=True)

    def case(device):
        net = MultiHead(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), [nn.Linear(5, 2) for _ in range(2)])
        chain = PriorChain(SupervisedModel(BayesianModule(net), likelihoods.Categorical()).to(device))
        options = {"coreset": coreset, "forward_transfer": True, **FIT, "num_samples": 3}
        first = train_stream(chain, stream[:1], **options)
        # What is kept moves with the chain.
        twin = copy.deepcopy(chain).to(CPU).to(device)
        matrix = train_stream(twin, stream, after=first, **options)
        assert {value.device.type for value in twin.coresets.buffers()} == {torch.device(device).type}
        return matrix.values.nan_to_num(-1.0).tolist(), twin.state_dict()

    assert_same(case)


AFTER = {
    "predict": lambda model, guide, rows: predict(model, guide, rows[0], num_samples=4, chunk_size=5).samples,
    "predict with dropout": lambda model, guide, rows: predict(model, guide, rows[0], dropout=True).samples,
    "predict from samples": lambda model, guide, rows: (
        predict(model, {name: q.sample((3,)) for name, q in guide.posterior().items()}, rows[0]).samples
    ),
    "quantities": lambda model, guide, rows: quantities(predict(model, guide, rows[0], num_samples=4), rows[1]),
    "SampledNetwork": lambda model, guide, rows: served(SampledNetwork(model, guide, 4), rows[0]),
    "last_layer_laplace": lambda model, guide, rows: laplace(model, guide, rows, "full"),
    "last_layer_laplace, kronecker": lambda model, guide, rows: laplace(model, guide, rows, "kronecker"),
    "mean_network": lambda model, guide, rows: values(mean_network(model.bnn, guide)),
    "prune": lambda model, guide, rows: pruned(prune(model, guide, rows, 50.0, num_cuts=3)),
    "diagnose": lambda model, guide, rows: [float(diagnose(model, guide, rows).terms.loss)],
    "to_module": lambda model, guide, rows: values(model.bnn.to_module(guide.median())),
}


def quantities(drawn, y):
    return [drawn.mean, drawn.log_prob(y), drawn.entropy, drawn.mutual_information]


def served(network, x):
    return network(x.to(next(network.buffers()).device)), network.predict(x).mean, network.state_dict()


def laplace(model, guide, rows, structure):
    found = last_layer_laplace(model, guide, rows, structure=structure)
    return found.mean, predict(model, found, rows[0], num_samples=3).samples


def pruned(result):
    return values(result.network), result.record.error


@pytest.mark.parametrize("is_default", [False, True], ids=["", "as the default device"])
@pytest.mark.parametrize("name", AFTER)
@on_both_devices
def test_after_training(device, name, is_default):
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 2))
    with torch.device(device) if is_default else nullcontext():
        model = classifier(device, net=net)
        guide = AutoRadial(model)
        fit(model, guide, data(CPU), **FIT)
        return [AFTER[name](model, guide, data(rows_at)) for rows_at in (CPU, device)]


pretend_only = pytest.mark.skipif(GPU, reason="counts what the pretend device reads")


def step_counts(step, number=5):
    """What one further step reads and copies."""
    step()
    step()
    with pretend.counted() as found:
        for _ in range(number):
            step()
    return {name: count / number for name, count in found.items() if count}


@pretend_only
@pytest.mark.parametrize("validation", [True, False])
def test_a_step_of_fit_reads_whether_its_loss_is_finite_and_what_validation_does(validation):
    model, batch = classifier(DEVICE), data(DEVICE)
    with pyro.validation_enabled(validation):
        run = run_on(model, AutoRadial(model), batch)
        counts = step_counts(run.step)
    # Validation reads whether a label is there, and whether labels, the output of the network and the parameters of the
    # likelihood are in range.
    # Its optimizer has no fused step on this device, so the loss is looked at each time.
    assert counts == {"reads": 6.0 if validation else 1.0}


@pretend_only
@pytest.mark.parametrize(("validation", "reads"), [(True, 32.0), (False, 5.0)])
def test_a_step_of_svi_reads_as_often_as_the_page_on_scale_says(validation, reads):
    model, batch = classifier(DEVICE), data(DEVICE)
    with pyro.validation_enabled(validation):
        svi = SVI(model, AutoRadial(model), pyro.optim.Adam({"lr": 0.01}), TraceMeanField_ELBO())
        assert step_counts(lambda: svi.step(*batch)) == {"reads": reads}


def test_tensors_of_two_devices_do_not_mix():
    model, (x, _) = classifier(DEVICE), data(CPU)
    with pytest.raises(RuntimeError, match=r"on the CPU|same device"), poutine.block():
        model.bnn(x)


def test_constants_in_a_backward_pass_are_on_the_device():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return 2 * x

        @staticmethod
        def backward(context, gradient):
            return gradient * torch.tensor([2.0, 2.0], device=gradient.device) + torch.zeros(2, device=gradient.device)

    x = torch.ones(2, device=DEVICE, requires_grad=True)
    Scaled.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


@on_both_devices
def test_estimators_for_tables(device):
    x, y = (part.numpy() for part in regression_data(CPU))
    options = {"optim": ADAM, "epochs": 2, "batch_size": 6, "num_samples": 4, "random_state": 0}
    regressor = BayesianRegressor(mlp().to(device), **options).fit(x, y)
    mean, std = regressor.predict(x, return_std=True)
    return [values(regressor.functions_), float(mean.mean()), float(std.mean()), float(regressor.sample_y(x).mean())]
