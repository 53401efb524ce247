"""The point where segments become a checkpoint.

Protocol: every rank writes its segments and returns a receipt; one process checks that the receipts
tile the model and that it finds the segments, too, and creates the manifest under a key that must
be free. A death anywhere before leaves only segments that nothing refers to. A reader lists
manifests and nothing else.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from checkpointing.errors import (
    AlreadyCommittedError,
    CorruptError,
    MissingError,
    NotCommittedError,
    SliceError,
    StaleGenerationError,
)
from checkpointing.format.boxes import TensorInfo, show_info
from checkpointing.format.coverage import check_coverage
from checkpointing.format.layout import Keys
from checkpointing.format.manifest import Manifest, Receipt, Segment, run_of
from checkpointing.format.slices import join
from checkpointing.read.catalogue import load_manifest, newest
from checkpointing.stores import Store

_log = logging.getLogger(__name__)

_LOOKS = 16
"""Segments that are looked for at once: on S3 a request each, so 3,000 take a few seconds."""


def commit(
    store: Store,
    keys: Keys,
    *,
    step: int,
    generation: int,
    receipts: Sequence[Receipt],
    training_state: Mapping[str, Any],
    versions: Mapping[str, str],
    refers_to: int | None = None,
) -> Manifest:
    """Publishes what the receipts name as the checkpoint of `step`. One process calls it.

    Committing the same again is fine, so a caller that got no answer may repeat it.

    Receipts may name segments of one earlier checkpoint beside their own: the run's newest, which
    it does not delete before this one is there. Then those segments have two that refer to them.

    Args:
        store: where the segments are.
        keys: names in the store.
        step: the step that the state belongs to.
        generation: the roster of the caller and of every writer.
        receipts: one of every writer, all of one attempt.
        training_state: JSON values to hand back on resume.
        versions: versions of the libraries.
        refers_to: step of that checkpoint; None for the newest in the store.

    Raises:
        SliceError: the slices do not tile the tensors, or ranks disagree on a tensor.
        NotCommittedError: receipts of different attempts, or a training state that is not JSON, or
            a segment that is neither of this attempt nor of that checkpoint; or it is gone; or one
            of this attempt is not in `store`, as this process sees it.
        StaleGenerationError: a newer generation of the run has committed this step or a later one.
        AlreadyCommittedError: another checkpoint of this step was first.
    """
    manifest = build_manifest(
        step=step,
        generation=generation,
        receipts=receipts,
        training_state=training_state,
        versions=versions,
        committed_at=time.time(),
    )
    _check_there(store, keys, receipts)  # first, for it takes time: what follows must not be old
    last = newest(store, keys)
    _refuse_stale(store, keys, last, manifest)
    base = last
    if refers_to is not None and (last is None or last.step != refers_to):
        base = load_manifest(store, keys, refers_to)
    _check_segments(keys, receipts, base)
    if not store.put_if_absent(keys.commit(step), manifest.to_bytes()):
        return _check_same(store, keys, manifest)
    return manifest


def build_manifest(
    *,
    step: int,
    generation: int,
    receipts: Sequence[Receipt],
    training_state: Mapping[str, Any],
    versions: Mapping[str, str],
    committed_at: float | None = None,
) -> Manifest:
    """What the receipts make together, checked. Pure; arguments as in `commit`.

    Raises:
        SliceError: the slices do not tile the tensors, or ranks disagree on a tensor.
        NotCommittedError: receipts of different attempts, or a training state that is not JSON.
    """
    attempt = _common_attempt(step, generation, receipts)
    slices = join([receipt.slices for receipt in receipts], _merge_tensors(receipts))
    check_coverage(slices)
    return Manifest(
        step=step,
        generation=generation,
        attempt=attempt,
        slices=slices,
        segments={s.key: s for receipt in receipts for s in receipt.segments},
        training_state=_as_json(step, training_state),
        versions=dict(versions),
        committed_at=committed_at,
    )


def _common_attempt(step: int, generation: int, receipts: Sequence[Receipt]) -> int:
    made = {(r.step, r.generation, r.attempt) for r in receipts}
    if len(made) != 1:
        raise NotCommittedError(
            step, f"{len(receipts)} receipts of (step, generation, attempt) {sorted(made)}"
        )
    (found,) = made
    if found[:2] != (step, generation):
        raise NotCommittedError(
            step, f"generation {generation} was to commit, but the receipts are of {found}"
        )
    return found[2]


def _merge_tensors(receipts: Sequence[Receipt]) -> dict[str, TensorInfo]:
    """All tensors in the order of their names, so that equal checkpoints have equal records."""
    merged: dict[str, TensorInfo] = {}
    for receipt in receipts:
        for name, info in zip(receipt.slices.names, receipt.slices.infos, strict=True):
            if merged.setdefault(name, info) != info:
                raise SliceError(
                    name,
                    f"{show_info(info)} on rank {receipt.rank}, "
                    f"{show_info(merged[name])} elsewhere",
                )
    return dict(sorted(merged.items()))


def _as_json(step: int, training_state: Mapping[str, Any]) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(json.dumps(dict(training_state), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise NotCommittedError(step, f"training_state is not JSON ({error})") from error
    return state


def _refuse_stale(store: Store, keys: Keys, last: Manifest | None, mine: Manifest) -> None:
    """Records of another run, copied into the store, count by generations of its own."""
    while last is not None and mine.step <= last.step:
        if mine.generation < last.generation and run_of(last) == run_of(mine):
            raise StaleGenerationError(mine.step, mine.generation, last.step, last.generation)
        last = newest(store, keys, before=last.step)


def _check_segments(keys: Keys, receipts: Sequence[Receipt], base: Manifest | None) -> None:
    there = {} if base is None else base.segments
    for one in receipts:
        for segment in one.segments:
            if not _is_own(keys, one, segment) and there.get(segment.key) != segment:
                which = "there is none" if base is None else f"that of step {base.step}"
                raise NotCommittedError(
                    one.step,
                    f"writer {one.rank} refers to {segment.key}, which is not part of the newest "
                    f"checkpoint ({which}) and may be deleted; the next save is written whole",
                )


def _is_own(keys: Keys, receipt: Receipt, segment: Segment) -> bool:
    """Whether a writer's segment is of this attempt, rather than of an earlier checkpoint."""
    own = keys.attempt(receipt.rank, receipt.step, receipt.generation, receipt.attempt)
    return segment.key.startswith(own)


def _check_there(store: Store, keys: Keys, receipts: Iterable[Receipt]) -> None:
    """A writer whose machine lacks the mount of a directory writes to its own disk, and all seems
    well to it. Segments of the checkpoint before were looked for when that was committed."""
    written = [(one, s) for one in receipts for s in one.segments if _is_own(keys, one, s)]
    with ThreadPoolExecutor(_LOOKS, thread_name_prefix="commit") as pool:
        found = pool.map(partial(stored_size, store), [segment.key for _, segment in written])
        for (one, segment), size in zip(written, found, strict=True):
            if size != segment.size_bytes:
                here = "is not there" if size is None else f"has {size} bytes there"
                raise NotCommittedError(
                    one.step,
                    f"writer {one.rank} wrote {segment.size_bytes} bytes to {segment.key}, which "
                    f"{here} as the coordinator sees {store!r}: is that mounted, and the same, on "
                    f"both nodes?",
                )


def stored_size(store: Store, key: str) -> int | None:
    """Bytes of what lies at a key; None: nothing does, or what is no file."""
    try:
        return store.size(key)
    except (MissingError, CorruptError):
        return None


def _check_same(store: Store, keys: Keys, manifest: Manifest) -> Manifest:
    """What is committed already, where that is the same but for the time of the commit."""
    key = keys.commit(manifest.step)
    try:
        there = Manifest.from_bytes(store.get(key), key)
    except CorruptError as error:
        raise AlreadyCommittedError(
            manifest.step, f"by a record not readable here: {error}"
        ) from error
    if replace(there, committed_at=manifest.committed_at).to_bytes() == manifest.to_bytes():
        return there
    raise AlreadyCommittedError(
        manifest.step,
        f"by generation {there.generation}, attempt {there.attempt}; this is generation "
        f"{manifest.generation}, attempt {manifest.attempt}, with other content",
    )
