"""A worker's part of the model and optimizer state, as named tensors: what is saved, loaded,
healed and compared.

The names are those of a checkpoint: `param/NAME`, and for each of the optimizer's moments
`MOMENT/NAME`, such as AdamW's `exp_avg/NAME` and `exp_avg_sq/NAME`. The tensors are the local
slices themselves, so whoever fills them fills the model and the optimizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from dataclasses import replace

import torch
from torch import nn

from checkpointing import TensorInfo, TensorSlice, plan_writers
from trainer.engine.host_copy import Copy, HostBuffer, Share
from trainer.engine.names import PARAMETERS
from trainer.engine.optimizer import SliceOptimizer, dtype_name
from trainer.optimizer import Optimizer, moment_dtype


class WorkerState:
    """The named tensors of one worker: its slices of the parameters and their moments.

    Args:
        leaves: what the optimizer works on, by the parameter's name: its local slice.
        frozen: local slices that are not trained, by the parameter's name.
        optimizer: holds the moments of each leaf.
        slices: the box of the full tensor that each local slice is, by the parameter's name.
        replicated: parameters that another worker of the replica saves.
    """

    def __init__(
        self,
        *,
        leaves: Mapping[str, nn.Parameter],
        frozen: Mapping[str, torch.Tensor],
        optimizer: SliceOptimizer,
        slices: Mapping[str, TensorSlice],
        replicated: Set[str],
    ) -> None:
        self._leaves, self._optimizer = leaves, optimizer
        self.frozen = frozen
        """See Args."""
        self._slices, self._replicated = slices, replicated
        self._shares: dict[tuple[int, int], Share] = {}
        self._copy: Copy | None = None

    @property
    def optimizer_steps(self) -> int:
        """Steps that reached the weights; fewer than the committed ones where some were skipped."""
        return self._optimizer.steps

    @optimizer_steps.setter
    def optimizer_steps(self, steps: int) -> None:
        self._optimizer.steps = steps

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by its name in a checkpoint: local slices, sharing their memory."""
        state = {PARAMETERS + name: tensor for name, tensor in self.frozen.items()}
        state |= {PARAMETERS + name: leaf.detach() for name, leaf in self._leaves.items()}
        for moment, tensors in self._optimizer.moments.items():
            state |= {f"{moment}/{name}": tensor for name, tensor in tensors.items()}
        return state

    def slices(self) -> dict[str, TensorSlice]:
        """The box of the full tensor that each entry of `tensors` is."""
        return {
            name: replace(
                self._slices[name.split("/", 1)[1]], name=name, dtype=dtype_name(tensor.dtype)
            )
            for name, tensor in self.tensors().items()
        }

    def share(self, writer: int, writers: int) -> Share:
        """What this worker writes of a checkpoint, each unique slice once in the replica. Of what
        the same slot of `writers` replicas holds alike, the part of number `writer`."""
        if (writer, writers) not in self._shares:
            self._shares[writer, writers] = self._make_share(writer, writers)
        return self._shares[writer, writers]

    def _make_share(self, writer: int, writers: int) -> Share:
        slices, tensors = self.slices(), self.tensors()
        names = [name for name in tensors if name.split("/", 1)[1] not in self._replicated]
        parts = plan_writers([slices[name] for name in names], writers)[writer]
        still = frozenset(PARAMETERS + name for name in self.frozen)
        return Share([(p, _part_of(tensors[p.name], slices[p.name], p)) for p in parts], still)

    def copy_to(self, buffer: HostBuffer, share: Share) -> Copy:
        """Begins to copy `share` to `buffer`. See `HostBuffer.copy`; whatever changes the state
        calls `await_copy` first."""
        self.await_copy()  # of a save before a step that was not applied
        self._copy = buffer.copy(share)
        return self._copy

    @property
    def copies(self) -> bool:
        """Whether the last copy is still being made, so that `await_copy` holds something back."""
        return self._copy is not None and not self._copy.done()

    def await_copy(self) -> None:
        """Holds back what comes after this, here or on the device, until the last copy is made."""
        if self._copy is not None:
            self._copy.before_change()
            self._copy = None

    def to_read(self) -> list[TensorSlice]:
        """What this worker needs of a saved state, in the order in which it is saved."""
        slices = self.slices()
        return [slices[name] for name, tensor in self.tensors().items() if tensor.numel()]

    @torch.no_grad()
    def fill(self, values: Mapping[str, torch.Tensor], *, optimizer_steps: int) -> None:
        """Takes over tensors by name: what `to_read` names."""
        self.await_copy()
        tensors = self.tensors()
        for name, value in values.items():
            tensors[name].copy_(value.reshape(tensors[name].shape))
        self.optimizer_steps = optimizer_steps

    def checksum(self) -> int:
        """A cheap number over the state: one bit changed changes it; 0 where it is empty. Waits for
        the device."""
        found = [_sum_of_bits(t) for t in self.tensors().values() if t.numel()]
        if not found:
            return 0
        sums = torch.stack(found)
        # Odd, as an even factor would push the highest bit out.
        places = torch.arange(1, 2 * len(sums), 2, device=sums.device)
        return int((sums * places).sum())

    def digest(self) -> str:
        """SHA-256 of the state, to compare replicas."""
        total = hashlib.sha256()
        for _, tensor in sorted(self.tensors().items()):
            flat = tensor.detach().cpu().contiguous().view(-1)
            total.update(flat.view(torch.uint8).numpy().data)
        return total.hexdigest()


def state_table(model: nn.Module, optimizer: Optimizer) -> dict[str, TensorInfo]:
    """What the state of a whole model is: every tensor's shape and dtype, by its name in a
    checkpoint. A frozen parameter has no moments.

    Args:
        model: it.
        optimizer: has the moments.
    """
    table = {}
    for name, param in model.named_parameters():
        info = TensorInfo(tuple(param.shape), dtype_name(param.dtype))
        table[PARAMETERS + name] = info
        if param.requires_grad:
            kept = TensorInfo(info.shape, moment_dtype(optimizer, info.dtype))
            table.update({f"{moment}/{name}": kept for moment in optimizer.moments})
    return table


def _part_of(tensor: torch.Tensor, whole: TensorSlice, part: TensorSlice) -> torch.Tensor:
    """The view of `tensor`, which holds `whole`, that holds `part` of it."""
    starts = [at - begin for at, begin in zip(part.offsets, whole.offsets, strict=True)]
    where = tuple(slice(at, at + size) for at, size in zip(starts, part.sizes, strict=True))
    shaped = tensor.detach().reshape(whole.sizes)
    return shaped[where] if where else shaped


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes as int64s, eight at a time, added up; as shorter numbers torch would copy all of
    them to int64s first. The last ones, which make no eight, are added by themselves."""
    flat = tensor.view(-1).view(torch.uint8)
    whole = tensor.nbytes // 8 * 8
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum()
