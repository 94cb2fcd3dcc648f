# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import pytest
import torch

from pyro_radial.continual.measures import AccuracyMatrix

NAN = float("nan")
NAMES = ("a", "b", "c")
LOWER = [[0.9, NAN, NAN], [0.95, 0.8, NAN], [0.5, 0.6, 0.7]]
FULL = [[0.9, 0.3, 0.2], [0.95, 0.8, 0.4], [0.5, 0.6, 0.7]]


def matrix(values, names=NAMES):
    return AccuracyMatrix(torch.tensor(values, dtype=torch.float64), names)


def test_measures_worked_by_hand():
    done = matrix(LOWER)
    assert done.average_accuracy == pytest.approx((0.5 + 0.6 + 0.7) / 3)
    assert done.learned.tolist() == pytest.approx([0.9, 0.8, 0.7])
    assert done.average_by_task.tolist() == pytest.approx([0.9, (0.95 + 0.8) / 2, 0.6])
    assert done.backward_transfer == pytest.approx(((0.5 - 0.9) + (0.6 - 0.8)) / 2)
    # Task a was at its best after task b.
    assert done.forgetting == pytest.approx(((0.95 - 0.5) + (0.8 - 0.6)) / 2)
    assert all(isinstance(m, float) for m in (done.average_accuracy, done.backward_transfer, done.forgetting))


def test_rows_are_added_one_by_one():
    start = AccuracyMatrix.empty(list(NAMES))
    assert start.values.isnan().all()
    assert start.names == NAMES
    first = start.with_row(0, [0.9])
    assert start.values.isnan().all()
    assert first.values[0].isnan().tolist() == [False, True, True]
    assert first.average_by_task[0] == 0.9
    assert first.average_by_task.isnan().tolist() == first.learned.isnan().tolist() == [False, True, True]
    done = first.with_row(1, torch.tensor([0.95, 0.8, 0.4])).with_row(2, [0.5, 0.6, 0.7])
    torch.testing.assert_close(done.values[1], torch.tensor([0.95, 0.8, 0.4], dtype=torch.float64), atol=1e-7, rtol=0)
    assert done.average_accuracy == pytest.approx(0.6)
    # A row that is measured again leaves nothing of the old one.
    assert done.with_row(1, [0.5, 0.5]).values[1].isnan().tolist() == [False, False, True]


EMPTY = AccuracyMatrix.empty(NAMES)
UNMEASURED = {
    "one task": (AccuracyMatrix(torch.tensor([[0.5]]), ("only",)), 0.5, "names must hold at least two tasks, got 1"),
    "learned together": (EMPTY.with_row(2, FULL[2]), 0.6, "row 0, after learning 'a', must be measured"),
    "unfinished": (
        EMPTY.with_row(0, FULL[0]).with_row(1, FULL[1]),
        None,
        "row 2, after learning 'c', must be measured",
    ),
}


@pytest.mark.parametrize(("measured", "accuracy", "message"), UNMEASURED.values(), ids=UNMEASURED)
def test_measures_that_need_more_rows_say_which(measured, accuracy, message):
    if accuracy is not None:
        assert measured.average_accuracy == pytest.approx(accuracy)
    for measure in ("backward_transfer", "forgetting") + (("average_accuracy",) if accuracy is None else ()):
        with pytest.raises(ValueError, match=message):
            getattr(measured, measure)


def test_forward_transfer_worked_by_hand():
    baseline = torch.tensor([NAN, 0.25, 0.3], dtype=torch.float64)
    done = AccuracyMatrix(matrix(FULL).values, NAMES, baseline)
    # Task b is at 0.3 after task a, and task c at 0.4 after task b.
    assert done.forward_transfer == pytest.approx(((0.3 - 0.25) + (0.4 - 0.3)) / 2)
    assert isinstance(done.forward_transfer, float)
    # What is above the diagonal matters for nothing else.
    for measure in ("backward_transfer", "forgetting"):
        assert getattr(done, measure) == getattr(matrix(LOWER), measure)
    added = matrix(LOWER).with_next(1, 0.3, 0.25).with_next(2, 0.4, 0.3)
    assert added.forward_transfer == done.forward_transfer
    assert added.values.isnan().tolist() == [[False, False, True], [False, False, False], [False, False, False]]
    for unmeasured in (matrix(FULL), matrix(LOWER).with_next(1, 0.3, 0.25)):
        with pytest.raises(ValueError, match=r"on task '[bc]' before it was learned, got NaN; train_stream\("):
            _ = unmeasured.forward_transfer
    with pytest.raises(ValueError, match="forward_transfer: names must hold at least two tasks, got 1"):
        _ = AccuracyMatrix(torch.tensor([[0.5]]), ("only",), baseline[:1]).forward_transfer


def test_more_tasks_leave_what_is_measured():
    two = AccuracyMatrix.empty(NAMES[:2]).with_row(0, [0.9]).with_next(1, 0.3, 0.25).with_row(1, [0.95, 0.8])
    more = two.with_more_tasks(list(NAMES))
    assert more.names == NAMES
    assert more.values[:2, :2].equal(two.values)
    assert more.values.isnan().tolist() == [[False, False, True], [False, False, True], [True, True, True]]
    assert more.baseline.isnan().tolist() == [True, False, True]
    assert two.with_more_tasks(NAMES[:2]).values.equal(two.values)
    assert more.with_next(2, 0.4, 0.3).with_row(2, [0.5, 0.6, 0.7]).forward_transfer == pytest.approx(0.075)
