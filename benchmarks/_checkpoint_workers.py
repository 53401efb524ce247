"""The processes of a run that saves: workers with a state, and a node's uploader for each store.

A worker copies its share to its buffer and hands it to the uploader, as `elastic/worker/saver.py`
does; the uploader is the run's own (`elastic/node/uploader.py`), without Ray. DCP saves the very
same tensors from the same workers."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import queue
import resource
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._checkpoint_peers import CREDENTIALS, dcp_writer
from benchmarks._checkpoint_state import make_task
from checkpointing import Attempt, Keys, S3Config, open_store, plan_places, write_shared
from checkpointing.format import segment
from checkpointing.format.crc32 import crc32
from checkpointing.stores.s3 import upload as upload_module
from elastic import ParallelConfig, TrainConfig
from elastic.node.uploader import MOST_CALLS, NICENESS, write_part
from elastic.protocol.run_paths import RunPaths
from elastic.protocol.saves import Upload
from trainer.backend.groups import leave_replica_group, make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.engine.engine import Engine
from trainer.engine.host_copy import HostBuffer, Share
from trainer.parallel.layout import ParallelDims, Slot
from trainer.recovery.heal import Newcomer
from trainer.recovery.heal_source import Source
from trainer.recovery.heal_wire import Meeting

WORKERS = 4
TIMEOUT_S = 600.0
_FACTOR, _PRODUCTS = torch.ones(512, 512), 48
"""Some 0.15 s on a core to itself, three times the copy of 256 MiB."""

FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the processes need to know."""

    size_bytes: int
    """Of the state, roughly."""
    rendezvous: Rendezvous
    """Where the workers meet."""
    peers: Path
    """Directory with the peers' libraries."""


@dataclass(frozen=True, kw_only=True)
class Copied:
    """A worker's part of a save of ours, up to where it would train on."""

    begun_s: float
    """When it began, on the monotonic clock."""
    held_s: float
    """How long it was held."""
    plan_s: float
    """Of it: finding what is whose."""
    buffer_s: float
    """Beside it in a run: making the buffer, 0 where there is one."""
    share_bytes: int
    """What was copied."""


class Worker:
    """One process of the workers; `form` comes first."""

    def __init__(self, number: int, setup: Setup, barrier: Any, uploads: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self._number, self._setup, self._barrier, self._uploads = number, setup, barrier, uploads
        self._formed = 0
        self._buffer: HostBuffer | None = None
        self._plain: tuple[torch.Tensor, torch.Tensor] | None = None

    def form(self, replicas: int) -> None:
        """Takes a place in a layout of so many replicas, with a state that no number is zero in."""
        if self._formed:
            leave_replica_group()
        self._plain = self._buffer = None
        self._formed += 1
        self.replicas, shard = replicas, WORKERS // replicas
        replica, rank = divmod(self._number, shard)
        self._meet = f"{self._formed}/replica/{replica}"
        dims = ParallelDims(shard=shard)
        self._mesh = make_replica_group(
            self._setup.rendezvous, self._meet, rank=rank, dims=dims, device="cpu"
        )
        task = make_task(self._setup.size_bytes)
        self.engine = Engine(
            task,
            TrainConfig(
                task=task,
                steps=1,
                global_batch=WORKERS,
                parallel=ParallelConfig(shard=shard),
            ),
            slot=Slot(replica=replica, rank=rank, dims=dims),
            mesh=self._mesh,
            device="cpu",
            max_replicas=replicas,
        )
        self.engine.initialize()
        torch.manual_seed(rank)
        for tensor in self.engine.state.tensors().values():
            tensor.uniform_(0.1, 1.0)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Every tensor of the state: its whole shape, and its dtype."""
        slices = self.engine.state.slices().items()
        return {name: (part.info.shape, part.info.dtype) for name, part in slices}

    def share_bytes(self) -> int:
        """What this worker writes of a save."""
        return sum(t.nbytes for t in self._share().tensors)

    def _share(self) -> Share:
        return self.engine.state.share(self.engine.slot.replica, self.replicas)

    # -- ours --------------------------------------------------------------------------------------

    def save(self, store: str, step: int) -> Copied:
        """Begins a save, as a worker does between two steps."""
        self._barrier.wait()
        begun_s = time.monotonic()
        share = self._share()
        planned_s = time.monotonic()
        if self._buffer is None:
            self._buffer = HostBuffer(share.size_bytes, self.engine.device)
        made_s = time.monotonic()
        self.engine.state.copy_to(self._buffer, share).wait()  # there is no step to go on with
        buffer = self._buffer
        self._uploads[store].put(self._upload(share, step, fd=buffer.fd, number=buffer.number))
        return Copied(
            begun_s=begun_s,
            held_s=time.monotonic() - begun_s - (made_s - planned_s),
            plan_s=planned_s - begun_s,
            buffer_s=made_s - planned_s,
            share_bytes=sum(tensor.nbytes for tensor in share.tensors),
        )

    def _upload(self, share: Share, step: int, *, fd: int, number: int) -> Upload:
        return Upload(
            place="store",
            pid=os.getpid(),
            fd=fd,
            number=number,
            attempt=Attempt(rank=self._number, step=step, generation=1),
            writers=WORKERS,
            slices=share.slices,
            training_state={},
            begun_at=time.time(),
        )

    def copies(self) -> tuple[float, float]:
        """Seconds by which a save makes the next step longer, and of a plain copy of as many bytes
        to warm memory."""
        share, state, buffer = self._share(), self.engine.state, self._buffer
        if self._plain is None:
            room = torch.zeros(2, share.size_bytes, dtype=torch.uint8)
            self._plain = room[0].fill_(1), room[1].fill_(1)
        assert buffer is not None
        source, target = self._plain
        plain_s = self._timed(lambda: target.copy_(source))
        alone_s = self._timed(_compute)
        copy_s = self._timed(lambda: state.copy_to(buffer, share), _compute, state.await_copy)
        return copy_s - alone_s, plain_s

    def _timed(self, *work: Callable[[], Any]) -> float:
        """Seconds that it takes all workers at once."""
        self._barrier.wait()
        first_s = time.monotonic()
        for part in work:
            part()
        return time.monotonic() - first_s

    def announce(self, store: str) -> None:
        """Has the uploader plan the first worker's part of a save, and do no more."""
        if self._number == 0:
            self._uploads[store].put(("plan", self._upload(self._share(), 0, fd=-1, number=0)))

    def dump(self, directory: Path) -> None:
        """This worker's bytes as a file, for what uploads files."""
        with (directory / f"rank{self._number}").open("wb") as file:
            for tensor in self._share().tensors:
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)

    # -- DCP ---------------------------------------------------------------------------------------

    def dcp(self, peer: str, endpoint: str, path: str, wait: bool) -> tuple[float, float, float]:
        """A save by DCP: when it began, how long it held the training, how long until it was there.

        Args:
            peer: "fsspec" or "s3torchconnector".
            endpoint: of the store.
            path: in the bucket.
            wait: `save`; else `async_save`.
        """
        import torch.distributed.checkpoint as dcp

        if str(self._setup.peers) not in sys.path:
            sys.path.insert(0, str(self._setup.peers))
        state, writer = self._dtensors(), dcp_writer(peer, endpoint, path)
        self._barrier.wait()
        begun_s = time.monotonic()
        if wait:
            dcp.save(state, storage_writer=writer)
            held_s = time.monotonic() - begun_s
        else:
            saved = dcp.async_save(state, storage_writer=writer)
            held_s = time.monotonic() - begun_s
            saved.result()  # type: ignore[union-attr]
        return begun_s, held_s, time.monotonic() - begun_s

    def _dtensors(self) -> dict[str, torch.Tensor]:
        """The local tensors, in place, as DCP wants them."""
        from torch.distributed.tensor import DTensor, Shard

        slices = self.engine.state.slices()
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self.engine.state.tensors().items():
            shape = torch.Size(slices[name].global_shape)
            found[name] = DTensor.from_local(
                tensor.reshape(slices[name].sizes),
                self._mesh.fsdp,
                [Shard(0)],
                run_check=False,
                shape=shape,
                stride=torch.empty(shape, device="meta").stride(),
            )
        return found

    # -- a heal ------------------------------------------------------------------------------------

    def heal(self) -> tuple[str, int]:
        """The second of two replicas takes its state from the first one, and has none before.

        Returns:
            The state's digest, and the bytes that came.
        """
        healthy = self.engine.slot.replica == 0
        meet = self._setup.rendezvous
        prefix = f"{self._formed}/heal/{self.engine.slot.shard}"
        meeting = Meeting(rendezvous=meet, prefix=prefix, secret=b"of the benchmark")
        talk = dist.PrefixStore(prefix, dist.TCPStore(meet.host, meet.port, is_master=False))
        came = 0
        if healthy:
            source = Source(self.engine, 0, meeting)
            talk.wait(["arrived"])
            source.close()
        else:
            for tensor in self.engine.state.tensors().values():
                tensor.zero_()
            newcomer = Newcomer(self.engine, meeting, clip_norm=1.0)
            until_s = time.monotonic() + TIMEOUT_S
            while not newcomer.finish():
                if time.monotonic() > until_s:
                    raise RuntimeError(f"no heal within {TIMEOUT_S:g} s")
                time.sleep(0.005)
            came = newcomer.bytes
            talk.set("arrived", "")
            newcomer.close()
        return self.engine.state.digest(), came

    def to_read(self) -> list[Any]:
        """What this worker would read of a checkpoint."""
        return [part.box for part in self.engine.state.to_read()]


def _compute() -> None:
    """What a step does, forward and backward, until the state changes."""
    for _ in range(_PRODUCTS):
        _FACTOR @ _FACTOR


def run_worker(
    number: int, setup: Setup, barrier: Any, uploads: dict[str, Any], orders: Any
) -> None:
    """A worker's process: carries out what it is told, until None."""
    worker = Worker(number, setup, barrier, uploads)
    while (order := orders.recv()) is not None:
        method, args = order
        try:
            orders.send(getattr(worker, method)(*args))
        except Exception:
            barrier.abort()  # the others must not wait for this one
            orders.send(Broken(traceback.format_exc()))
    os._exit(0)  # groups and threads of peers may not end by themselves


@dataclass(frozen=True)
class Broken:
    """What a process answers that could not do what it was told."""

    text: str


# -- the uploader ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What an uploader did before the first byte of a save."""

    open_s: float
    """Opening the store."""
    plan_s: float
    """Planning one worker's part."""


class _Begun(Exception):
    """The first segment would be written now."""


class _Nothing:
    """The store of a plan that is not carried out."""

    def put(self, key: str, chunks: Any) -> int:
        raise _Begun


def _plan(config: S3Config, upload: Upload) -> Setting:
    begun_s = time.monotonic()
    open_store(config)
    opened_s = time.monotonic()
    _, size = plan_places(upload.slices)
    memory = memoryview(mmap.mmap(-1, size))  # nothing of it is touched, so it takes no memory
    planned_s = time.monotonic()
    with contextlib.suppress(_Begun):
        write_shared(_Nothing(), Keys(), upload.attempt, upload.slices, memory)  # type: ignore[arg-type]
    return Setting(open_s=opened_s - begun_s, plan_s=time.monotonic() - planned_s)


def _checksums(on: bool) -> None:
    """Makes every CRC32 of the writing path 0 from now on, or what it is."""
    modules: list[Any] = [segment, upload_module]
    for module in modules:
        module.crc32 = crc32 if on else _no_checksum


def _no_checksum(data: Any, value: int = 0) -> int:
    return 0


def run_uploader(config: S3Config, uploads: Any, receipts: Any) -> None:
    """An uploader's process: writes what comes, answers with receipts, ends with None."""
    os.environ.update(CREDENTIALS)
    os.nice(NICENESS)
    paths = RunPaths(root=Path("/none"), store=config)
    with ThreadPoolExecutor(MOST_CALLS) as pool:
        while (order := uploads.get()) is not None:
            if isinstance(order, Upload):
                pool.submit(_write, paths, order, receipts)
            elif order[0] == "plan":
                receipts.put(_plan(config, order[1]))
            elif order[0] == "checksums":
                _checksums(order[1])
            elif order[0] == "cpu":
                receipts.put(_cpu_s())


def _write(paths: RunPaths, upload: Upload, receipts: Any) -> None:
    try:
        receipts.put(write_part(upload, paths, "", 512 << 20).receipt)
    except Exception:
        receipts.put(Broken(traceback.format_exc()))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# -- all of them -----------------------------------------------------------------------------------


class Workers(contextlib.AbstractContextManager["Workers"]):
    """The processes, as the benchmark talks to them. They are forked: before any thread is made,
    and before anything imports a boto3 that the peers' is not.

    Args:
        setup: for the workers.
        stores: where uploaders write, by name.
    """

    def __init__(self, setup: Setup, stores: dict[str, S3Config]) -> None:
        barrier = FORK.Barrier(WORKERS)
        self._uploads = {name: FORK.Queue() for name in stores}
        self._receipts = {name: FORK.Queue() for name in stores}
        self._orders: list[Any] = []
        self._processes: list[Any] = []
        for number in range(WORKERS):
            here, there = FORK.Pipe()
            self._orders.append(here)
            self._start(run_worker, number, setup, barrier, self._uploads, there)
        self.uploaders = {
            name: self._start(run_uploader, config, self._uploads[name], self._receipts[name])
            for name, config in stores.items()
        }

    def _start(self, work: Callable[..., None], *args: Any) -> Any:
        process = FORK.Process(target=work, args=args, daemon=True)
        process.start()
        self._processes.append(process)
        return process

    @property
    def worker_pids(self) -> list[int]:
        """Of the workers."""
        return [process.pid for process in self._processes[:WORKERS]]

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def tell(self, method: str, *args: Any) -> list[Any]:
        """Has all workers do something at once. Returns what each answers."""
        for orders in self._orders:
            orders.send((method, args))
        answers = [self._answer(orders) for orders in self._orders]
        for answer in answers:
            _check(answer)
        return answers

    def _answer(self, orders: Any) -> Any:
        if not orders.poll(TIMEOUT_S):
            raise RuntimeError(f"a worker has not answered within {TIMEOUT_S:g} s")
        return orders.recv()

    def tell_uploader(self, store: str, *order: Any) -> None:
        """Has an uploader do something."""
        self._uploads[store].put(order)

    def hear_uploader(self, store: str, answers: int = 1) -> list[Any]:
        """Waits for so many answers of an uploader."""
        heard = []
        for _ in range(answers):
            try:
                heard.append(_check(self._receipts[store].get(timeout=TIMEOUT_S)))
            except queue.Empty:
                raise RuntimeError(f"the uploader to {store} is silent") from None
        return heard


def _check(answer: Any) -> Any:
    if isinstance(answer, Broken):
        raise RuntimeError(answer.text)
    return answer
