"""What `benchmarks.checkpoint` measures, one function each."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from benchmarks._checkpoint_peers import BUCKET, Boto, s5cmd_upload
from benchmarks._checkpoint_state import boxes_of, plan_rows
from benchmarks._checkpoint_workers import WORKERS, Setting, Workers
from checkpointing import (
    Attempt,
    Keys,
    Manifest,
    Reader,
    Receipt,
    S3Config,
    Store,
    commit,
    open_store,
    plan_places,
    write_shared,
)
from checkpointing.format.segment import slice_bytes
from tests.support.fakes.s3_faults import FaultServer, Rule

RESHARDS = ((4, 3), (4, 6), (8, 5))
_SAMPLE_S = 0.002


@dataclass
class Bench:
    """The run, as the measurements see it."""

    workers: Workers
    endpoint: str
    stores: dict[str, S3Config]
    files: list[Path]
    proxies: dict[str, FaultServer]
    step: int = 0
    manifest: Manifest | None = None
    boto: Boto | None = None
    rule: Rule | None = None
    tensors: dict[str, Any] = field(default_factory=dict)
    state_bytes: int = 0

    def counts(self) -> dict[str, int]:
        """What the server has been asked so far."""
        with urlopen(f"{self.endpoint}/-/counts", timeout=10) as answer:
            return dict(json.loads(answer.read()))

    def forget(self) -> None:
        """Empties the server."""
        urlopen(Request(f"{self.endpoint}/-/objects", method="DELETE"), timeout=60).close()


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One save, by whichever system."""

    held_s: float
    """How long it held the worker that it held longest."""
    total_s: float
    """Until it was complete in the store."""


def form(bench: Bench, replicas: int) -> None:
    """Has the workers take their places in so many replicas."""
    bench.workers.tell("form", replicas)
    bench.tensors = bench.workers.tell("tensors")[0]
    bench.state_bytes = _bytes_of(bench.tensors)


def _bytes_of(tensors: dict[str, Any]) -> int:
    shares = plan_rows(tensors, 1, 0)
    return sum(slice_bytes(part) for part in shares)


def publish(bench: Bench, store: Store, receipts: list[Receipt]) -> Manifest:
    """Commits what was written last."""
    return commit(
        store,
        Keys(),
        step=bench.step,
        generation=1,
        receipts=receipts,
        training_state={},
        versions={},
    )


# -- the systems -----------------------------------------------------------------------------------


def save_ours(bench: Bench, store: str = "plain") -> Saved:
    """A save of all workers, to its commit."""
    bench.step += 1
    copied = bench.workers.tell("save", store, bench.step)
    receipts = bench.workers.hear_uploader(store, WORKERS)
    bench.manifest = publish(bench, open_store(bench.stores[store]), receipts)
    ended_s = time.monotonic()
    return Saved(
        held_s=max(one.held_s for one in copied),
        total_s=ended_s - min(one.begun_s for one in copied),
    )


def save_dcp(bench: Bench, peer: str, wait: bool) -> Saved:
    """A save by DCP; `wait` for `save`, else `async_save`."""
    bench.step += 1
    path = f"dcp/{bench.step}"
    told = bench.workers.tell("dcp", peer, bench.endpoint, path, wait)
    begun_s = min(begun for begun, _, _ in told)
    return Saved(
        held_s=max(held for _, held, _ in told),
        total_s=max(begun + took for begun, _, took in told) - begun_s,
    )


def save_raw(bench: Bench, how: str) -> Saved:
    """The same bytes as files, by a client alone."""
    bench.step += 1
    prefix = f"raw/{bench.step}"
    if bench.boto is None:
        bench.boto = Boto(bench.endpoint)
    begun_s = time.monotonic()
    if how == "boto3":
        bench.boto.upload(bench.files, prefix)
    else:
        s5cmd_upload(bench.endpoint, bench.files, prefix, signed=how == "s5cmd")
    took_s = time.monotonic() - begun_s
    return Saved(held_s=took_s, total_s=took_s)


SYSTEMS: dict[str, Callable[[Bench], Saved]] = {
    "ours": save_ours,
    "dcp_save_s3torchconnector": lambda bench: save_dcp(bench, "s3torchconnector", True),
    "dcp_async_s3torchconnector": lambda bench: save_dcp(bench, "s3torchconnector", False),
    "dcp_save_fsspec": lambda bench: save_dcp(bench, "fsspec", True),
    "dcp_async_fsspec": lambda bench: save_dcp(bench, "fsspec", False),
    "boto3": lambda bench: save_raw(bench, "boto3"),
    "s5cmd": lambda bench: save_raw(bench, "s5cmd"),
    "s5cmd_unsigned": lambda bench: save_raw(bench, "s5cmd_unsigned"),
    "ours_by_proxy": lambda bench: save_ours(bench, "proxy"),
    "ours_at_20_percent_503": lambda bench: save_ours(bench, "throttled"),
}


def measure(bench: Bench, name: str) -> Saved:
    """One save of a system on an empty server, which must have got all of the state."""
    before = bench.counts()["received_bytes"]
    saved = SYSTEMS[name](bench)
    received = bench.counts()["received_bytes"] - before
    bench.forget()
    if received < bench.state_bytes:
        raise RuntimeError(f"{name}: the server got {received} of {bench.state_bytes} bytes")
    return saved


# -- ours alone ------------------------------------------------------------------------------------


def hold(bench: Bench) -> tuple[float, float]:
    """What a save holds the training for, and a plain copy of as many bytes: the slowest worker."""
    ours, plain = zip(*bench.workers.tell("copies"), strict=True)
    return max(ours), max(plain)


def first_and_second(bench: Bench) -> dict[str, float]:
    """What the first and the second save set up, in a layout that is new, and the first's peak of
    memory beyond what was there."""
    with PeakMemory([*bench.workers.worker_pids, bench.workers.uploaders["plain"].pid]) as memory:
        numbers: dict[str, float] = {}
        for which in ("first", "second"):
            bench.workers.tell("announce", "plain")
            (setting,) = bench.workers.hear_uploader("plain")
            assert isinstance(setting, Setting)
            bench.step += 1
            copied = bench.workers.tell("save", "plain", bench.step)
            bench.workers.hear_uploader("plain", WORKERS)
            bench.forget()
            parts = {
                "plan_s": max(one.plan_s for one in copied),
                "buffer_s": max(one.buffer_s for one in copied),
                "open_s": setting.open_s,
                "uploader_plan_s": setting.plan_s,
            }
            numbers |= {f"{which}_{name}": value for name, value in parts.items()}
            numbers[f"{which}_s"] = sum(parts.values())
    numbers["share_bytes"] = sum(one.share_bytes for one in copied)
    numbers["peak_extra_bytes"] = memory.extra_bytes
    return numbers


class PeakMemory(contextlib.AbstractContextManager["PeakMemory"]):
    """The most memory that processes hold together beyond what they held at first, sampled.

    Shared memory counts for the workers, the first ones, alone: the uploader maps the same pages.
    """

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self.extra_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._base = self._now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            self.extra_bytes = max(self.extra_bytes, self._now() - self._base)

    def _now(self) -> int:
        return sum(_resident(pid, shared=pid in self._pids[:WORKERS]) for pid in self._pids)


def _resident(pid: int, *, shared: bool) -> int:
    kinds = ("RssAnon:", "RssShmem:") if shared else ("RssAnon:",)
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(words[1]) * 1024 for words in lines if words and words[0] in kinds)


def without_checksums(bench: Bench) -> dict[str, float]:
    """A save with checksums and one without: seconds, and CPU seconds of the uploader; and their
    share of both."""
    numbers = {}
    for name, on in (("without", False), ("with", True)):
        bench.workers.tell_uploader("plain", "checksums", on)
        before_s = _uploader_cpu_s(bench)
        numbers[f"{name}_s"] = save_ours(bench).total_s
        numbers[f"{name}_cpu_s"] = _uploader_cpu_s(bench) - before_s
        bench.forget()
    numbers["share"] = 1 - numbers["without_s"] / numbers["with_s"]
    numbers["share_of_cpu"] = 1 - numbers["without_cpu_s"] / numbers["with_cpu_s"]
    return numbers


def _uploader_cpu_s(bench: Bench) -> float:
    bench.workers.tell_uploader("plain", "cpu")
    (cpu_s,) = bench.workers.hear_uploader("plain")
    return float(cpu_s)


def bytes_written(bench: Bench, replicas: int) -> float:
    """What the server gets of a save, over the bytes of the state. Leaves the layout at that."""
    form(bench, replicas)
    before = bench.counts()["received_bytes"]
    save_ours(bench)
    written = bench.counts()["received_bytes"] - before
    bench.forget()
    return written / bench.state_bytes


def reshard_read(bench: Bench, saved: int, wanted: int) -> float:
    """Bytes that `wanted` workers read of a checkpoint of `saved`, over the bytes they need."""
    bench.step += 1
    store, receipts = open_store(bench.stores["plain"]), []
    for rank in range(saved):
        slices = plan_rows(bench.tensors, saved, rank)
        memory = memoryview(bytearray(plan_places(slices)[1]))
        attempt = Attempt(rank=rank, step=bench.step, generation=1)
        receipts.append(write_shared(store, Keys(), attempt, slices, memory))
    manifest = publish(bench, store, receipts)
    before = bench.counts()["sent_bytes"]
    for rank in range(wanted):
        Reader(store, manifest).read_many(boxes_of(plan_rows(bench.tensors, wanted, rank)))
    read = bench.counts()["sent_bytes"] - before
    bench.forget()
    return read / bench.state_bytes


def peer_heal(bench: Bench) -> dict[str, int]:
    """What the store is asked while a replica heals from another one, beside a committed checkpoint
    that has the same state; and what it is asked where the replica reads that instead."""
    form(bench, 2)
    save_ours(bench)
    before = bench.counts()["requests"]
    told = bench.workers.tell("heal")
    healed = bench.counts()["requests"] - before
    half = WORKERS // 2
    if [digest for digest, _ in told[:half]] != [digest for digest, _ in told[half:]]:
        raise RuntimeError("the healed replica has another state than its source")
    came = sum(number for _, number in told)
    if came < bench.state_bytes:
        raise RuntimeError(f"the heal brought {came} of {bench.state_bytes} bytes")
    assert bench.manifest is not None
    for boxes in bench.workers.tell("to_read")[half:]:
        Reader(open_store(bench.stores["plain"]), bench.manifest).read_many(boxes)
    restored = bench.counts()["requests"] - before - healed
    bench.forget()
    return {"heal_requests": healed, "heal_bytes": came, "restore_requests": restored}


@contextlib.contextmanager
def twenty_percent(bench: Bench) -> Iterator[None]:
    """From here on the throttling proxy answers every fifth request with 503; some must come."""
    rule = bench.proxies["throttled"].inject("slow_down", times=None, chance=0.2)
    yield
    if not rule.fired:
        raise RuntimeError("no 503 was injected: raise --size-mib")
    bench.rule = rule


def url_of(name: str) -> str:
    """Where a system of ours writes."""
    return f"s3://{BUCKET}/{name}"
