# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Captured steps, on a stand-in for a device with graphs."""

import copy
import warnings
from functools import partial

import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch.optim.lr_scheduler import ExponentialLR

from pyro_radial import AutoRadial, CompiledSVI, TermsELBO, fit
from pyro_radial.infer.compiler.cuda import MOST_CAPTURES
from pyro_radial.infer.compiler.state import Refused
from pyro_radial.infer.step.evaluation import Mode
from tests.helpers.devices import capture_on_cpu, waiting_is_an_error
from tests.helpers.networks import classifier, data, mlp
from tests.helpers.runs import assert_same, killed, problem, trained
from tests.helpers.runs import data as rows

X, Y = data(8)
FUSED = partial(torch.optim.Adam, lr=0.01, fused=True)


@pytest.fixture
def device(monkeypatch):
    return capture_on_cpu(monkeypatch)


def steps_of(optim=FUSED, compile=True, **settings):
    """The steps of a small network."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model = classifier(net=mlp())
    guide = AutoRadial(model)
    guide.setup(X, Y)
    pyro.set_rng_seed(1)
    return CompiledSVI(model, guide, optim, TermsELBO(), compile=compile, **settings)


def values(guide):
    return {name: value.detach().clone() for name, value in guide.named_parameters()}


def assert_captured_as_recorded(number, optim=FUSED, change=lambda svi, step: None):
    """Compare steps, with a change before each; return the captured ones."""
    outcomes = []
    for compile in (False, True):
        svi = steps_of(optim, compile)
        losses = []
        for step in range(number):
            change(svi, step)
            losses.append(float(svi.step(X + 0.1 * step, Y)))
        outcomes.append({"losses": torch.tensor(losses), **values(svi.guide)})
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-5, atol=1e-6)
    return svi


OPTIMIZERS = {
    "fused Adam": (FUSED, True),
    "fused SGD": (partial(torch.optim.SGD, lr=1e-4, fused=True), True),
    "Adam of Pyro": (pyro.optim.Adam({"lr": 0.01}), True),
    "ClippedAdam of Pyro": (pyro.optim.ClippedAdam({"lr": 0.01}), False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:the optimizer takes its step after")
def test_captured_steps_are_the_recorded_ones(name, device):
    optim, is_inside = OPTIMIZERS[name]
    svi = assert_captured_as_recorded(8, optim)
    assert svi._latest.mode == Mode.CAPTURED
    assert svi._latest.stepped == is_inside
    assert device.captures == 1


def test_an_optimizer_that_is_not_in_the_graph_is_named(device):
    svi = steps_of(partial(torch.optim.Rprop, lr=0.01))
    # It makes the optimizer.
    svi.step(X, Y)
    with pytest.warns(UserWarning, match="takes its step after the CUDA graph: Rprop has no fused step") as caught:
        svi.step(X, Y)
    assert len(caught) == 1
    (reason,) = svi.eager_reasons
    assert reason.startswith("Rprop has no fused step")


@pytest.mark.filterwarnings("ignore:the optimizer takes its step after the CUDA graph. gradients are clipped")
@pytest.mark.parametrize("options", [{"clip_norm": 5.0}, {"accumulate": 2}], ids=["clipped", "in parts"])
def test_a_captured_run_with_options_is_the_run_as_it_is(options, device):
    states = []
    for compile in (False, True):
        states.append(trained(*problem(), optim=FUSED, batch_size=10, compile=compile, **options)[0])
    assert device.captures == ("clip_norm" in options)
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=1e-5)


def test_only_arguments_that_change_are_copied(device):
    svi = steps_of()
    for step in range(5):
        svi.step(X + step, Y)
    (replay,) = svi.graphs.programs
    assert replay.captured._is_copied == [True, False]
    # The same tensor until now is another one: another capture, and then no more.
    for _ in range(6):
        svi.step(X, Y.clone())
    assert replay.captured.captures == 2


def test_another_shape_is_another_graph(device):
    svi = steps_of()
    for number in (8, 5) * 5:
        svi.step(X[:number].clone(), Y[:number].clone())
    assert len(svi.graphs.programs) == 2
    assert device.captures == 2


def change_betas(svi):
    svi.optimizer.param_groups[0]["betas"] = (0.5, 0.6)


def load_state(svi):
    state = copy.deepcopy(svi.optimizer.state_dict())
    for buffers in state["state"].values():
        buffers["exp_avg"] += 0.1
    svi.optimizer.load_state_dict(state)


def replace_storage(svi):
    for parameter in svi.guide.parameters():
        parameter.data = parameter.data.clone() + 0.1


def triple_gradient(parameter):
    # Torch refuses a hook that returns something.
    parameter.grad *= 3.0


def add_hook(svi):
    next(iter(svi.guide.parameters())).register_post_accumulate_grad_hook(triple_gradient)


#: What changes between two steps, and the number of captures.
CHANGES = {change_betas: 2, load_state: 2, replace_storage: 2, add_hook: 2}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps_counts_as_without_capture(change, device):
    svi = assert_captured_as_recorded(10, change=lambda svi, step: change(svi) if step == 5 else None)
    assert svi.compiled
    assert device.captures == CHANGES[change]


def test_a_scheduler_changes_rates_without_another_capture(device):
    schedulers = {}

    def schedule(svi, step):
        if step == 1:
            schedulers[svi] = ExponentialLR(svi.optimizer, 0.7)
        elif step:
            schedulers[svi].step()

    svi = assert_captured_as_recorded(9, change=schedule)
    assert svi.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.7**7)
    assert device.captures == 1


def test_a_loss_that_is_not_finite_changes_nothing_and_is_named_later(device):
    svi = steps_of(FUSED, check_every=5)
    for _ in range(15):
        svi.step(X, Y)
    assert svi._latest.stepped
    expected = values(svi.guide)
    nonfinite = X.clone()
    nonfinite[0, 0] = torch.nan
    svi.step(nonfinite, Y)
    for _ in range(3):
        svi.step(X, Y)
    with pytest.raises(FloatingPointError, match=r"not finite in step 15: log-likelihood of site 'y'.*no step"):
        svi.step(X, Y)
    assert_same(values(svi.guide), expected)
    svi.step(X, Y)
    assert not torch.equal(next(iter(expected.values())), next(iter(values(svi.guide).values())))


def test_losses_and_terms_of_earlier_steps_do_not_change(device):
    svi = steps_of()
    seen = []
    for _ in range(7):
        loss = svi.step(X, Y)
        terms = svi.loss.terms
        seen.append((loss, float(loss), terms, float(terms.kl), float(terms.negative_log_likelihood)))
    assert len({value for _, value, *_ in seen}) == 7
    for loss, value, terms, kl, nll in seen:
        assert float(loss) == value
        assert (float(terms.kl), float(terms.negative_log_likelihood)) == (kl, nll)


def test_tensors_that_are_replaced_again_and_again_end_the_captures(device):
    svi = steps_of()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5 * MOST_CAPTURES):
            svi.step(X, Y)
            if step % 3 == 2:
                replace_storage(svi)
    assert [str(warning.message).partition(": ")[2] for warning in caught] == [
        "its tensors, or settings of its optimizer, are replaced again and again"
    ]
    assert device.captures == MOST_CAPTURES
    assert svi._latest.mode == Mode.COMPILED
    assert all(bool(torch.isfinite(value).all()) for value in values(svi.guide).values())


def test_a_step_that_cannot_be_captured_is_taken_without(device, monkeypatch):
    def refuse(body):
        raise Refused("RuntimeError: operation not permitted when stream is capturing")

    monkeypatch.setattr(device, "capture", refuse)
    with pytest.warns(UserWarning, match="without a CUDA graph: RuntimeError: operation not permitted") as caught:
        assert_captured_as_recorded(6)
    assert len(caught) == 1


def test_evaluations_and_gradients_alone_are_not_captured(device):
    svi = steps_of()
    for _ in range(4):
        svi.step(X, Y)
    loss = svi.loss_and_grads(svi.model, svi.guide, X, Y)
    gradients = {name: parameter.grad.clone() for name, parameter in svi.guide.named_parameters()}
    svi.evaluate_loss(X, Y)
    assert float(loss) != float(svi.evaluate_loss(X, Y))
    assert_same(gradients, {name: parameter.grad for name, parameter in svi.guide.named_parameters()})


def test_a_killed_run_of_captured_steps_ends_bit_for_bit_as_an_undisturbed_one(device, tmp_path, monkeypatch):
    def run(**settings):
        return trained(*problem("batch norm"), data=rows(), optim=FUSED, compile=True, **settings)[0]

    undisturbed = run()
    assert device.captures
    path = tmp_path / "run.pt"
    with killed(monkeypatch, "save", 7, "after"):
        run(checkpoint=path, checkpoint_every=1)
    assert_same(run(checkpoint=path, checkpoint_every=1), undisturbed)


def on_cuda(guide=AutoRadial, optim=FUSED):
    """As :func:`steps_of`, on a GPU and without compilation by inductor, which takes long."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model = classifier(net=mlp()).cuda()
    svi = CompiledSVI(model, guide(model), optim, TermsELBO(), check_every=1_000)
    svi.graphs.compile_now = False
    return svi, X.cuda(), Y.cuda()


@pytest.mark.cuda
def test_on_cuda_captured_steps_are_those_of_the_program_and_wait_for_nothing():
    outcomes = []
    for captured in (False, True):
        # Without noise, the order of draws makes no difference.
        svi, x, y = on_cuda(AutoDelta, partial(torch.optim.Adam, lr=0.01))
        if not captured:
            svi.graphs.compile = False
        for step in range(8):
            svi.step(x + 0.1 * step, y)
        outcomes.append(values(svi.guide))
    assert svi._latest.stepped
    for name, value in outcomes[0].items():
        torch.testing.assert_close(outcomes[1][name], value, rtol=1e-4, atol=1e-5)
    with waiting_is_an_error():
        for _ in range(20):
            svi.step(x, y)


@pytest.mark.cuda
@pytest.mark.parametrize("compile_now", [True, False], ids=["compiled", "recorded"])
def test_on_cuda_noise_follows_the_seed_and_the_state_of_the_generator(compile_now):
    svi, x, y = on_cuda(optim=partial(torch.optim.SGD, lr=0.0))
    svi.graphs.compile_now = compile_now
    for _ in range(5):
        svi.step(x, y)
    assert svi._latest.mode == Mode.CAPTURED
    losses = []
    for seed in (3, 4, 3):
        torch.manual_seed(seed)
        losses.append([float(svi.step(x, y)) for _ in range(3)])
    assert losses[0] == losses[2] != losses[1]
    assert len({*losses[0]}) == 3
    state = torch.cuda.get_rng_state()
    loss = float(svi.step(x, y))
    torch.cuda.set_rng_state(state)
    assert float(svi.step(x, y)) == loss


@pytest.mark.cuda
@pytest.mark.parametrize("at", [1, 150, 310])
def test_on_cuda_a_killed_run_ends_bit_for_bit_as_an_undisturbed_one(at, tmp_path, monkeypatch):
    def run(**settings):
        torch.manual_seed(0)
        model = classifier(8, mlp()).cuda()
        guide = AutoRadial(model)
        fit(model, guide, (X, Y), epochs=320, batch_size=8, optim=FUSED, seed=0, progress=False, **settings)
        return values(guide)

    with pyro.validation_enabled(False):
        undisturbed = run()
        path = tmp_path / "run.pt"
        with killed(monkeypatch, "save", at, "after"):
            run(checkpoint=path)
        assert_same(run(checkpoint=path), undisturbed)


@pytest.mark.cuda
def test_on_cuda_fit_runs_with_that_default_device():
    torch.set_default_device("cuda")
    try:
        model = classifier(8, mlp())
        result = fit(model, AutoRadial(model), (X.cpu(), Y.cpu()), epochs=120, optim=FUSED, progress=False)
    finally:
        torch.set_default_device(None)
    assert result.history[-1]["nll"] < result.history[0]["nll"]
