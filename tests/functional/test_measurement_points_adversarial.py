# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import copy
import pickle

import pyro.contrib.gp.kernels as gp_kernels
import pytest
import torch
from torch import nn

from pyro_radial.functional import AdversarialPoints, GaussianProcess, UniformBox


def bump(points):
    """A hill with its top at (0.5, -3)."""
    top = points.new_tensor([0.5, -3.0])
    return -((points - top) / points.new_tensor([1.0, 10.0])).square().sum()


def climb(climbing, objective, steps):
    return torch.stack([climbing.ascend(objective) for _ in range(steps)])


def test_points_climb_to_the_top_of_a_known_objective_whatever_the_sides_of_the_box():
    climbing = AdversarialPoints(UniformBox([-1.0, -10.0], [1.0, 10.0], num_points=5), lr=0.02)
    x = torch.zeros(3, 2)
    climbing(x)
    values = climb(climbing, bump, 300)
    assert float(values[-1]) > float(values[0])
    torch.testing.assert_close(climbing(x), torch.tensor([0.5, -3.0]).expand(5, -1), rtol=0, atol=0.02)


def test_points_start_at_random_in_the_box_and_stay_until_they_ascend():
    box, x = UniformBox([2.0, -5.0], [3.0, 5.0], num_points=50), torch.zeros(3, 2)
    climbing = AdversarialPoints(box)
    points = climbing(x)
    assert torch.equal(climbing(x), points)
    assert bool((points >= box.low).all() and (points <= box.high).all())
    assert not torch.equal(AdversarialPoints(box)(x), points)


def test_points_stop_at_the_walls_of_the_box_and_can_leave_them_again():
    climbing, x = AdversarialPoints(UniformBox(-1.0, 1.0, num_points=4), lr=0.1), torch.zeros(3, 1)
    climbing(x)
    climb(climbing, lambda points: points.sum(), 40)
    assert bool((climbing(x) == 1.0).all())
    climb(climbing, lambda points: -points.sum(), 20)
    assert bool((climbing(x) < 1.0).all())


def test_only_the_points_get_a_gradient_and_what_they_are_handed_out_as_has_none():
    climbing, x = AdversarialPoints(UniformBox(-1.0, 1.0, num_points=4)), torch.zeros(3, 2)
    net = nn.Linear(2, 1)
    assert not climbing(x).requires_grad
    climbing.ascend(lambda points: net(points).sum())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not isinstance(climbing, nn.Module)


def test_the_objectives_value_is_returned_without_gradient_before_the_step():
    climbing, x = AdversarialPoints(UniformBox(-1.0, 1.0, num_points=4)), torch.zeros(3, 2)
    before = climbing(x)
    value = climbing.ascend(bump)
    torch.testing.assert_close(value, bump(before))
    assert not value.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.double])
def test_points_have_the_dtype_of_the_latest_batch(dtype):
    climbing = AdversarialPoints(UniformBox(-1.0, 1.0, num_points=4))
    climbing(torch.zeros(3, 2, dtype=torch.float32))
    assert climbing(torch.zeros(3, 2, dtype=dtype)).dtype == dtype
    seen = []
    climbing.ascend(lambda points: seen.append(points.dtype) or points.sum())
    assert seen == [dtype]


def test_points_find_where_two_gaussian_processes_differ_most():
    # Means differ only around 0.6, so there the divergence of their distributions is largest.
    kernel = gp_kernels.RBF(1, lengthscale=torch.tensor(0.2))
    q = GaussianProcess(kernel, mean=lambda x: (-(x[:, 0] - 0.6).square() / 0.5).exp(), noise=0.1)
    p = GaussianProcess(kernel, noise=0.1)

    def divergence(points):
        (mean_q, covariance), (mean_p, _) = q.moments(points), p.moments(points)
        difference = mean_q - mean_p
        return 0.5 * (difference * torch.linalg.solve(covariance[0], difference)).sum()

    climbing, x = AdversarialPoints(UniformBox(-1.0, 1.0, num_points=1), lr=0.02), torch.zeros(3, 1)
    climbing(x)
    climb(climbing, divergence, 200)
    assert float(climbing(x)) == pytest.approx(0.6, abs=0.02)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda climbing: pickle.loads(pickle.dumps(climbing))])
def test_a_copy_climbs_on_its_own(duplicate):
    climbing, x = AdversarialPoints(UniformBox(-1.0, 1.0, num_points=4), lr=0.1), torch.zeros(3, 2)
    before = climbing(x)
    climbing.ascend(bump)
    other = duplicate(climbing)
    after = climbing(x)
    other.ascend(bump)
    assert torch.equal(climbing(x), after)
    assert not torch.equal(after, before)
    climbing.ascend(bump)
    assert torch.equal(climbing(x), other(x))


def test_it_shows_its_box_and_rate():
    assert repr(AdversarialPoints(UniformBox(0.0, 1.0, 2), lr=0.5)) == (
        "AdversarialPoints(UniformBox(low=0.0, high=1.0, num_points=2), lr=0.5)"
    )


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (lambda points: points.sum(-1), "finite scalar"),
        (lambda points: points.sum() * float("nan"), "finite scalar"),
        (lambda points: points.detach().sum(), "differentiable"),
        (lambda points: torch.ones((), requires_grad=True) * 2, "depend on the points"),
    ],
)
def test_objectives_that_cannot_be_climbed_are_refused_by_name(objective, words):
    climbing = AdversarialPoints(UniformBox(-1.0, 1.0, num_points=4))
    climbing(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=f"objective .*{words}"):
        climbing.ascend(objective)


def test_bad_arguments_and_orders_are_refused():
    with pytest.raises(ValueError, match="box"):
        AdversarialPoints((-1.0, 1.0))
    with pytest.raises(ValueError, match="lr"):
        AdversarialPoints(UniformBox(-1.0, 1.0, 2), lr=0.0)
    climbing = AdversarialPoints(UniformBox(-1.0, 1.0, 2))
    with pytest.raises(RuntimeError, match="on a batch before"):
        climbing.ascend(bump)
    climbing(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="x must have inputs"):
        climbing(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="low must have the shape"):
        AdversarialPoints(UniformBox([0.0, 0.0], [1.0, 1.0], 2))(torch.zeros(3, 4))


@pytest.mark.cuda
def test_on_cuda_points_climb_where_the_batch_is():
    climbing, x = AdversarialPoints(UniformBox(-1.0, 1.0, num_points=4), lr=0.1), torch.zeros(3, 2, device="cuda")
    assert climbing(x).is_cuda
    assert bool(torch.stack([climbing.ascend(bump) for _ in range(20)]).isfinite().all())
