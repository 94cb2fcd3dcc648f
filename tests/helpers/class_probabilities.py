# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Class probabilities that are calibrated, and labels."""

import torch


def simulate(num_points, num_classes, seed=0):
    """Probabilities and labels drawn from them, so the probabilities are calibrated."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_points, num_classes, generator=generator, dtype=torch.float64)
    probs = logits.softmax(-1)
    return probs, torch.multinomial(probs, 1, generator=generator)[:, 0]
