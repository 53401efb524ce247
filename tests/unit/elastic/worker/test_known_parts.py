"""Which save's parts a worker compares with."""

from __future__ import annotations

from checkpointing import Attempt, KnownPart, TensorSlice
from checkpointing.format.manifest import Segment
from checkpointing.format.slices import SavedSlice
from elastic.worker.known_parts import KnownParts

SLICE = TensorSlice("param/w", (4,), "uint8", (0,), (4,))


def parts(mark: bytes) -> dict[TensorSlice, KnownPart]:
    place = SavedSlice(name="param/w", offsets=(0,), sizes=(4,), segment="k", begin=0, end=4)
    segment = Segment(key="k", size_bytes=4, block_bytes=4, crcs=(0,))
    return {SLICE: KnownPart(sample=mark, digest=mark, place=place, segment=segment)}


def attempt(step: int, generation: int) -> Attempt:
    return Attempt(rank=0, step=step, generation=generation)


def test_only_the_committed_one_is_compared_with() -> None:
    saved = KnownParts()
    assert saved.of((2, 1)) == {}
    saved.add(attempt(4, 1), parts(b"4"))
    saved.add(attempt(6, 1), parts(b"lost"))
    assert saved.of((4, 1)) == parts(b"4"), "that of step 6 was never committed"
    saved.add(attempt(6, 2), parts(b"6"))
    assert saved.of((6, 2)) == parts(b"6")
    assert saved.of((6, 1)) == saved.of((4, 1)) == {}, "passed, and forgotten"


def test_where_the_coordinator_does_not_know_nothing_is() -> None:
    saved = KnownParts()
    saved.add(attempt(4, 1), parts(b"4"))
    assert saved.of(None) == {}
    assert saved.of((4, 1)) == {}
