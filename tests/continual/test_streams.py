# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A stream is a sequence of tasks, each built when it is asked for."""

import pytest
import torch

from pyro_radial.continual.standard_streams import class_split_stream
from pyro_radial.continual.streams import Task, TaskStream

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


def test_a_stream_of_own_tasks():
    own = [task("one"), task("two", head=1)]
    stream = TaskStream.of(own, num_heads=2, num_outputs=3)
    assert list(stream) == own
    assert (stream.num_heads, stream.num_outputs) == (2, 3)


def test_streams_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="names must hold at least one task"):
        TaskStream.of([], num_outputs=2)
    with pytest.raises(ValueError, match="num_heads"):
        TaskStream.of([task()], num_heads=0, num_outputs=2)
    with pytest.raises(ValueError, match="num_outputs"):
        TaskStream.of([task()], num_outputs=0)
    with pytest.raises(ValueError, match="builders must be 1"):
        TaskStream(("one",), (), num_heads=1, num_outputs=2)
    with pytest.raises(ValueError, match="'one': head must be less than num_heads=1, got 1"):
        TaskStream.of([task(head=1)], num_outputs=2)[0]
    with pytest.raises(ValueError, match="must be built with its name 'one', got 'two'"):
        TaskStream(("one",), (lambda: task("two"),), num_heads=1, num_outputs=2)[0]


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


def test_a_negative_head_is_named():
    with pytest.raises(ValueError, match="task 'one': head must be non-negative, got -1"):
        task(head=-1)
