# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Densities and divergences under the compiler, ``vmap``, both modes of differentiation, and without any rows."""

import pytest
import torch

from pyro_radial.distributions import RadialNormal
from tests.helpers.distributions import FAMILIES, kl_of, parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kl_is_mapped_with_fixed_directions(family):
    arguments = parameters(4, 3)
    mapped = torch.vmap(kl_of(family))(*arguments)
    # Each example alone: a batch has directions of its own for each row.
    alone = torch.stack([kl_of(family)(*row) for row in zip(*arguments, strict=True)])
    torch.testing.assert_close(mapped, alone)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(2,), (2, 3), (7,)])
def test_a_fixed_seeds_gradient_is_the_derivative_of_its_value(family, shape):
    arguments = [tensor.requires_grad_() for tensor in parameters(*shape)]
    torch.autograd.gradcheck(kl_of(family), arguments, check_forward_ad=True)


@pytest.mark.parametrize("event_dim", [0, 1, 2])
def test_the_density_is_differentiated_forward(event_dim):
    value, loc, _, scale = parameters(5, 2, 3)
    arguments = [value.requires_grad_(), loc[0, 0].requires_grad_(), scale.requires_grad_()]

    def log_prob(value, loc, scale):
        return RadialNormal(loc, scale, event_dim).log_prob(value)

    torch.autograd.gradcheck(log_prob, arguments, check_forward_ad=True)
    primal = [tensor.detach() for tensor in arguments]
    _, forward = torch.func.jvp(log_prob, tuple(primal), tuple(torch.ones_like(t) for t in primal))
    gradients = torch.autograd.grad(log_prob(*arguments).sum(), arguments)
    torch.testing.assert_close(forward.sum(), sum(gradient.sum() for gradient in gradients))
