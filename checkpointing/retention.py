"""Which checkpoints go, and how: the manifest first, so that none is ever seen half gone."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from checkpointing.commit import load_manifest, newest
from checkpointing.errors import CorruptError, NotCommittedError
from checkpointing.layout import Keys
from checkpointing.stores import Store


def plan_retention(
    steps: Iterable[int], keep_last: int, keep_every: int | None, pinned: Collection[int]
) -> list[int]:
    """The steps to delete, ascending. The newest is never among them.

    Args:
        steps: steps that have a checkpoint.
        keep_last: how many of the newest stay.
        keep_every: multiples of this many steps stay; None for no such rule.
        pinned: steps that stay whatever the rules say.
    """
    ordered = sorted(set(steps))
    return [
        step
        for step in ordered[: -max(keep_last, 1)]
        if step not in pinned and not (keep_every and step % keep_every == 0)
    ]


def delete_checkpoint(store: Store, keys: Keys, step: int) -> None:
    """Deletes a checkpoint: its manifest first, its segments after.

    Killed in between, it leaves segments that `sweep_uncommitted` finds. The same goes for a
    manifest that cannot be read, and so does not say where its segments are.

    Raises:
        NotCommittedError: there is none.
    """
    try:
        segments = list(load_manifest(store, keys, step).segments)
    except CorruptError:
        segments = []
    store.delete(keys.commit(step))
    store.delete_many(segments)


def sweep_uncommitted(store: Store, keys: Keys, older_than_step: int) -> list[str]:
    """Deletes what attempts that never committed have left, and returns the deleted keys.

    Only steps below `older_than_step` and below the newest checkpoint are touched: at later ones a
    writer may be at work. Where a manifest exists but cannot be read (it may be of a later schema)
    the step is left alone.
    """
    last = newest(store, keys)
    if last is None:
        return []
    limit = min(older_than_step, last.step)
    by_step: dict[int, list[str]] = {}
    for key in [*store.list(keys.data), *store.list(keys.commits)]:
        step = keys.step_of(key)
        if step is not None and step < limit:
            by_step.setdefault(step, []).append(key)
    doomed = [k for step, found in by_step.items() for k in _unreferenced(store, keys, step, found)]
    store.delete_many(doomed)
    return sorted(doomed)


def _unreferenced(store: Store, keys: Keys, step: int, found: list[str]) -> list[str]:
    try:
        kept = {keys.commit(step), *load_manifest(store, keys, step).segments}
    except NotCommittedError:
        kept = set()
    except CorruptError:
        return []
    return [key for key in found if key not in kept]
