# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceMeanField_ELBO
from torch.func import grad, hessian, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_radial import TermsELBO
from pyro_radial.distributions import RadialNormal, row_operator
from pyro_radial.distributions.kl_formulas.shared import directions
from pyro_radial.distributions.kl_formulas.to_radial import normal_to_radial, radial_to_radial
from tests.helpers.devices import recent_compiler
from tests.helpers.distributions import FAMILIES, kl_of, parameters

OPERATORS = {
    "radial": torch.ops.pyro_radial.radial_to_radial.default,
    "normal": torch.ops.pyro_radial.normal_to_radial.default,
}


def arguments_of(shape, dtype=torch.double):
    ratio, shift = torch.rand(shape, dtype=dtype) + 0.3, torch.randn(shape, dtype=dtype)
    return ratio, shift, directions(ratio)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_gradient", [False, True])
def test_the_operator_is_registered_as_torch_asks(family, dtype, with_gradient):
    for shape in ((2,), (3, 4), (2, 0, 3)):
        torch.library.opcheck(OPERATORS[family], (*arguments_of(shape, dtype), with_gradient))
    ratio, shift, noise = arguments_of((4, 3), dtype)
    # Not in the order of their memory, and with noise that rows share.
    strange = ratio.T.contiguous().T, shift[:1].expand(4, 3), noise[:1]
    torch.library.opcheck(OPERATORS[family], (*strange, with_gradient))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_its_gradient_is_that_of_its_own_steps(family, dtype):
    formula = {"radial": radial_to_radial, "normal": normal_to_radial}[family]
    for shape, length in (((5, 2), 1.0), ((3, 7), 1e-3), ((2, 3, 40), 30.0)):
        ratio, shift, noise = arguments_of(shape, dtype)
        ratio, shift = ratio.requires_grad_(), (length * shift).requires_grad_()
        value, *slopes = formula(ratio, shift, noise, True)
        expected = torch.autograd.grad(value.sum(), (ratio, shift))
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
        for slope, own in zip(slopes, expected, strict=True):
            assert float((slope - own).detach().norm() / own.norm()) < tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_in_groups_are_those_at_once(family, monkeypatch):
    arguments = arguments_of((50, 3))
    at_once = OPERATORS[family](*arguments, True)
    monkeypatch.setattr(row_operator, "_NUMBERS_AT_ONCE", 4 * 3 * arguments[2].shape[-2])
    for part, whole in zip(OPERATORS[family](*arguments, True), at_once, strict=True):
        torch.testing.assert_close(part, whole)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(2,), (2, 3), (7,)])
def test_first_derivatives_are_those_of_differences_in_both_modes(family, shape):
    arguments = [tensor.requires_grad_() for tensor in parameters(*shape)]
    torch.autograd.gradcheck(kl_of(family), arguments, check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kl_is_mapped_with_fixed_directions(family):
    arguments = parameters(4, 3)
    # Each example alone: a batch has directions of its own for each row.
    alone = torch.stack([kl_of(family)(*row) for row in zip(*arguments, strict=True)])
    torch.testing.assert_close(vmap(kl_of(family))(*arguments), alone)


def twice(function, at):
    at = at.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(at), at, create_graph=True)
    return torch.autograd.grad(first.sum(), at)


def along(function, at):
    """The directional derivative, in forward mode."""
    return jvp(function, (at,), (torch.ones_like(at),))[1]


SECOND_ORDERS = {
    "forward over reverse": lambda function, at: along(grad(function), at),
    "reverse over reverse": lambda function, at: grad(lambda a: grad(function)(a).sum())(at),
    "forward over forward": lambda function, at: along(lambda a: along(function, a), at),
    "reverse over forward": lambda function, at: grad(lambda a: along(function, a))(at),
    "create_graph": twice,
    "autograd.functional": torch.autograd.functional.hessian,
}
second_order = pytest.mark.parametrize("second", SECOND_ORDERS.values(), ids=SECOND_ORDERS)


@pytest.mark.parametrize("family", FAMILIES)
@second_order
def test_second_derivatives_raise_an_error(family, second):
    loc, scale, center, unit = parameters(3)
    for transform in (second, lambda f, at: hessian(f)(at), lambda f, at: vmap(hessian(f))(at.expand(2, -1))):
        with pytest.raises(RuntimeError, match=r"second derivatives .* are not implemented"):
            transform(lambda s: kl_of(family)(loc, s, center, unit), scale)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loss", [TraceMeanField_ELBO, TermsELBO])
@second_order
def test_second_derivatives_of_a_loss_raise_an_error_and_do_not_fall_back_on_sampling(family, loss, second):
    loc, scale, center, unit = parameters(3)

    def model():
        pyro.sample("w", RadialNormal(center, unit, validate_args=False))

    def of_scale(scale):
        q = RadialNormal(loc, scale, validate_args=False)
        if family == "normal":
            q = dist.Normal(loc, scale, validate_args=False).to_event(1)
        return loss().differentiable_loss(model, lambda: pyro.sample("w", q))

    torch.testing.assert_close(grad(of_scale)(scale), grad(lambda s: kl_of(family)(loc, s, center, unit))(scale))
    torch.testing.assert_close(along(of_scale, scale), grad(of_scale)(scale).sum())
    with pytest.raises(RuntimeError, match=r"second derivatives .* are not implemented"):
        second(of_scale, scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_gradient_none_is_found(family, monkeypatch):
    asked = []
    plain = row_operator._OPERATORS[f"{family}_to_radial"]
    monkeypatch.setitem(
        row_operator._OPERATORS, f"{family}_to_radial", lambda *args: asked.append(args[3]) or plain(*args)
    )
    arguments = parameters(3, 4)
    kl_of(family)(*arguments)
    with torch.no_grad():
        kl_of(family)(*(tensor.requires_grad_() for tensor in arguments))
    kl_of(family)(*arguments).sum().backward()
    assert asked == [False, False, True]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("family", FAMILIES)
@recent_compiler
def test_values_and_gradients_compile_as_one_graph(family):
    torch._dynamo.reset()
    arguments = [tensor.requires_grad_() for tensor in parameters(4, 3)]
    compiled = torch.compile(kl_of(family), fullgraph=True, backend="aot_eager")(*arguments)
    torch.testing.assert_close(compiled, kl_of(family)(*arguments))
    expected = torch.autograd.grad(kl_of(family)(*arguments).sum(), arguments)
    torch.testing.assert_close(torch.autograd.grad(compiled.sum(), arguments), expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [3, 100_000])
def test_a_captured_graph_has_one_node_for_it_and_its_gradient(family, rows):
    arguments = [tensor.requires_grad_() for tensor in parameters(rows, 2)]

    def with_gradient(*arguments):
        value = kl_of(family)(*arguments)
        return value.detach(), *torch.autograd.grad(value.sum(), arguments)

    graph = make_fx(with_gradient)(*arguments)
    ours = [str(node.target) for node in graph.graph.nodes if "pyro_radial" in str(node.target)]
    assert ours == ["pyro_radial.fixed_noise.default", f"pyro_radial.{family}_to_radial.default"]
    assert len(graph.graph.nodes) < 60
    others = [tensor.detach().roll(1, 0).requires_grad_() for tensor in arguments]
    torch.testing.assert_close(graph(*others), with_gradient(*others))
