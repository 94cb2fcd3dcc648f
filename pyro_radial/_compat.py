# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Every name that Pyro or torch does not document, in one place, so that a change there breaks one line."""

from collections.abc import Mapping
from typing import Any

import pyro
from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.infer.autoguide.guides import prototype_hide_fn
from pyro.infer.autoguide.utils import deep_setattr, helpful_support_errors
from pyro.infer.trace_mean_field_elbo import _check_mean_field_requirement as check_mean_field_requirement
from pyro.nn import PyroModule
from pyro.ops.tensor_utils import periodic_repeat
from pyro.util import check_model_guide_match, check_site_shape
from torch import Tensor, compiler
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "OVERRIDDEN",
    "adopt",
    "check_mean_field_requirement",
    "check_model_guide_match",
    "check_site_shape",
    "deep_setattr",
    "forget_stored",
    "helpful_support_errors",
    "initial_scale",
    "is_deterministic",
    "is_traced",
    "loc_and_scale",
    "own_mask",
    "periodic_repeat",
    "prototype_hide_fn",
    "set_context",
    "stored_name",
    "tree_leaves",
    "tree_map_only",
]

# What a subclass can only override where Pyro has it: the methods, by Pyro's class.
OVERRIDDEN = {
    "AutoGuide": ("_create_plates", "_prototype_hide_fn", "_setup_prototype"),
    "ELBO": ("_get_traces", "_guess_max_plate_nesting", "_vectorized_num_particles"),
    "TraceMeanField_ELBO": ("_differentiable_loss_particle", "_get_trace"),
}


def is_deterministic(site: Mapping[str, Any]) -> bool:
    """Whether a site holds a computed value: observed in Pyro's bookkeeping, but no observation.

    ``pyro.deterministic`` marks its sites; a ``Reparam`` leaves one with its density masked out.
    """
    masked_out = isinstance(site["fn"], MaskedDistribution) and own_mask(site["fn"]) is False
    return bool(site["infer"].get("_deterministic", False)) or masked_out


def is_traced() -> bool:
    """Whether a compiler or ``make_fx`` writes down what is computed: what is split up for the processor's cache would
    be as many nodes of its graph.
    """
    return compiler.is_compiling() or get_proxy_mode() is not None


def own_mask(distribution: MaskedDistribution) -> Any:
    """The mask of a masked distribution: a bool, or a tensor that broadcasts over its batch."""
    return distribution._mask


def initial_scale(guide: Any) -> float:
    """What the scales of Pyro's ``AutoNormal`` or ``AutoDiagonalNormal`` start at."""
    return float(guide._init_scale)


def loc_and_scale(guide: Any, name: str) -> tuple[Tensor, Tensor]:
    """The parameters of a site in Pyro's ``AutoNormal``."""
    loc, scale = guide._get_loc_and_scale(name)
    return loc, scale


def stored_name(module: PyroModule, parameter: str | None = None) -> str:
    """Under which name Pyro's parameter store keeps what belongs to a module, or one of its parameters."""
    return module._pyro_name if parameter is None else module._pyro_get_fullname(parameter)


def forget_stored(root: str) -> None:
    """Take everything of a module, and of those below it, out of Pyro's parameter store.

    By hand, since Pyro's own way leaves behind what a parameter was before it got replaced.
    """
    store = pyro.get_param_store()
    below = (f"{root}.", f"{root}$$$")
    for name in [name for name in list(store._params) if name.startswith(below)]:
        store._params.pop(name, None)
        store._constraints.pop(name, None)
    for tensor in [tensor for tensor, name in list(store._param_to_name.items()) if name.startswith(below)]:
        store._param_to_name.pop(tensor, None)


def set_context(module: PyroModule, context: Any) -> None:
    """Give a module another context: what says whether its parameters are read from Pyro's store."""
    module._pyro_context = context


def adopt(module: PyroModule, name: str, of: PyroModule | None = None) -> None:
    """Give a module another name in Pyro's parameter store, and the context of another or a fresh one.

    Pyro's own way to set these refuses modules that have run already, which a copy has.
    """
    module._pyro_name = name
    module._pyro_context = (PyroModule() if of is None else of)._pyro_context
