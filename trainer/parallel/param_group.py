"""FSDP2's own object for the parameters of a module, which it has no public name for."""

from __future__ import annotations

from typing import Any, cast

from torch import nn


def param_group(module: nn.Module) -> Any:
    """That of a module that was fully sharded; None: it has no parameters of its own, or this torch
    keeps it elsewhere. torch 2.11 to 2.13 have it here, one for each module."""
    state = cast(Any, module)._get_fsdp_state()
    return getattr(state, "_fsdp_param_group", None)
