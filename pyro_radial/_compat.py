# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Every name that Pyro or torch does not document, in one place, so that a change there breaks one line."""

from collections.abc import Mapping
from typing import Any

from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.infer.autoguide.guides import prototype_hide_fn
from pyro.infer.autoguide.utils import deep_setattr, helpful_support_errors
from pyro.infer.trace_mean_field_elbo import _check_mean_field_requirement as check_mean_field_requirement
from pyro.nn import PyroModule
from pyro.ops.tensor_utils import periodic_repeat
from pyro.util import check_model_guide_match, check_site_shape
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "adopt",
    "check_mean_field_requirement",
    "check_model_guide_match",
    "check_site_shape",
    "deep_setattr",
    "helpful_support_errors",
    "is_deterministic",
    "own_mask",
    "periodic_repeat",
    "prototype_hide_fn",
    "stored_name",
    "tree_leaves",
    "tree_map_only",
]


def is_deterministic(site: Mapping[str, Any]) -> bool:
    """Whether a site holds a computed value: observed in Pyro's bookkeeping, but no observation.

    ``pyro.deterministic`` marks its sites; a ``Reparam`` leaves one with its density masked out.
    """
    masked_out = isinstance(site["fn"], MaskedDistribution) and own_mask(site["fn"]) is False
    return bool(site["infer"].get("_deterministic", False)) or masked_out


def own_mask(distribution: MaskedDistribution) -> Any:
    """The mask of a masked distribution: a bool, or a tensor that broadcasts over its batch."""
    return distribution._mask


def stored_name(module: PyroModule) -> str:
    """Under which name Pyro's parameter store keeps what belongs to a module."""
    return module._pyro_name


def adopt(module: PyroModule, name: str, of: PyroModule | None = None) -> None:
    """Give a module another name in Pyro's parameter store, and the context of another or a fresh one.

    Pyro's own way to set these refuses modules that have run already, which a copy has.
    """
    module._pyro_name = name
    module._pyro_context = (PyroModule() if of is None else of)._pyro_context
