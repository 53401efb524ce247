"""Restores without a cluster: one process per slot, real process groups, faults in the store's way.

What `elastic` does between two tries (a roster, a step to go on from) is done here by hand.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from checkpointing import (
    CorruptError,
    Manifest,
    OtherRecordError,
    Reader,
    Store,
    load_manifest,
    open_store,
)
from tests.support.tiny_checkpoint import KEYS, write_state
from trainer.backend.groups import leave_replica_group, make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import ParallelConfig, TrainConfig
from trainer.engine.engine import Engine
from trainer.parallel.layout import ParallelDims, Slot
from trainer.recovery.shared_restore import Restored, Saved, Unreadable, read_together
from trainer.replication.replicas import CrossGroup
from trainer.tasks.custom import CustomTask
from trainer.tasks.task import PreparedTask

SHARD, STEPS = 2, (20, 10)


def build_model() -> nn.Module:
    """One weight that is cut, and some that are not."""
    return nn.Sequential(nn.Linear(512, 1100), nn.Linear(1100, 6, bias=False), nn.LayerNorm(6))


def no_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    """Nothing is trained here."""
    raise AssertionError("no step is taken")


def task() -> PreparedTask:
    """The model as a task; nothing is learned."""
    return CustomTask(build_model=build_model, loss_function=no_loss, dataset=[0])


def full_state(step: int) -> dict[str, torch.Tensor]:
    """The state of a step."""
    torch.manual_seed(step)
    names = [(name, tuple(p.shape)) for name, p in build_model().named_parameters()]
    return {
        prefix + name: torch.randn(shape)
        for prefix in ("param/", "exp_avg/", "exp_avg_sq/")
        for name, shape in names
    }


def write_checkpoints(root: Path) -> int:
    """Those of `STEPS`. Returns the bytes of the tensors of one."""
    for step in STEPS:
        write_checkpoint(root, step, full_state(step))
    return sum(tensor.nbytes for tensor in full_state(STEPS[0]).values())


STATE = {"optimizer_steps": 7, "skipped_in_a_row": 1}


def write_checkpoint(
    root: Path,
    step: int,
    tensors: dict[str, torch.Tensor],
    state: Mapping[str, Any] = STATE,
) -> None:
    """One of `step`, which there is not yet."""
    write_state(
        open_store(root),
        tensors,
        step=step,
        state=dict(state),
        segment_bytes=1 << 20,
        block_bytes=4096,
    )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One restore, with what goes wrong."""

    name: str
    """What it is called."""
    root: str
    """Where the checkpoints lie."""
    replicas: int
    """How many restore."""
    blind: tuple[int, int] | None = None
    """(replica, rank) that sees a flipped bit in all that it reads."""
    without_record: tuple[int, int] | None = None
    """(replica, rank) that cannot read the commit record."""
    stray: tuple[int, int] | None = None
    """(replica, rank) on whose machine other checkpoints lie."""
    stray_root: str = ""
    """Where those are."""
    killed: tuple[int, int] | None = None
    """(replica, rank) that dies at its second range read."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What one worker saw of one try."""

    step: int
    """Of the checkpoint."""
    outcome: str
    """Class of what `read_together` returned, or "RuntimeError"."""
    error: str | None
    """Where it was Unreadable."""
    sha256: str | None
    """Of the record that this worker opened, where that was another's than the others'."""
    untouched: bool
    """The engine's state was as before when `read_together` returned."""
    equal: bool
    """What it returned is this worker's part of `full_state`."""
    bytes_read: int
    """From the store, but for the manifest."""
    position: int
    """Of its replica in the roster."""


class WatchedStore:
    """Counts what is read of segments, and does harm."""

    def __init__(self, store: Store, *, blind: bool, killed: bool) -> None:
        self._store, self._blind, self._killed = store, blind, killed
        self.bytes = self.reads = 0

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """See `Store.get_range`."""
        data = self._store.get_range(key, start, length)
        self.bytes, self.reads = self.bytes + len(data), self.reads + 1
        if self._killed and self.reads == 2:
            os._exit(0)
        return bytes([data[0] ^ 16]) + data[1:] if self._blind else data


class _Worker:
    def __init__(self, meet: Rendezvous, replica: int, rank: int, scenario: Scenario) -> None:
        self.meet, self.scenario, self.place = meet, scenario, (replica, rank)
        dims = ParallelDims(shard=SHARD)
        mesh = make_replica_group(
            meet,
            f"{scenario.name}/replica/{replica}",
            rank=rank,
            dims=dims,
            device="cpu",
        )
        train = TrainConfig(
            task=task(), steps=30, global_batch=6, parallel=ParallelConfig(shard=SHARD)
        )
        slot = Slot(replica=replica, rank=rank, dims=dims)
        self.engine = Engine(
            task(), train, slot=slot, mesh=mesh, device="cpu", max_replicas=scenario.replicas
        )
        self.engine.initialize()

    def run(self) -> list[Tried]:
        """Tries the steps until one is restored; replicas that lose a worker are left out."""
        tried: list[Tried] = []
        here = list(range(self.scenario.replicas))
        for attempt, step in enumerate((STEPS[0], *STEPS)):
            if attempt == 1:
                if tried[0].outcome == "Unreadable":
                    continue
                here = [r for r in here if r != (self.scenario.killed or (-1, 0))[0]]
            tried.append(self._try(attempt, step, here))
            if tried[-1].outcome in ("Restored", "RuntimeError"):
                break
        return tried

    def _try(self, attempt: int, step: int, here: Sequence[int]) -> Tried:
        replica, rank = self.place
        cross = CrossGroup(
            self.meet,
            f"{self.scenario.name}/cross/{attempt}/{rank}",
            lanes=[(position,) for position in range(len(here))],
            total_lanes=len(here),
            rank=here.index(replica),
            device="cpu",
            leave_now=lambda: False,
        )
        stray = self.scenario.stray == self.place
        store = open_store(self.scenario.stray_root if stray else self.scenario.root)
        watched = WatchedStore(
            store,
            blind=self.scenario.blind == self.place,
            killed=self.scenario.killed == self.place and attempt == 0,
        )
        before, read, outcome = self.engine.state.digest(), None, "RuntimeError"
        try:
            read = read_together(
                self.engine,
                cross,
                lambda: self._open(watched, load_manifest(store, KEYS, step)),
                least_bytes=1,
            )
            outcome = type(read).__name__
        except RuntimeError:
            pass  # a peer of this worker's own replica is gone
        finally:
            cross.close()
        error = read.error if isinstance(read, Unreadable) else None
        return Tried(
            step=step,
            outcome=outcome,
            error=str(error) if error else None,
            sha256=error.sha256 if isinstance(error, OtherRecordError) else None,
            untouched=self.engine.state.digest() == before,
            equal=isinstance(read, Restored) and self._loads(read, step),
            bytes_read=watched.bytes,
            position=cross.rank,
        )

    def _open(self, watched: WatchedStore, manifest: Manifest) -> Saved:
        if self.scenario.without_record == self.place:
            raise CorruptError(KEYS.commit(manifest.step), "it is truncated")
        return Reader(watched, manifest), manifest.training_state

    def _loads(self, read: Restored, step: int) -> bool:
        self.engine.load(read.values, optimizer_steps=read.optimizer_steps)
        tensors, slices, full = (
            self.engine.state.tensors(),
            self.engine.state.slices(),
            full_state(step),
        )
        numbers = (self.engine.state.optimizer_steps, read.skipped_in_a_row)
        return numbers == (7, 1) and all(
            torch.equal(
                tensor.reshape(slices[name].sizes),
                full[name][tuple(slice(o, o + n) for o, n in _range(slices[name]))],
            )
            for name, tensor in tensors.items()
        )


def _range(part: Any) -> Any:
    return zip(part.offsets, part.sizes, strict=True)


def _process(number: int, port: int, scenarios: list[Scenario], results: Any) -> None:
    torch.set_num_threads(1)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=60)
    replica, rank = divmod(number, SHARD)
    for scenario in scenarios:
        if replica < scenario.replicas:
            results[scenario.name, replica, rank] = _Worker(meet, replica, rank, scenario).run()
            leave_replica_group()


# Processes are forked from one that has imported all this already, and what `data_plane` needs.
multiprocessing.set_forkserver_preload(
    [__name__, "tests.support.data_plane", "transformers.models.llama.modeling_llama"]
)


def run_scenarios(scenarios: list[Scenario]) -> Callable[[str], dict[tuple[int, int], list[Tried]]]:
    """Plays them one after the other on the same processes; one that kills must be the last.

    Returns:
        Name of a scenario -> (replica, rank) -> its tries.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = max(scenario.replicas for scenario in scenarios) * SHARD
    with mp.Manager() as manager:
        shared = manager.dict()
        mp.start_processes(
            _process,
            args=(store.port, scenarios, shared),
            nprocs=workers,
            start_method="forkserver",
        )
        results = dict(shared)
    return lambda name: {key[1:]: tried for key, tried in results.items() if key[0] == name}
