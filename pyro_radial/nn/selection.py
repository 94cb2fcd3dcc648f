# Copyright Contributors to the pyro_radial project.
# SPDX-License-Identifier: Apache-2.0

"""Which parameters of a network are random."""

import re
from collections.abc import Callable

from pyro.nn import PyroModule
from torch import Tensor, nn

__all__ = ["NORM_LAYERS", "STATISTICS_LAYERS", "Select", "check_net", "select_parameters"]

# Norm layers that keep running statistics.
STATISTICS_LAYERS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
NORM_LAYERS = (*STATISTICS_LAYERS, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)

Select = Callable[[str, nn.Parameter], bool] | str | None


def check_net(net: nn.Module) -> None:
    """Raises a ValueError naming ``net`` unless it is a plain network with all its tensors made."""
    if not isinstance(net, nn.Module):
        raise ValueError(f"net must be a torch.nn.Module, got {type(net).__name__}")
    if any(isinstance(module, PyroModule) for module in net.modules()):
        raise ValueError("net must be a plain network, got one with a PyroModule, which is a Pyro model already")
    for name, parameter in net.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"net must have run once on data, got the lazy parameter {name!r}")
    for prefix, module in net.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                raise ValueError(
                    f"net must hold no tensor that was computed from its parameters, got {attribute!r} of module "
                    f"{prefix!r} ({type(module).__name__}); compute it in forward, and in the place of "
                    "torch.nn.utils.weight_norm or spectral_norm take those of torch.nn.utils.parametrizations"
                )


def select_parameters(net: nn.Module, select: Select) -> dict[str, nn.Parameter]:
    """
    The parameters that are to be random, tied ones once.

    :param nn.Module net: the network.
    :param select: a function of (name, parameter), a regular expression searched in the name, or None for all but
        frozen ones and those of norm layers.
    :returns: the chosen parameters by name, in the network's order.
    :raises ValueError: naming ``select``, if it is none of these, chooses nothing or what is not floating point.
    """
    if not (select is None or isinstance(select, str) or callable(select)):
        raise ValueError(
            f"select must be a function of (name, parameter), a regular expression or None, got {select!r}"
        )
    try:
        chosen = _matcher(net, select)
    except re.error as error:
        raise ValueError(f"select must be a valid regular expression, got {select!r} ({error})") from error
    selected = {name: parameter for name, parameter in net.named_parameters() if chosen(name, parameter)}
    if not selected:
        names = [name for name, _ in net.named_parameters()]
        raise ValueError(f"select must choose at least one parameter of the network, got none of {names}")
    for name, parameter in selected.items():
        if not parameter.is_floating_point():
            raise ValueError(
                f"select must choose floating point parameters, got {name!r} of {parameter.dtype}; leave it out with "
                "select, or hold it as a real parameter and call torch.view_as_complex on it in forward"
            )
    return selected


def _matcher(net: nn.Module, select: Select) -> Callable[[str, nn.Parameter], bool]:
    if isinstance(select, str):
        pattern = re.compile(select)
        return lambda name, parameter: pattern.search(name) is not None
    if select is not None:
        return select
    norms = (module for module in net.modules() if isinstance(module, NORM_LAYERS))
    left_out = {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}
    return lambda name, parameter: parameter.requires_grad and id(parameter) not in left_out
