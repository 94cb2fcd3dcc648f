# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Unique names in Pyro's parameter store."""

import itertools
import re
import weakref
from collections.abc import Iterator
from typing import Any

import pyro
import torch
from pyro.nn import PyroModule

from pyro_radial._pyro.checks import warn
from pyro_radial._pyro.compat import adopt, forget_stored, stored_name

COUNTER = re.compile(r"_\d+$")
_instances: dict[str, Iterator[int]] = {}


class _Owner:
    """Shared by all modules with one name in the store; the entries of that name are deleted with the last of them.

    A deep copy shares name and owner. An unpickled module owns nothing, because its name may be taken here.
    """

    def __init__(self, name: str | None = None) -> None:
        if name is not None:
            _owners[name] = self
            weakref.finalize(self, forget_stored, name).atexit = False

    def __deepcopy__(self, memo: dict[int, object]) -> "_Owner":
        return self

    def __reduce__(self) -> tuple[type["_Owner"], tuple[()]]:
        return _Owner, ()


_owners: weakref.WeakValueDictionary[str, _Owner] = weakref.WeakValueDictionary()


def unique_name(cls: type) -> str:
    """Return a new name for an instance of a class: ``"Net"``, ``"Net_2"``, ``"Net_3"``, ... within this process."""
    # One operation each, so two threads never get the same number.
    count = next(_instances.setdefault(cls.__name__, itertools.count(1)))
    return cls.__name__ if count == 1 else f"{cls.__name__}_{count}"


def rename_tree(module: PyroModule, name: str, root: PyroModule | None = None) -> None:
    """Rename a module and each :class:`~pyro.nn.PyroModule` below it, with one new context for all of them.

    They no longer read parameters stored under their old names. The root's parameter ``a.b`` is stored as
    ``name + ".a.b"``; the entries of the new name are deleted from Pyro's store with the module and its copies.
    """
    adopt(module, name, root)
    if root is None:
        module._stored_owner = _Owner(name)
    for child_name, child in module.named_children():
        if isinstance(child, PyroModule):
            rename_tree(child, f"{name}.{child_name}", module if root is None else root)


class UniquelyNamed(PyroModule):
    """A :class:`~pyro.nn.PyroModule` with a unique name for each instance in Pyro's global parameter store.

    The store finds parameters by name, so two roots with one name share them silently, and a deep copy overwrites its
    own values from the store. Here each instance gets a new name when it is made, copied or unpickled, unless it is
    part of another PyroModule. Its entries in the store are deleted with it.
    """

    _store_is_checked: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._take_fresh_name()

    def __setstate__(self, state: dict[str, object]) -> None:
        # deepcopy and unpickling both call this.
        super().__setstate__(state)
        if stored_name(self) == self._root_name:
            self._take_fresh_name()

    def check_store(self) -> None:
        """Warn once if the parameter store holds the parameters of another process's module of this class.

        A subclass calls this when it runs.
        """
        if self._store_is_checked or torch.compiler.is_compiling():
            return
        self._store_is_checked = True
        root_name = _root(stored_name(self))
        # Lists made in one step, because another thread may make a module meanwhile.
        living = {root_name, *(_root(owner.key) for owner in _owners.valuerefs())}
        roots = set(map(_root, tuple(pyro.get_param_store().keys())))
        # The same class with another counter, from another process.
        strangers = sorted(
            root for root in roots - living if COUNTER.sub("", root) == COUNTER.sub("", root_name)
        )
        if strangers:
            warn(
                f"Pyro's parameter store holds parameters of {', '.join(strangers)}, which {root_name} does not read: "
                "such names count the objects of a process, and these are from another process; save and load the "
                "state_dict() of a guide or model instead"
            )

    def _take_fresh_name(self) -> None:
        self._root_name = unique_name(type(self))
        self._store_is_checked = False
        rename_tree(self, self._root_name)


def _root(stored: str) -> str:
    """Return the name of the root module of a stored parameter."""
    return re.split(r"\.|\$\$\$", stored, maxsplit=1)[0]
