# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Train a guide with Accelerate: a loop of your own, on whatever machine and in however many processes it is started.

Run it as ``python tutorials/train_with_accelerate.py``, or by ``accelerate launch`` or ``torchrun`` in several
processes; it needs ``pip install accelerate``.
"""

import argparse
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from image_sets import load
from pyro_radial import AutoRadial, BayesianModule, RadialELBO, SupervisedModel, predict
from pyro_radial.nn import likelihoods


def main(argv: Sequence[str] | None = None) -> None:
    """Train on images of digits, and print the scores of the test images."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="no")
    args = parser.parse_args(argv)

    # On a machine without an accelerator it has to be told so, or it takes several processes for unrelated ones.
    accelerator = Accelerator(cpu=not torch.accelerator.is_available(), mixed_precision=args.mixed_precision)
    torch.manual_seed(0)
    digits = load("digits")
    rows = TensorDataset(digits.train_images, digits.train_labels)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    # N is the number of all rows, however many processes share them.
    model = SupervisedModel(BayesianModule(net), likelihoods.Categorical(num_data=len(rows)))
    guide = AutoRadial(model)
    # The parameters have to be there before an optimizer and Accelerate look for them.
    guide.setup(*rows[:2])
    elbo = RadialELBO()
    loss = elbo(model, guide)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    loader = DataLoader(rows, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(0))
    loss, optimizer, loader = accelerator.prepare(loss, optimizer, loader)

    # Each process draws weights of its own; the gradients that Accelerate averages hold the KL once.
    torch.manual_seed(accelerator.process_index)
    for epoch in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(loss(x, y))
            optimizer.step()
        terms = elbo.terms.per_datum()
        accelerator.print(
            f"epoch {epoch}: nll {terms.negative_log_likelihood:.4f}, kl {terms.kl:.4f}, in the last batch"
        )

    if accelerator.is_main_process:
        prediction = predict(model, guide, digits.test_images)
        right = prediction.mean.argmax(-1) == digits.test_labels
        print(f"accuracy {right.float().mean():.4f}")
        print(f"log-likelihood {prediction.log_prob(digits.test_labels).mean():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
