# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pytest
import torch
from torch.nn import functional as F

from pyro_radial.infer.compiler import noise
from pyro_radial.infer.compiler.noise import split_noise
from pyro_radial.infer.compiler.tensor_graph import record


def draws(x):
    """Every kind of noise that does not depend on values."""
    a = torch.randn(3, 2)
    b = torch.empty(4).normal_() * x
    c = torch.rand_like(x)
    d = F.dropout(x + 1.0, 0.3)
    e = torch.randperm(4)
    f = torch.empty(4).exponential_(2.0)
    g = torch.randn_like(x.expand(2, 4).t())
    return a, b, c, d, x[e], f, g


@pytest.mark.parametrize("kind", ["one by one", "together"])
def test_a_graph_with_its_noise_as_inputs_is_the_graph(kind, monkeypatch):
    x = torch.linspace(0.0, 1.0, 4)
    module = record(draws, [], [x]).module
    if kind == "together":
        monkeypatch.setattr(noise, "_draw_one_by_one", noise._draw_together)
    draw, rest = split_noise(module)
    assert "randn" not in rest.code
    torch.manual_seed(0)
    expected = module(x)
    torch.manual_seed(0)
    found = rest(x, *draw())
    assert len(found) == len(expected) == 7
    for own, other in zip(found, expected, strict=True):
        assert own.shape == other.shape
        assert own.dtype == other.dtype
        if kind == "one by one":
            assert torch.equal(own, other)
    # Noise is fresh.
    assert not torch.equal(rest(x, *draw())[0], found[0])


def test_noise_that_is_drawn_together_has_the_right_distributions(monkeypatch):
    def function(x):
        return torch.randn(20_000), torch.rand(20_000), torch.randn(10, 2_000), x

    x = torch.zeros(1)
    monkeypatch.setattr(noise, "_draw_one_by_one", noise._draw_together)
    draw, rest = split_noise(record(function, [], [x]).module)
    torch.manual_seed(0)
    first, uniform, second, _ = rest(x, *draw())
    # Four standard errors of 20,000 draws.
    for normal in (first, second):
        assert abs(float(normal.mean())) < 4.0 / 20_000**0.5
        assert abs(float(normal.var()) - 1.0) < 4.0 * (2.0 / 20_000) ** 0.5
    assert abs(float((first * second.flatten()).mean())) < 4.0 / 20_000**0.5
    assert 0.0 <= float(uniform.min()) < float(uniform.max()) < 1.0
    assert abs(float(uniform.mean()) - 0.5) < 4.0 / (12 * 20_000) ** 0.5


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [torch._standard_gamma(x), torch.randn(3)],
        lambda x: [torch.poisson(x), torch.randn(3)],
        lambda x: [torch.bernoulli(x / 2.0)],
        lambda x: [x * 2.0],
    ],
    ids=["gamma", "Poisson", "Bernoulli", "none"],
)
def test_a_graph_with_noise_that_depends_on_values_stays_whole(function):
    x = torch.ones(3)
    module = record(function, [], [x]).module
    draw, rest = split_noise(module)
    assert draw() == []
    torch.manual_seed(0)
    expected = module(x)
    torch.manual_seed(0)
    assert all(map(torch.equal, rest(x), expected))
