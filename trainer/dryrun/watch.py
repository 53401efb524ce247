"""Watches every operation: which memory is alive, and what is sent to other workers.

A storage counts from the first operation that returns it until it is let go, or is resized, which
is how FSDP2 gives whole parameters their memory and takes it away. What it is for is known by where
it was made (`labelled`), or by what is done with it (FSDP2's own operations, collectives).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.dryrun.kernels import Beside
from trainer.models import chunked_head
from trainer.parallel.context.ring import COMPOSED
from trainer.parallel.two_level import TwoLevels

COMPONENTS = (
    "parameters",
    "gathered",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "buckets",
)
"""What memory is for; see docs/dryrun.md."""

_USES = {
    "fsdp.all_gather_copy_in": "buckets",
    "fsdp.split_with_sizes_copy": "gathered",
    "fsdp.chunk_cat": "buckets",
}
"""Operations of FSDP2 -> what they write to is for."""

_KINDS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
}
"""c10d's operations -> names that users know. Others keep their own."""


NODES, NODE = "nodes", "node"
"""What the levels of two-level collectives are called."""

_MADE_HERE = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""What `torch.tensor` calls with the numbers it was given."""


_WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
"""Operations that the host waits for."""


_WAIT_TENSOR = torch.ops._c10d_functional.wait_tensor.default
"""Returns what it is given; on fake tensors torch makes another one."""


class Call(NamedTuple):
    """What collectives are counted by."""

    group: str
    """The peers."""
    kind: str
    """Such as all_gather."""


class Watch(TorchDispatchMode):
    """Counts memory and collectives of all operations within it.

    Args:
        vocabulary: sizes that the last dimension of logits has.
        granule: bytes that the allocator rounds up to.
        beside: what operations take beside their results.
    """

    def __init__(
        self,
        *,
        vocabulary: Collection[int] = (),
        granule: int = 1,
        beside: Beside = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self._vocabulary, self._granule, self._beside = vocabulary, granule, beside
        self._alive: dict[int, tuple[str, int, weakref.ref[Any]]] = {}
        self._now = dict.fromkeys(COMPONENTS, 0)
        self._label = "activations"
        self._sees = True
        self._synced: int | None = None
        self._restore: list[Callable[[], None]] = []
        self.groups: dict[str, str] = {}
        """c10d's name of a group -> who is in it. Others are not counted."""
        self.levels: TwoLevels | None = None
        """Over which FSDP2's group sends."""
        self.peak = dict(self._now)
        """Bytes by component when most were alive."""
        self.calls, self.call_bytes = Counter[Call](), Counter[Call]()
        """How often, and bytes in the larger of what goes in and what comes out."""
        self.host_syncs = 0
        """How often the host waited for a number of the device."""

    def __enter__(self) -> Watch:
        self._restore = [
            _replace(torch.UntypedStorage, "resize_", self._resizing),
            _replace(ShardingPropagator, "_propagate_tensor_meta_non_cached", self._unseen),
            _replace(chunked_head, "same", lambda _: lambda *_: True),  # no part of later steps
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for restore in self._restore:
            restore()

    @contextmanager
    def labelled(self, component: str) -> Iterator[None]:
        """What memory is for that is first seen in the block."""
        before, self._label = self._label, component
        try:
            yield
        finally:
            self._label = before

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What is done in the block counts for nothing."""
        before, self._sees = self._sees, False
        try:
            yield
        finally:
            self._sees = before

    def forget_peak(self) -> None:
        """The peak is that of what comes from here on."""
        self.peak = dict(self._now)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """See TorchDispatchMode. Otherwise nothing would be compiled within it."""
        return True

    def count(self, group: str, kind: str, sent_bytes: int) -> None:
        """Counts a collective."""
        self.calls[Call(group, kind)] += 1
        self.call_bytes[Call(group, kind)] += sent_bytes

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "prim" or not self._sees:
            return func(*args, **(kwargs or {}))
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come here on their own
        kwargs = kwargs or {}
        if _real(args) and func not in _MADE_HERE:
            if func in _WAITS:  # of a sample, which a worker has on its device
                self._wait_for(args[0])
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is _WAIT_TENSOR:
            return args[0]
        if func in COMPOSED:
            with self._again():
                return COMPOSED[func](*args, **kwargs)
        if func in _WAITS:
            number = self._wait_for(args[0])
            if func is torch.ops.aten.equal.default:
                self._synced = None  # what it waited for is its own
                return True
            return number
        result = func(*args, **kwargs)
        self._synced = None
        found = tensors_in(result)
        for tensor in found:
            self.see(tensor)
        if func in self._beside:
            self._add("activations", self._beside[func](*args, **kwargs))
            self._add("activations", -self._beside[func](*args, **kwargs))
        use = _USES.get(f"{func.namespace}.{func.overloadpacket.__name__}")
        if use is not None:
            for tensor in _written(func, args, kwargs):
                self._relabel(tensor, use)
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            self._note(func, args, kwargs, found)
        return result

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Sees, in the block, the operations that one is composed of."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def _wait_for(self, tensor: torch.Tensor) -> float | int:
        """The host reads a number: 0. Numbers of one tensor, one after the other, are one wait."""
        storage = tensor.untyped_storage()._cdata
        self.host_syncs += storage != self._synced
        self._synced = storage
        return 0.0 if tensor.is_floating_point() else 0

    def see(self, tensor: torch.Tensor) -> None:
        """Counts the memory of a tensor from here on, unless it is counted already."""
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        label = self._label
        if (
            label == "activations"
            and tensor.is_floating_point()
            and tensor.dim() > 1
            and tensor.shape[-1] in self._vocabulary
        ):
            label = "logits"
        gone = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]
        self._alive[key] = (label, 0, gone)
        self._set(key, label, storage.nbytes())

    def _set(self, key: int, label: str, size: int) -> None:
        """What a storage is for, and its size, from now on."""
        size = -(-size // self._granule) * self._granule
        before, size_before, gone = self._alive[key]
        self._alive[key] = (label, size, gone)
        self._now[before] -= size_before
        self._add(label, size)

    def _add(self, label: str, size: int) -> None:
        self._now[label] += size
        if size > 0 and sum(self._now.values()) > sum(self.peak.values()):
            self.peak = dict(self._now)

    def _forget(self, key: int) -> None:
        label, size, _ = self._alive.pop(key)
        self._now[label] -= size

    def _relabel(self, tensor: torch.Tensor, label: str) -> None:
        entry = self._alive.get(tensor.untyped_storage()._cdata)
        if entry is not None and entry[0] == "activations":
            key = tensor.untyped_storage()._cdata
            self._set(key, label, entry[1])

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._alive:
                self._set(storage._cdata, "gathered", size)
            return result

        return resize_

    def _unseen(self, propagate: Callable[..., Any]) -> Callable[..., Any]:
        """DTensor finds out the form of a result on fake tensors of the whole, on a worker too."""

        def propagate_unseen(*args: Any) -> Any:
            with self.unseen():
                return propagate(*args)

        return propagate_unseen

    def _note(self, func: Any, args: Any, kwargs: Any, found: list[torch.Tensor]) -> None:
        """Counts a collective of c10d."""
        group = _group_of(args, self.groups)
        name = func.overloadpacket.__name__
        if group is None:
            return
        given = tensors_in((args, kwargs))
        for tensor in given:
            self._relabel(tensor, "buckets")
        size = max((t.numel() * t.element_size() for t in (*given, *found)), default=0)
        if name == "recv_":  # as much as is sent
            return
        if name == "send" and self.levels is not None:
            group = NODES if self.levels.node_of(args[2]) else NODE  # of the first worker
        self.count(group, _KINDS.get(name, name.strip("_")), size)


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Puts `wrap(former)` in the place of a method; returns what puts the former back."""
    former = getattr(owner, name)
    setattr(owner, name, wrap(former))
    return lambda: setattr(owner, name, former)


def tensors_in(values: Any) -> list[Any]:
    """Tensors among them, in lists, tuples and mappings."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _real(args: Any) -> bool:
    """Whether an operation is on tensors that were made outside, such as those of a mesh."""
    found = tensors_in(args)
    return bool(found) and not any(isinstance(t, FakeTensor) or t.is_meta for t in found)


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterable[torch.Tensor]:
    """What an operation of FSDP2 writes to: `out`, or the second argument."""
    return tensors_in(kwargs["out"]) if "out" in kwargs else tensors_in(args[1])


def _group_of(args: Any, groups: Mapping[str, str]) -> str | None:
    """Who is in the group of a collective: an argument of it, boxed or by its name."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            with_name = _unboxed(value)
            if with_name is not None:
                return groups.get(with_name)
        elif isinstance(value, str) and value in groups:
            return groups[value]
    return None


def _unboxed(value: torch.ScriptObject) -> str | None:
    try:
        return str(ProcessGroup.unbox(value).group_name)
    except (RuntimeError, TypeError, ValueError):  # it is a reduction's operation
        return None
