# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Each page's blocks of Python run, in order and in one scope; those of other libraries where they are installed."""

import importlib.util
import re
import warnings

import pyro
import pytest
from torch.distributions import kl_divergence

from pyro_radial.distributions import HypersphericalUniform
from pyro_radial.uncertainty import interval_coverage
from tests.helpers.pages import DOCS, examples

PAGES = [page for page in sorted(DOCS.rglob("*.md")) if examples(page)]
OTHERS = DOCS / "coming_from.md"
# By the name of the caption, in lower case the module.
LINES = dict(
    re.findall(
        r"^```{code-block} python\n:caption: (\w+)\n(.*?)^```", OTHERS.read_text(), flags=re.DOTALL | re.MULTILINE
    )
)


def run(page, scope):
    for number, example in enumerate(examples(page)):
        exec(compile(example, f"{page.name}, example {number + 1}", "exec"), scope)
    return scope


def kl_to_uniform(direction):
    return kl_divergence(direction, HypersphericalUniform(direction.dim))


# What a page promises in words.
PROMISES = {
    "getting_started": lambda scope: scope["result"].history[-1]["nll"] < 0.5,
    "decisions": lambda scope: (
        scope["result"].relative_regret() < 80 and scope["first"].arms.tolist() == scope["again"].arms.tolist()
    ),
    "chains": lambda scope: scope["matrix"].average_accuracy > 0.9,
    "not_learning": lambda scope: (
        scope["diagnosis"].noise > scope["diagnosis"].signal
        and scope["learned"].noise < 0.5 * scope["learned"].signal
        and scope["early"].comparison.findings
    ),
    "radial": lambda scope: abs(float(scope["least"]) - 60.4) < 0.05,
    "directions": lambda scope: (kl_to_uniform(scope["direction"]).diff() > 0).all(),
    # The number of held truths among 500 has a standard error of 0.013, and calibration one more.
    "judging": lambda scope: (
        abs(scope["held"].float().mean() - 0.9) < 0.08
        and abs(interval_coverage(scope["lower"], scope["upper"], scope["target"][1500:]) - 0.9) < 0.08
    ),
    "new_family": lambda scope: (scope["direction"].sample().norm(dim=-1) - 1).abs().max() < 1e-5,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = run(page, {"__name__": page.stem})
    assert PROMISES.get(page.stem, lambda scope: True)(scope)


@pytest.mark.parametrize("library", LINES)
def test_the_lines_of_another_library_run(library):
    if importlib.util.find_spec(library.lower()) is None:
        pytest.skip(f"{library} is not installed")
    if library == "TyXe" and not hasattr(pyro.util, "deep_getattr"):
        pytest.skip("TyXe needs pyro.util.deep_getattr, which this Pyro does not have")
    scope = {"__name__": library}
    exec(examples(OTHERS)[0], scope)
    with warnings.catch_warnings():
        # Their warnings are theirs.
        warnings.simplefilter("ignore")
        exec(compile(LINES[library], f"{OTHERS.name}, {library}", "exec"), scope)
