# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""A process that trains one model with one library, and takes steps when it is told to.

It reads lines from its standard input: a number of steps, "compile" for steps that are compiled from then on, or
"final", and answers each with a line of JSON.
"""

import json
import sys
import time
from typing import Any

from benchmarks.guides._eight_models.data import BLOCK, DRAWS, LEARNING_RATE, NUMPYRO


def training(name: str, contender: str, small: bool) -> Any:
    """The steps; each library is imported by its own processes alone."""
    if contender in NUMPYRO:
        from benchmarks.guides._eight_models import in_numpyro

        return in_numpyro.Training(name, small, contender, LEARNING_RATE, BLOCK)
    from benchmarks.guides._eight_models import in_pyro

    return in_pyro.Training(name, small, contender, LEARNING_RATE)


def main(name: str, contender: str, form: str) -> None:
    """Answer until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    run = training(name, contender, form == "small")
    for line in sys.stdin:
        start = time.process_time()
        if line.strip() == "compile":
            answer: Any = run.compile()
        elif line.strip() == "final":
            answer = {"loss": run.final(DRAWS), "eagerly": "; ".join(run.eager_reasons())}
        else:
            run.steps(int(line))
            answer = {"cpu": time.process_time() - start}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
