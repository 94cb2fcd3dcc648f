# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A step clips gradients and computes in lower precision, and trains all that guide and model have."""

import copy
from functools import partial

import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import nn
from torch.optim import SGD

from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    AutoRadialDirectional,
    BayesianModule,
    FunctionalELBO,
    SupervisedModel,
    TermsELBO,
    predict,
)
from pyro_radial.functional import GaussianKL, GaussianProcess
from pyro_radial.infer.training import training_run
from pyro_radial.nn import likelihoods
from tests.helpers.runs import FIT, ROWS, assert_same, data, described_problem, problem, state_of, trained


def change_of_one_step(**settings):
    """What one step of plain gradient descent of rate one subtracts from all parameters, as one vector."""
    model, guide = problem()
    guide.setup(*data())
    start = copy.deepcopy(dict(guide.named_parameters()))
    trained(model, guide, epochs=1, batch_size=ROWS, optim=partial(SGD, lr=1.0), **settings)
    return torch.cat([(start[name] - p).flatten().detach() for name, p in guide.named_parameters()])


def test_gradients_are_clipped_together_and_keep_their_direction():
    free = change_of_one_step()
    clipped = change_of_one_step(clip_norm=0.5)
    assert float(free.norm()) > 5.0
    # Single precision, where parameters of order one have moved by their clipped gradients.
    assert float(clipped.norm()) == pytest.approx(0.5, rel=1e-4)
    torch.testing.assert_close(clipped / clipped.norm(), free / free.norm(), rtol=1e-3, atol=1e-5)
    assert torch.equal(change_of_one_step(clip_norm=1e6), free)


class Watched(nn.Module):
    """A network that says what its products are computed in."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.seen = set()

    def forward(self, x):
        f = self.linear(x)
        SEEN.append(f.dtype)
        return f


SEEN = []


class Recorded(likelihoods.Categorical):
    """A likelihood that says what it computes densities of."""

    def observation(self, f, **noise):
        SEEN.append(("f", f.dtype))
        return super().observation(f, **noise)


def watched(device="cpu"):
    torch.manual_seed(1)
    model = SupervisedModel(BayesianModule(Watched()), Recorded()).to(device)
    return model, AutoRadial(model)


def test_the_network_computes_in_bfloat16_and_everything_else_in_full_precision():
    SEEN.clear()
    plain, plain_result = trained(*watched(), validation=data(9))
    assert set(SEEN) == {torch.float32, ("f", torch.float32)}
    SEEN.clear()
    model, guide = watched()
    state, result = trained(model, guide, autocast=torch.bfloat16, validation=data(9))
    # The set-up and the validation are in full precision.
    assert set(SEEN) == {torch.bfloat16, torch.float32, ("f", torch.float32)}
    assert {p.dtype for p in guide.parameters()} == {torch.float32}
    # bfloat16 has 8 bits: losses and parameters agree to a percent, and not exactly.
    for record, other in zip(result.history, plain_result.history, strict=True):
        assert record["nll"] == pytest.approx(other["nll"], rel=0.01)
        assert record["nll"] != other["nll"]
    assert all(torch.allclose(value, plain[name], rtol=0.01, atol=1e-3) for name, value in state.items())
    # The KL never goes through the network.
    assert result.history[0]["kl"] == pytest.approx(plain_result.history[0]["kl"], rel=1e-4)


def test_a_divergence_of_functions_is_computed_in_full_precision():
    prior = GaussianProcess(lambda a, b: (-0.5 * torch.cdist(a, b) ** 2).exp())
    results = []
    for autocast in (None, torch.bfloat16):
        model, guide = problem(likelihood=likelihoods.Gaussian())
        loss = FunctionalELBO(prior, divergence=GaussianKL(), num_functions=30)
        pair = data()[0], torch.zeros(ROWS, 2)
        results.append(trained(model, guide, data=pair, loss=loss, epochs=1, autocast=autocast)[1].history[0]["kl"])
    # Function values of 8 bits; a Cholesky factor of such a dtype does not exist.
    assert results[1] == pytest.approx(results[0], rel=0.15)
    assert results[1] != results[0]


@pytest.mark.parametrize("guide", [AutoRadial, AutoMeanField, AutoRadialDirectional])
def test_a_whole_loss_within_autocast_keeps_its_kl_in_full_precision(guide):
    """As Lightning and Accelerate run it, guide and KL included."""
    model, made = problem(guide=guide)
    made.setup(*data())
    elbo = TermsELBO()
    terms = []
    for enabled in (False, True):
        made.zero_grad()
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = elbo(model, made)(*data())
        loss.backward()
        assert {loss.dtype, *(parameter.grad.dtype for parameter in made.parameters())} == {torch.float32}
        terms.append(elbo.terms)
    assert torch.equal(terms[0].kl, terms[1].kl)
    # The network computes in 8 bits.
    assert terms[1].loss != terms[0].loss
    assert float(terms[1].loss) == pytest.approx(float(terms[0].loss), rel=1e-3)


@pytest.mark.cuda
def test_a_network_on_cuda_trains_in_lower_precision():
    SEEN.clear()
    model, guide = watched("cuda")
    result = trained(model, guide, autocast=torch.bfloat16, clip_norm=10.0, epochs=FIT["epochs"])[1]
    assert {torch.bfloat16, torch.float32, ("f", torch.float32)} == set(SEEN)
    assert result.history[-1]["nll"] < result.history[0]["nll"] * 1.5


@pytest.mark.parametrize(("guide", "local"), [(AutoNormal, False), (AutoDelta, True), (AutoRadial, False)])
def test_any_guide_trains_and_predicts_with_parameters_in_the_store_or_in_modules(guide, local):
    with pyro.settings.context(module_local_params=local):
        model, made = problem("batch norm", guide=guide)
        made(*data())
        before = state_of(model, made)
        state, _ = trained(model, made, epochs=2, mean_only_epochs=1)
        assert all(not torch.equal(state[name], value) for name, value in before.items() if "num_batches" not in name)
        assert predict(model, made, data()[0], num_samples=2).mean.shape == (ROWS, 2)


def test_local_and_stored_parameters_train_alike():
    states = []
    for local in (False, True):
        with pyro.settings.context(module_local_params=local):
            states.append(trained(*problem("batch norm"))[0])
    assert_same(*states)


def test_state_that_is_no_tensor_comes_back_with_the_best_epoch(monkeypatch):
    script = iter([1.0, 0.5, 2.0])
    monkeypatch.setattr(training_run.TrainingRun, "_validate", lambda *_: next(script))
    model, guide = described_problem()
    _, result = trained(model, guide, validation=data())
    assert result.best_epoch == 1
    # Batches of 6, 6, 6 and 2 rows, for two epochs.
    assert model.seen == 2 * [6, 6, 6, 2]


def test_a_state_with_other_entries_than_tensors_is_told_from_one_without(tmp_path):
    path = tmp_path / "run.pt"
    trained(*described_problem(), checkpoint=path)
    assert torch.load(path, weights_only=True)["model"]["_extra_state"]["name"] == "described"
    with pytest.raises(ValueError, match=r"another model: 1 entries differ \(_extra_state: here None, there not a"):
        trained(*problem(), checkpoint=path)
