"""Parameters that one rank holds whole: there is nothing to gather.

FSDP2 casts and copies each of them nevertheless, whenever its module is entered. Here a module
computes with the very memory of a parameter that is in the format of the computation; the others
are cast, those of a group at once, to memory that FSDP2 takes back as ever. Nobody writes to
parameters between a forward and its backward: all that changes them comes at a step's boundary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from trainer.parallel.param_group import param_group

OF_GROUP = ("wait_for_unshard", "_all_gather_result", "_to_unsharded", "fsdp_params", "device")
OF_PARAM = (
    "_sharded_param_data", "_sharded_local_tensor", "all_gather_outputs", "init_unsharded_param",
    "init_all_gather_outputs", "alloc_all_gather_outputs",
)  # fmt: skip
"""Names of FSDP2's own that are used here: it has no public ones for this."""


def leave_in_place(module: nn.Module, compute_dtype: torch.dtype) -> None:
    """Has FSDP2 copy no parameter of a module that is sharded over one rank. Where this torch lacks
    a name, or a parameter has an all-gather of its own, all is left to FSDP2.

    Args:
        module: fully sharded.
        compute_dtype: number format of forward and backward.
    """
    group = param_group(module)
    if group is not None and _is_known(group) and not any(map(_gathers_itself, group.fsdp_params)):
        group.wait_for_unshard = partial(_wait_for_unshard, group, compute_dtype)


def _is_known(group: Any) -> bool:
    return all(hasattr(group, name) for name in OF_GROUP) and all(
        hasattr(param, name) for param in group.fsdp_params for name in OF_PARAM
    )


def _gathers_itself(param: Any) -> bool:
    return hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")


def _wait_for_unshard(group: Any, compute_dtype: torch.dtype) -> None:
    """In place of the group's own, on the stream that computes."""
    if group._all_gather_result is None:  # they are there, or are not wanted
        return
    group._all_gather_result = None
    cast = []
    for param in group.fsdp_params:
        if not _is_as_computed(param._sharded_param_data, compute_dtype):
            cast.append(param)
        elif not hasattr(param, "_unsharded_param"):
            param.all_gather_outputs = [param._sharded_param_data]
            param.init_unsharded_param()
            param.all_gather_outputs = []  # FSDP2 frees and fills what is in there
    if cast:
        _cast(cast, compute_dtype, group.device)
    group._to_unsharded()


def _is_as_computed(shard: torch.Tensor, compute_dtype: torch.dtype) -> bool:
    """FSDP2 takes a parameter for the start of its storage."""
    is_cast = shard.is_floating_point() and shard.dtype != compute_dtype
    return not is_cast and shard.storage_offset() == 0


def _cast(params: list[Any], compute_dtype: torch.dtype, device: torch.device) -> None:
    shards = [param._sharded_param_data for param in params]
    for param, shard in zip(params, shards, strict=True):
        dtype = compute_dtype if shard.is_floating_point() else shard.dtype
        param.init_all_gather_outputs([shard.numel()], [dtype], 1, device)
        param.alloc_all_gather_outputs()
    whole = tuple(param.all_gather_outputs[0] for param in params)
    # What autograd has kept of them is the same again: a second unshard is not a change.
    with torch.no_grad(), _unsafe_preserve_version_counter(whole):
        torch._foreach_copy_(whole, shards)
    for param in params:
        param.init_unsharded_param()
