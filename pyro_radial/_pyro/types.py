# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Names for what a model, a guide, their arguments, a batch and a site are to Pyro."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

#: A function or module that makes sample sites; its arguments are those of a training step, such as ``(x, y)``.
Model = Callable[..., Any]
#: A function or module with the arguments of its model, which draws a value for each latent site of the model.
Guide = Callable[..., Any]
#: The arguments of a model and its guide: those without names, and those with names.
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
#: The inputs or the targets of some rows: a tensor ``[B, ...]``, or several in a tuple or a dict.
Batch = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
#: A node of a trace: ``name``, ``fn`` (the distribution), ``value``, ``infer``, ``is_observed`` and more.
Node = Mapping[str, Any]
#: The same entries while a handler may change them; a trace keeps them as a node.
Message = dict[str, Any]
