# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train a Pyro model of scvi-tools with compiled steps: its training plan gets another ``svi``.

Run it as ``python tutorials/scvi_tools.py``; it needs ``pip install scvi-tools``. It trains latent Dirichlet allocation
on made-up counts with the training plan of scvi-tools and with ours, and prints CPU times and losses of both. All cells
are one batch, because the model makes a Python number of the largest count in a batch: other batches are other graphs.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import anndata
import numpy as np
import pyro
import scvi
from scvi.model import AmortizedLDA
from scvi.train import PyroTrainingPlan

from pyro_radial import CompiledSVI


class CompiledPyroTrainingPlan(PyroTrainingPlan):
    """The training plan of scvi-tools, with compiled steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.svi = CompiledSVI(self.svi.model, self.svi.guide, self.optim, self.loss_fn)


class CompiledLDA(AmortizedLDA):
    """Latent Dirichlet allocation that trains with compiled steps."""

    _training_plan_cls = CompiledPyroTrainingPlan


def train(kind: type[AmortizedLDA], data: anndata.AnnData, epochs: int) -> AmortizedLDA:
    """Train a model, and print its CPU seconds and its last loss."""
    scvi.settings.seed = 0
    pyro.clear_param_store()
    kind.setup_anndata(data)
    model = kind(data, n_topics=5)
    start = time.process_time()
    model.train(max_epochs=epochs, batch_size=data.n_obs, train_size=1.0, accelerator="cpu")
    loss = float(np.asarray(model.history["elbo_train"]).ravel()[-1])
    print(f"{kind.__name__}: {time.process_time() - start:.1f} s, loss {loss:.6g}")
    return model


def main(argv: Sequence[str] | None = None) -> None:
    """Train both ways."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=1_500)
    parser.add_argument("--cells", type=int, default=512)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    signatures = rng.gamma(0.5, 2.0, size=(5, 200))
    counts = rng.poisson(rng.dirichlet(np.full(5, 0.3), size=args.cells) @ signatures)
    data = anndata.AnnData(counts.astype(np.float32))
    for kind in (AmortizedLDA, CompiledLDA):
        train(kind, data, args.epochs)


if __name__ == "__main__":
    main()
