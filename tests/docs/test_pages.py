# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Each page's blocks of Python run, in order and in one scope; those of other libraries where they are installed."""

import importlib.util
import json
import re
import warnings
from statistics import mean

import pyro
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_radial import predict
from pyro_radial.distributions import HypersphericalUniform
from tests.helpers.pages import DOCS, examples

pytestmark = pytest.mark.site

ROOT = DOCS.parent
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if examples(page)]
# Blocks that need a library, by page and by the name of the caption, in lower case the module.
LINES = {
    (page, library): lines
    for page in ("coming_from", "recipes", "serving")
    for library, lines in re.findall(
        r"^```{code-block} python\n:caption: (\w+)\n(.*?)^```",
        (DOCS / f"{page}.md").read_text(),
        flags=re.DOTALL | re.MULTILINE,
    )
}


def run(page, scope):
    for number, example in enumerate(examples(page)):
        exec(compile(example, f"{page.name}, example {number + 1}", "exec"), scope)
    return scope


def kl_to_uniform(direction):
    return kl_divergence(direction, HypersphericalUniform(direction.dim))


def only_whole_names_are_normal(scope):
    normal = {name for name, family in scope["guide"].chosen_families().items() if type(family).__name__ == "Normal"}
    with pytest.raises(NotImplementedError):
        scope["guide"].posterior()["spread"].mean  # noqa: B018
    return normal == {"spread", "offset"} and "0.bias" in scope["guide"].chosen_families()


def needs_all_rows(scope):
    with pytest.raises(ValueError, match="site 'offset' of the guide is inside a plate"):
        predict(scope["model"], scope["guide"], (scope["x"], scope["group"]), chunk_size=100)
    return True


def gradient_of_sampled_density(q, event_dim):
    """The gradient of log q along a draw, in the scales of a density on its own draws."""
    torch.manual_seed(1)
    scales = torch.full((100,), 2.0, requires_grad=True)
    posterior = q(torch.zeros(100), scales).to_event(event_dim)
    posterior.log_prob(posterior.rsample()).backward()
    return scales.grad


def public_class_is_wrong_as_described(scope):
    public, exact = scope["NoisyNormal"], scope["RadialNormal"]
    gradients = [gradient_of_sampled_density(public, 1), gradient_of_sampled_density(exact, 0)]
    torch.testing.assert_close(gradients[0], torch.full((100,), -0.5))
    # Single precision: the logarithm of the distance enters a hundred times.
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-4)
    # The deviation comes from 20,000 radii, so its standard error is 0.0005.
    return (
        abs(scope["draws"].std() - 0.1) < 0.003
        and abs(scope["at_best"]) < 1e-6
        and abs(scope["public_at_best"] - 9.9) < 1e-4
    )


# Pages that need other packages.
NEEDS = {"adapters": ("peft", "transformers"), "pyro_models": ("arviz_base", "arviz_stats")}
# What a page promises in words.
PROMISES = {
    # Two numbers for each weight of the adapters and the head, and not those of the base model.
    "adapters": lambda scope: (
        sum(value.numel() for value in torch.load("adapters.pt").values())
        == 2 * sum(parameter.numel() for parameter in scope["model"].bnn.sample_parameters().values())
    ),
    "getting_started": lambda scope: scope["result"].history[-1]["nll"] < 0.5,
    "decisions": lambda scope: scope["regret"][100:].mean() < 0.3 * scope["chance"][100:].mean(),
    "trained_network": lambda scope: (
        max(scope["scaled"], scope["last"], scope["trained_on"]) < scope["before"] - 0.05
        and scope["scaled"] < scope["last"]
        and abs(scope["scaled"] - scope["trained_on"]) < 0.03
    ),
    # Offsets of 60 rows with noise 0.2, and a curve that is learned.
    "hierarchical": lambda scope: (
        (scope["centered"] - scope["true_offset"]).abs().max() < 0.2
        and needs_all_rows(scope)
        and only_whole_names_are_normal(scope)
        and scope["correlation"] > 0.9
    ),
    # The share among 160 true values has a standard error of 0.024.
    "pyro_models": lambda scope: (
        abs(scope["held"].mean() - 0.9) < 0.07
        and not any("intervals" in finding for finding in scope["diagnosis"].findings)
        and scope["resumed"] == pytest.approx(scope["undisturbed"], rel=1e-6)
        and scope["tree"].log_likelihood["counts"].dims == ("chain", "draw", "samples", "genes")
    ),
    "saving": lambda scope: scope["resumed"] == pytest.approx(scope["undisturbed"], rel=1e-6),
    # Two logits far from the data, under a kernel of variance 1; the variance of 500 draws has an error of 6 %.
    "functions": lambda scope: ((scope["draws"].samples @ torch.tensor([-1.0, 1.0]))[:, -1].var() / 2 - 1).abs() < 0.25,
    "serving": lambda scope: torch.allclose(scope["loaded"](scope["x"]), scope["served"](scope["x"]), atol=1e-6),
    "from_public_code": public_class_is_wrong_as_described,
    "chains": lambda scope: (
        scope["matrix"].average_accuracy > 0.9
        and [(task.name, task.head) for task in scope["own"]] == [("0-4", 0), ("5-9", 1)]
        and scope["own_matrix"].average_accuracy > 0.9
        and scope["own_matrix"].average_accuracy == float(scope["own_matrix"].values[-1].mean())
        and torch.equal(scope["grown"].values[0, 0], scope["first"].values[0, 0])
        and scope["grown"].average_accuracy > 0.9
    ),
    "not_learning": lambda scope: (
        scope["diagnosis"].noise > scope["diagnosis"].signal
        and scope["learned"].noise < 0.5 * scope["learned"].signal
        and min(scope["ratios"].values()) < 0.8
    ),
    "radial": lambda scope: abs(float(scope["least"]) - 60.4) < 0.05,
    # A thousand steps leave noise in the widths.
    "widths": lambda scope: ((scope["guide"].posterior()["weight"].stddev / scope["exact"]).log().abs() < 0.3).all(),
    # Of 50 units; an error of at most two points more on the rows that pruning judges.
    "directions": lambda scope: (
        (kl_to_uniform(scope["direction"]).diff() > 0).all()
        and scope["small"][0].out_features < 40
        and (scope["small"](scope["x"]).argmax(-1) == scope["y"]).double().mean() > 0.9
    ),
    # A coverage on 500 rows has a standard error of 0.013, and the 500 calibration rows add as much.
    "judging": lambda scope: all(
        abs(scope[coverage] - 0.9) < 0.08 for coverage in ("set_coverage", "interval_coverage", "network_coverage")
    ),
    # Always predicting no force has an error of 1.15.
    "several_outputs": lambda scope: (
        (scope["draws"]["force"].mean + 2 * scope["positions"]).square().mean().sqrt() < 0.4
        and scope["draws"].keys() == {"energy", "force"}
    ),
    "recipes": lambda scope: scope["draws"].samples.shape == (20, 20, 1),
    "new_family": lambda scope: (scope["direction"].sample().norm(dim=-1) - 1).abs().max() < 1e-5,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for package in NEEDS.get(page.stem, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    scope = run(page, {"__name__": page.stem})
    assert PROMISES.get(page.stem, lambda scope: True)(scope)


@pytest.mark.parametrize(("page", "library"), LINES)
def test_the_lines_of_another_library_run(page, library, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if importlib.util.find_spec(library.lower()) is None:
        pytest.skip(f"{library} is not installed")
    if library == "TyXe" and not hasattr(pyro.util, "deep_getattr"):
        pytest.skip("TyXe needs pyro.util.deep_getattr, which this Pyro does not have")
    scope = {"__name__": library}
    exec(examples(DOCS / f"{page}.md")[0], scope)
    with warnings.catch_warnings():
        # Their warnings are theirs.
        warnings.simplefilter("ignore")
        exec(compile(LINES[page, library], f"{page}, {library}", "exec"), scope)


def test_the_table_of_all_methods_has_the_numbers_of_the_results():
    rows = json.loads((ROOT / "benchmarks" / "uncertainty" / "lenet5.json").read_text())["rows"]
    section = (DOCS / "which_guide.md").read_text().split("## All methods on one set of images")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (\w.*?) \| (.*) \|$", section, flags=re.MULTILINE)
    assert len(lines) > 8
    for method, cells in lines:
        own = [row for row in rows if row["use"] == "test" and row["method"] == method]
        numbers = [float(cell.replace(",", "")) for cell in cells.split(" | ")]
        names = ("nll", "auroc_mnist", "seconds")
        for name, number, digits in zip(names, numbers, (3, 3, 0), strict=False):
            assert number == pytest.approx(mean(row[name] for row in own), abs=0.51 * 10**-digits), (method, name)
