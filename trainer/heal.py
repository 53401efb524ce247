"""Heal: the copy of model and optimizer state into a replica that has none.

Every worker of the new replica receives from the worker with the same (shard, tensor) of a healthy
one, in parallel, over the group across replicas. Each transfer carries a checksum. The new replica
agrees inside itself whether all of it arrived, so that none of its workers goes on alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from trainer.engine import Engine
from trainer.errors import CrossGroupLost
from trainer.loop import Progress
from trainer.replicas import CrossGroup

_HEADER = 3
"""int64 numbers before the state: optimizer steps, skipped steps in a row, CRC-32 of the state."""


def give_state(
    engine: Engine, cross: CrossGroup, progress: Progress, pairs: Sequence[tuple[int, int]]
) -> None:
    """A healthy worker's part: sends its state where it is a source, else just takes part.

    A failure shows in the next collective of `cross`, so that the replica goes on in step until its
    commit.

    Args:
        engine: this worker's state.
        cross: the group across replicas.
        progress: where the state is in the run.
        pairs: (target, source), as ranks of `cross`.
    """
    source = any(giver == cross.rank for _, giver in pairs)
    payload = _pack(engine, progress) if source else None
    try:
        cross.hand_over(payload, pairs, _size(engine))
    except CrossGroupLost:
        return


def take_state(
    engine: Engine, cross: CrossGroup, progress: Progress, pairs: Sequence[tuple[int, int]]
) -> int | None:
    """A new worker's part: receives its state. All workers of the new replica call it.

    Returns:
        Bytes received by this worker, or None where a part did not reach the whole replica: it has
        no state.
    """
    try:
        payload = cross.hand_over(None, pairs, _size(engine))
        good = payload is not None and _checksum(payload) == int(_header(payload)[2])
    except CrossGroupLost:
        payload, good = None, False
    if engine.sum_in_replica([0.0 if good else 1.0])[0] > 0 or payload is None:
        return None
    tensors = list(engine.state_tensors().values())
    parts = payload[8 * _HEADER :].view(torch.float32).split([tensor.numel() for tensor in tensors])
    with torch.no_grad():
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
    engine.forget_initial_weights()
    header = _header(payload)
    engine.optimizer_steps, progress.skipped_in_a_row = int(header[0]), int(header[1])
    return payload.numel()


def _size(engine: Engine) -> int:
    return 8 * _HEADER + 4 * sum(tensor.numel() for tensor in engine.state_tensors().values())


def _pack(engine: Engine, progress: Progress) -> torch.Tensor:
    """Header and the whole local state, float32, as one flat buffer of bytes."""
    payload = torch.empty(_size(engine), dtype=torch.uint8, device=engine.device)
    state = payload[8 * _HEADER :].view(torch.float32)
    torch.cat([tensor.flatten() for tensor in engine.state_tensors().values()], out=state)
    numbers = [engine.optimizer_steps, progress.skipped_in_a_row, _checksum(payload)]
    _header(payload).copy_(torch.tensor(numbers, dtype=torch.int64))
    return payload


def _header(payload: torch.Tensor) -> torch.Tensor:
    return payload[: 8 * _HEADER].view(torch.int64)


def _checksum(payload: torch.Tensor) -> int:
    return zlib.crc32(payload[8 * _HEADER :].cpu().numpy().data)
