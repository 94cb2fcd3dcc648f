# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""What is trained is all of the guide's and the model's own, wherever it is kept."""

import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoNormal

from pyro_radial import AutoMeanField, AutoRadial, predict
from pyro_radial.infer.training import training_run
from tests.helpers.runs import (
    ROWS,
    assert_same,
    data,
    described_problem,
    problem,
    state_of,
    trained,
)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("guide", [AutoNormal, AutoDelta, AutoRadial, AutoMeanField])
def test_any_guide_trains_and_predicts_with_parameters_in_the_store_or_in_modules(guide, local):
    with pyro.settings.context(module_local_params=local):
        model, made = problem("batch norm", guide=guide)
        made(*data())
        before = state_of(model, made)
        state, _ = trained(model, made, epochs=2, mean_only_epochs=1)
        assert all(not torch.equal(state[name], value) for name, value in before.items() if "num_batches" not in name)
        assert predict(model, made, data()[0], num_samples=2).mean.shape == (ROWS, 2)


def test_local_and_stored_parameters_train_alike():
    states = []
    for local in (False, True):
        with pyro.settings.context(module_local_params=local):
            states.append(trained(*problem("batch norm"))[0])
    assert_same(*states)


def test_state_that_is_no_tensor_comes_back_with_the_best_epoch(monkeypatch):
    script = iter([1.0, 0.5, 2.0])
    monkeypatch.setattr(training_run.TrainingRun, "_validate", lambda *_: next(script))
    model, guide = described_problem()
    _, result = trained(model, guide, validation=data())
    assert result.best_epoch == 1
    # Batches of 6, 6, 6 and 2 rows, for two epochs.
    assert model.seen == 2 * [6, 6, 6, 2]


def test_a_state_with_other_entries_than_tensors_is_told_from_one_without(tmp_path):
    path = tmp_path / "run.pt"
    trained(*described_problem(), checkpoint=path)
    assert torch.load(path, weights_only=True)["model"]["_extra_state"]["name"] == "described"
    with pytest.raises(ValueError, match=r"another model: 1 entries differ \(_extra_state: here None, there not a"):
        trained(*problem(), checkpoint=path)
