# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Which page of the reference has which name, read from the pages themselves."""

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parent / "api"
# A package and the names that its page has, all that it exports where the page says no more.
AUTOMODULE = re.compile(r"\.\. automodule:: (\S+)\n +:members:(.*)")
# A result type, which functions return and no package exports.
AUTOCLASS = re.compile(r"\.\. autoclass:: (\S+)\.(\w+)")


def pages() -> dict[str, list[str]]:
    """The names on the page of each package, packages before what is inside them."""
    found = {}
    for path in sorted(PAGES.glob("pyro_radial.*.md")):
        package, listed = AUTOMODULE.search(path.read_text()).groups()
        found[package] = re.findall(r"\w+", listed) or list(importlib.import_module(package).__all__)
    return found


@cache
def public_names() -> dict[int, str]:
    """The one name of each documented object, by its identity."""
    listed = [(package, name) for package, names in pages().items() for name in names]
    for path in sorted(PAGES.glob("pyro_radial.*.md")):
        listed += AUTOCLASS.findall(path.read_text())
    return {id(getattr(importlib.import_module(module), name)): f"{module}.{name}" for module, name in listed}


def public_name(target: str) -> tuple[Any, str | None]:
    """What a dotted name means, and its name on its page; None and None where there is no such object.

    The attributes of a class are named after the class: a method has no page of its own.
    """
    names = public_names()
    first, *rest = target.split(".")
    try:
        found = importlib.import_module(first)
        name = names.get(id(found))
        for part in rest:
            found = _part_of(found, part)
            name = names.get(id(found), name and f"{name}.{part}")
    except (AttributeError, ImportError, ValueError):
        found = _in_module(*target.rpartition(".")[::2])
        return found, names.get(id(found))
    return found, name


def _in_module(module: str, name: str) -> Any:
    """Return what a module defines, also where a package exports a function under the module's name; or None."""
    try:
        return vars(importlib.import_module(module)).get(name)
    except (ImportError, ValueError):
        return None


def _part_of(parent: Any, part: str) -> Any:
    """An attribute, or a module that nothing has imported yet."""
    if hasattr(parent, part) or not hasattr(parent, "__path__"):
        return getattr(parent, part)
    return importlib.import_module(f"{parent.__name__}.{part}")
