# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Test cases for every automatic guide, on models with weights, constraints, plates and subsampling."""

from collections.abc import Iterator
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.optim import PyroOptim
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from pyro_radial.infer.autoguide.per_site import AutoPerSite
from pyro_radial.infer.loss.elbo import TermsELBO

NUM_PARTICLES = 2_000
STANDARD_ERRORS = 4.0


Data = tuple[Tensor, Tensor]


def weights_model(x: Tensor, y: Tensor | None = None) -> Tensor:
    """Run a linear model with a matrix, a vector and a constrained scalar; site names have dots, as in networks."""
    weight = pyro.sample("layer.weight", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
    bias = pyro.sample("layer.bias", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(0.0, 0.5))
    with pyro.plate("data", len(x), dim=-1):
        mean = (x[:, None, :] * _beside_data(weight, 2)).sum(-1) + _beside_data(bias, 1)
        return pyro.sample(
            "y", dist.Normal(mean, _beside_data(noise, 0)[..., None]).to_event(1), obs=y
        )


def train(
    model: object,
    guide: object,
    *args: object,
    lr: float = 0.1,
    steps: int = 3,
    num_particles: int = 1,
) -> list[float]:
    """Train a guide by SVI, and return the losses."""
    svi = SVI(
        model,
        guide,
        PyroOptim(torch.optim.Adam, {"lr": lr}),
        TraceMeanField_ELBO(num_particles=num_particles),
    )
    return [svi.step(*args) for _ in range(steps)]


def _beside_data(value: Tensor, event_dim: int) -> Tensor:
    """Reshape one draw, or many draws with any dimensions of a vectorizing handler, to [draws, 1, *event]."""
    event = value.shape[value.dim() - event_dim :]
    return value.reshape(-1, 1, *event) if value.dim() > event_dim else value.expand(1, *event)


def local_model(data: Tensor, batch: int | None = None) -> None:
    """Run a model with a latent vector for each row, and mini-batches of rows."""
    center = pyro.sample("center", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with pyro.plate("rows", len(data), subsample_size=batch) as index:
        local = pyro.sample("local", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        pyro.sample("obs", dist.Normal(center + local, 1.0).to_event(1), obs=data[index])


def constrained_model() -> None:
    """Run a model with sites on the half-line, the unit interval and the simplex."""
    pyro.sample("rate", dist.LogNormal(0.5, 0.3).expand([3]).to_event(1))
    pyro.sample("share", dist.Beta(2.0, 3.0).expand([2]).to_event(1))
    pyro.sample("mixture", dist.Dirichlet(torch.full((3,), 2.0)))


class GuideTests:
    """Check a guide with every loss of Pyro's, subsampling, its posterior and its quantiles.

    Inherit from it, define :meth:`make`, and let pytest collect the class.
    """

    #: Whether the guide has ``quantiles``; set it to False for a family without them.
    has_quantiles = True

    def make(self, model: Any, **kwargs: Any) -> Any:
        """Return the guide of a model; pass on keyword arguments such as ``create_plates``."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _fresh_start(self) -> Iterator[None]:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        yield
        pyro.clear_param_store()

    @pytest.fixture(name="data")
    def _data(self) -> Data:
        """Return inputs and targets for the model of weights."""
        return torch.randn(6, 3), torch.randn(6, 2)

    @pytest.fixture(name="guide")
    def _guide(self, data: Data) -> AutoPerSite:
        """Return a guide of the model of weights, with parameters."""
        guide = self.make(weights_model)
        guide(*data)
        return guide

    def test_the_guide_samples_every_latent_site_of_the_model(
        self, guide: AutoPerSite, data: Data
    ) -> None:
        model_trace = prune_subsample_sites(poutine.trace(weights_model).get_trace(*data))
        guide_trace = poutine.trace(guide).get_trace(*data)
        for name in model_trace.stochastic_nodes:
            site: Any = model_trace.nodes[name]
            twin: Any = guide_trace.nodes[name]
            assert twin["value"].shape == site["value"].shape
            assert twin["fn"].batch_shape == site["fn"].batch_shape

    @pytest.mark.parametrize(
        "model", [weights_model, constrained_model], ids=["weights", "constrained"]
    )
    def test_all_losses_estimate_the_same_elbo(self, model: object, data: Data) -> None:
        args = data if model is weights_model else ()
        guide = self.make(model)
        guide(*args)
        means: list[Tensor] = []
        errors: list[Tensor] = []
        for loss in (Trace_ELBO, TraceMeanField_ELBO, TermsELBO):
            elbo = loss(
                num_particles=NUM_PARTICLES // 20, vectorize_particles=True, max_plate_nesting=1
            )
            with torch.no_grad():
                draws = torch.tensor([float(elbo.loss(model, guide, *args)) for _ in range(20)])
            means.append(draws.mean())
            errors.append(draws.std() / len(draws) ** 0.5)
        for mean, error in zip(means[1:], errors[1:], strict=True):
            assert abs(mean - means[0]) <= STANDARD_ERRORS * (error**2 + errors[0] ** 2).sqrt()

    def test_a_vectorized_loss_estimates_the_looped_one(
        self, guide: AutoPerSite, data: Data
    ) -> None:
        vectorized = TermsELBO(
            num_particles=NUM_PARTICLES, vectorize_particles=True, max_plate_nesting=1
        )
        looped = TermsELBO()
        with torch.no_grad():
            value = float(vectorized.loss(weights_model, guide, *data))
            losses = [float(looped.loss(weights_model, guide, *data)) for _ in range(40)]
        draws = torch.tensor(losses)
        # Both estimate the same mean, from 40 looped draws and fifty times as many vectorized ones.
        assert (
            abs(value - draws.mean())
            <= STANDARD_ERRORS * draws.std() * (1 / 40 + 1 / NUM_PARTICLES) ** 0.5
        )

    @pytest.mark.parametrize("local", [False, True])
    def test_training_lowers_the_loss_by_svi_and_by_torch(self, local: bool, data: Data) -> None:
        with pyro.settings.context(module_local_params=local):
            guide = self.make(weights_model)
            losses = train(weights_model, guide, *data, lr=0.05, steps=15, num_particles=2)
            assert sum(losses[-5:]) < sum(losses[:5])
            elbo = TermsELBO(num_particles=2)(weights_model, self.make(weights_model))  # type: ignore[arg-type]
            elbo(*data)
            optimizer = torch.optim.Adam(elbo.parameters(), lr=0.05)
            values = []
            for _ in range(15):
                optimizer.zero_grad()
                loss = elbo(*data)
                loss.backward()
                optimizer.step()
                values.append(loss.item())
            assert sum(values[-5:]) < sum(values[:5])

    def test_subsampling_keeps_parameters_for_every_row_and_trains_all(self) -> None:
        data = torch.randn(7, 2) + 3.0
        guide = self.make(local_model)
        draw = guide(data, 3)
        assert draw["local"].shape == (3, 2)
        assert guide.median()["local"].shape == (7, 2)
        initial_median = guide.median()["local"].clone()
        train(local_model, guide, data, 3, lr=0.05, steps=20)
        assert bool((guide.median()["local"] != initial_median).any(-1).all())

    def test_the_posterior_is_detached_and_stays_as_it_was(
        self, guide: AutoPerSite, data: Data
    ) -> None:
        posterior = guide.posterior()
        value = posterior["layer.weight"].sample()
        log_prob = posterior["layer.weight"].log_prob(value)
        assert not log_prob.requires_grad
        train(weights_model, guide, *data, steps=1)
        assert torch.equal(posterior["layer.weight"].log_prob(value), log_prob)
        assert bool((posterior["noise"].sample((50,)) > 0).all())

    def test_quantiles_are_those_of_draws(self, guide: AutoPerSite) -> None:
        if not self.has_quantiles:
            pytest.skip("the guide has no quantiles")
        levels = [0.1, 0.5, 0.75]
        quantiles = guide.quantiles(levels)
        posterior = guide.posterior()
        for name in ("layer.weight", "noise"):
            draws = posterior[name].sample((NUM_PARTICLES,))
            for level, quantile in zip(levels, quantiles[name], strict=True):
                frequency = (draws <= quantile).double().mean(0)
                error = (level * (1 - level) / NUM_PARTICLES) ** 0.5
                assert bool(((frequency - level).abs() <= STANDARD_ERRORS * error).all())
