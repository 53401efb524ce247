"""Which checkpoints a store holds: found, loaded, compared with a model, set aside.

A reader lists manifests and nothing else, so segments without one do not exist for it.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Mapping

from checkpointing.errors import (
    CorruptError,
    IncompatibleError,
    MissingError,
    NotCommittedError,
    StoreError,
)
from checkpointing.format.boxes import TensorInfo, show_info
from checkpointing.format.layout import Keys
from checkpointing.format.manifest import Manifest
from checkpointing.stores import Store

_log = logging.getLogger(__name__)

SET_ASIDE = ".unreadable"
"""Ending of the key of a damaged commit record that was set aside; retention deletes it."""

FOREIGN = ".foreign"
"""Ending of the key of one that only people delete: it is not the run's own, or it was pinned when
the run gave it up. A second one of the same step ends in `.foreign.1`, and so on."""

_FOREIGN = re.compile(rf"{re.escape(FOREIGN)}(\.\d+)?")

_NAMED = 3
"""Tensors that an error about another model names."""


def newest(store: Store, keys: Keys, *, before: int | None = None) -> Manifest | None:
    """The newest checkpoint whose record can be read, or None; logs a warning for each that cannot.

    Args:
        store: where to look.
        keys: names in the store.
        before: look at earlier steps than this one only.
    """
    steps = (s for s in reversed(list_steps(store, keys)) if before is None or s < before)
    for step in steps:
        try:
            return load_manifest(store, keys, step)
        except CorruptError as error:
            _log.warning("passing over the checkpoint of step %d: %s", step, error)
        except NotCommittedError:
            continue  # deleted between the listing and the reading
    return None


def list_steps(store: Store, keys: Keys) -> list[int]:
    """Steps that have a commit record, ascending; whether it is sound is not looked at."""
    found = ((keys.step_of(key), key) for key in store.list(keys.commits))
    return sorted(step for step, key in found if step is not None and key == keys.commit(step))


def load_manifest(store: Store, keys: Keys, step: int) -> Manifest:
    """The commit record of `step`. One that is damaged is read once more, which cures a flip on the
    way: a run gives it up otherwise.

    Raises:
        NotCommittedError: there is none.
        CorruptError: it is truncated, changed, of an unknown schema or of another step, or names
            segments that are not of this store.
    """
    key = keys.commit(step)
    try:
        try:
            manifest = Manifest.from_bytes(store.get(key), key)
        except CorruptError:
            manifest = Manifest.from_bytes(store.get(key), key)
    except MissingError as error:
        raise NotCommittedError(step, f"there is no {key}; list_steps() says which are") from error
    if manifest.step != step:
        raise CorruptError(key, f"this is the manifest of step {manifest.step}")
    strange = [one for one in manifest.segments if not keys.is_segment(one, up_to_step=step)]
    if strange:
        raise CorruptError(
            key,
            f"{len(strange)} of its {len(manifest.segments)} segments are not of this store, as "
            f"{strange[0]!r}; those begin with {keys.data!r} and are of step {step} or before",
        )
    return manifest


def check_kept(store: Store, keys: Keys, manifest: Manifest) -> None:
    """Where what was read of a checkpoint is missing or wrong: whether the checkpoint is still
    there. A run deletes old ones while others read them. One that it gave up meanwhile counts as
    there: what is wrong with it is why.

    Raises:
        NotCommittedError: it is not.
    """
    step = manifest.step
    try:
        there = load_manifest(store, keys, step)
    except NotCommittedError:
        if _is_aside(store, keys, manifest):
            return
        raise NotCommittedError(step, "it was deleted while it was read; pin it first") from None
    except (CorruptError, StoreError):
        return
    if there.sha256 != manifest.sha256:
        raise NotCommittedError(step, "another one was written while it was read; try again")


def _is_aside(store: Store, keys: Keys, manifest: Manifest) -> bool:
    """Whether the run has given up just this one: it was found damaged there, too."""
    record = keys.commit(manifest.step)
    try:
        aside = [key for key in store.list(record) if key != record]
        return any(_is_record(store, key, manifest) for key in aside)
    except StoreError:
        return False


def _is_record(store: Store, key: str, manifest: Manifest) -> bool:
    try:
        return Manifest.from_bytes(store.get(key), key).sha256 == manifest.sha256
    except (CorruptError, MissingError):
        return False


def set_aside(store: Store, keys: Keys, step: int) -> None:
    """Moves a damaged commit record out of the way, so that its step can be committed again.

    Its segments stay (`Survey.set_aside`) until retention deletes it. None there is fine. Where
    somebody may have pinned it, see `claims.give_up`.
    """
    key = keys.commit(step)
    if (record := _record(store, key)) is None:
        return
    _log.warning("%s is given up, and kept as %s%s", key, key, SET_ASIDE)
    store.put(f"{key}{SET_ASIDE}", [record])
    store.delete(key)


def set_foreign_aside(
    store: Store, keys: Keys, step: int, why: str = "not this run's", *, ending: str = ""
) -> None:
    """Moves a commit record out of the way that is not the run's own, or what else `why` says of
    it; `ending` is that of its key where it was set aside already.

    It and its segments stay until somebody deletes it (`Survey.aside`). None there is fine.
    """
    key = keys.commit(step)
    if (record := _record(store, f"{key}{ending}")) is None:
        return
    for number in itertools.count():
        kept = f"{key}{FOREIGN}.{number}" if number else f"{key}{FOREIGN}"
        if store.put_if_absent(kept, record) or store.get(kept) == record:  # by a killed start
            break
    _log.warning("%s is %s, and is kept as %s", key, why, kept)
    store.delete(f"{key}{ending}")


def _record(store: Store, key: str) -> bytes | None:
    """What lies under the key of a record that may be damaged; None: nothing."""
    try:
        return store.get(key)
    except MissingError:
        return None
    except CorruptError:  # a FIFO, say: there is nothing to keep of it
        return b""


def is_foreign(keys: Keys, key: str) -> bool:
    """Whether a key is that of a record that `set_foreign_aside` has kept."""
    step = keys.step_of(key)
    if step is None or not key.startswith(keys.commit(step)):
        return False
    return _FOREIGN.fullmatch(key, len(keys.commit(step))) is not None


def check_compatible(
    manifest: Manifest, tensors: Mapping[str, tuple[tuple[int, ...], str]]
) -> None:
    """Checks that a model has exactly the checkpoint's tensors. `tensors`: name to (shape, dtype).

    Raises:
        IncompatibleError: names the first few tensors that differ, in name order, and counts them.
    """
    wanted = {name: TensorInfo(tuple(shape), dtype) for name, (shape, dtype) in tensors.items()}
    names = sorted(wanted.keys() | manifest.tensors.keys())
    differing = [name for name in names if wanted.get(name) != manifest.tensors.get(name)]
    if differing:
        first, *more = differing[:_NAMED]
        fact = (
            f"{show_info(manifest.tensors.get(first))} in the checkpoint of step {manifest.step}, "
            f"{show_info(wanted.get(first))} in the model"
        )
        for name in more:
            saved, mine = manifest.tensors.get(name), wanted.get(name)
            fact += f"; {name!r}: {show_info(saved)} and {show_info(mine)}"
        raise IncompatibleError(first, fact, len(differing))
