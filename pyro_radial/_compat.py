# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Every use of a name that Pyro or torch does not document, in one place, so that a change there breaks one line."""

from collections.abc import Mapping
from typing import Any

from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.infer.autoguide.guides import prototype_hide_fn
from pyro.infer.autoguide.utils import deep_setattr, helpful_support_errors
from pyro.infer.trace_mean_field_elbo import _check_mean_field_requirement as check_mean_field_requirement
from pyro.ops.tensor_utils import periodic_repeat
from pyro.util import check_model_guide_match, check_site_shape
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "check_mean_field_requirement",
    "check_model_guide_match",
    "check_site_shape",
    "deep_setattr",
    "helpful_support_errors",
    "is_deterministic",
    "periodic_repeat",
    "prototype_hide_fn",
    "tree_leaves",
    "tree_map_only",
]


def is_deterministic(site: Mapping[str, Any]) -> bool:
    """Whether a site holds a computed value: observed in Pyro's bookkeeping, but no observation.

    ``pyro.deterministic`` marks its sites; a ``Reparam`` leaves one with its density masked out.
    """
    masked_out = isinstance(site["fn"], MaskedDistribution) and site["fn"]._mask is False
    return bool(site["infer"].get("_deterministic", False)) or masked_out
