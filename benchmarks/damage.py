"""Damage to a checkpoint's files: is each case found, and is no tensor ever wrong?

    python -m benchmarks.damage [--cases 1000] [--seed 0]

Takes a minute or two. Three steps of a small state by two writers lie in a directory; the later
ones refer to what the first wrote of the tensors that stand still. Each case is drawn by the seed,
and undone after it: a file, be it a segment or a commit record, is changed, or two are swapped,
between steps and writers too. Every step that has the file is read, whole and in small parts, and
verified.

wrong_tensors: cases in which a read returned other elements than were saved. bare_errors: in which
something other than a CheckpointError came. undetected: in which `verify` found nothing; a change
that alters no tensor may stay unseen by a read, so that is no failure. found_by_read counts those
that a read found. The exit status is 1 unless the first three are 0.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks._common import end_properly, print_result, say, scratch
from checkpointing import (
    Attempt,
    Box,
    CheckpointError,
    Keys,
    KnownPart,
    Reader,
    Store,
    TensorSlice,
    commit,
    load_manifest,
    newest,
    open_store,
    plan_places,
    verify_checkpoint,
    write_changed,
)
from checkpointing.format.tensor_bytes import raw_bytes

KEYS = Keys()
STEPS = (100, 200, 300)
WRITERS = 2
FROZEN = ("param/embed", "param/scale")

_BLOCK_BYTES, _PIECE_BYTES, _SEGMENT_BYTES = 16 << 10, 2 << 10, 36_000
"""Small, so that a small state has segments of several blocks, and of a single piece: each large
tensor fills a segment of its writer, and what is small lies between."""

_CASE_S = 60
_SAY_EVERY = 100

State = dict[str, torch.Tensor]


def state_of(step: int) -> State:
    """What is saved at a step: weights that change, norms that are all ones, a frozen part."""
    fixed, drawn = torch.Generator().manual_seed(0), torch.Generator().manual_seed(step)
    return {
        "param/embed": torch.randn(6, 3000, generator=fixed),
        "param/scale": torch.randn(2, 8, generator=fixed),
        "param/up": torch.randn(6, 3000, generator=drawn),
        "param/norm": torch.randn(4, 16, generator=drawn),
        "param/ones": torch.ones(2, 64),
        "moment/up": torch.randn(6, 6000, generator=drawn).bfloat16(),
        "count": torch.tensor([[step], [step + 1]]),
    }


def write(
    store: Store, step: int, state: State, known: list[Mapping[TensorSlice, KnownPart]]
) -> None:
    """Commits a state. `known` has what each writer knows of the step before, and then of this."""
    receipts = []
    for rank in range(WRITERS):
        slices, data = [], []
        for name, tensor in state.items():
            rows = len(tensor) // WRITERS
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            offsets, sizes = (rank * rows, 0), (rows, shape[1])
            slices.append(TensorSlice(name, shape, dtype, offsets, sizes))
            data.append(raw_bytes(tensor[rank * rows : (rank + 1) * rows]))
        places, size = plan_places(slices)
        memory = bytearray(size)
        for place, one in zip(places, data, strict=True):
            memory[place : place + len(one)] = one
        written = write_changed(
            store,
            KEYS,
            Attempt(rank=rank, step=step, generation=0),
            slices,
            memoryview(memory),
            known=known[rank],
            still=FROZEN,
            segment_bytes=_SEGMENT_BYTES,
            block_bytes=_BLOCK_BYTES,
            piece_bytes=_PIECE_BYTES,
        )
        receipts.append(written.receipt)
        known[rank] = written.parts
    commit(store, KEYS, step=step, generation=0, receipts=receipts, training_state={}, versions={})


@dataclass(frozen=True, kw_only=True)
class Case:
    """One damage."""

    kind: str
    """Of which kind."""
    keys: tuple[str, ...]
    """The objects that are not as they were written."""


@contextmanager
def damaged(root: Path, rng: random.Random) -> Iterator[Case]:
    """Draws a damage and does it; undoes it afterwards."""
    keys = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
    while True:
        kind, key, other = rng.choice(list(KINDS)), rng.choice(keys), rng.choice(keys)
        mine, theirs = (root / key).read_bytes(), (root / other).read_bytes()
        changed = KINDS[kind](rng, mine, theirs)
        if changed != mine:  # else nothing is damaged
            break
    files = {key: changed, other: mine} if kind == "swap" else {key: changed}
    kept = {name: root.parent / f"kept-{number}" for number, name in enumerate(files)}
    for name, content in files.items():
        (root / name).rename(kept[name])
        _put(root / name, content)
    try:
        yield Case(kind=kind, keys=tuple(files))
    finally:
        for name, place in kept.items():
            _remove(root / name)
            place.rename(root / name)


Content = bytes | Callable[[Path], Any]
"""What is at a path: a file with such bytes, or what a function makes there."""


def _put(path: Path, content: Content) -> None:
    if callable(content):
        content(path)
    else:
        path.write_bytes(content)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flip(rng: random.Random, mine: bytes, theirs: bytes) -> bytes:
    return _over(mine, at := rng.randrange(len(mine)), bytes([mine[at] ^ 1 << rng.randrange(8)]))


def _edit(rng: random.Random, mine: bytes, theirs: bytes) -> bytes:
    """A run of bytes is drawn, zero, another run of the file, or of another one."""
    at = rng.randrange(len(mine))
    size = min(rng.choice((1, 4, 512, _PIECE_BYTES, _BLOCK_BYTES)), len(mine) - at)
    source = rng.choice((rng.randbytes(size), bytes(size), mine, theirs))
    start = rng.randrange(max(1, len(source) - size + 1))
    return _over(mine, at, source[start : start + size])


def _over(data: bytes, at: int, run: bytes) -> bytes:
    return data[:at] + run + data[at + len(run) :]


KINDS: dict[str, Callable[[random.Random, bytes, bytes], Content]] = {
    "swap": lambda rng, mine, theirs: theirs,
    "copy": lambda rng, mine, theirs: theirs,
    "flip": _flip,
    "edit": _edit,
    "truncate": lambda rng, mine, theirs: mine[: rng.randrange(len(mine))],
    "extend": lambda rng, mine, theirs: mine + rng.choice((b"\0", rng.randbytes(99), mine)),
    "insert": lambda rng, mine, theirs: mine[: (at := rng.randrange(len(mine)))] + b"x" + mine[at:],
    "empty": lambda rng, mine, theirs: b"",
    "delete": lambda rng, mine, theirs: _nothing,
    "directory": lambda rng, mine, theirs: Path.mkdir,
    "fifo": lambda rng, mine, theirs: os.mkfifo,
    "device": lambda rng, mine, theirs: _device,
}
"""Kind of damage -> what is then in a file's place, from what was there and in another file's."""


def _nothing(path: Path) -> None:
    """Leaves the path free."""


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


class Judge:
    """Reads and verifies what is damaged.

    Args:
        store: where the steps are.
        rng: draws what is read in small parts.
    """

    def __init__(self, store: Store, rng: random.Random) -> None:
        self._store, self._rng = store, rng
        self._states = {step: state_of(step) for step in STEPS}
        self._files = {
            step: {KEYS.commit(step), *load_manifest(store, KEYS, step).segments} for step in STEPS
        }

    def judge(self, case: Case) -> set[str]:
        """What is to be counted of a case, each once."""
        found = set[str]()
        for step, files in self._files.items():
            hit = files & set(case.keys)
            if hit:
                found |= self._read(step)
                found |= self._verify(step, hit)
        return found

    def _read(self, step: int) -> set[str]:
        state, found = self._states[step], set[str]()
        boxes = [Box(name, (0, 0), tuple(tensor.shape)) for name, tensor in state.items()]
        for wanted in (boxes, *([self._part(box)] for box in boxes)):
            try:
                newest(self._store, KEYS)
                reader = Reader(self._store, load_manifest(self._store, KEYS, step), threads=1)
                tensors = reader.read_many(wanted)
            except CheckpointError:
                found.add("found_by_read")
            except Exception as error:  # the point of the benchmark: nothing else may come
                say(f"read of step {step}: {type(error).__name__}: {error}")
                found.add("bare_errors")
            else:
                for box, tensor in zip(wanted, tensors, strict=True):
                    rows, columns = map(_range, box.offsets, box.sizes)
                    if not torch.equal(tensor, state[box.name][rows, columns]):
                        say(f"read of step {step}: {box} is wrong")
                        found.add("wrong_tensors")
        return found

    def _part(self, box: Box) -> Box:
        offsets = tuple(self._rng.randrange(size) for size in box.sizes)
        room = zip(box.sizes, offsets, strict=True)
        return Box(box.name, offsets, tuple(self._rng.randint(1, size - at) for size, at in room))

    def _verify(self, step: int, hit: set[str]) -> set[str]:
        try:
            findings = verify_checkpoint(self._store, KEYS, step, threads=1).findings
        except CheckpointError:
            return set()  # no such checkpoint
        except Exception as error:
            say(f"verify of step {step}: {type(error).__name__}: {error}")
            return {"bare_errors"}
        missed = hit - {finding.key for finding in findings}
        # A record that is unreadable says nothing of the segments.
        return {"undetected"} if missed and KEYS.commit(step) not in hit - missed else set()


def _range(start: int, size: int) -> slice:
    return slice(start, start + size)


def _hangs(*_: Any) -> None:
    say(f"a case did not end within {_CASE_S} s")
    os._exit(1)  # a thread that hangs would keep any other exit waiting


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000, help="how many; default: 1000")
    parser.add_argument("--seed", type=int, default=0, help="draws them; default: 0")
    options = parser.parse_args()
    end_properly()
    signal.signal(signal.SIGALRM, _hangs)
    rng, started_s = random.Random(options.seed), time.monotonic()
    with scratch("damage") as folder:
        root = folder / "checkpoints"
        store = open_store(root)
        known: list[Mapping[TensorSlice, KnownPart]] = [{} for _ in range(WRITERS)]
        for step in STEPS:
            write(store, step, state_of(step), known)
        judge = Judge(store, rng)
        counts = collections.Counter[str]()
        kinds = collections.Counter[str]()
        for number in range(options.cases):
            signal.alarm(_CASE_S)
            with damaged(root, rng) as case:
                found = judge.judge(case)
            counts.update(found)
            kinds[case.kind] += 1
            if found - {"found_by_read"}:
                say(f"case {number}: {case.kind} of {' and '.join(case.keys)}: {sorted(found)}")
            if number % _SAY_EVERY == _SAY_EVERY - 1:
                say(f"{number + 1} cases, {counts['found_by_read']} found by a read")
        signal.alarm(0)
    failures = {name: counts[name] for name in ("wrong_tensors", "bare_errors", "undetected")}
    print_result(
        {
            "cases": options.cases,
            **failures,
            "found_by_read": counts["found_by_read"],
            "kinds": dict(sorted(kinds.items())),
            "seconds": round(time.monotonic() - started_s, 1),
        }
    )
    sys.exit(1 if any(failures.values()) else 0)


if __name__ == "__main__":
    main()
