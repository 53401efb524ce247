"""The processes that have a part in a save on S3, each of which a test kills at a request that the
store holds. They run the code of a run, without Ray.

    worker      holds the copy                          trainer/engine/host_copy.py
    uploader    writes segments out of it               checkpointing/write/byte_writer.py
    committer   publishes the manifest, retires others  elastic/coordinator/publisher.py
    driver      begins the next start of the run        elastic/driver/resume.py
    importer    brings a checkpoint from elsewhere      trainer/exchange/intake.py
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from ray.train import RunConfig

from checkpointing import (
    Attempt,
    CheckpointConfig,
    Keys,
    Manifest,
    Receipt,
    S3Config,
    TensorSlice,
    open_store,
    write_shared,
)
from elastic.coordinator.publisher import Publisher
from elastic.driver.resume import (
    find_stored,
    last_generation,
    remove_orphans,
    run_directory,
    set_others_aside,
)
from elastic.protocol.run_identity import identify, record_identity
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import read_events
from tests.support.tiny_checkpoint import NUMBERS
from trainer.engine.host_copy import HostBuffer, Share
from trainer.engine.shared_copy import open_copy
from trainer.exchange.intake import Incoming, commit_incoming

RUN, GENERATION, DEADLINE_S = "run", 1, 60.0
LARGE = 21
"""The step whose state has a segment that goes up in two parts."""

Where = tuple[int, int, int]
"""Process, descriptor and number of a copy."""

_processes = multiprocessing.get_context("forkserver")  # the test's threads stay out of the child
_processes.set_forkserver_preload(["pytest", "elastic.driver.resume", "trainer.exchange.intake"])


class Role:
    """A process that does something, tells of it, and can be killed."""

    def __init__(self, work: Callable[..., None], *args: Any) -> None:
        self.said, said = _processes.Pipe(duplex=False)
        self.process = _processes.Process(
            target=_play, args=(dict(os.environ), work, said, *args), daemon=True
        )
        self.process.start()
        said.close()

    def hear(self) -> Any:
        """What it tells."""
        assert self.said.poll(DEADLINE_S)
        return self.said.recv()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.join()


def _play(env: Mapping[str, str], work: Callable[..., None], said: Connection, *args: Any) -> None:
    os.environ.update(env)
    work(said, *args)


def shapes(step: int) -> dict[str, tuple[int, ...]]:
    """Tensors of the state."""
    return {"param/w": (1536 if step == LARGE else 8, 1024), "param/bias": (64,)}


def state(step: int) -> dict[str, torch.Tensor]:
    """What is saved."""
    rng = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes(step).items()}


def slices(step: int) -> tuple[TensorSlice, ...]:
    """It as one worker holds it."""
    return tuple(
        TensorSlice(name, shape, "float32", (0,) * len(shape), shape)
        for name, shape in shapes(step).items()
    )


def worker(said: Connection, step: int) -> None:
    """Copies the state of `step`, says where that is, and holds it."""
    share = Share(list(zip(slices(step), state(step).values(), strict=True)))
    buffer = HostBuffer(share.size_bytes, torch.device("cpu"))
    buffer.copy(share).wait()
    said.send((os.getpid(), buffer.fd, buffer.number))
    signal.pause()


def write(config: S3Config, where: Where, step: int, rank: int = 0) -> Receipt:
    """What an uploader does with a copy (`elastic.node.uploader.write_part`)."""
    attempt = Attempt(rank=rank, step=step, generation=GENERATION)
    with open_copy(*where) as memory:
        return write_shared(
            open_store(config),
            Keys(),
            attempt,
            slices(step),
            memory,
            segment_bytes=_segment_bytes(step),
        )


def _segment_bytes(step: int) -> int:
    """So that each tensor has a segment of its own."""
    return math.prod(shapes(step)["param/w"]) * 4


def uploader(said: Connection, config: S3Config, where: Where, step: int) -> None:
    """Writes a part, and says the receipt."""
    said.send(write(config, where, step))


def new_publisher(config: S3Config) -> Publisher:
    """The committing part of a coordinator; it keeps one checkpoint."""
    paths = RunPaths(root=Path("/nonexistent"), store=config)
    return Publisher(paths, CheckpointConfig(keep_last=1), versions={}, newest=0)


def publish(publisher: Publisher, receipt: Receipt, writers: int = 1) -> int | None:
    """A worker hands in a receipt."""
    return asyncio.run(_publish(publisher, receipt, writers))


async def _publish(publisher: Publisher, receipt: Receipt, writers: int) -> int | None:
    size = await publisher.take(receipt, NUMBERS, writers)
    if size is not None:
        await publisher.retire(receipt.step)
    return size


def committer(said: Connection, config: S3Config, receipt: Receipt) -> None:
    """Commits, and retires what is older."""
    said.send(publish(new_publisher(config), receipt))


def begin_run(config: S3Config, storage: Path) -> Manifest | None:
    """What `ElasticTrainer.fit` does with a store before any worker starts."""
    base = S3Config(
        url=config.url.removesuffix(f"/{RUN}"),
        endpoint_url=config.endpoint_url,
        timeout_s=config.timeout_s,
    )
    run = RunConfig(name=RUN, storage_path=str(storage))
    with run_directory(run, CheckpointConfig(store=base)) as paths:
        identity = identify(paths)
        origin = find_stored(paths, read_events(paths.events), identity, None)
        record_identity(paths, identity)
        surveyor = set_others_aside(paths, origin, identity, None)
        remove_orphans(surveyor, last_generation(origin) + 1)
        return origin.stored


def driver(said: Connection, config: S3Config, storage: Path) -> None:
    """Begins a start of the run."""
    begin_run(config, storage)
    said.send("begun")


def bring(config: S3Config, step: int) -> None:
    """Imports a checkpoint with a segment for each tensor."""
    incoming = (
        Incoming(part=part, read=lambda name=part.name: state(step)[name])  # type: ignore[misc]
        for part in slices(step)
    )
    store = open_store(config)
    commit_incoming(
        store,
        Keys(),
        incoming,
        step=step,
        training_state=NUMBERS,
        segment_bytes=_segment_bytes(step),
    )


def importer(said: Connection, config: S3Config, step: int) -> None:
    """Imports, and says whether that was possible."""
    try:
        bring(config, step)
        said.send("done")
    except Exception as error:
        said.send(f"{type(error).__name__}: {error}")
