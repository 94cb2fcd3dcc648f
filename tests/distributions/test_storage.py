# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Any distribution as tensors and a structure, and back."""

import copy
import math
import sys

import pyro
import pyro.distributions as dist
import pyro.distributions.transforms as T
import pytest
import torch
from pyro.distributions import constraints
from torch import nn
from torch.distributions import biject_to

from pyro_radial.distributions import RadialNormal
from pyro_radial.distributions.storage import describe, rebuild
from tests.helpers.files import through_a_file


class Shifted(dist.TorchDistribution):
    """A distribution of a user: no expand of its own, private attributes, one optional argument."""

    arg_constraints = {}
    support = constraints.real

    def __init__(self, shift, width=None, *, sign=1.0, validate_args=None):
        self._shift = shift
        self._width = width
        self.sign = sign
        super().__init__(shift.shape, validate_args=validate_args)

    def _normal(self):
        return dist.Normal(self.sign * self._shift, 1.0 if self._width is None else self._width)

    def sample(self, sample_shape=torch.Size()):
        return self._normal().sample(sample_shape)

    def log_prob(self, value):
        return self._normal().log_prob(value)


class Typed(Shifted):
    """The name of its argument is also that of a method of every module."""

    def __init__(self, type):
        self.type = type
        super().__init__(type)


class Forgetful(dist.Normal):
    """Does not keep its argument."""

    def __init__(self, precision):
        super().__init__(0.0, precision**-0.5)


class Misleading(dist.Normal):
    """Keeps something else under the name of its argument."""

    def __init__(self, scale):
        super().__init__(0.0, 2.0 * scale)


class Wider(dist.Normal):
    """Has another shape than its arguments say."""

    def __init__(self, loc, scale):
        super().__init__(loc.expand(2, *loc.shape), scale)


class Holder(dist.Normal):
    def __init__(self, loc, scale, extra):
        self.extra = extra
        super().__init__(loc, scale)


class Undefined(dist.Normal):
    def log_prob(self, value):
        return super().log_prob(value) * math.nan


def positive(*shape):
    return torch.rand(shape) + 0.5


def covariance(size=3):
    root = torch.randn(2, size, size)
    return root @ root.mT + torch.eye(size)


def radial(event_dim=1):
    return RadialNormal(torch.randn(2, 3), positive(2, 3), event_dim)


def mixture():
    return dist.MixtureSameFamily(dist.Categorical(positive(4)), dist.Normal(torch.randn(4), positive(4)))


def used(distribution):
    """Distributions keep what they compute when they are used."""
    for name in ("probs", "logits", "covariance_matrix", "precision_matrix", "scale_tril"):
        getattr(distribution, name, None)
    distribution.log_prob(distribution.sample())
    return distribution


DISTRIBUTIONS = {
    "normal": lambda: dist.Normal(torch.randn(3, requires_grad=True), 2.0),
    "torch's normal": lambda: torch.distributions.Normal(torch.randn(3), 2.0),
    "normal expanded": lambda: dist.Normal(0.0, 1.0).expand([3, 2]).to_event(1),
    "radial of rows": lambda: radial(1).to_event(1),
    "gamma": lambda: dist.Gamma(positive(3), positive(3)),
    "Student t": lambda: dist.StudentT(3.0, torch.randn(3), positive(3)),
    "von Mises": lambda: dist.VonMises(torch.randn(3), positive(3)),
    "MVN covariance": lambda: dist.MultivariateNormal(torch.randn(3), covariance()),
    "MVN precision": lambda: dist.MultivariateNormal(torch.randn(3), precision_matrix=covariance()),
    "MVN factor": lambda: dist.MultivariateNormal(torch.randn(3), scale_tril=torch.linalg.cholesky(covariance())),
    "MVN used": lambda: used(dist.MultivariateNormal(torch.randn(3), precision_matrix=covariance())),
    "MVN low rank": lambda: dist.LowRankMultivariateNormal(torch.randn(3), torch.randn(3, 2), positive(3)),
    "categorical probs": lambda: dist.Categorical(positive(2, 3)),
    "categorical logits": lambda: dist.Categorical(logits=torch.randn(2, 3)),
    "categorical used": lambda: used(dist.Categorical(logits=torch.randn(2, 3))).expand([4, 2]),
    "one-hot": lambda: dist.OneHotCategorical(logits=torch.randn(2, 3)),
    "Bernoulli": lambda: dist.Bernoulli(torch.rand(3)),
    "Bernoulli used": lambda: used(dist.Bernoulli(logits=torch.tensor([-90.0, 0.3, 90.0]))),
    "Poisson": lambda: dist.Poisson(positive(3), is_sparse=True),
    "mixture": mixture,
    "radial through positive": lambda: dist.TransformedDistribution(radial(1), [biject_to(constraints.positive)]),
    "radial through interval": lambda: dist.TransformedDistribution(
        radial(1), [biject_to(constraints.interval(torch.tensor([1.0, 2.0, 3.0]), 7.0))]
    ),
    "two affine maps": lambda: dist.TransformedDistribution(
        dist.Normal(torch.randn(3), 1.0),
        [T.AffineTransform(torch.randn(3), positive(3)), T.AffineTransform(1.0, torch.tensor(2.0)).with_cache()],
    ),
    "inverse of a composition": lambda: dist.TransformedDistribution(
        dist.Gamma(positive(3), 1.0), [T.ComposeTransform([T.ExpTransform(), T.AffineTransform(0.0, 2.0)]).inv]
    ),
    "independent transform": lambda: dist.TransformedDistribution(
        radial(1), [T.IndependentTransform(T.ExpTransform(), 2)]
    ),
    "reshaped": lambda: dist.TransformedDistribution(radial(2), [T.ReshapeTransform((2, 3), (3, 2))]),
    "stacked": lambda: dist.TransformedDistribution(
        dist.Normal(torch.zeros(3, 2), 1.0).to_event(2), [T.StackTransform([T.ExpTransform(), T.TanhTransform()], 1)]
    ),
    "masked by False": lambda: dist.Normal(torch.randn(3), 1.0).mask(False),
    "masked by a tensor": lambda: dist.Normal(torch.randn(3), 1.0).mask(torch.tensor([True, False, True])).to_event(1),
    "delta": lambda: dist.Delta(torch.randn(2, 3), log_density=torch.randn(2), event_dim=1),
    "user's": lambda: Shifted(torch.randn(3), positive(3), sign=-1.0),
    "user's without the option": lambda: Shifted(torch.randn(3)),
    "user's expanded": lambda: Shifted(torch.randn(3, 1)).expand([2, 3, 4]).to_event(1),
}


def plain(value):
    """Whether this is of dicts, lists, strings and numbers alone."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(part) for key, part in value.items())
    if isinstance(value, list):
        return all(plain(part) for part in value)
    return value is None or type(value) in (bool, int, float, str)


def sample_of(distribution):
    pyro.set_rng_seed(1)
    return distribution.sample()


@pytest.fixture(params=DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def distribution(request):
    return request.param()


class TestRoundTrip:
    def test_the_distribution_is_the_same_and_its_parts_are_plain(self, distribution):
        structure, tensors = describe(distribution)
        assert plain(structure)
        module = nn.Module()
        for name, tensor in tensors.items():
            assert type(tensor) is torch.Tensor
            assert tensor.is_contiguous()
            assert not tensor.requires_grad
            module.register_buffer(name, tensor)
        assert module.state_dict().keys() == tensors.keys()
        twin = rebuild(*through_a_file((structure, tensors)))
        assert type(twin) is type(distribution)
        assert (twin.batch_shape, twin.event_shape) == (distribution.batch_shape, distribution.event_shape)
        assert repr(twin.support) == repr(distribution.support)
        sample = sample_of(distribution)
        torch.testing.assert_close(sample_of(twin), sample)
        torch.testing.assert_close(twin.log_prob(sample), distribution.log_prob(sample))

    def test_tensors_cast_to_float64_give_a_distribution_in_float64(self, distribution):
        structure, tensors = describe(distribution)
        cast = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        twin = rebuild(structure, cast)
        sample = sample_of(distribution)
        value = sample
        if sample.is_floating_point() and any(tensor.is_floating_point() for tensor in tensors.values()):
            assert twin.sample().dtype == torch.float64
            value = sample.double()
        torch.testing.assert_close(twin.log_prob(value).float(), distribution.log_prob(sample), rtol=1e-3, atol=1e-3)


class TestTensors:
    @pytest.mark.parametrize(
        ("make", "names"),
        [
            (lambda: dist.Normal(torch.randn(3), positive(3)).to_event(1), ["loc", "scale"]),
            (DISTRIBUTIONS["radial of rows"], ["loc", "scale"]),
            (DISTRIBUTIONS["masked by a tensor"], ["loc", "scale", "mask"]),
            (mixture, ["probs", "loc", "scale"]),
            (DISTRIBUTIONS["MVN used"], ["loc", "precision_matrix"]),
            (DISTRIBUTIONS["categorical used"], ["logits"]),
            (DISTRIBUTIONS["one-hot"], ["logits"]),
            (
                DISTRIBUTIONS["two affine maps"],
                ["loc", "scale", "transforms_0_loc", "transforms_0_scale", "transforms_1_scale"],
            ),
        ],
    )
    def test_their_names_are_as_short_as_can_be(self, make, names):
        assert list(describe(make())[1]) == names

    def test_a_name_that_every_module_has_is_not_used(self):
        assert list(describe(Typed(torch.zeros(3)))[1]) == ["type_2"]

    def test_what_is_repeated_is_stored_once(self):
        structure, tensors = describe(dist.Normal(0.0, 1.0).expand([1000, 1000]).to_event(2))
        assert {name: tensor.numel() for name, tensor in tensors.items()} == {"loc": 1, "scale": 1}
        assert rebuild(structure, tensors).event_shape == (1000, 1000)

    def test_the_rebuilt_distribution_uses_the_given_ones(self):
        structure, tensors = describe(radial(1).to_event(1))
        tensors["loc"].requires_grad_()
        twin = rebuild(structure, tensors)
        assert twin.base_dist.loc.data_ptr() == tensors["loc"].data_ptr()
        twin.sample().sub(twin.mean).sum().backward()
        assert tensors["loc"].grad is not None

    @pytest.mark.cuda
    def test_a_distribution_on_the_device_stays_there_and_leaves_its_random_state_alone(self):
        distribution = RadialNormal(torch.zeros(3, device="cuda"), 1.0).to_event(0)
        state = torch.cuda.get_rng_state()
        structure, tensors = describe(distribution)
        assert torch.equal(torch.cuda.get_rng_state(), state)
        assert rebuild(structure, tensors).sample().is_cuda
        assert not rebuild(structure, {name: t.cpu() for name, t in tensors.items()}).sample().is_cuda


class TestRebuild:
    def test_the_cache_of_a_transform_is_kept(self):
        twin = rebuild(*describe(DISTRIBUTIONS["two affine maps"]()))
        assert [transform._cache_size for transform in twin.transforms] == [0, 1]

    @pytest.mark.parametrize(
        ("module", "name"), [("antigravity", "Distribution"), (__name__, "Gone"), (__name__, "Shifted.Gone")]
    )
    def test_nothing_is_imported(self, module, name):
        structure, tensors = describe(Shifted(torch.zeros(3)))
        structure["class"] = [module, name]
        with pytest.raises(ValueError, match=rf"no class {name} in module .*: import it before loading"):
            rebuild(structure, tensors)
        assert "antigravity" not in sys.modules

    @pytest.mark.parametrize(("module", "name"), [("os", "system"), ("subprocess", "Popen"), ("torch.nn", "Linear")])
    def test_only_distributions_and_transforms_are_made(self, module, name):
        structure = {"class": [module, name], "arguments": {}}
        with pytest.raises(ValueError, match="neither a distribution nor a transform"):
            rebuild(structure, {})

    def test_a_missing_tensor_is_named(self):
        structure, tensors = describe(dist.Normal(torch.zeros(3), 1.0))
        del tensors["scale"]
        with pytest.raises(ValueError, match="tensor 'scale' of the structure is missing"):
            rebuild(structure, tensors)


def planar():
    return dist.TransformedDistribution(dist.Normal(torch.zeros(3), 1.0).to_event(1), [T.Planar(3)])


def local():
    class Local(Shifted):
        pass

    return Local(torch.zeros(3))


class TestRefused:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Forgetful(positive(3)), "Forgetful cannot be stored: Forgetful has no attribute .* 'precision'"),
            (lambda: Misleading(positive(3)), "Misleading cannot be stored: rebuilt, its log-density .* differs"),
            (lambda: Wider(torch.zeros(3), 1.0), "Wider cannot be stored: rebuilt, its shapes are"),
            (lambda: Undefined(torch.zeros(3), 1.0), "Undefined cannot be stored: its log-density .* is NaN"),
            (lambda: Holder(0.0, 1.0, object()), "Holder cannot be stored: its argument 'extra' is of class object"),
            (lambda: Holder(0.0, 1.0, [{}]).mask(True), "its argument 'base_dist.extra_0' is of class dict"),
            (planar, "TransformedDistribution cannot be stored"),
            (local, "Local cannot be stored: there is no class local.<locals>.Local"),
            (lambda: torch.zeros(3), "Tensor cannot be stored: it is not a distribution"),
            (lambda: T.ExpTransform(), "ExpTransform cannot be stored: it is not a distribution"),
        ],
    )
    def test_the_class_and_the_reason_are_named(self, make, message):
        with pytest.raises(ValueError, match=message):
            describe(make())

    def test_a_tensor_that_is_not_finite_is_named_and_the_distribution_left_as_it_was(self):
        normal, state = dist.Normal(0.0, math.inf, validate_args=False).expand([3]), torch.get_rng_state()
        before = copy.copy(vars(normal))
        with pytest.raises(ValueError, match=r"tensor 'base_distribution\.scale' is not finite"):
            describe(normal.to_event(1))
        assert vars(normal) == before
        assert torch.equal(torch.get_rng_state(), state)
