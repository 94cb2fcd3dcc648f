# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Calls of ``pyro_radial.nn.likelihoods``."""

import math

import pyro.distributions as dist
import torch

from pyro_radial.nn import likelihoods
from tests.calls.sweep import Call, distribution, flag, non_negative_int, optional, positive_float, positive_int, tensor

F = torch.zeros(4, 2)

num_data = optional(positive_int)
shared = dict(num_data=num_data, event_dim=non_negative_int)
#: Right targets of each likelihood for the output F, and wrong ones.
TARGETS = {
    "Bernoulli": (torch.ones(4, 2), {"two": torch.full((4, 2), 2.0), "complex": torch.ones(4, 2, dtype=torch.cfloat)}),
    "Categorical": (
        torch.ones(4, dtype=torch.long),
        {
            "class out of range": torch.full((4,), 2),
            "real numbers": torch.ones(4),
            "one-hot": torch.eye(2)[[0, 1, 0, 1]],
        },
    ),
    "Gaussian": (torch.ones(4, 2), {"flags": torch.ones(4, 2, dtype=torch.bool)}),
    "HeteroscedasticGaussian": (torch.ones(4, 1), {"flags": torch.ones(4, 1, dtype=torch.bool)}),
    "MaskedCategorical": (
        torch.tensor([1, -100, 0, -100]),
        {"class out of range": torch.full((4,), 2), "real numbers": torch.ones(4)},
    ),
    "MaskedGaussian": (torch.full((4, 2), math.nan), {"inf": torch.full((4, 2), math.inf)}),
    "Poisson": (torch.ones(4, 2), {"negative": -torch.ones(4, 2), "half": torch.full((4, 2), 0.5)}),
}
outputs = tensor | {"number": 1.0, "without outputs": torch.zeros(4)}


def settings(**expected):
    return lambda found: {name: getattr(found, name) for name in expected} == expected


class Own(likelihoods.Likelihood):
    """A likelihood as a user writes it."""

    def observation(self, f, **noise):
        return dist.Normal(f, 1.0).to_event(self.event_dim)


gaussian = dict(
    shared,
    scale=optional(positive_float),
    learn_scale=flag,
    precision_prior=optional(distribution)
    | {"real": dist.Normal(0.0, 1.0), "vector": dist.Gamma(torch.ones(2), torch.ones(2)).to_event(1)},
)

CALLS = [
    *(
        Call(
            "nn.likelihoods.Likelihood.forward",
            lambda right=right: dict(f=F, y=right, observed=torch.ones(right.shape, dtype=torch.bool)),
            lambda y, right=right: torch.equal(y.nan_to_num(), right.to(y).nan_to_num()),
            invalid=dict(
                f=outputs | {"no rows": torch.zeros(0, 2)},
                y=optional(tensor) | wrong | {"number": 1.0, "another shape": torch.ones(3, 2)},
                observed=optional(tensor) | {"numbers": right, "another shape": torch.ones(3, dtype=torch.bool)},
            ),
            also=(
                ({"y": None}, lambda y, right=right: y.shape == right.shape),
                ({"observed": None}, lambda y, right=right: y.shape == right.shape),
            ),
            on=getattr(likelihoods, name),
            case=name,
        )
        for name, (right, wrong) in TARGETS.items()
    ),
    Call(
        "nn.likelihoods.Likelihood",
        lambda: dict(num_data=100, event_dim=0),
        settings(num_data=100, event_dim=0),
        invalid=shared,
        also=(({"num_data": None}, settings(num_data=None)),),
    ),
    *(
        Call(
            f"nn.likelihoods.{name}",
            lambda: dict(num_data=100, event_dim=2),
            settings(num_data=100, event_dim=2),
            invalid=shared | ({"event_dim": positive_int} if "Categorical" in name else {}),
            also=(({"num_data": None}, settings(num_data=None)),),
        )
        for name in ("Bernoulli", "Categorical", "MaskedCategorical", "Poisson")
    ),
    *(
        Call(
            f"nn.likelihoods.{name}",
            lambda: dict(num_data=100, event_dim=2, scale=0.5, learn_scale=False, precision_prior=None),
            settings(num_data=100, event_dim=2, scale=0.5),
            invalid=gaussian,
            also=(
                ({"num_data": None}, settings(num_data=None)),
                ({"scale": None}, settings(scale=1.0)),
                ({"scale": None, "precision_prior": dist.Gamma(6.0, 6.0)}, lambda found: found.precision_prior),
                ({"learn_scale": True}, lambda found: abs(found.scale.item() - 0.5) < 1e-6),
            ),
        )
        for name in ("Gaussian", "MaskedGaussian")
    ),
    Call(
        "nn.likelihoods.HeteroscedasticGaussian",
        lambda: dict(num_data=100, event_dim=1, floor=0.5),
        settings(num_data=100, floor=0.5),
        invalid=dict(num_data=num_data, event_dim=positive_int, floor=positive_float),
        also=(({"num_data": None}, settings(num_data=None)),),
    ),
    Call(
        "nn.likelihoods.Likelihood.train_on",
        lambda: dict(num_data=100),
        lambda found: found is None,
        invalid=dict(num_data=positive_int),
        on=lambda: Own(num_data=100),
    ),
    Call(
        "nn.likelihoods.Likelihood.function_values",
        lambda: dict(f=F),
        lambda found: found is F,
        invalid=dict(f=outputs),
        on=Own,
    ),
]

METHODS = {
    "Likelihood": "observation inverse_link noise predictive_entropy target_shape check_output check_target "
    "check_target_dtype check_target_values",
    "Bernoulli": "observation inverse_link predictive_entropy check_target_dtype check_target_values",
    "Categorical": "observation inverse_link predictive_entropy target_shape check_target check_target_values",
    "Gaussian": "observation inverse_link noise",
    "HeteroscedasticGaussian": "observation inverse_link target_shape check_output",
    "MaskedCategorical": "observation check_target_values",
    "MaskedGaussian": "observation check_target_values",
    "Poisson": "observation inverse_link check_target_values",
}
NOT_CALLED = {
    f"nn.likelihoods.{name}.{method}": "forward and predictions give it an output that function_values has checked"
    for name, methods in METHODS.items()
    for method in methods.split()
}
