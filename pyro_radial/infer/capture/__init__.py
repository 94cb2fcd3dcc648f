# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A Pyro program, its loss and its gradients as one graph of tensor operations, replayed with fresh noise."""

from pyro_radial.infer.capture.captured_loss import CapturedLoss

__all__ = ["CapturedLoss"]
