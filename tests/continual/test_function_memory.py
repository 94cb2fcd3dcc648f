# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The loss that holds functions where they were at kept inputs, and a stream that is learned with it."""

import math
from functools import partial

import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn

from benchmarks.guides._examples.program import Program, compared
from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, PriorChain, SupervisedModel, TermsELBO
from pyro_radial.continual import Coreset, Task, TaskStream
from pyro_radial.continual.coresets import random_coreset
from pyro_radial.continual.function_memory import FunctionChainELBO, FunctionMemory
from pyro_radial.continual.prior_chain import posterior_of
from pyro_radial.functional import FunctionalELBO, GaussianProcess, UniformBox
from pyro_radial.nn import MultiHead, likelihoods, use_head
from tests.helpers.programs import Graphed
from tests.helpers.runs import assert_same as assert_same_state
from tests.helpers.streams import OPTIONS, ROWS, chain, learn, stream

X, Y = torch.randn(8, 3), torch.randint(2, (8,))
FUNCTIONS = Coreset(6, use="functions", max_points=4)
NORMAL = partial(chain, form="normal")


def linear_chain(local=False, heads=None):
    """A chain of a network that is linear in its weights, with a posterior after a first task."""
    net = nn.Linear(3, 2) if heads is None else MultiHead(nn.Identity(), [nn.Linear(3, 2) for _ in range(heads)])
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=40), local_reparameterization=local)
    return PriorChain(model, "normal")


def learned(one, init_stddev=0.3):
    """Lets a chain have some posterior under the head in use."""
    guide = AutoMeanField(one, init_stddev=init_stddev)
    guide.setup(X, Y)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    one.advance(guide)


def marginals(distributions, x, prefix=""):
    """Mean and variance of the outputs of a linear layer, by hand."""
    weight, bias = distributions[f"{prefix}weight"], distributions[f"{prefix}bias"]
    return x @ weight.mean.T + bias.mean, x.square() @ weight.variance.T + bias.variance


def sum_of_kl(one, other):
    """From the closed form of the KL of two normals, in another arrangement."""
    (m, v), (m0, v0) = one, other
    return (0.5 * (v0 / v).log() + (v + (m - m0) ** 2) / (2.0 * v0) - 0.5).sum()


@pytest.mark.parametrize(("guide_type", "local"), [(AutoMeanField, False), (AutoRadial, True), (AutoNormal, False)])
def test_it_is_the_sum_of_the_closed_forms(guide_type, local):
    pyro.set_rng_seed(0)
    one = linear_chain(local)
    learned(one)
    x = torch.randn(5, 3)
    kept = FunctionMemory.of(one, x)
    for found, expected in zip((kept.mean, kept.variance), marginals(one.prior, x), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    guide = guide_type(one)
    guide(X, Y)
    elbo = FunctionChainELBO([kept], kl_weight=7.0, weight_space_kl=0.3)
    loss = elbo(one, guide)(X, Y)
    now = marginals(posterior_of(guide), x)
    torch.testing.assert_close(
        elbo.terms.kl_by_site["f"], sum_of_kl(now, (kept.mean, kept.variance)).detach(), rtol=1e-4, atol=1e-4
    )
    terms = elbo.terms
    total = terms.negative_log_likelihood + 7.0 * terms.kl_by_site["f"] + 0.3 * terms.weight_space_kl
    torch.testing.assert_close(loss.detach(), total)
    if guide_type is AutoNormal:
        return  # Its KL is of draws.
    reference = TermsELBO()
    reference(one, guide)(X, Y)
    torch.testing.assert_close(terms.weight_space_kl, reference.terms.kl)


def with_three_heads():
    """A chain, a guide and what is kept of two heads, which are learned."""
    pyro.set_rng_seed(0)
    one = linear_chain(heads=3)
    for head in (0, 1):
        use_head(one, head)
        learned(one, 0.2 + 0.1 * head)
    kept = [FunctionMemory.of(one, torch.randn(rows, 3), head) for head, rows in enumerate((4, 2))]
    use_head(one, 2, other_heads=[0, 1])
    guide = AutoMeanField(one, init_stddev=0.5)
    guide.setup(X, Y)
    return one, guide, kept


def test_each_head_has_its_turn_and_the_mean_of_all_is_the_sum():
    one, guide, kept = with_three_heads()
    elbo = FunctionChainELBO(kept)
    terms = []
    for _ in range(4):
        elbo(one, guide)(X, Y)
        terms.append(elbo.terms.kl)
    expected = torch.zeros(2)
    for number, memory in enumerate(kept):
        prefix = f"heads.{memory.head}."
        of_guide, of_prior = (marginals(q, memory.x, prefix) for q in (guide.posterior(), one.prior))
        expected[number] = sum_of_kl(of_guide, of_prior)
    # The first step is step 1.
    torch.testing.assert_close(torch.stack(terms), 2.0 * expected[[1, 0, 1, 0]], rtol=1e-4, atol=1e-4)


def test_heads_in_turn_are_no_graph():
    one, guide, kept = with_three_heads()
    captured = Graphed(one, guide, FunctionChainELBO(kept), compile=False)
    with pytest.warns(UserWarning, match="the heads of kept functions take turns"):
        captured((X, Y), {})
    assert captured.eager_reasons


def test_a_graph_replays_it_with_new_points_each_time():
    pyro.set_rng_seed(0)
    one = linear_chain(local=True)
    learned(one)
    kept = FunctionMemory.of(one, torch.randn(6, 3))
    elbo = FunctionChainELBO([kept], max_points=4, weight_space_kl=0.3)
    guide = AutoRadial(one)
    guide.setup(X, Y)
    captured = Graphed(one, guide, elbo, compile=False)
    values = []
    for seed in (1, 2):
        value, error, _ = compared(Program(one, guide, elbo, (X, Y)), captured.graphs, seed)
        assert error <= 1e-6
        values.append(value)
    assert values[0] != values[1]
    assert not captured.eager_reasons
    assert len(captured.programs) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_points": 0}, "max_points must be a positive integer"),
        ({"weight_space_kl": -1.0}, "weight_space_kl must be a non-negative"),
        ({"kl_weight": math.nan}, "kl_weight must be a non-negative"),
    ],
)
def test_bad_arguments_are_named(options, message):
    kept = FunctionMemory(0, torch.zeros(1, 3), torch.zeros(1, 2), torch.ones(1, 2), 1)
    with pytest.raises(ValueError, match=message):
        FunctionChainELBO(**{"memories": [kept], **options})


def one_value_each(x, size, *, seed):
    """Inputs with one value, which differs from row to row."""
    return x.mean(1, keepdim=True)[:size].expand(size, x.shape[1])


class TestStream:
    """``train_stream`` with functions kept."""

    def test_later_tasks_have_the_loss_and_the_rows_that_are_left(self, fits):
        first_task = {"loss": TermsELBO(kl_weight=0.1)}
        loss = TermsELBO(2, kl_weight=0.3, strict_kl=True)
        learn(NORMAL(), coreset=FUNCTIONS, loss=loss, first_task=first_task)
        one, two = fits  # And no training before predictions.
        assert one["rows"] == two["rows"] == ROWS - 6
        assert one["loss"] is first_task["loss"]
        loss = two["loss"]
        assert isinstance(loss, FunctionChainELBO)
        assert (loss.kl_weight, loss.weight_space_kl, loss.num_particles, loss.max_points) == (10.0, 0.3, 2, 4)
        assert loss.strict_kl
        assert "heads.0.weight" in two["sites"]
        assert "heads.1.weight" not in one["sites"]
        (kept,) = loss.memories
        assert kept.head == 0
        assert kept.x.shape == (6, 4)
        assert kept.mean.shape == kept.variance.shape == (6, 2)
        assert kept.size == 6

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({"inputs": "current"}, lambda x: x[1][random_coreset(x[1], 6, seed=OPTIONS["seed"])]),
            ({"choose": one_value_each}, lambda x: one_value_each(x[0], 6, seed=0)),
        ],
        ids=["of the task in training", "no rows of any task"],
    )
    def test_inputs_need_not_be_rows_that_are_left_out(self, options, expected, fits):
        learn(NORMAL(), coreset=Coreset(6, use="functions", **options))
        one, two = fits
        assert one["rows"] == two["rows"] == ROWS
        (held,) = two["loss"].memories
        assert held.head == 0
        assert torch.equal(held.x, expected([task.train[0] for task in stream()]))

    @pytest.mark.parametrize("chosen", [torch.zeros(5, 4), torch.zeros(6, 3), torch.full((6, 4), math.nan)])
    def test_inputs_that_are_no_inputs_of_a_task_are_refused(self, chosen):
        message = r"choose must return 6 indices or finite inputs of shape \[4\] for task 'classes 0, 1', got \["
        with pytest.raises(ValueError, match=message):
            learn(NORMAL(), coreset=Coreset(6, lambda x, size, seed: chosen, use="functions"))

    def test_functions_stay_where_they_are_held(self):
        moved = []
        for weight in (1e-6, 1e3):
            pyro.set_rng_seed(0)
            net = MultiHead(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), [nn.Linear(8, 2) for _ in range(2)])
            model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(), local_reparameterization=True)
            one = PriorChain(model, "normal")
            x = stream()[0].train[0]
            before = []

            def remember(record, one=one, x=x, before=before):
                if one.prior and not before:
                    before.append(FunctionMemory.of(one, x, 0))

            options = {"loss": TermsELBO(kl_weight=0.0), "epochs": 60, "optim": partial(torch.optim.Adam, lr=0.02)}
            # Without noise of the last steps, which differs between processors.
            options["scheduler"] = "cosine"
            guide = partial(AutoRadial, init_stddev=0.1)
            kept = Coreset(ROWS // 2, use="functions", weight=weight)
            learn(one, coreset=kept, callback=remember, guide=lambda chain, guide=guide: chain.guide(guide), **options)
            after = FunctionMemory.of(one, x, 0)
            moved.append(float((after.mean - before[0].mean).square().mean()))
        assert moved[1] < 0.05 * moved[0]


def test_what_cannot_be_held_is_refused_and_the_chain_is_as_it_was():
    changing = TermsELBO(kl_weight=lambda step: 0.5)
    box = UniformBox([-1.0] * 4, [1.0] * 4, 3)
    functional = FunctionalELBO(GaussianProcess(lambda a, b: torch.exp(-torch.cdist(a, b))), box)
    for options, message in (
        ({"loss": changing}, "loss must be a TermsELBO with a constant kl_weight.*with kl_weight=<function"),
        ({"loss": functional}, "loss must be a TermsELBO .*got FunctionalELBO"),
        ({"first_task": {"seed": 1}}, r"first_task must leave .* got \['seed'\]"),
    ):
        one = NORMAL()
        before = {name: value.clone() for name, value in one.state_dict().items() if isinstance(value, torch.Tensor)}
        with pytest.raises(ValueError, match=message):
            learn(one, coreset=FUNCTIONS, **options)
        assert one.prior == {}
        assert_same_state({n: v for n, v in one.state_dict().items() if n in before}, before)


def test_inputs_of_another_width_are_refused_by_the_task_s_name():
    wide = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = [(torch.randn(10, width), torch.randint(2, (10,))) for width in (3, 2)]
    tasks = TaskStream.of([Task("one", data[0], data[0]), Task("two", data[1], data[1])], num_outputs=2)
    one = PriorChain(SupervisedModel(BayesianModule(wide), likelihoods.Categorical()), "normal")
    with pytest.raises(ValueError, match=r"inputs of task 'two' must have the shape .*head 0, \[3\], got \[2\]"):
        learn(one, tasks, coreset=Coreset(3, use="functions"))
    assert one.prior == {}


def test_a_posterior_without_variances_is_refused_by_the_site():
    one = NORMAL(multi_head=False)
    excluded = one.advance
    one.advance = lambda guide: excluded(guide, exclude="bias")
    with pytest.raises(ValueError, match=r"coreset must have functions to keep before task .*site '.*bias'"):
        learn(one, stream(multi_head=False), coreset=FUNCTIONS, guide=lambda c: c.guide(AutoMeanField))
    assert one.prior == {}


class Wordless(SupervisedModel):
    """A model that does not say what its function is."""

    def forward(self, x, y=None):
        """As ever, in silence."""
        with pyro.poutine.block(hide=["f"]):
            return super().forward(x, y)


def test_a_model_without_a_function_is_refused_by_task_and_site():
    normal = NORMAL(multi_head=False).model
    one = PriorChain(Wordless(normal.bnn, normal.likelihood), "normal")
    with pytest.raises(ValueError, match=r"task '.+' cannot be predicted: .*must be a site of the model, got 'f'"):
        learn(one, stream(multi_head=False), coreset=FUNCTIONS)
    assert one.prior == {}


def test_a_list_of_tasks_is_told_how_to_become_a_stream():
    with pytest.raises(
        ValueError, match=r"stream must be a TaskStream, got list; TaskStream\.of\(.*, num_heads=\.\.\.\)"
    ):
        learn(NORMAL(), [stream()[0]])
