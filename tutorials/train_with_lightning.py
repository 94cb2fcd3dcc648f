# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train a guide with Lightning: the loss of a model and its guide is a module, so a LightningModule takes it as it is.

Run it as ``python tutorials/train_with_lightning.py``, with ``--processes 2`` in two processes; it needs
``pip install lightning scikit-learn``. With ``--checkpoint FOLDER`` it saves every epoch there. A killed run resumes
from the last one when the same command is started again, and ends as an undisturbed run does.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, TermsELBO, predict
from pyro_radial.nn import likelihoods

Batch = tuple[Tensor, Tensor]

BATCH_SIZE = 32
LEARNING_RATE = 0.01
SEED = 0


class BayesianClassifier(lightning.LightningModule):
    """A network with a radial posterior over its weights.

    :param nn.Module net: a plain network.
    :param rows: all inputs and labels to train on, however many processes share them.
    """

    def __init__(self, net: nn.Module, rows: Batch) -> None:
        super().__init__()
        self.rows = rows
        # N is the number of all rows.
        model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=len(rows[0])))
        guide = AutoRadial(model)
        # The parameters have to be there before Lightning looks for them.
        guide.setup(*(part[:2] for part in rows))
        self.elbo = TermsELBO()
        self.loss = self.elbo(model, guide)

    def train_dataloader(self) -> Any:
        """The rows of this process, in an order that depends on the number of the epoch alone."""
        rows = TensorDataset(*self.rows)
        sampler: Any = DistributedSampler(rows, self.trainer.world_size, self.trainer.global_rank, seed=SEED)
        return DataLoader(rows, batch_size=BATCH_SIZE, sampler=sampler)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Have each process draw weights of its own in each step, and a resumed run the same ones.

        Lightning averages gradients over processes, so they hold the KL once. It saves no random numbers.
        """
        torch.manual_seed(SEED + self.global_step * self.trainer.world_size + self.global_rank)

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

    def configure_optimizers(self) -> Any:
        """Make Adam for the guide and the model, with a rate that falls to zero."""
        optimizer = torch.optim.Adam(self.loss.parameters(), lr=LEARNING_RATE)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(argv: Sequence[str] | None = None) -> None:
    """Train on images of digits, and print the scores of the test images."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1, help="on a machine with GPUs, one for each")
    parser.add_argument("--checkpoint", type=Path, help="a folder to save to, and to resume from")
    args = parser.parse_args(argv)

    # All processes start at the same parameters.
    lightning.seed_everything(SEED)
    images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    train, test = (images[:1400], labels[:1400]), (images[1400:], labels[1400:])
    net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    module = BayesianClassifier(net, train)

    # One file for each epoch, "epoch=0.ckpt" and so on.
    saving = ModelCheckpoint(args.checkpoint, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        devices=args.processes,
        strategy="ddp" if args.processes > 1 else "auto",
        logger=False,
        enable_checkpointing=args.checkpoint is not None,
        callbacks=[] if args.checkpoint is None else [saving],
    )
    done = 0 if args.checkpoint is None else len(list(args.checkpoint.glob("epoch=*.ckpt")))
    resume_from = args.checkpoint / f"epoch={done - 1}.ckpt" if done else None
    held_out = DataLoader(TensorDataset(*test), batch_size=256)
    trainer.fit(module, val_dataloaders=held_out, ckpt_path=resume_from)
    if trainer.is_global_zero:
        x, y = test
        prediction = predict(module.loss.model, module.loss.guide, x.to(module.device))
        y = y.to(module.device)
        print(f"accuracy {(prediction.mean.argmax(-1) == y).float().mean():.4f}")
        print(f"log-likelihood {prediction.log_prob(y).mean():.4f}")


if __name__ == "__main__":
    main()
