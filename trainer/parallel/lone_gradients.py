"""Gradients of parameters that one rank holds whole: there is nothing to scatter.

FSDP2 copies those of a group to a flat buffer in float32, and from the second micro-batch on adds
that to the gradient: 18 bytes moved for each number that autograd gives in bfloat16. Here they are
added as they come, 10 bytes, and those of a first micro-batch are copied to where they are wanted.
The numbers are the same: a cast to float32 is exact. Decision: docs/decisions/067.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from trainer.parallel.apply import local_tensor
from trainer.parallel.wide_sums import AddTo

OF_GROUP = ("post_backward", "fsdp_params", "device_handle", "comm_ctx")
OF_PARAM = ("unsharded_grad_data", "to_sharded_dtensor")
"""Names of FSDP2's own that are used here, beside those of `lone`."""


class Memory(Protocol):
    """For a group's gradients."""

    offered: torch.Tensor | None
    """Flat, for those of the next micro-batch; None: there are some already, or nobody wants any
    in a place of their own."""


class Pending:
    """Gradients that autograd has given, until they have been read on another stream."""

    def __init__(self) -> None:
        self._read: tuple[Any, Sequence[torch.Tensor]] | None = None
        self._streams: Any = None
        self._stream: Any = None

    def keep(self, streams: Any, stream: Any, gradients: Sequence[torch.Tensor]) -> None:
        """Until what is queued on `stream` now has been done; `streams` are the device's."""
        self._streams, self._stream = streams, stream
        self._read = stream.record_event(), gradients

    def settle(self) -> None:
        """What the current stream does next comes after that: their memory may be used again."""
        if self._read is not None:
            self._streams.current_stream().wait_event(self._read[0])
            self._read = None

    def end(self) -> None:
        """And after all that is queued on that stream: the sums may be read."""
        if self._stream is not None:
            self._streams.current_stream().wait_stream(self._stream)
        self._read = None


def add_in_place(
    group: Any, memory: Memory, reduced: Callable[[], None], pending: Pending, add: AddTo
) -> None:
    """Has FSDP2 find no gradients of a group that is sharded over one rank: they have been put in
    their places. Where a parameter has none yet and others do, or this torch lacks a name, all is
    left to FSDP2.

    Args:
        group: FSDP2's.
        memory: of its gradients.
        reduced: called afterwards, on the stream that they are put there on: that of FSDP2's
            all-reduce hook, in whose place it is. The computation does not wait for what it queues.
        pending: of all groups of the model, in turn.
        add: adds what comes to what is there.
    """
    if _is_known(group):
        fsdp2 = group.post_backward
        group.post_backward = partial(_post_backward, group, fsdp2, memory, reduced, pending, add)


def _is_known(group: Any) -> bool:
    return all(hasattr(group, name) for name in OF_GROUP) and all(
        hasattr(type(param), name) for param in group.fsdp_params for name in OF_PARAM
    )


def _post_backward(
    group: Any,
    fsdp2: Callable[[], None],
    memory: Memory,
    reduced: Callable[[], None],
    pending: Pending,
    add: AddTo,
) -> None:
    """In place of the group's own. It may come again, without gradients."""
    params = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
    if params and all(map(_has_gradient, params)):
        there = [param.sharded_param.grad is not None for param in params]
        if all(there) or not any(there):
            _put(group, params, memory, reduced, pending, add if there[0] else None)
    fsdp2()


def _has_gradient(param: Any) -> bool:
    return hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None


def _put(
    group: Any,
    params: Sequence[Any],
    memory: Memory,
    reduced: Callable[[], None],
    pending: Pending,
    add: AddTo | None,
) -> None:
    """What autograd has given, to where it is wanted, or added to what is there."""
    given = [param.unsharded_grad_data for param in params]
    for param in params:
        param._unsharded_param.grad = None
    flat, streams, stream = memory.offered, group.device_handle, group.comm_ctx.all_reduce_stream
    pending.settle()
    stream.wait_stream(streams.current_stream())
    with streams.stream(stream), torch.no_grad():
        if add is not None:
            add([local_tensor(param.sharded_param.grad) for param in params], given)
        else:
            sizes = [piece.numel() for piece in given]
            if flat is None:
                flat = torch.empty(sum(sizes), dtype=torch.float32, device=group.device)
            parts = zip(flat.split(sizes), params, strict=True)
            views = [part.view(param.sharded_size) for part, param in parts]
            torch._foreach_copy_(views, given)
            for param, view in zip(params, views, strict=True):
                param.sharded_param.grad = param.to_sharded_dtensor(view)
        pending.keep(streams, stream, given)
        reduced()
