"""The commit record of a large model on many workers: how small, how fast to read and to plan by.

    python -m benchmarks.manifest [--workers 1024] [--layers 80]

Takes two minutes. The state is Llama's with 70.6 billion parameters in float32 and Adam's moments,
sharded over all workers as FSDP2 does; what each worker would write is planned as in a run, and the
CRC32s are drawn. Then the coordinator's part is done: the receipts, as they come from Ray, become a
record, which is written to a directory and read by fresh processes.

bytes: of the record. commit_s: from receipts to bytes. read_s: from the file to a manifest.
memory_bytes: of the manifest in memory; peak_bytes: by which a process grows while it reads it.
plan_s: what a worker reads of which segment, on as many workers and on 15/16 of them, the longest
of three workers each. lock_held_s: longest time for which another thread did not run meanwhile, of
the commit and of the read.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import random
import resource
import statistics
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._common import end_properly, print_result, say, scratch
from benchmarks._processes import resident_bytes
from checkpointing import (
    Box,
    Keys,
    Manifest,
    Reader,
    Receipt,
    Segment,
    TensorSlice,
    build_manifest,
    load_manifest,
    open_store,
)
from checkpointing.format.boxes import TensorInfo
from checkpointing.format.layout import BLOCK_BYTES, PIECE_BYTES, SEGMENT_BYTES, table_bytes
from checkpointing.format.manifest import CrcTable
from checkpointing.format.segment import slice_bytes
from checkpointing.format.slices import SavedSlice, SliceTable
from checkpointing.write.segment_plan import SegmentPlan, declare, plan_packing, plan_parts

HIDDEN, MLP, KEYS_AND_VALUES, VOCABULARY = 8192, 28672, 1024, 128256
KINDS = ("param", "exp_avg", "exp_avg_sq")
STEP, GENERATION, ATTEMPT = 1000, 3, 12345

_TICK_S = 0.001
_READS = 3


def state(layers: int) -> dict[str, TensorInfo]:
    """The tensors of a Llama with `layers` layers of its 70 B form, in training."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    in_layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KEYS_AND_VALUES, HIDDEN),
        "self_attn.v_proj": (KEYS_AND_VALUES, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (MLP, HIDDEN),
        "mlp.up_proj": (MLP, HIDDEN),
        "mlp.down_proj": (HIDDEN, MLP),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{n}.weight": shape for n, shape in in_layer.items()}
    infos = {name: TensorInfo(shape, "float32") for name, shape in shapes.items()}
    return {f"{kind}/{name}": info for kind in KINDS for name, info in infos.items()}


def share(tensors: dict[str, TensorInfo], rank: int, workers: int) -> Iterator[Box]:
    """The part of each tensor that a worker has: a chunk of its rows, the last one shorter."""
    for name, info in tensors.items():
        rows = -(-info.shape[0] // workers)
        begin = min(rank * rows, info.shape[0])
        count = min(rows, info.shape[0] - begin)
        rest = info.shape[1:]
        yield Box(name, (begin, *[0] * len(rest)), (count, *rest))


def receipt(tensors: dict[str, TensorInfo], rank: int, workers: int) -> Receipt:
    """What a worker hands in."""
    slices = tuple(
        TensorSlice(b.name, tensors[b.name].shape, tensors[b.name].dtype, b.offsets, b.sizes)
        for b in share(tensors, rank, workers)
    )
    parts = plan_parts(slices, SEGMENT_BYTES).parts
    plans = plan_packing(parts, frozenset(), SEGMENT_BYTES, PIECE_BYTES)
    rng = random.Random(rank)
    keys: list[str] = []
    segments: list[Segment] = []
    places: list[SavedSlice] = []
    for index, plan in enumerate(plans):
        key = Keys().segment(
            rank=rank, step=STEP, generation=GENERATION, attempt=ATTEMPT, index=index
        )
        keys.append(key)
        segments.append(_segment(key, plan, rng))
        places += plan.places(key)
    return Receipt(
        rank=rank,
        step=STEP,
        generation=GENERATION,
        attempt=ATTEMPT,
        slices=SliceTable.of(places, declare(slices), keys),
        segments=tuple(segments),
    )


def _segment(key: str, plan: SegmentPlan, rng: random.Random) -> Segment:
    begin = len(plan.head) + sum(map(slice_bytes, plan.parts))
    size = begin + table_bytes(begin, PIECE_BYTES)
    return Segment(
        key=key,
        size_bytes=size,
        block_bytes=BLOCK_BYTES,
        crcs=tuple(rng.getrandbits(32) for _ in range(-(-begin // BLOCK_BYTES))),
        table=CrcTable(begin=begin, piece_bytes=PIECE_BYTES, crc32=rng.getrandbits(32)),
        keyed=True,
    )


@dataclass
class Pauses:
    """How long another thread did not run."""

    longest_s: float = 0.0


@contextmanager
def watched() -> Iterator[Pauses]:
    """A thread that wants to run each millisecond."""
    pauses, end = Pauses(), threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not end.wait(_TICK_S):
            now = time.monotonic()
            pauses.longest_s, last = max(pauses.longest_s, now - last), now

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield pauses
    finally:
        end.set()
        thread.join()


def commit(receipts: Sequence[Receipt]) -> Manifest:
    """What the coordinator does with the last receipt."""
    return build_manifest(
        step=STEP,
        generation=GENERATION,
        receipts=receipts,
        training_state={"step": STEP},
        versions={"torch": "2.13.0"},
    )


def read(directory: str) -> dict[str, float]:
    """In a process of its own: reads the record, and what it takes."""
    store = open_store(directory)
    before = resident_bytes()
    with watched() as pauses:
        began = time.perf_counter()
        load_manifest(store, Keys(), STEP)
        seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tracemalloc.start()
    kept = load_manifest(store, Keys(), STEP)
    memory, _ = tracemalloc.get_traced_memory()
    assert kept.step == STEP
    return {
        "read_s": seconds,
        "memory_bytes": memory,
        "peak_bytes": peak - before,
        "lock_held_s": pauses.longest_s,
    }


def plan_s(reader: Reader, workers: int) -> float:
    """Seconds that the slowest of a few workers takes to plan what it reads."""
    tensors = dict(reader.manifest.tensors)
    longest = 0.0
    for rank in (0, workers // 2, workers - 1):
        wanted = [box for box in share(tensors, rank, workers) if box.sizes[0]]
        began = time.perf_counter()
        reader.plan(wanted)
        longest = max(longest, time.perf_counter() - began)
    return longest


def measure(workers: int, layers: int, directory: Path) -> dict[str, Any]:
    """All of it."""
    tensors = state(layers)
    packed = []
    for rank in range(workers):
        packed.append(pickle.dumps(receipt(tensors, rank, workers)))
        if (rank + 1) % 256 == 0:
            say(f"{rank + 1} of {workers} workers have planned")
    receipts = [pickle.loads(one) for one in packed]  # of this process, as Ray brings them
    receipt_bytes = sum(map(len, packed))
    del packed
    with watched() as pauses:
        began = time.perf_counter()
        manifest = commit(receipts)
        raw = manifest.to_bytes()
        commit_s = time.perf_counter() - began
    say(f"{len(manifest.slices):,} slices in {len(raw):,} bytes after {commit_s:.2f} s")
    store = open_store(directory)
    store.put(Keys().commit(STEP), [raw])
    reads = [_in_its_own_process(directory) for _ in range(_READS)]
    reader = Reader(store, load_manifest(store, Keys(), STEP))
    fewer = workers * 15 // 16
    return {
        "slices": len(manifest.slices),
        "parameters": sum(math.prod(i.shape) for i in tensors.values()) // len(KINDS),
        "bytes": len(raw),
        "receipt_bytes": receipt_bytes,
        "commit_s": commit_s,
        "commit_lock_held_s": pauses.longest_s,
        **{key: statistics.median(one[key] for one in reads) for key in reads[0]},
        "plan_s": max(plan_s(reader, workers), plan_s(reader, fewer)),
    }


def _in_its_own_process(directory: Path) -> dict[str, float]:
    code = f"import benchmarks.manifest as m, json; print(json.dumps(m.read({str(directory)!r})))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1024, help="that share the state")
    parser.add_argument("--layers", type=int, default=80, help="of the model")
    options = parser.parse_args(arguments)
    if options.workers < 16 or options.layers < 1:
        parser.error("at least 16 workers and one layer are needed")
    end_properly()
    with scratch("manifest") as directory:
        print_result(measure(options.workers, options.layers, directory))


if __name__ == "__main__":
    main()
