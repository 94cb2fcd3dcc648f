# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Several processes train one guide as one process would."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from pyro_radial import AutoRadial, BayesianModule, RadialELBO, SupervisedModel
from pyro_radial.infer.training.training_run import TrainingRun
from pyro_radial.nn import likelihoods
from tests.helpers.ranks import KINDS, assert_same_everywhere, on_ranks, run, run_kind, values
from tests.helpers.runs import FIT, ROWS, assert_same, data, problem, trained
from tests.helpers.streams import CORESET, learn


@pytest.mark.parametrize("kind", KINDS)
def test_processes_end_bit_for_bit_alike(kind):
    _, result = assert_same_everywhere(on_ranks(partial(run_kind, kind=kind)))
    assert len(result.history) == FIT["epochs"]


def learn_tasks(rank, folder):
    matrix, state = learn(coreset=CORESET)
    drawn = torch.rand(3)
    with pytest.raises(ValueError, match="checkpoint must be None with several processes"):
        learn(checkpoint=folder)
    return state, str(matrix), drawn, dist.is_initialized()


def test_tasks_are_learned_together_one_after_another(tmp_path):
    assert_same_everywhere(on_ranks(learn_tasks, tmp_path))


def start_elsewhere(rank):
    """A training of a network drawn in each process, with the parameters and the generators after each step."""
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical())
    steps, original = [], TrainingRun.step

    def step(self):
        original(self)
        parameters = torch.cat([parameter.detach().flatten() for parameter in self.trainer.parameters.values()])
        steps.append((parameters, torch.get_rng_state()))

    TrainingRun.step = step
    state, result = trained(model, AutoRadial(model), batch_size=2, epochs=10, optim=partial(Adam, lr=0.01))
    return (state, result, torch.rand(3), dist.is_initialized()), steps


def test_processes_that_start_elsewhere_are_alike_from_the_first_step_to_the_50th():
    ends, (steps, other_steps) = zip(*values(on_ranks(start_elsewhere)), strict=True)
    _, result = assert_same_everywhere(ends)
    assert len(steps) == 50
    for (parameters, generator), (other_parameters, other_generator) in zip(steps, other_steps, strict=True):
        assert torch.equal(parameters, other_parameters)
        # Each draws noise of its own.
        assert not torch.equal(generator, other_generator)
    assert result.history[-1]["loss"] < result.history[0]["loss"]


def without_noise(**settings):
    """One process's end, and that of several whose batches make up as many rows, of a guide that hardly draws."""
    make = partial(problem, guide=partial(AutoRadial, init_stddev=1e-7))
    return partial(run, make=make, optim=partial(SGD, lr=1e-3), **settings)


@pytest.mark.parametrize(("size", "batch_size", "accumulate"), [(2, 10, 1), (3, 7, 2), (2, 4, 1), (3, 6, 2)])
def test_steps_are_those_of_one_process_on_all_the_rows(size, batch_size, accumulate):
    """Rows in all and in each: 20 in 10 and 10; 7, 7 and 6; with a last batch of 4 in 2 and 2; of 2 in 1, 1 and 0."""
    settings = {"epochs": 2, "accumulate": accumulate}
    whole, expected, *_ = without_noise(batch_size=size * batch_size, **settings)(0)
    before = without_noise(batch_size=ROWS, epochs=1)
    start = trained(*before.keywords["make"](), epochs=1, optim=partial(SGD, lr=0.0))[0]
    state, result = assert_same_everywhere(on_ranks(without_noise(batch_size=batch_size, **settings), size=size))
    for name, value in whole.items():
        moved = float((value - start[name]).abs().max())
        assert moved > 0
        # Noise of a ten-millionth, and rounding of parameters of order one in a few steps.
        assert torch.allclose(state[name], value, rtol=0, atol=1e-4 * moved + 1e-6), name
    for record, other in zip(result.history, expected.history, strict=True):
        assert record == pytest.approx(other, rel=1e-5)


def test_the_loss_is_within_noise_of_one_process_at_twice_the_batch():
    settings = {"epochs": 25, "optim": partial(Adam, lr=0.02)}
    alone = [
        sum(
            record["loss"]
            for record in trained(*problem(), batch_size=10, **{**settings, "seed": seed})[1].history[-5:]
        )
        / 5
        for seed in range(6)
    ]
    _, result = assert_same_everywhere(on_ranks(partial(run, batch_size=5, **settings)))
    ours = sum(record["loss"] for record in result.history[-5:]) / 5
    spread = torch.tensor(alone)
    # A draw more from the same distribution as six others: its distance from their mean has variance 1 + 1/6.
    assert abs(ours - float(spread.mean())) < 4 * (7 / 6) ** 0.5 * float(spread.std())
    assert ours < result.history[0]["loss"]


def by_hand(rank):
    """A step of ``DistributedDataParallel`` around the loss, in a loop of one's own, and one of ``fit``."""
    dist.init_process_group("gloo")
    gradients = []
    for own_loop in (True, False):
        model, guide = problem(guide=partial(AutoRadial, init_stddev=1e-7))
        x, y = data()
        guide.setup(x[:2], y[:2])
        if own_loop:
            loss = DistributedDataParallel(RadialELBO()(model, guide))
            loss(*(part.tensor_split(2)[rank] for part in (x, y))).backward()
        else:
            trained(model, guide, epochs=1, batch_size=10, optim=partial(SGD, lr=0.0))
        gradients.append({name: parameter.grad for name, parameter in guide.named_parameters()})
    # It was initialized before fit, which leaves it so.
    assert dist.is_initialized()
    dist.destroy_process_group()
    return gradients


def test_a_loop_of_ones_own_around_the_loss_has_the_gradients_of_fit():
    (hand, ours), (other_hand, other_ours) = values(on_ranks(by_hand))
    assert_same(hand, other_hand)
    assert_same(ours, other_ours)
    for name, value in hand.items():
        # Twenty rows in another order.
        assert torch.allclose(ours[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max())), name


def test_lower_precision_is_of_the_network_alone_in_each_process():
    plain, lower = (assert_same_everywhere(on_ranks(partial(run_kind, kind=kind))) for kind in ("plain", "autocast"))
    assert all(value.dtype == torch.float32 for value in lower[0].values())
    for record, other in zip(lower[1].history, plain[1].history, strict=True):
        # bfloat16 has 8 bits; the KL never goes through the network.
        assert record["nll"] == pytest.approx(other["nll"], rel=0.01)
        assert record["nll"] != other["nll"]
    assert lower[1].history[0]["kl"] == pytest.approx(plain[1].history[0]["kl"], rel=1e-4)
