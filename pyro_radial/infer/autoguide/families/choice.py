# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Which family a guide's user wants for which site."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from pyro_radial.infer.autoguide.families.family import Family

__all__ = ["Families", "choose_families"]

#: Families by the names of sites or by patterns in them, or a function of a site's name and the site.
Families = Mapping[str, Family] | Callable[[str, Any], Family | None]


def choose_families(wanted: Families | None, sites: Mapping[str, Any]) -> dict[str, Family]:
    """The families by site, of those sites that the user has a wish for.

    :param wanted: families by the names of sites, or by regular expressions searched in their names, where a name goes
        before a pattern; or a function of a site's name and the site that returns a family, or None for the guide's
        own.
    :param Mapping sites: Pyro's sites by name.
    :raises ValueError: naming the key or the site, for a key that names no site, two patterns for one, a pattern that
        is none, or what is no family.

    Example::

        >>> from pyro_radial.infer.autoguide.families import Delta, Normal
        >>> chosen = choose_families({r"bias$": Normal(), "0.bias": Delta()}, dict.fromkeys(["0.bias", "1.bias", "w"]))
        >>> {site: type(family).__name__ for site, family in chosen.items()}
        {'0.bias': 'Delta', '1.bias': 'Normal'}
    """
    if wanted is None:
        return {}
    if callable(wanted):
        chosen: dict[str, Any] = {name: wanted(name, site) for name, site in sites.items()}
        chosen = {name: family for name, family in chosen.items() if family is not None}
    elif isinstance(wanted, Mapping):
        chosen = _by_key(wanted, sites)
    else:
        raise ValueError(f"families must be a mapping or a function, got {type(wanted).__name__}")
    for name, family in chosen.items():
        if not isinstance(family, Family):
            raise ValueError(f"families: what is given for site '{name}' must be a Family, got {type(family).__name__}")
    return chosen


def _by_key(wanted: Mapping[str, Family], sites: Mapping[str, Any]) -> dict[str, Family]:
    patterns = {key: _matched(key, sites) for key in wanted if key not in sites}
    for key, names in patterns.items():
        if not names:
            raise ValueError(f"families: {key!r} names no site and matches none of {sorted(sites)}")
    chosen = {}
    for name in sites:
        keys = [name] if name in wanted else [key for key, names in patterns.items() if name in names]
        if len(keys) > 1:
            raise ValueError(f"families: site '{name}' matches {len(keys)} patterns, {keys}; one of them must not")
        if keys:
            chosen[name] = wanted[keys[0]]
    return chosen


def _matched(key: Any, sites: Mapping[str, Any]) -> set[str]:
    try:
        pattern = re.compile(key)
    except (re.error, TypeError) as error:
        raise ValueError(f"families: {key!r} is no site and no valid regular expression ({error})") from error
    return {name for name in sites if pattern.search(name)}
