# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Count the files of the package that one call of a program passes through.

    python -m tools.walks           # five numbers
    python -m tools.walks --files   # and the files, in the order in which they are entered

A file counts if a function in it is entered during the call. What happens only once, at first use, happens before.
"""

import argparse
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import pyro_radial
from pyro_radial import AutoMeanField, AutoRadial, CompiledSVI, PriorChain, TermsELBO, predict
from tests.golden.functional import ELBO as FunctionalELBO
from tests.golden.functional import GaussianKL, box, process
from tests.golden.programs import classification, classifier, regression, regressor, trained

PACKAGE = str(Path(pyro_radial.__file__).parent)


class Walk:
    """The files that are entered between start and stop."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}

    def start(self) -> None:
        """Watch from here on."""
        threading.setprofile(self._enter)
        sys.setprofile(self._enter)

    def stop(self) -> None:
        """Stop watching."""
        sys.setprofile(None)
        threading.setprofile(None)

    def _enter(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            self.files[str(Path(code.co_filename).relative_to(PACKAGE))] = None


def walk_of(call: Callable[[], object]) -> list[str]:
    """Return the files of one call, after two others."""
    for _ in range(2):
        call()
    walk = Walk()
    walk.start()
    try:
        call()
    finally:
        walk.stop()
    return list(walk.files)


def training_step() -> list[str]:
    """Return the files of one step of ``fit``, from the model's call in a step to its call in the next one."""
    model = classifier(num_data=48)
    guide = AutoRadial(model)
    walk, calls = Walk(), 0

    def at_the_model(*_):
        nonlocal calls
        calls += 1
        # In the middle of the second epoch: an epoch has eight steps.
        if calls == 12:
            walk.start()
        elif calls == 13:
            walk.stop()

    guide.setup(*classification())
    model.register_forward_pre_hook(at_the_model)
    trained(model, guide, classification(48), epochs=3)
    return list(walk.files)


def prediction() -> list[str]:
    """Return the files of a prediction of 16 draws."""
    model = classifier()
    guide = AutoRadial(model)
    guide.setup(*classification())
    x = classification()[0]
    return walk_of(lambda: predict(model, guide, x, num_samples=16))


def chain_advance() -> list[str]:
    """Return the files of the third ``chain.advance``."""
    chain = PriorChain(classifier())
    walk = Walk()
    for task in range(3):
        guide = chain.guide(AutoRadial)
        trained(chain, guide, classification(seed=task), epochs=1)
        if task == 2:
            walk.start()
        chain.advance(guide)
    walk.stop()
    return list(walk.files)


def functional_loss() -> list[str]:
    """Return the files of a functional ELBO with its gradients."""
    model = regressor()
    guide = AutoMeanField(model)
    guide.setup(*regression())
    loss = FunctionalELBO(process(), box(), divergence=GaussianKL())
    return walk_of(lambda: loss.differentiable_loss(model, guide, *regression()).backward())


def compiled_step() -> list[str]:
    """Return the files of a step on a recorded graph."""
    model = classifier()
    guide = AutoRadial(model)
    svi = CompiledSVI(model, guide, partial(torch.optim.Adam, lr=0.05), TermsELBO(), compile=False)
    return walk_of(lambda: svi.step(*classification()))


WALKS = {
    "a training step": training_step,
    "a prediction of 16 draws": prediction,
    "chain.advance": chain_advance,
    "a functional ELBO": functional_loss,
    "a compiled step": compiled_step,
}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.walks", description=__doc__)
    parser.add_argument("--files", action="store_true", help="print the files too")
    with_files = parser.parse_args().files
    for name, program in WALKS.items():
        torch.manual_seed(0)
        files = program()
        print(f"{name}: {len(files)}")
        if with_files:
            print("".join(f"    {file}\n" for file in files), end="")


if __name__ == "__main__":
    main()
