# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train a guide with Accelerate: a loop of your own, on whatever machine and in however many processes it is started.

Run it as ``python tutorials/train_with_accelerate.py``, or by ``accelerate launch`` or ``torchrun`` in several
processes; it needs ``pip install accelerate scikit-learn``. With ``--checkpoint FOLDER`` it saves every epoch there. A
killed run resumes from the last one when the same command is started again, and ends as an undisturbed run does.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_radial import AutoRadial, BayesianModule, SupervisedModel, TermsELBO, predict
from pyro_radial.nn import likelihoods

BATCH_SIZE = 32
LEARNING_RATE = 0.01


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--checkpoint", type=Path, help="a folder to save to, and to resume from")
    return parser.parse_args(argv)


def make_accelerator(mixed_precision: str) -> Accelerator:
    # On a machine without an accelerator it has to be told so, or it takes several processes for unrelated ones.
    on_cpu = not torch.accelerator.is_available()
    # The order of the rows depends on the number of the epoch alone, so a resumed run has the same order.
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    return Accelerator(cpu=on_cpu, mixed_precision=mixed_precision, dataloader_config=order)


def save(accelerator: Accelerator, folder: Path, epoch: int) -> None:
    """Save an epoch in a folder of its own, which is there only when it is complete."""
    accelerator.save_state(str(folder / "partial"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (folder / "partial").rename(folder / f"epoch_{epoch}")


def main(argv: Sequence[str] | None = None) -> None:
    """Train on images of digits, and print the scores of the test images."""
    args = parse(argv)
    accelerator = make_accelerator(args.mixed_precision)
    images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    train, test = (images[:1400], labels[:1400]), (images[1400:], labels[1400:])

    # All processes start at the same parameters.
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    # N is the number of all rows, however many processes share them.
    likelihood = likelihoods.Categorical(num_data=len(train[0]))
    model = SupervisedModel(BayesianModule(net), likelihood).to(accelerator.device)
    guide = AutoRadial(model)
    # The parameters have to be there before an optimizer and Accelerate look for them.
    guide.setup(*(part[:2].to(accelerator.device) for part in train))
    elbo = TermsELBO()
    loss: Any = elbo(model, guide)
    optimizer: Any = torch.optim.Adam(loss.parameters(), lr=LEARNING_RATE)

    loader = DataLoader(TensorDataset(*train), batch_size=BATCH_SIZE, shuffle=True)
    loss, optimizer, loader = accelerator.prepare(loss, optimizer, loader)
    # The rate falls to zero. A scheduler that Accelerate prepares would step once for each process.
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    accelerator.register_for_checkpointing(scheduler)

    # Each process draws weights of its own; the gradients that Accelerate averages hold the KL once.
    torch.manual_seed(accelerator.process_index)
    done = 0
    if args.checkpoint is not None:
        done = len(list(args.checkpoint.glob("epoch_*")))
    if done:
        # This restores the random numbers of each process too.
        accelerator.load_state(str(args.checkpoint / f"epoch_{done - 1}"))
    for epoch in range(done, args.epochs):
        loader.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(loss(x, y))
            optimizer.step()
            scheduler.step()
        terms = elbo.terms.per_datum()
        accelerator.print(
            f"epoch {epoch}: nll {terms.negative_log_likelihood:.4f}, kl {terms.kl:.4f}, in the last batch"
        )
        if args.checkpoint is not None:
            save(accelerator, args.checkpoint, epoch)

    if accelerator.is_main_process:
        x, y = (part.to(accelerator.device) for part in test)
        prediction = predict(model, guide, x)
        print(f"accuracy {(prediction.mean.argmax(-1) == y).float().mean():.4f}")
        print(f"log-likelihood {prediction.log_prob(y).mean():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
