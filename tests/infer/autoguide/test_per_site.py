# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.distributions import constraints
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoGuideList
from torch import nn

from pyro_radial import AutoMeanField, AutoRadial, BayesianModule, SupervisedModel
from pyro_radial.nn import likelihoods
from tests.helpers.models import matrix_model

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class NegativeExponential(dist.Exponential):
    support = constraints.less_than(0.0)

    def rsample(self, sample_shape=torch.Size()):
        return -super().rsample(sample_shape)

    def log_prob(self, value):
        return super().log_prob(-value)


def test_setup_keeps_the_running_statistics_of_a_trained_network():
    """A second guide made for a trained model must not see two rows as its statistics."""
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model = SupervisedModel(BayesianModule(net), likelihoods.Gaussian(num_data=6))
    AutoRadial(model)(X, torch.zeros(6, 1))
    model(10 + X, torch.zeros(6, 1))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert sum(name.endswith("num_batches_tracked") and int(b) == 1 for name, b in before.items()) == 1
    AutoMeanField(model).setup(X[:2], torch.zeros(2, 1))
    after = dict(model.named_buffers())
    assert all(torch.equal(after[name], buffer) for name, buffer in before.items())
    model(X, torch.zeros(6, 1))
    assert not all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_an_init_that_is_not_finite_names_the_site():
    def model():
        pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    guide = AutoRadial(model, init_loc_fn=lambda site: torch.full((2,), math.inf))
    with pytest.raises(ValueError, match="'w'"):
        guide.setup()


def test_a_decreasing_transform_keeps_quantiles_in_order():
    guide = AutoMeanField(lambda: pyro.sample("w", NegativeExponential(1.0)), init_stddev=0.5)
    guide()
    low, high = guide.quantiles([0.1, 0.9])["w"]
    assert low < high < 0


def test_the_density_of_a_constrained_draw_does_not_suffer_from_inverting_its_transform():
    # log q of the guide's own draw moves with loc through the Jacobian alone, here exactly 1 per element. Inverting
    # exp in float32 would move the draw by a good part of so small a scale, and the gradient with it.
    guide = AutoRadial(
        lambda: pyro.sample("w", dist.LogNormal(0.0, 1.0).expand([50]).to_event(1)),
        init_loc_fn=lambda site: torch.full((50,), 150.0),
        init_scale=1e-5,
    )
    poutine.trace(guide).get_trace().log_prob_sum().backward()
    gradient = guide.locs.w_unconstrained.grad
    torch.testing.assert_close(gradient, -torch.ones(50))


@pytest.mark.parametrize("method", ["median", "posterior", "scale_change"])
def test_a_guide_without_parameters_says_to_set_it_up(method):
    with pytest.raises(RuntimeError, match="setup"):
        getattr(AutoRadial(matrix_model), method)()


def test_a_loaded_guide_without_its_model_still_samples():
    import io

    guide = AutoRadial(matrix_model)
    guide()
    buffer = io.BytesIO()
    torch.save(guide, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert loaded()["weight"].shape == (5, 4)
    assert guide.model is not None


def test_no_memory_of_the_store_survives_clearing_it():
    guide = AutoRadial(matrix_model)
    guide()
    before = guide.median()["weight"].clone()
    pyro.clear_param_store()
    guide()
    assert torch.equal(guide.median()["weight"], before)


def rows_of_a_plate(rows, y):
    """Local variables of a mini-batch: the model is given the numbers of the rows."""
    with pyro.plate("rows", 20, subsample=rows):
        local = pyro.sample("local", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(local, 0.3), obs=y)


ADVICE = (
    r"site 'local' is in the plate 'rows', and the guide draws 5 of its 20 rows .* "
    r"create_plates=lambda rows, ...: pyro.plate\('rows', 20, subsample=rows, dim=-1\)"
)


def test_local_variables_of_given_rows_need_the_plate_of_the_model():
    y = torch.linspace(-1.0, 1.0, 20)
    guide = AutoMeanField(rows_of_a_plate)
    with pytest.raises(ValueError, match=f"AutoMeanField: {ADVICE}"):
        guide(torch.arange(5), y[:5])
    # All rows in their order are those of the guide.
    guide.setup(torch.arange(20), y)
    assert guide.median()["local"].shape == (20,)
    right = AutoMeanField(rows_of_a_plate, create_plates=lambda rows, y: pyro.plate("rows", 20, subsample=rows))
    svi = SVI(rows_of_a_plate, right, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
    for _ in range(30):
        for rows in torch.randperm(20).split(5):
            svi.step(rows, y[rows])
    # With rows of the guide's own the correlation is about zero.
    assert torch.corrcoef(torch.stack([right.median()["local"], y]))[0, 1] > 0.95


def test_a_part_of_a_list_takes_the_plates_of_the_list():
    def listed(**plates):
        guides = AutoGuideList(rows_of_a_plate, **plates)
        guides.append(AutoMeanField(rows_of_a_plate))
        return guides

    rows = torch.arange(3, 8)
    with pytest.raises(ValueError, match=ADVICE):
        listed()(rows, torch.zeros(5))
    draw = listed(create_plates=lambda rows, y: pyro.plate("rows", 20, subsample=rows))(rows, torch.zeros(5))
    assert draw["local"].shape == (5,)


def test_a_plate_that_draws_as_many_rows_as_an_argument_has_is_warned_of():
    def model(y, size):
        with pyro.plate("rows", 20, subsample_size=5) as rows:
            local = pyro.sample("local", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(local, 0.1), obs=y[rows] if size == 20 else y)

    # With all rows as an argument the model takes the guide's.
    AutoMeanField(model).setup(torch.zeros(20), 20)
    with pytest.warns(UserWarning, match=ADVICE):
        AutoMeanField(model).setup(torch.zeros(5), 5)
