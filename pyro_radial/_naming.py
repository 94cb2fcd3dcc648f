# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Names in Pyro's parameter store that belong to one object only."""

from collections import Counter
from typing import Any

from pyro.nn import PyroModule

from pyro_radial._compat import adopt, stored_name

__all__ = ["UniquelyNamed", "rename_tree", "unique_name"]

_instances: Counter[str] = Counter()


def unique_name(cls: type) -> str:
    """
    A name for one more instance of a class: ``"Net"``, ``"Net_2"``, ``"Net_3"``, ... within this process.

    :param type cls: the class of the instance.
    :rtype: str
    """
    _instances[cls.__name__] += 1
    count = _instances[cls.__name__]
    return cls.__name__ if count == 1 else f"{cls.__name__}_{count}"


def rename_tree(module: PyroModule, name: str) -> None:
    """
    Makes ``module`` a root called ``name``: it and all :class:`~pyro.nn.PyroModule` below it are renamed to match
    and share one fresh context, so that they read none of the parameters stored under their old names.

    :param PyroModule module: the root of the tree.
    :param str name: its new name; the parameter ``a.b`` of the root is stored as ``name + ".a.b"``.
    """
    adopt(module, name)
    _rename_below(module, name, module)


def _rename_below(module: PyroModule, name: str, root: PyroModule) -> None:
    for child_name, child in module.named_children():
        if isinstance(child, PyroModule):
            adopt(child, f"{name}.{child_name}", root)
            _rename_below(child, f"{name}.{child_name}", root)


class UniquelyNamed(PyroModule):
    """
    A :class:`~pyro.nn.PyroModule` whose every instance has a name of its own in Pyro's global parameter store.

    The store finds parameters by name, so two roots of one name share them silently, and a deep copy reads the
    store back over its own values. Here each instance gets a fresh name when it is made, copied or unpickled.
    An instance that became part of another PyroModule keeps the name that this one gave it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._take_fresh_name()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # deepcopy and unpickling both end here.
        super().__setstate__(state)
        if stored_name(self) == self._root_name:
            self._take_fresh_name()

    def _take_fresh_name(self) -> None:
        self._root_name = unique_name(type(self))
        rename_tree(self, self._root_name)
