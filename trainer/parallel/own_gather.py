"""A parameter's shard that FSDP2 gathers in a way of its own.

FSDP2 asks the shard itself, by `fsdp_pre_all_gather` and `fsdp_post_all_gather`, so it must be a
tensor of another class. This one is a shell round an ordinary tensor, `memory`, which is all that
optimizer, heals and checkpoints see (`local_tensor`): names, shapes, dtypes and placements are as
ever. Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, "Note: All-Gather Extensions".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_KEEP = frozenset(
    {
        _aten.as_strided.default, _aten.clone.default, _aten.detach.default,
        _aten.empty_like.default, _aten.new_zeros.default, _aten.slice.Tensor,
        _aten.split.Tensor, _aten._to_copy.default, _aten.view.default,
    }
)  # fmt: skip
"""What FSDP2 and DTensor cut, pad and move a shard with: the result is one, too."""


class OwnGather(torch.Tensor):
    """A shell round a shard; a subclass says how it is gathered.

    Args:
        memory: the shard, an ordinary tensor.
    """

    memory: torch.Tensor

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> OwnGather:
        shell: OwnGather = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=memory.device,
        )
        shell.memory = memory
        return shell

    def with_memory(self, memory: torch.Tensor) -> OwnGather:
        """Another one, that is gathered in the same way."""
        return type(self)(memory)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        shells: list[OwnGather] = []

        def opened(shell: OwnGather) -> torch.Tensor:
            shells.append(shell)
            return shell.memory

        plain, named = tree_map_only(OwnGather, opened, (args, dict(kwargs or {})))
        result = func(*plain, **named)
        if func is _aten.copy_.default:
            return args[0]
        if func in _KEEP:
            return tree_map_only(torch.Tensor, shells[0].with_memory, result)
        return result

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.memory!r})"


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The ordinary tensor that a shard is."""
    return tensor.memory if isinstance(tensor, OwnGather) else tensor
