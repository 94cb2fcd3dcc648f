# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pytest
import torch
from torch.distributions import kl_divergence
from torch.func import grad, hessian, vmap

from pyro_radial.distributions.kl_formulas.kl_to_normal import kl_to_normal

SHAPE = (3, 4, 5)
# Of the other side's parameters: its own for each element, a row, one number, and a batch beyond q's.
SHAPES = [SHAPE, (5,), (1, 1, 1), (2, 3, 4, 5)]


def parameters(shape, dtype=torch.double):
    tensors = torch.randn(SHAPE), torch.rand(SHAPE) + 0.3, torch.randn(shape), torch.rand(shape) + 0.3
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def by_elements(loc, scale, center, unit, event_dims):
    """Torch's own KL, whose gradient is that of its steps."""
    kl = kl_divergence(torch.distributions.Normal(loc, scale), torch.distributions.Normal(center, unit))
    return kl.sum(list(range(-event_dims, 0))) if event_dims else kl


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("event_dims", [0, 1, 3])
def test_between_normals_it_is_torchs_with_its_gradients(shape, event_dims):
    arguments = parameters(shape)
    value, expected = kl_to_normal(*arguments, event_dims), by_elements(*arguments, event_dims)
    torch.testing.assert_close(value, expected)
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad((weights * value).sum(), arguments)
    torch.testing.assert_close(gradients, torch.autograd.grad((weights * expected).sum(), arguments))


@pytest.mark.parametrize("radius", [None, 7])
@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_its_derivatives_match_differences(radius, shape):
    arguments = parameters(shape)
    torch.autograd.gradcheck(lambda *a: kl_to_normal(*a, 2, radius), arguments, check_forward_ad=True)
    torch.autograd.gradgradcheck(lambda *a: kl_to_normal(*a, 2, radius), arguments)


def test_function_transforms_agree():
    loc, scale, center, unit = (tensor.detach() for tensor in parameters((5,)))

    def of_row(loc, scale):
        return kl_to_normal(loc, scale, center, unit, 1, 5)

    rows = loc[0], scale[0]
    torch.testing.assert_close(vmap(of_row)(*rows), of_row(*rows))
    by_rows = torch.stack([grad(of_row, argnums=1)(*row) for row in zip(*rows, strict=True)])
    torch.testing.assert_close(vmap(grad(of_row, argnums=1))(*rows), by_rows)
    by_scale = hessian(of_row, argnums=1)(loc[0, 0], scale[0, 0])
    torch.testing.assert_close(by_scale.diagonal(), scale[0, 0] ** -2 + unit**-2 / 5)


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float16), (torch.bfloat16, torch.float32)])
def test_half_precision_keeps_its_dtype_in_gradients_alone(dtypes):
    arguments = [
        tensor.detach().to(dtype).requires_grad_()
        for tensor, dtype in zip(parameters((1, 1, 1)), dtypes * 2, strict=True)
    ]
    exact = [tensor.detach().double().requires_grad_() for tensor in arguments]
    value, expected = kl_to_normal(*arguments, 3), kl_to_normal(*exact, 3)
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    found, gradients = (torch.autograd.grad(*pair) for pair in ((value, arguments), (expected, exact)))
    for gradient, own, argument in zip(found, gradients, arguments, strict=True):
        assert gradient.dtype == argument.dtype
        torch.testing.assert_close(gradient.double(), own, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dim", [1, 3, 20_000])
def test_at_the_prior_it_is_zero_with_zero_gradients(dim):
    loc, scale = torch.randn(dim), torch.rand(dim) + 0.1
    arguments = [tensor.clone().requires_grad_() for tensor in (loc, scale, loc, scale)]
    value = kl_to_normal(*arguments, 1)
    assert float(value.detach()) == 0.0
    assert not any(gradient.any() for gradient in torch.autograd.grad(value, arguments))


def test_values_and_gradients_compile_as_one_graph():
    torch._dynamo.reset()
    arguments = parameters((1, 1, 1))
    compiled = torch.compile(lambda *a: kl_to_normal(*a, 3, 60), fullgraph=True, backend="aot_eager")(*arguments)
    expected = kl_to_normal(*arguments, 3, 60)
    torch.testing.assert_close(compiled, expected)
    gradients = torch.autograd.grad(compiled, arguments)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, arguments))
