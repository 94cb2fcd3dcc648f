# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The eight models in NumPyro."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.scipy.linalg import solve_triangular
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from numpyro.infer.initialization import init_to_uniform, init_to_value

from benchmarks.guides._eight_models import models
from benchmarks.guides._eight_models.data import NUM_DATA, arrays

Array = Any


def states(y: Array) -> None:
    """A chain by the noise of its steps."""
    keep = numpyro.sample("keep", dist.Beta(5.0, 1.0))
    move, noise = (numpyro.sample(name, dist.LogNormal(-1.0, 1.0)) for name in ("move", "noise"))
    with numpyro.plate("steps", len(y)):
        step = numpyro.sample("step", dist.Normal(0.0, 1.0))

    def advance(state: Array, step: Array) -> tuple[Array, Array]:
        state = keep * state + move * step
        return state, state

    found = jax.lax.scan(advance, jnp.zeros(()), step)[1]
    with numpyro.plate("seen", len(y)):
        numpyro.sample("y", dist.Normal(found, noise), obs=y)


def net(start: dict[str, Array], part: str, x: Array) -> Array:
    """Two layers with softplus units."""
    w = {name: numpyro.param(name, value) for name, value in start.items() if name.startswith(part)}
    hidden = jax.nn.softplus(x @ w[f"{part}_weight_0"] + w[f"{part}_bias_0"])
    return hidden @ w[f"{part}_weight_1"] + w[f"{part}_bias_1"]


def autoencoder(y: Array, start: dict[str, Array]) -> None:
    """Images from codes."""
    with numpyro.plate("rows", len(y)):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(len(start["d_weight_0"])), 1.0).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=net(start, "d", z)).to_event(1), obs=y)


def encoder(y: Array, start: dict[str, Array]) -> None:
    """Codes from images."""
    loc, log_scale = jnp.split(net(start, "e", y), 2, -1)
    with numpyro.plate("rows", len(y)):
        numpyro.sample("z", dist.Normal(loc, jnp.exp(log_scale)).to_event(1))


def network(x: Array, y: Array, sizes: tuple[tuple[int, int], ...]) -> None:
    """Normal weights of a rectifier network."""
    for number, (inputs, outputs) in enumerate(sizes):
        weight = numpyro.sample(f"weight_{number}", dist.Normal(0.0, 1.0).expand([inputs, outputs]).to_event(2))
        bias = numpyro.sample(f"bias_{number}", dist.Normal(0.0, 1.0).expand([outputs]).to_event(1))
        x = (jax.nn.relu(x) if number else x) @ weight + bias
    with handlers.scale(scale=NUM_DATA / len(y)), numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Categorical(logits=x), obs=y)


def process(x: Array, y: Array, inducing: Array) -> None:
    """A Gaussian process through whitened values at inducing points."""
    length, variance, noise = (
        numpyro.sample(name, dist.LogNormal(-1.0, 1.0)) for name in ("length", "variance", "noise")
    )
    values = numpyro.sample("values", dist.Normal(0.0, 1.0).expand([len(inducing)]).to_event(1))

    def kernel(a: Array, b: Array) -> Array:
        return variance * jnp.exp(-0.5 * jnp.square((a[:, None] - b) / length))

    factor = jnp.linalg.cholesky(kernel(inducing, inducing) + 1e-3 * jnp.eye(len(inducing)))
    with numpyro.plate("rows", len(y), subsample_size=len(y) // 10) as rows:
        at_rows = solve_triangular(factor, kernel(inducing, x[rows]), lower=True)
        left = jnp.maximum(variance - jnp.square(at_rows).sum(0), 0.0)
        numpyro.sample("y", dist.Normal(values @ at_rows, jnp.sqrt(left + jnp.square(noise))), obs=y[rows])


SIMPLE: dict[str, Callable[..., None]] = {
    "hierarchical regression": partial(models.hierarchical, numpyro),
    "cell counts": partial(models.counts, numpyro),
    "eight schools": partial(models.schools, numpyro),
    "mixture, enumerated": partial(models.mixture, numpyro, ones=jnp.ones(3)),
    "state space": states,
    "sparse GP": process,
}


def made(name: str, data: dict[str, Array]) -> tuple[Any, Any, Any, tuple[Array, ...]]:
    """The model, guide, loss and arguments."""
    if name == "VAE":
        y = data.pop("y")
        return partial(autoencoder, start=data), partial(encoder, start=data), TraceMeanField_ELBO(), (y,)
    if name.startswith("784"):
        x, y = data.pop("x"), data.pop("y")
        sizes = tuple(tuple(value.shape) for key, value in data.items() if key.startswith("weight"))
        model = partial(network, sizes=sizes)
        guide = AutoNormal(model, init_loc_fn=init_to_value(values=data), init_scale=0.01)
        return model, guide, TraceMeanField_ELBO(), (x, y)
    model, args, start = SIMPLE[name], tuple(data.values()), init_to_uniform(radius=0.0)
    if name == "mixture, enumerated":
        continuous = handlers.block(model, hide=["which"])
        return (
            model,
            AutoNormal(continuous, init_loc_fn=start),
            TraceEnum_ELBO(max_plate_nesting=1),
            args,
        )
    make = AutoMultivariateNormal if name == "sparse GP" else AutoNormal
    return model, make(model, init_loc_fn=start), Trace_ELBO(), args


class Training:
    """Steps of one contender: one compiled update for each, or ``block`` of them in one compiled loop."""

    def __init__(self, name: str, small: bool, kind: str, lr: float, block: int) -> None:
        data = {key: jnp.asarray(value) for key, value in arrays(name, small).items()}
        model, guide, loss, self.args = made(name, data)
        self.svi = SVI(model, guide, numpyro.optim.Adam(lr), loss)
        self.state = self.svi.init(jax.random.PRNGKey(0), *self.args)
        #: The seed of the final loss.
        self.seed = 1
        self.block = block if kind == "NumPyro, scan" else 1
        self.update = jax.jit(self.svi.update)
        self.loop = jax.jit(self.looped)
        self.evaluate = jax.jit(self.svi.evaluate)

    def looped(self, state: Any, *args: Array) -> Any:
        """Several updates."""
        return jax.lax.scan(lambda state, _: self.svi.update(state, *args), state, None, length=self.block)

    def steps(self, number: int) -> None:
        """Take steps, and wait for each compiled call as torch does."""
        advance = self.update if self.block == 1 else self.loop
        for _ in range(max(1, number // self.block)):
            self.state, loss = advance(self.state, *self.args)
            loss.block_until_ready()

    def compile(self) -> None:
        """Nothing: the first step compiles."""

    def final(self, draws: int) -> float:
        """The mean loss over draws."""
        keys = jax.random.split(jax.random.PRNGKey(self.seed), draws)
        return sum(float(self.evaluate(self.state._replace(rng_key=key), *self.args)) for key in keys) / draws

    def eager_reasons(self) -> list[str]:
        """Everything is compiled."""
        return []
