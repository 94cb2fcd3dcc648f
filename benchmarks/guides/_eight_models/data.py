# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Made-up data of the eight models, their sizes, and what all processes must know."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray[Any, Any]]
GROUPS, GENES, INDUCING, NUM_DATA = 50, 300, 30, 60_000
BATCHES = (32, 128, 1024)
PYRO = ("SVI", "JitTrace_ELBO", "CompiledSVI")
NUMPYRO = ("NumPyro", "NumPyro, scan")
CONTENDERS = PYRO + NUMPYRO
LEARNING_RATE = 1e-3
#: Steps in one turn.
BLOCK = 10
#: Draws of the final loss.
DRAWS = 50
#: Where processes start, and their environment.
ROOT = Path(__file__).parents[3]
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
}


def hierarchical(rng: np.random.Generator, small: bool) -> Arrays:
    """Rows in groups with intercepts of their own."""
    rows = 100 if small else 5_000
    x, group = rng.normal(size=(rows, 4)), rng.integers(GROUPS, size=rows)
    y = x.sum(-1) + rng.normal(size=GROUPS)[group] + 0.5 * rng.normal(size=rows)
    return {"x": x, "group": group, "y": y}


def counts(rng: np.random.Generator, small: bool) -> Arrays:
    """Counts of genes at locations, mixed from the signatures of cell types."""
    locations, types = 10 if small else 1_000, 8
    signatures = rng.gamma(0.5, 2.0, size=(types, GENES))
    mean = rng.gamma(0.5, 1.0, size=(locations, types)) @ signatures
    return {"signatures": signatures, "counts": rng.poisson(mean * rng.gamma(5.0, 0.2, size=mean.shape)).astype(float)}


def schools(rng: np.random.Generator, small: bool) -> Arrays:
    """Eight effects and their standard errors."""
    effects = [12.0, 4.0, -3.0, 8.0, -1.0, 2.0, 15.0, 10.0]
    return {"y": np.array(effects), "errors": np.array([14.0, 9.0, 15.0, 12.0, 8.0, 11.0, 10.0, 17.0])}


def mixture(rng: np.random.Generator, small: bool) -> Arrays:
    """Points around three centers."""
    rows = 20 if small else 1_000
    return {"y": 4.0 * (rng.integers(3, size=rows) - 1.0) + rng.normal(size=rows)}


def states(rng: np.random.Generator, small: bool) -> Arrays:
    """A chain that forgets, with noise."""
    steps = 5 if small else 100
    state, y = 0.0, np.zeros(steps)
    for t in range(steps):
        state = 0.9 * state + 0.5 * rng.normal()
        y[t] = state + 0.3 * rng.normal()
    return {"y": y}


def layers(rng: np.random.Generator, *sizes: int) -> Arrays:
    """The first weights and biases of a network."""
    found = {}
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        found[f"weight_{number}"] = rng.normal(size=(inputs, outputs)) * (2.0 / inputs) ** 0.5
        found[f"bias_{number}"] = np.zeros(outputs)
    return found


def autoencoder(rng: np.random.Generator, small: bool) -> Arrays:
    """A batch of binary images, and the first weights of an encoder and a decoder."""
    pixels, hidden, latent, batch = (20, 8, 2, 4) if small else (784, 400, 20, 128)
    encoder, decoder = layers(rng, pixels, hidden, 2 * latent), layers(rng, latent, hidden, pixels)
    own = {f"{part}_{name}": 0.5 * w for part, net in (("e", encoder), ("d", decoder)) for name, w in net.items()}
    return {"y": (rng.random((batch, pixels)) < 0.3).astype(float), **own}


def network(batch: int) -> Callable[[np.random.Generator, bool], Arrays]:
    """A batch of images and labels, and the first means of the weights."""

    def make(rng: np.random.Generator, small: bool) -> Arrays:
        hidden = (8,) if small else (200,) * 4
        x, y = rng.normal(size=(batch, 784)), rng.integers(10, size=batch)
        return {"x": x, "y": y, **layers(rng, 784, *hidden, 10)}

    return make


def process(rng: np.random.Generator, small: bool) -> Arrays:
    """A noisy sine, and inducing points."""
    x = np.sort(rng.uniform(0.0, 10.0, size=40 if small else 2_000))
    y = np.sin(3.0 * x) + 0.3 * rng.normal(size=len(x))
    return {"x": x, "y": y, "inducing": np.linspace(0.0, 10.0, INDUCING)}


MODELS: dict[str, Callable[[np.random.Generator, bool], Arrays]] = {
    "hierarchical regression": hierarchical,
    "cell counts": counts,
    "eight schools": schools,
    "mixture, enumerated": mixture,
    "state space": states,
    "VAE": autoencoder,
    **{f"784-200x4-10, batch {batch}": network(batch) for batch in BATCHES},
    "sparse GP": process,
}


def arrays(name: str, small: bool) -> Arrays:
    """The data of a model in single precision."""
    found = MODELS[name](np.random.default_rng(0), small)
    return {key: value.astype(np.float32 if value.dtype.kind == "f" else np.int32) for key, value in found.items()}
