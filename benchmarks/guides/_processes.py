# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""CPU seconds of processes, on Linux."""

import os
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process that runs, or has ended and is not waited for."""

    has_ended: bool
    #: CPU seconds, with those of the children that it has waited for.
    seconds: float


def processes_below(root: int) -> dict[int, Process]:
    """Return a process and all those that it has started, and that these have, by their numbers; empty elsewhere."""
    parents: dict[int, int] = {}
    processes: dict[int, Process] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(file.parent.name)
        parents[number] = int(fields[1])
        ticks = sum(map(int, fields[11:15]))
        processes[number] = Process(fields[0] == "Z", ticks / os.sysconf("SC_CLK_TCK"))
    below = {root} & processes.keys()
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return {number: processes[number] for number in below}
