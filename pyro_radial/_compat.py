# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Every use of a Pyro name that Pyro does not document, in one place, so that a change there breaks one line."""

from collections.abc import Mapping
from typing import Any

from pyro.infer.autoguide.guides import prototype_hide_fn
from pyro.infer.autoguide.utils import deep_setattr, helpful_support_errors
from pyro.ops.tensor_utils import periodic_repeat

__all__ = ["deep_setattr", "helpful_support_errors", "is_deterministic", "periodic_repeat", "prototype_hide_fn"]


def is_deterministic(site: Mapping[str, Any]) -> bool:
    """Whether a site was made by ``pyro.deterministic``: observed in Pyro's bookkeeping, but no observation."""
    return bool(site["infer"].get("_deterministic", False))
