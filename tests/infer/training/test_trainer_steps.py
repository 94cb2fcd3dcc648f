# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One step: clipped gradients, lower precision with and without scaled losses, and a learning rate that is changed."""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from pyro_radial import (
    AutoMeanField,
    AutoRadial,
    AutoRadialDirectional,
    BayesianModule,
    FunctionalELBO,
    SupervisedModel,
    TermsELBO,
)
from pyro_radial.functional import GaussianKL, GaussianProcess
from pyro_radial.infer.optim.joint import change_rates, initial_rates
from pyro_radial.nn import likelihoods
from tests.helpers.runs import FIT, ROWS, STEPS_PER_EPOCH, assert_same, data, killed, problem, state_of, trained

CPU = torch.device("cpu")


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


def test_a_killed_run_of_lower_precision_resumes_to_the_same_end(tmp_path, monkeypatch):
    settings = {"autocast": torch.bfloat16, "clip_norm": 1.0}
    expected = trained(*problem(), **settings)
    settings |= {"checkpoint": tmp_path / "run.pt", "checkpoint_every": 1}
    with killed(monkeypatch, "step", STEPS_PER_EPOCH + 2, "before"):
        trained(*problem(), **settings)
    state, result = trained(*problem(), **settings)
    assert result == expected[1]
    assert_same(state, expected[0])


@pytest.mark.parametrize("settings", [{"clip_norm": 1.0}, {"autocast": torch.bfloat16}])
def test_other_clipping_or_precision_is_another_run(settings, tmp_path):
    trained(*problem(), checkpoint=tmp_path / "run.pt")
    with pytest.raises(ValueError, match=rf"was made with {next(iter(settings))}=.*None.*, this run has"):
        trained(*problem(), checkpoint=tmp_path / "run.pt", **settings)


def test_a_learning_rate_changed_on_resume_is_said_and_used(tmp_path):
    path = tmp_path / "run.pt"
    trained(*problem(), checkpoint=path, epochs=1, optim=partial(Adam, lr=0.01))
    model, guide = problem()
    message = re.escape(f"checkpoint {path} was made with lr=0.01, this run resumes with lr=0")
    with pytest.warns(UserWarning, match=message):
        trained(model, guide, checkpoint=path, epochs=2, optim=partial(Adam, lr=0.0))
    still = state_of(*resumed_at(0.01, path))
    assert_same(state_of(model, guide), still)


def resumed_at(lr, path):
    """The pair as its checkpoint of no further epoch has it."""
    model, guide = problem()
    with pytest.warns(UserWarning, match="resumes with lr"):
        trained(model, guide, checkpoint=path, epochs=2, optim=partial(Adam, lr=lr))
    return model, guide


def test_a_rate_that_has_decayed_has_decayed_as_far_from_the_new_one(tmp_path):
    parameter = nn.Parameter(torch.zeros(2))
    old, new = SGD([parameter], lr=0.4), SGD([parameter], lr=0.1)
    before, now = initial_rates(old), initial_rates(new)
    for group in old.param_groups:
        group["lr"] *= 0.5
    new.load_state_dict(old.state_dict())
    with pytest.warns(UserWarning, match=r"lr=0\.4, this run resumes with lr=0\.1"):
        change_rates(new, None, before, now, tmp_path / "run.pt")
    assert new.param_groups[0]["lr"] == pytest.approx(0.05)
    assert (before, now) == ([0.4], [0.1])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_network_on_cuda_trains_in_lower_precision(dtype):
    SEEN.clear()
    model, guide = watched("cuda")
    result = trained(model, guide, autocast=dtype, clip_norm=10.0, epochs=FIT["epochs"])[1]
    assert {dtype, torch.float32, ("f", torch.float32)} == set(SEEN)
    assert result.history[-1]["nll"] < result.history[0]["nll"] * 1.5
