# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""How well a guide predicts rows that it is not trained on."""

from pyro_radial._pyro.random_state import seeded
from pyro_radial.infer.prediction.predict import predict
from pyro_radial.infer.training.data import Rows
from pyro_radial.infer.training.trained import Trained

__all__ = ["validation_nll"]

SEED = 0
NUM_SAMPLES = 16


def validation_nll(trained: Trained, rows: Rows, function_site: str) -> float:
    """The negative log predictive density per datum, of 16 draws that leave the training's own noise alone.

    :param Trained trained: model and guide.
    :param Rows rows: the data held out.
    :param str function_site: the deterministic site where the model records the function's values.
    :returns: nats per datum; NaN if the density of any row is.
    """
    x, y = rows.all()
    with seeded(SEED, trained.device):
        prediction = predict(trained.model, trained.guide, x, num_samples=NUM_SAMPLES, function_site=function_site)
        density = prediction.log_prob(y)
    return -float(density.mean())
