# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""The old words that are left, now or at a revision: ``python -m tests.vocabulary [REV]``."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What we do not say, and what we say.
OLD_WORDS = {
    r"(?<![a-zA-Z])laws?(?![a-zA-Z])|Laws?(?![a-z])": "distribution",
    r"(?<!standard)(?<![a-z])deviations?(?![a-z])": "standard deviation",
    r"(?<![-a-z])quiet(ens?)?(?![a-z])": "low-variance",
    r"(?<![a-z])(rooms?\b(?! for)|floor plan|of the house)": "package layout, module",
    r"(?<![a-z])pictures?(?![a-z])": "plot",
    r"(?<![a-z])(measured|published|same|such|these|all|its|no|script per|every) figures?\b(?! (and|that|it|\d))": (
        "result"
    ),
    r"(?<!pre)images? of (a |an )?(distribution|point|normal|radial|one there|its normal|the marginals|affine)": (
        "pushforward"
    ),
    r"(wait|waits|waiting) for the device": "host-device synchronization",
    r"\bTogether\(|(import|, ) ?separate$": "Concatenated, split_coreset",
    r"RadialBNNPrior": "BNNPrior",
    r"(factor|normal|standard|optim|vector|parameter|regular|penal|maxim|minim|summar|random|synchron|initial|general|"
    r"linear|marginal|organ|recogn|visual|real|final|special|local)is(e|ed|es|er|ers|ing|ations?)(?![a-z])": "-ize",
    r"(?<![a-z])(behaviour|neighbour|colour|centre|centred|labelled|licence|artefact|grey|favour|analyse)": "American",
}
IGNORED = re.compile(r"tests/(test_)?vocabulary\.py$|CHANGELOG\.md$|LICENSE$|\.(png|json|npz)$")
# "Standard deviation" may be broken over two lines of a comment or of a notebook's cell.
IMAGE = re.compile(r'"image/png": ".*"')
SPLIT = re.compile(r"standard[\s\"\\n,#_]*deviation", re.IGNORECASE)


def texts(revision: str | None) -> dict[str, str]:
    """The project's text files, of the work tree or of a revision."""
    listing = ["git", "ls-files"] if revision is None else ["git", "ls-tree", "-r", "--name-only", revision]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    wanted = [name for name in names if not IGNORED.search(name)]
    if revision is None:
        return {name: (ROOT / name).read_text() for name in wanted if (ROOT / name).exists()}
    show = ["git", "show"]
    return {
        name: subprocess.run([*show, f"{revision}:{name}"], cwd=ROOT, capture_output=True, text=True).stdout
        for name in wanted
    }


def left(files: dict[str, str]) -> Counter[tuple[str, str]]:
    """How often an old word stands in each file, by (what we say instead, file)."""
    found: Counter[tuple[str, str]] = Counter()
    for name, text in files.items():
        text = SPLIT.sub("standarddeviation", IMAGE.sub("", text))
        for pattern, instead in OLD_WORDS.items():
            flags = re.MULTILINE if "Laws" in pattern or "BNN" in pattern or "Together" in pattern else re.IGNORECASE
            number = len(re.findall(pattern, text, flags)) + len(re.findall(pattern, name, flags))
            if number:
                found[instead, name] += number
    return found


def main() -> None:
    """Print the number of each, and in how many files."""
    found = left(texts(sys.argv[1] if len(sys.argv) > 1 else None))
    for instead in dict.fromkeys(OLD_WORDS.values()):
        of_word = {name: number for (word, name), number in found.items() if word == instead}
        print(f"{sum(of_word.values()):5d} in {len(of_word):3d} files: {instead}")
    print(f"{sum(found.values()):5d} in all")


if __name__ == "__main__":
    main()
