# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""One trunk with several heads; one head is in use."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from pyro_radial.nn.bayesian_module import modules_of


class MultiHead(nn.Module):
    """A network with a head for each task, ``heads[head](trunk(x))``.

    In ``BayesianModule(MultiHead(...))`` the parameters of other heads make no sites. A guide set up now has sites for
    the trunk and this head, and the loss has no KL for other heads. This holds only if the MultiHead is the whole
    network. The choice of the head is not part of the state.

    :param nn.Module trunk: what the heads share.
    :param heads: the modules that take the trunk's output, one for each task.
    :raises ValueError: if the trunk or a head is not a module, or there is no head.

    Example::

        >>> import torch
        >>> from pyro_radial.nn import BayesianModule
        >>> bnn = BayesianModule(MultiHead(nn.Linear(3, 8), [nn.Linear(8, 2), nn.Linear(8, 5)]))
        >>> use_head(bnn, 1)
        >>> bnn.sites_in_use
        ('trunk.weight', 'trunk.bias', 'heads.1.weight', 'heads.1.bias')
        >>> bnn(torch.zeros(7, 3)).shape
        torch.Size([7, 5])
    """

    def __init__(self, trunk: nn.Module, heads: Iterable[nn.Module]) -> None:
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleList(heads)
        if not self.heads:
            raise ValueError("heads must hold at least one module, got none")
        #: The head in use, and then others whose parameters stay random.
        self._random: tuple[int, ...] = (0,)

    @property
    def head(self) -> int:
        """The index of the head in use. Setting it to anything else raises a ValueError."""
        return self._random[0]

    @head.setter
    def head(self, head: int) -> None:
        self._check_head("head", head)
        self._random = (head,)

    def _check_head(self, argument: str, head: int) -> None:
        """Raise a ValueError that names the argument unless this is the index of a head."""
        if not 0 <= head < len(self.heads):
            raise ValueError(
                f"{argument} must be an index of one of {len(self.heads)} heads, got {head!r}"
            )

    def uses_parameter(self, name: str) -> bool:
        """Return whether a parameter belongs to the trunk, the head in use, or a head that stays random beside it."""
        if not name.startswith("heads."):
            return True
        # By identity: a parameter that several heads share has its name in the first of them.
        heads = nn.ModuleList(self.heads[head] for head in self._random)
        return id(self.get_parameter(name)) in map(id, heads.parameters())

    def forward(self, *args: object, **kwargs: object) -> object:
        """Return the output of the head in use for the trunk's output."""
        return self.heads[self.head](self.trunk(*args, **kwargs))


def use_head(model: nn.Module, head: int, *, other_heads: Iterable[int] = ()) -> None:
    """Set the head of every :class:`MultiHead` in a model.

    :param nn.Module model: a :class:`~pyro_radial.nn.SupervisedModel` or any other module.
    :param int head: the index of the head.
    :param other_heads: other heads whose parameters stay random, so that a guide has sites for them, such as the heads
        of earlier tasks whose functions are compared while the trunk changes.
    :raises ValueError: if there is no MultiHead, or one of them has no such head; nothing is changed then.
    """
    other_heads = list(other_heads)
    multi_heads = modules_of(MultiHead, model)
    if not multi_heads:
        raise ValueError(f"model must hold a MultiHead, got {type(model).__name__}")
    for module in multi_heads:
        module._check_head("head", head)
        for index in other_heads:
            module._check_head("other_heads", index)
    for module in multi_heads:
        module._random = (head, *other_heads)


@contextmanager
def under_head(model: nn.Module, head: int) -> Iterator[None]:
    """Use a head of a model, if it has any, and restore the heads afterwards."""
    multi_heads = modules_of(MultiHead, model)
    with ExitStack() as restore:
        for module in multi_heads:
            restore.callback(setattr, module, "_random", module._random)
        if multi_heads:
            use_head(model, head)
        yield
