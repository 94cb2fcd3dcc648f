# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Networks to cut, drawn at random or known from the literature."""

import copy
import random

import torch
from torch import nn

from pyro_radial.compression.scores import Cut
from pyro_radial.compression.surgery import complete_cut

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
POOLS = (
    (nn.MaxPool1d, nn.AvgPool1d, nn.LPPool1d),
    (nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d),
    (nn.MaxPool3d, nn.AvgPool3d, nn.LPPool3d),
)
# Not zero at zero: a unit that is cut must not reach the next layer through one of these.
ACTIVATIONS = (nn.Sigmoid, nn.Softplus, nn.ReLU, nn.Tanh, nn.LogSigmoid, nn.GELU)


def lenet(first=20, second=50, third=500):
    """The convolutional network of Caffe's MNIST example, without activations between the convolutions."""
    return nn.Sequential(
        nn.Conv2d(1, first, 5),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * second, third),
        nn.ReLU(),
        nn.Linear(third, 10),
    )


def keep(size, indices):
    mask = torch.zeros(size, dtype=torch.bool)
    mask[list(indices)] = True
    return mask


def random_chain(seed):
    """A chain in float64 and a batch of inputs that fits it."""
    draw = random.Random(seed)
    dims = draw.choice([0, 1, 2, 3])
    shape = [draw.randint(2, 4), *[9, 8, 7][:dims]] if dims else [draw.randint(3, 6)]
    x = torch.randn(3, *shape, dtype=torch.float64)
    modules = []

    def add(module):
        nonlocal x
        # Odd statistics and affine maps, as after training.
        for tensor in module.buffers():
            if tensor.ndim == 1:
                tensor.copy_(torch.rand_like(tensor) + 0.5)
        for tensor in module.parameters():
            nn.init.normal_(tensor)
        modules.append(module.double().eval())
        with torch.no_grad():
            x = modules[-1](x)

    inputs = x
    for _ in range(draw.randint(1, 3) if dims else 0):
        padding = draw.choice([0, 1, 2])
        mode = draw.choice(["zeros", "circular", "replicate"]) if padding == 1 else "zeros"
        add(
            CONVS[dims - 1](
                x.shape[1],
                draw.randint(2, 5),
                kernel_size=1 if min(x.shape[2:]) < 3 else draw.choice([1, 2, 3]),
                stride=draw.choice([1, 1, 2]),
                padding=padding,
                padding_mode=mode,
                bias=draw.random() < 0.8,
            )
        )
        if draw.random() < 0.4:
            add(BATCH_NORMS[dims - 1](x.shape[1], affine=draw.random() < 0.7))
        add(draw.choice(ACTIVATIONS)())
        if draw.random() < 0.3:
            add(nn.PReLU(x.shape[1]))
        if draw.random() < 0.5 and min(x.shape[2:]) > 3:
            pool = draw.choice(POOLS[dims - 1])
            add(pool(2, 2) if "LP" in pool.__name__ else pool(2))
        if draw.random() < 0.2:
            add(nn.Dropout())
    if dims:
        add(nn.Flatten())
        if draw.random() < 0.4:
            add(nn.BatchNorm1d(x.shape[1]))
    for _ in range(draw.randint(1, 3)):
        add(nn.Linear(x.shape[1], draw.randint(2, 6), bias=draw.random() < 0.8))
        if draw.random() < 0.4:
            add(nn.BatchNorm1d(x.shape[1]))
        add(draw.choice(ACTIVATIONS)())
    add(nn.Linear(x.shape[1], 2))
    if draw.random() < 0.3:
        add(nn.LogSoftmax(-1))
    at = draw.randint(0, len(modules))
    nested = [nn.Sequential(*modules[:at]), nn.Sequential(nn.Sequential(*modules[at:]))]
    return nn.Sequential(*draw.choice([modules, nested])).eval(), inputs


def weight_layers(net):
    return [(name, module) for name, module in net.named_modules() if isinstance(module, (nn.Linear, *CONVS))]


def random_cut(net, seed, share=0.6):
    """Masks over some of the outputs and inputs of a chain."""
    draw = random.Random(seed)

    def masks(sizes):
        return {name: torch.rand(size) < share for name, size in sizes if draw.random() < 0.7}

    layers = weight_layers(net)
    outputs = masks([(name, module.weight.shape[0]) for name, module in layers[:-1]])
    return Cut(outputs, masks([(name, module.weight.shape[1]) for name, module in layers]))


def masked(net, cut, scores=None):
    """A copy of a chain whose cut units have zero weights and biases, incoming and outgoing."""
    whole = complete_cut(net, cut, scores)
    zeroed = copy.deepcopy(net)
    with torch.no_grad():
        for name, module in weight_layers(zeroed):
            module.weight[~whole.outputs[name]] = 0
            module.weight[:, ~whole.inputs[name]] = 0
            if module.bias is not None:
                module.bias[~whole.outputs[name]] = 0
    return zeroed
