"""What blocks keep for backward waits on the host, and comes back before it is needed.

Each call of a block is a passage. What autograd saves in it is copied out while the blocks behind
it compute. Backward comes to the passages the other way round: when it enters one, the passage
`horizon` before it is fetched, and has as many blocks' backward to arrive in. The last `horizon`
blocks keep what they have: it is needed at once. So a device holds the activations of `horizon`
blocks and of the one at work, in forward as in backward.

With recomputation a block saves nothing but its inputs; then those are what moves. The bits are the
same: they are copies.

Whoever owns the graph owns all this: where a graph is let go of, in the middle of a backward too,
its copies are dropped and its blocks of host memory are free again. Nothing here holds on to it.
Sources: SageMaker's model parallelism v2, "activation offloading", for the horizon; Chen et al.,
2016, for what is saved with recomputation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainer.parallel.compiled import trains
from trainer.parallel.host_memory import Flight, HostMemory


class Offload:
    """Moves what the blocks of one model save.

    Args:
        horizon: blocks ahead of which a passage is fetched.
        least_bytes: smaller tensors stay.
        host: where to.
    """

    def __init__(self, horizon: int, least_bytes: int, host: HostMemory) -> None:
        self._horizon, self._least_bytes, self._host = horizon, least_bytes, host
        self._passages = list[weakref.ref[_Passage]]()
        self._moved = weakref.WeakValueDictionary[tuple[Any, ...], _Moved]()

    def cover(self, model: nn.Module, blocks: Sequence[str]) -> None:
        """Has the blocks' forward run under it, in training. In place; after recomputation and
        compilation, which stay inside, and before FSDP2, whose hooks stay outside.

        Args:
            model: it.
            blocks: names of its repeated blocks, in the order in which they run.
        """
        for index, name in enumerate(blocks):
            block: Any = model.get_submodule(name)
            stays = index >= len(blocks) - self._horizon
            block.forward = _CoveredForward(self, block, stays=stays)

    def begin(self) -> _Passage:
        """The passage of a block that begins its forward. What left `horizon` passages ago has
        arrived by now, or is waited for: its memory is used again."""
        while self._passages and self._passages[-1]() is None:
            self._passages.pop()
        passage = _Passage(len(self._passages))
        self._passages.append(weakref.ref(passage))
        if passage.index >= self._horizon:
            before = self._passages[passage.index - self._horizon]()
            if before is not None:
                before.settle()
        return passage

    def enter(self, passage: _Passage) -> None:
        """Backward comes to a passage: those ahead are fetched, the nearest first."""
        if not passage.entered:
            passage.entered = True
            ahead = self._passages[max(0, passage.index - self._horizon) : passage.index]
            for other in (passage, *(reference() for reference in reversed(ahead))):
                if other is not None:
                    other.fetch()

    def pack(self, passage: _Passage, weights: set[int], tensor: torch.Tensor) -> _Saved:
        """What autograd saves instead of a tensor."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage() if _is_plain(local) else None
        if storage is None or storage.nbytes() < self._least_bytes or storage._cdata in weights:
            return _Saved(self, passage, tensor)
        moved = self._move(local, storage, tensor._version)
        passage.takes(moved)
        form = (tuple(local.shape), local.stride(), int(local.storage_offset()))
        return _SavedElsewhere(self, passage, tensor, moved, form)

    def _move(self, local: torch.Tensor, storage: torch.UntypedStorage, version: int) -> _Moved:
        """All of a storage, once for as long as it is alive and what it was: by itself a saved part
        would have kept all of it, too. The version is the whole tensor's: what changes a DTensor
        in place counts there alone."""
        key = (storage._cdata, version, local.dtype)
        moved = self._moved.get(key)
        if moved is None or not moved.is_of(storage):
            # Detached: autograd asks of a view of its own tensor, on the thread that copies, too.
            values = local.detach().as_strided((storage.nbytes() // local.itemsize,), (1,), 0)
            block = self._host.take(storage.nbytes())
            moved = _Moved(values, block, self._host.store(block, values), self._host)
            self._moved[key] = moved
        return moved


class _CoveredForward:
    """The forward of one block. Its weights, which FSDP2 frees and gathers by itself, stay."""

    def __init__(self, offload: Offload, block: nn.Module, *, stays: bool) -> None:
        self._offload, self._block, self._forward = offload, block, block.forward
        self._stays, self._weights = stays, set[int]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not trains(self._block):
            return self._forward(*args, **kwargs)
        if not self._weights:  # FSDP2 resizes these storages, but they stay the same ones
            self._weights = {
                part.untyped_storage()._cdata
                for param in self._block.parameters()
                for part in _parts(param)
            }
        passage = self._offload.begin()
        pack: Callable[[torch.Tensor], _Saved] = (
            partial(_Saved, self._offload, passage)
            if self._stays
            else partial(self._offload.pack, passage, self._weights)
        )
        with saved_tensors_hooks(pack, _Saved.unpack):
            return self._forward(*args, **kwargs)


class _Passage:
    """One call of a block. What autograd saved in it keeps it alive."""

    def __init__(self, index: int) -> None:
        self.index = index
        """Its place among the passages."""
        self.entered = False
        """Whether backward has come to it."""
        self._moved = list[weakref.ref[_Moved]]()

    def takes(self, moved: _Moved) -> None:
        """Something of it is on its way to the host."""
        self._moved.append(weakref.ref(moved))

    def settle(self) -> None:
        """Waits for what is on its way out."""
        for moved in self._alive():
            moved.settle()

    def fetch(self) -> None:
        """Begins to bring back what is not there, in the order in which backward needs it."""
        for moved in reversed(self._alive()):
            moved.fetch()

    def _alive(self) -> list[_Moved]:
        return [moved for reference in self._moved if (moved := reference()) is not None]


class _Moved:
    """The values of one storage, on the host, and back again from `fetch` on."""

    def __init__(
        self, values: torch.Tensor, block: torch.Tensor, out: Flight, host: HostMemory
    ) -> None:
        self._host, self._block, self._out = host, block, out
        self._of = weakref.ref(values.untyped_storage())
        self._form = values.shape, values.dtype, values.device
        self._back: tuple[torch.Tensor, Flight] | None = None

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether it was copied from this storage, which may have the address of an earlier one."""
        return self._of() is storage

    def settle(self) -> None:
        """Has what is computed next come after the copy out."""
        self._out.wait()

    def fetch(self) -> None:
        """Begins the copy back, once."""
        if self._back is None:
            self._out.wait()
            shape, dtype, device = self._form
            values = torch.empty(shape, dtype=dtype, device=device)
            self._back = values, self._host.load(values, self._block)

    def values(self) -> torch.Tensor:
        """All of the storage's numbers, on the device."""
        self.fetch()
        assert self._back is not None
        values, flight = self._back
        flight.wait()
        return values

    def __del__(self) -> None:
        self._out.drop()
        if self._back is not None:
            self._back[1].drop()
        self._host.give_back(self._block)


class _Saved:
    """What autograd holds for a tensor that stays."""

    def __init__(self, offload: Offload, passage: _Passage, tensor: torch.Tensor) -> None:
        self._offload, self._passage = offload, passage
        # A saved output refers to the graph, which refers to what is saved: a cycle that Python
        # does not see, and that would keep all of it where backward never comes.
        self._tensor = tensor.detach()
        self._shape, self._version = tensor.shape, self._tensor._version

    def unpack(self) -> torch.Tensor:
        """The tensor, in backward.

        Raises:
            RuntimeError: it was changed in place since. Torch compares no versions under hooks.
        """
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._shape)} that a block keeps for backward has been "
                f"modified by an inplace operation: it is at version {self._tensor._version}, and "
                f"was saved at version {self._version}. Use the operation that makes a new tensor; "
                "torch.autograd.set_detect_anomaly(True) tells whose backward needs it"
            )
        self._offload.enter(self._passage)
        return self._value()

    def _value(self) -> torch.Tensor:
        return self._tensor


class _SavedElsewhere(_Saved):
    """What autograd holds for a tensor that has moved."""

    def __init__(
        self,
        offload: Offload,
        passage: _Passage,
        tensor: torch.Tensor,
        moved: _Moved,
        form: tuple[tuple[int, ...], tuple[int, ...], int],
    ) -> None:
        super().__init__(offload, passage, tensor)
        self._moved, self._form = moved, form
        self._spread: tuple[Any, ...] | None = None
        # It lets go of its memory, and its version still counts with the tensor's.
        own = self._tensor
        if isinstance(own, DTensor):
            self._spread = own.device_mesh, own.placements, own.shape, own.stride()
            own._local_tensor = own._local_tensor.new_empty(0)
        else:
            own.data = own.new_empty(0)

    def _value(self) -> torch.Tensor:
        local = self._moved.values().as_strided(*self._form)
        if self._spread is None:
            return local
        mesh, placements, shape, stride = self._spread
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is numbers in memory, and not something of another class round them."""
    return tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)


def _parts(param: torch.Tensor) -> list[torch.Tensor]:
    """The numbers in memory that a whole parameter is made of."""
    local: Any = param.to_local() if isinstance(param, DTensor) else param
    if not is_traceable_wrapper_subclass(local):
        return [local]
    return [getattr(local, name) for name in local.__tensor_flatten__()[0]]
