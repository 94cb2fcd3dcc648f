# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Where in nested modules the parameters of each site are."""

from collections.abc import Collection

__all__ = ["places"]

OWN = "own"


def places(names: Collection[str]) -> dict[str, str]:
    """The path of each site's parameters: the site's own name, unless other sites are named below it.

    A module cannot be a parameter as well, so that with a site ``w.lam`` those of the site ``w`` are within the module
    ``w``, under a name that no site has.

    :param names: of all sites.

    Example::

        >>> places(["w.lam", "w", "b"])
        {'w.lam': 'w.lam', 'w': 'w.own', 'b': 'b'}
    """
    above = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
    return {name: _below(name, names) if name in above else name for name in names}


def _below(name: str, names: Collection[str]) -> str:
    path = f"{name}.{OWN}"
    while any(other == path or other.startswith(f"{path}.") for other in names):
        path += "_"
    return path
