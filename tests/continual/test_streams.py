# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A stream builds its tasks on access; the standard streams hold every row of their data set once."""

import pytest
import torch

from pyro_radial.continual.streams import Task, TaskStream
from tutorials.streams import class_split_stream, permuted_stream

NAN = float("nan")
GOOD = (torch.rand(3, 2), torch.tensor([0, 1, 0]))


def task(name="one", head=0):
    return Task(name, GOOD, GOOD, head=head)


def test_a_stream_builds_on_demand_and_keeps_the_latest_task():
    calls = []

    def build(name):
        calls.append(name)
        return task(name)

    names = ("a", "b", "c")
    builders = tuple(lambda name=name: build(name) for name in names)
    stream = TaskStream(names, builders, num_heads=1, num_outputs=2)
    assert (len(stream), stream.names, calls) == (3, names, [])
    assert stream[1] is stream[1] is stream[-2]
    assert calls == ["b"]
    assert [task.name for task in stream] == ["a", "b", "c"]
    assert calls == ["b", "a", "b", "c"]


def test_a_slice_is_a_stream_with_the_same_heads():
    data = torch.rand(12, 2), torch.arange(12) % 6
    part = class_split_stream(data, data)[1:]
    assert isinstance(part, TaskStream)
    assert (len(part), part.num_heads, part[0].head) == (2, 3, 1)
    assert part[0].name == "classes 2, 3"
    with pytest.raises(ValueError, match="at least one task"):
        part[2:]
    with pytest.raises(IndexError):
        part[2]


def test_streams_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="tasks must hold at least one task"):
        TaskStream.of([], num_outputs=2)
    with pytest.raises(ValueError, match="builders must be 1"):
        TaskStream(("one",), (), num_heads=1, num_outputs=2)
    with pytest.raises(ValueError, match="'one': head must be less than num_heads=1, got 1"):
        TaskStream.of([task("zero"), task(head=1)], num_outputs=2)
    late = TaskStream(("one",), (lambda: task(head=1),), num_heads=1, num_outputs=2)
    with pytest.raises(ValueError, match="'one': head must be less than num_heads=1, got 1"):
        late[0]
    with pytest.raises(ValueError, match="must be built with its name 'one', got 'two'"):
        TaskStream(("one",), (lambda: task("two"),), num_heads=1, num_outputs=2)[0]
    with pytest.raises(ValueError, match="classes_per_task must divide the 6 classes of heads, got 4"):
        class_split_stream(TRAIN, TEST, classes_per_task=4)


@pytest.mark.parametrize("part", ["train", "test", "validation"])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((torch.rand(0, 2), torch.zeros(0)), "must have at least one row"),
        ((torch.rand(3, 2), torch.zeros(2)), "y must have as many rows as x, got 2 for 3"),
        ((torch.tensor([[0.0], [NAN]]), torch.zeros(2)), "x must not hold NaN, got NaN in 1 of 2 rows, first in row 1"),
    ],
)
def test_bad_parts_of_a_task_are_named(part, data, message):
    parts = {"train": GOOD, "test": GOOD, "validation": GOOD} | {part: data}
    with pytest.raises(ValueError, match=rf"task 'mine': {part}.*{message}"):
        Task("mine", **parts)


def numbered(num_rows, num_classes, start=0, seed=0):
    """Rows that hold their own number, with every class among the labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.arange(start, start + num_rows, dtype=torch.float32)[:, None].repeat(1, 2)
    y = torch.arange(num_rows) % num_classes
    return x, y[torch.randperm(num_rows, generator=generator)]


def row_numbers(data):
    return data[0][:, 0].int().tolist()


TRAIN, TEST = numbered(23, 6), numbered(12, 6, start=100, seed=1)


@pytest.mark.parametrize("multi_head", [True, False])
@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_every_row_is_in_exactly_one_task_with_its_label(multi_head, fraction):
    stream = class_split_stream(TRAIN, TEST, multi_head=multi_head, validation_fraction=fraction)
    labels_of_rows = torch.cat([TRAIN[1], torch.zeros(77, dtype=torch.long), TEST[1]])
    seen = []
    for number, task in enumerate(stream):
        for part in [task.train, task.test] + ([task.validation] if fraction else []):
            rows = row_numbers(part)
            assert rows == sorted(rows)
            labels = part[1] + (2 * number if multi_head else 0)
            assert labels.tolist() == labels_of_rows[rows].tolist()
            assert set(labels.tolist()) <= {2 * number, 2 * number + 1}
            seen += rows
    assert sorted(seen) == [*range(23), *range(100, 112)]


@pytest.mark.parametrize("num_tasks", [1, 3])
def test_train_and_test_are_permuted_alike(num_tasks):
    # An element holds its own place in the row, so that a row is the permutation itself.
    x = torch.arange(12.0).reshape(1, 3, 2, 2).repeat(4, 1, 1, 1)
    data = x, torch.tensor([0, 1, 2, 0])
    stream = permuted_stream(data, data, num_tasks, validation_fraction=0.5)
    orders = []
    for task in stream:
        parts = task.train[0], task.test[0], task.validation[0]
        assert [part.shape for part in parts] == [(2, 3, 2, 2), (4, 3, 2, 2), (2, 3, 2, 2)]
        (order,) = {tuple(row) for part in parts for row in part.flatten(1).int().tolist()}
        assert sorted(order) == list(range(12))
        assert task.head == 0
        orders.append(order)
    assert len(set(orders)) == num_tasks
    assert orders[0] == tuple(range(12))


def test_the_arrays_of_a_task_are_converted_and_a_dataset_is_refused():
    mine = Task("mine", (TRAIN[0].numpy(), TRAIN[1].numpy()), TEST)
    torch.testing.assert_close(mine.train, TRAIN, rtol=0, atol=0)
    assert mine.test[0] is TEST[0]
    with pytest.raises(ValueError, match=r"task 'mine': test must be a pair \(x, y\) of tensors, got TensorDataset"):
        Task("mine", TRAIN, torch.utils.data.TensorDataset(*TEST))
