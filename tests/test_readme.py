# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).resolve().parents[1] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_the_first_example_is_short():
    lines = [line for line in EXAMPLES[0].splitlines() if line.strip()]
    assert len(lines) < 15


@pytest.fixture(scope="module")
def scope():
    scope = {}
    run_up_to(0, scope)
    return scope


def run_up_to(number, scope):
    """Run an example after those that it goes on from, whichever tests have run in this process."""
    for index in range(scope.get("examples_run", 0), number + 1):
        exec(EXAMPLES[index], scope)
        scope["examples_run"] = index + 1


def test_the_second_example_chains_what_the_first_made(scope):
    run_up_to(1, scope)
    assert scope["chain"].prior.keys() == scope["guide"].posterior().keys()


def test_the_first_example_learns_what_a_constant_cannot(scope):
    accuracy = (scope["draws"].mean.argmax(-1) == scope["y"]).double().mean()
    # The labels are exclusive-or of two signs: no linear function and no constant gets far above one half.
    assert accuracy > 0.9
    assert torch.isfinite(scope["draws"].log_prob(scope["y"])).all()


def test_the_third_example_remembers_three_tasks(scope):
    run_up_to(2, scope)
    # A third by chance.
    assert scope["matrix"].average_accuracy > 0.9
    assert (scope["matrix"].learned > 0.9).all()


def test_the_fourth_example_leaves_a_smaller_network_that_is_nearly_as_good(scope):
    run_up_to(3, scope)
    assert scope["small"][0].out_features < 40
    errors = (scope["small"](scope["x"]).argmax(-1) != scope["y"]).double().mean()
    assert errors <= min(record.loss for record in scope["records"]) + 0.02


def test_the_fifth_example_comes_near_the_exact_process(scope):
    run_up_to(4, scope)
    stddev = scope["covariance"][0].diagonal().sqrt()
    functions = scope["draws"].samples.squeeze(-1)
    # Among the data a few hundredths; beyond them, in standard deviations that are nearly those of the prior.
    assert stddev[0] < 0.1 < 0.9 < stddev[1]
    gap = (functions.mean(0) - scope["mean"].squeeze(-1)).abs()
    assert gap[0] < 0.1
    assert gap[1] < 0.5
    assert ((functions.std(0) / stddev - 1).abs() < 0.5).all()


@pytest.mark.parametrize("name", re.findall(r"^ {2,4}(\w+(?:/|\.py))", README.read_text(), flags=re.MULTILINE))
def test_every_module_of_the_package_layout_exists(name):
    package = README.parent / "pyro_radial"
    assert (package / name).exists() or (package / "infer" / name).exists()


def test_every_package_is_in_the_package_layout():
    package = README.parent / "pyro_radial"
    packages = [path.name for path in package.iterdir() if path.is_dir() and (path / "__init__.py").exists()]
    assert all(f"  {name}/" in README.read_text() for name in packages)
