# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train a guide with Lightning: the loss of a model and its guide is a module, so a LightningModule takes it as it is.

Run it as ``python tutorials/train_with_lightning.py``, with ``--processes 2`` in two processes; it needs
``pip install lightning``.
"""

import argparse
from collections.abc import Sequence

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from image_sets import load
from pyro_radial import AutoRadial, BayesianModule, RadialELBO, SupervisedModel, predict
from pyro_radial.nn import likelihoods

Batch = tuple[Tensor, Tensor]


class BayesianClassifier(lightning.LightningModule):
    """A network with a radial posterior over its weights.

    :param nn.Module net: a plain network.
    :param int num_data: N, the rows of the whole training set, however many processes share them.
    :param batch: a few rows, to make the guide's parameters before Lightning looks for them.
    """

    def __init__(self, net: nn.Module, num_data: int, batch: Batch) -> None:
        super().__init__()
        model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=num_data))
        guide = AutoRadial(model)
        guide.setup(*batch)
        self.elbo = RadialELBO()
        self.loss = self.elbo(model, guide)

    def on_train_start(self) -> None:
        """Have each process draw weights of its own; the gradients that Lightning averages hold the KL once."""
        torch.manual_seed(torch.initial_seed() + self.global_rank)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss, in nats for all N rows."""
        loss: Tensor = self.loss(*batch)
        terms = self.elbo.terms.per_datum()
        self.log_dict({"nll": terms.negative_log_likelihood, "kl": terms.kl}, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The negative log predictive density, in nats per row."""
        x, y = batch
        prediction = predict(self.loss.model, self.loss.guide, x, num_samples=16)
        self.log("validation_nll", -prediction.log_prob(y).mean(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam for the guide, and for what the model has of its own."""
        return torch.optim.Adam(self.loss.parameters(), lr=1e-3)


def main(argv: Sequence[str] | None = None) -> None:
    """Train on images of digits, and print the scores of the test images."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1, help="on a machine with GPUs, one for each")
    args = parser.parse_args(argv)

    lightning.seed_everything(0)
    digits = load("digits")
    rows = TensorDataset(digits.train_images, digits.train_labels)
    test = TensorDataset(digits.test_images, digits.test_labels)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    module = BayesianClassifier(net, num_data=len(rows), batch=rows[:2])

    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        devices=args.processes,
        strategy="ddp" if args.processes > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(rows, batch_size=32, shuffle=True), DataLoader(test, batch_size=256))
    if trainer.is_global_zero:
        prediction = predict(module.loss.model, module.loss.guide, digits.test_images)
        right = prediction.mean.argmax(-1) == digits.test_labels
        print(f"accuracy {right.float().mean():.4f}")
        print(f"log-likelihood {prediction.log_prob(digits.test_labels).mean():.4f}")


if __name__ == "__main__":
    main()
