# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The device and dtype of modules, their modes and their buffers."""

import torch
from torch import nn

from pyro_radial.nn import BayesianModule, SupervisedModel, likelihoods
from pyro_radial.nn.modules import Autocast, device_of, dtype_of, evaluating, keeping_buffers


def test_device_and_dtype_are_those_of_the_first_module_that_has_any():
    double, half = nn.Linear(2, 2).double(), nn.Linear(2, 2).half()
    assert dtype_of(lambda x: x, nn.ReLU(), double, half) == torch.float64
    assert dtype_of(nn.ReLU()) == torch.get_default_dtype()
    assert device_of(lambda x: x, nn.ReLU()) == torch.device("cpu")
    assert device_of(nn.Linear(2, 2, device="meta")) == torch.device("meta")


def test_a_network_whose_parameters_are_all_random_has_the_device_and_dtype_of_its_start():
    model = SupervisedModel(BayesianModule(nn.Linear(2, 2).double()), likelihoods.Gaussian())
    assert not list(model.parameters())
    assert (dtype_of(model), device_of(model)) == (torch.float64, torch.device("cpu"))


def test_modes_of_all_submodules_are_restored():
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    bnn = BayesianModule(net)
    bnn.skeleton[1][0].eval()
    modes = [module.training for module in (*bnn.modules(), *bnn.skeleton.modules())]
    with evaluating(bnn, len):
        assert not any(module.training for module in (*bnn.modules(), *bnn.skeleton.modules()))
    assert [module.training for module in (*bnn.modules(), *bnn.skeleton.modules())] == modes


def test_buffers_are_restored_in_place():
    norm = nn.BatchNorm1d(2)
    running_mean = norm.running_mean
    with keeping_buffers(norm):
        norm(torch.randn(5, 2) + 3)
        norm.running_var = torch.full((2,), 7.0)
    assert norm.running_mean is running_mean
    assert running_mean.tolist() == [0.0, 0.0]
    assert norm.running_var.tolist() == [1.0, 1.0]
    assert norm.num_batches_tracked == 0


def test_a_model_computes_in_the_dtype_of_autocast():
    model = Autocast(nn.Linear(2, 2), torch.bfloat16, torch.device("cpu"))
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16
