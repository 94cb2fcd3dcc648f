# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import copy

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.distributions.transforms import ExpTransform
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from torch import nn

from pyro_radial import AutoRadial, BayesianModule
from pyro_radial.poutine import swap_prior

W = dist.Normal(0.0, 1.0).expand([3]).to_event(1)
NEW = dist.Normal(torch.tensor([1.0, 2.0, 3.0]), 0.5).to_event(1)


def model():
    w = pyro.sample("w", W)
    pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 20, subsample_size=4):
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=torch.zeros(4))


def site(model, name="w", *args):
    return poutine.trace(model).get_trace(*args).nodes[name]


def sampled(distribution):
    return lambda: pyro.sample("w", distribution)


def test_the_log_density_is_that_of_the_new_prior_and_the_rest_stays():
    trace = poutine.trace(model).get_trace()
    swapped = poutine.trace(poutine.replay(swap_prior(model, {"w": NEW}), trace=trace)).get_trace()
    trace.compute_log_prob()
    swapped.compute_log_prob()
    value = trace.nodes["w"]["value"]
    assert torch.equal(swapped.nodes["w"]["log_prob"], NEW.log_prob(value))
    for name in ("b", "y"):
        assert torch.equal(swapped.nodes[name]["log_prob"], trace.nodes[name]["log_prob"])
    assert swapped.nodes["data"]["fn"].__class__ is trace.nodes["data"]["fn"].__class__


def test_guides_are_refused():
    guide = AutoRadial(model)
    parts = AutoGuideList(model)
    parts.append(AutoNormal(model))
    for wrong in (guide, parts, poutine.block(guide, hide=["w"]), poutine.scale(guide, scale=2.0)):
        with pytest.raises(ValueError, match="model must not be a guide"):
            swap_prior(wrong, {})
    with pytest.raises(ValueError, match=r"site 'w' must be a Pyro distribution, got Normal"):
        swap_prior(model, {"w": torch.distributions.Normal(0.0, 1.0)})


def test_the_new_prior_takes_the_batch_of_its_plates():
    def plated():
        with pyro.plate("outer", 2, dim=-2), pyro.plate("inner", 5, dim=-1):
            pyro.sample("w", W)

    for batch in ((), (5,), (2, 1), (2, 5)):
        prior = dist.Normal(torch.rand(*batch, 3), 1.0).to_event(1)
        fn = site(swap_prior(plated, {"w": prior}))["fn"]
        assert fn.batch_shape == (2, 5)
        assert torch.equal(fn.mean, prior.mean.expand(2, 5, 3))


def test_the_prior_that_is_given_never_changes():
    class NoExpand(dist.TorchDistribution):
        """Its ``expand`` is Pyro's general one, which changes in place when it is done a second time."""

        has_rsample, arg_constraints, support = True, {}, dist.constraints.real

        def __init__(self):
            super().__init__()

        def rsample(self, sample_shape=()):
            return torch.randn(sample_shape)

        def log_prob(self, value):
            return dist.Normal(0.0, 1.0).log_prob(value)

    prior = NoExpand().expand([3])

    def plated(size):
        with pyro.plate("rows", size, dim=-2), pyro.plate("columns", 3):
            pyro.sample("w", dist.Normal(0.0, 1.0))

    swapped = swap_prior(plated, {"w": prior})
    for size in (2, 4):
        assert site(swapped, "w", size)["fn"].batch_shape == (size, 3)
        assert prior.batch_shape == (3,)


@pytest.mark.parametrize("mask", [False, torch.tensor([True, False, True])], ids=["all", "some"])
def test_masks_of_the_prior_and_of_handlers_stay(mask):
    distribution = dist.Normal(torch.zeros(3), 1.0)
    new = dist.Normal(torch.ones(3), 2.0)
    handled = poutine.mask(sampled(distribution), mask=mask)
    for masked in (sampled(distribution.mask(mask)), sampled(distribution.mask(True).mask(mask)), handled):
        trace = poutine.trace(swap_prior(masked, {"w": new})).get_trace()
        trace.compute_log_prob()
        node = trace.nodes["w"]
        expected = torch.where(torch.as_tensor(mask), new.log_prob(node["value"]), torch.zeros(3))
        assert torch.equal(node["log_prob"], expected)


def test_the_outermost_of_two_holds():
    outer = swap_prior(swap_prior(model, {"w": W, "b": dist.Normal(5.0, 1.0)}), {"w": NEW})
    assert torch.equal(site(outer)["fn"].mean, NEW.mean)
    assert site(outer, "b")["fn"].mean == 5.0


LOG_NORMAL, POINT = dist.LogNormal(0.0, 1.0), dist.Delta(torch.tensor(0.0))
WRONG = {
    "event shape": (W, dist.Normal(torch.zeros(4), 1.0).to_event(1), r"'w' has event shape \(4,\).*\(3,\)"),
    "event dims": (W, dist.Normal(torch.zeros(3), 1.0), r"'w' has event shape \(\).*\(3,\)"),
    "batch shape": (W, dist.Normal(torch.zeros(2, 3), 1.0).to_event(1), r"'w' has batch shape \(2,\)"),
    "values outside": (LOG_NORMAL, dist.Normal(0.0, 1.0), "'w' has values outside"),
    "a point": (W, dist.Delta(torch.zeros(3)).to_event(1), "'w'.*zero density"),
    "a point, moved": (LOG_NORMAL, dist.TransformedDistribution(POINT, [ExpTransform()]), "'w'.*zero density"),
    "an interval of a line": (W, dist.Uniform(-torch.ones(3), 1.0).to_event(1), "'w'.*zero density"),
    "half of a line": (W, dist.LogNormal(torch.zeros(3), 1.0).to_event(1), "'w'.*zero density"),
}


@pytest.mark.parametrize(("old", "new", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_does_not_fit_is_refused_with_the_name_of_the_site(old, new, message):
    swapped = swap_prior(sampled(old), {"w": new})
    for _ in range(2):  # What was refused once is not taken for compared.
        with pytest.raises(ValueError, match=message):
            swapped()


def test_a_site_of_a_subsampled_plate_is_refused():
    def local(rows):
        with pyro.plate("rows", 20, subsample=rows):
            pyro.sample("z", W)

    full = dist.Normal(torch.zeros(20, 3), 1.0).to_event(1)
    with pytest.raises(ValueError, match=r"'z'.*belongs to its rows"):
        swap_prior(local, {"z": full})(torch.arange(5))
    swap_prior(local, {"z": full})(torch.arange(20))


def test_an_improper_prior_may_be_replaced():
    improper = dist.ImproperUniform(dist.constraints.positive, (), (3,))
    assert site(swap_prior(sampled(improper), {"w": dist.LogNormal(torch.zeros(3), 1.0).to_event(1)}))
    with pytest.raises(ValueError, match="'w' has values outside"):
        swap_prior(sampled(improper), {"w": W})()


def test_parameters_of_the_model_stay_visible_and_copies_are_independent():
    bnn = BayesianModule(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)))
    swapped = swap_prior(bnn, {"0.bias": dist.Normal(torch.ones(2), 0.1).to_event(1)})
    assert {id(p) for p in swapped.parameters()} == {id(p) for p in bnn.parameters()} != set()
    assert site(copy.deepcopy(swapped), "0.bias", torch.zeros(1, 3))["fn"].mean.tolist() == [1.0, 1.0]
    assert not hasattr(swapped, "likelihood")
