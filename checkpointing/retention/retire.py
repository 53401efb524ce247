"""Which checkpoints go, and how: the manifest first, so that none is ever seen half gone.

    retire            what a run does after each commit
      ├─ survey.py    which segments each commit record refers to
      ├─ plan_retention
      └─ delete_checkpoint
           ├─ claims.claim_for_deletion     a pinned one stays
           ├─ the commit record
           └─ plan_segments                 what no other record refers to

A store may hold millions of segments, so what a commit costs is measured by what it deletes. All of
them are listed, for what is left over, only where something may be: at the first retention, where
the last one failed, where a record or a claim that protected segments is gone, and where the caller
says so.

A commit record may refer to segments of earlier checkpoints, as long as the newest commit record
refers to them too: that one is never deleted by a run, and so neither are they. What cannot be read
protects every segment of its own step and of those before it.

A store may have records that are not the run's own. Those of steps after its newest are none of a
run's business, and those that its start has set aside (`commit.FOREIGN`) are only for people to
delete; both protect what they refer to.

A sweep lists segments and records first, and then looks at what refers to them: whatever was
written under a claim that is gone by then has a commit record by then (`claims.claim_for_import`).
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

from checkpointing.errors import NotCommittedError, ProtectedError
from checkpointing.format.layout import Keys
from checkpointing.read.catalogue import is_foreign
from checkpointing.retention.claims import claim_for_deletion
from checkpointing.retention.survey import Survey, Surveyor
from checkpointing.retention.verified_mark import forget_verified
from checkpointing.stores import Store
from checkpointing.stores.local import UNFINISHED

_log = logging.getLogger(__name__)


def plan_retention(
    steps: Iterable[int],
    keep_last: int,
    keep_every: int | None,
    pinned: Collection[int],
    *,
    unreadable: Collection[int] = (),
    verified: Collection[int] = (),
    back_to: Collection[int] = (),
) -> list[int]:
    """The steps to delete, ascending.

    The newest that can be read is never among them, nor the newest verified one.

    Args:
        steps: steps that have a checkpoint.
        keep_last: how many of the newest stay; those that cannot be read stay beside them.
        keep_every: multiples of this many steps stay; None for no such rule.
        pinned: steps that stay whatever the rules say.
        unreadable: of `steps`, those whose commit record cannot be read.
        verified: of `steps`, those of which every byte was checked.
        back_to: of each of these, the newest that can be read of that step or before stays.
    """
    ordered = sorted(set(steps))
    readable = [step for step in ordered if step not in unreadable]
    oldest_kept = readable[-max(keep_last, 1) :][0] if readable else -math.inf
    best = {max((step for step in readable if step in verified), default=None)}
    best |= {max((s for s in readable if s <= wanted), default=None) for wanted in back_to}
    return [
        step
        for step in ordered
        if step < oldest_kept
        and step not in best
        and step not in pinned
        and not (keep_every and step % keep_every == 0)
    ]


def plan_segments(gone: Iterable[str], rest: Survey, keys: Keys) -> list[str]:
    """Of the segments that a deleted record refers to, those that nothing else needs, sorted.

    Args:
        gone: keys that the deleted record refers to.
        rest: what the other records refer to.
        keys: names in the store.
    """
    guarded = max(rest.unreadable | rest.set_aside, default=-1)
    found = defaultdict[int, set[str]](set)
    for key in gone:
        if key not in rest.aside:
            found[_step(keys, key, default=-1)].add(key)
    recorded = sorted(rest.segments)
    return sorted(
        key
        for step, written in found.items()
        if step > guarded and step not in rest.importing
        for key in _unneeded(written, rest, recorded[bisect_left(recorded, step) :])
    )


def _unneeded(written: AbstractSet[str], rest: Survey, recorded: Sequence[int]) -> AbstractSet[str]:
    """Of segments written at one step, those that no record refers to. Only records of that step
    and later ones, `recorded`, may: `load_manifest` refuses all others."""
    for step in recorded:
        written = written - rest.segments[step]
        if not written:
            break
    return written


def retire(
    surveyor: Surveyor,
    *,
    keep_last: int,
    keep_every: int | None,
    up_to_step: int,
    back_to: Collection[int] = (),
    littered: bool = False,
) -> list[int]:
    """Deletes what the rules no longer keep, and what attempts below `up_to_step` have left: as far
    as it sees by itself that something may be left, or is told so by `littered`.

    One process of a run calls it, after the commit of `up_to_step`: whatever has a later step is
    not of this run, and is neither counted nor deleted. For each step of `back_to` the newest of
    it or before stays: what was saved later may have to be given up. Returns the deleted steps.
    """
    store, keys = surveyor.store, surveyor.keys
    before, surveyor.last = surveyor.last, None  # where this one fails, the next looks for the rest
    first = survey = surveyor.survey()
    expired = plan_retention(
        (step for step in survey.steps if step <= up_to_step),
        keep_last,
        keep_every,
        survey.pinned,
        unreadable=survey.unreadable,
        verified=survey.verified,
        back_to=back_to,
    )
    deleted = []
    for step in expired:
        try:
            survey = _delete(store, keys, step, survey)
        except ProtectedError as error:  # pinned since we looked
            _log.info("%s", error)
            continue
        surveyor.forget(step)
        deleted.append(step)
    whole = littered or before is None or not first.holds(before) or not survey.guards(first)
    sweep_uncommitted(surveyor, up_to_step, segments=whole)
    surveyor.last = survey
    return deleted


def delete_checkpoint(store: Store, keys: Keys, step: int, *, force: bool = False) -> None:
    """Deletes a checkpoint: its manifest first, then the segments that no other one refers to.

    Killed in between, it leaves segments that `sweep_uncommitted` finds. The same goes for a
    manifest that cannot be read, and so does not say where its segments are.

    Args:
        store: where it is.
        keys: names in the store.
        step: which one.
        force: also the newest one that can be read, and the newest verified one.

    Raises:
        NotCommittedError: there is none.
        ProtectedError: it is pinned, or, without `force`, the newest of its kind.
    """
    survey = Surveyor(store=store, keys=keys).survey()
    if step not in survey.steps:
        raise NotCommittedError(step, f"there is no {keys.commit(step)}")
    if not force:
        _refuse_newest(step, survey)
    _delete(store, keys, step, survey)


def sweep_uncommitted(
    surveyor: Surveyor, older_than_step: int, *, segments: bool = True
) -> list[str]:
    """Deletes what attempts that never committed have left, and returns the deleted keys.

    Only steps below `older_than_step` and below the newest checkpoint are touched: at later ones a
    writer may be at work. Without `segments` only what lies among the records: to list all segments
    of many checkpoints takes long.
    """
    store, keys = surveyor.store, surveyor.keys
    written = store.list(keys.data) if segments else []
    noted = store.list(keys.commits)
    survey = surveyor.survey(verified=False)
    if not survey.segments:
        return []
    limit = min(older_than_step, max(survey.segments))
    data = [key for key in written if _step(keys, key, default=limit) < limit]
    listed = [key for key in noted if _step(keys, key, default=limit) < limit]
    records = [key for key in listed if not _belongs(keys, key, survey)]
    expired = [*plan_segments(data, survey, keys), *records]
    store.delete_many(expired)
    return sorted(expired)


def sweep_orphans(surveyor: Surveyor, generation: int) -> list[str]:
    """Deletes the segments that earlier generations wrote and nothing refers to, of any step.

    Called once at the start of a run, before anything is written: `generation` is the first that
    the run will have, and no writer of an earlier one can publish any more. Returns the keys.
    """
    store, keys = surveyor.store, surveyor.keys
    written = {key: keys.generation_of(key) for key in store.list(keys.data)}
    mine = [key for key, wrote in written.items() if wrote is not None and wrote < generation]
    expired = plan_segments(mine, surveyor.survey(verified=False), keys)
    store.delete_many(expired)
    return expired


def sweep_attempts(surveyor: Surveyor, gone: Callable[[int, int], bool]) -> None:
    """Deletes the segments of attempts that are `gone`, by step and generation, and that no record
    refers to. The caller sees to it that no commit of them is under way, or will be."""
    store, keys = surveyor.store, surveyor.keys
    written = list[str]()
    for key in store.list(keys.data):
        step, generation = keys.step_of(key), keys.generation_of(key)
        if step is not None and generation is not None and gone(step, generation):
            written.append(key)
    store.delete_many(plan_segments(written, surveyor.survey(verified=False), keys))


def _refuse_newest(step: int, survey: Survey) -> None:
    if step == max(survey.segments, default=None):
        raise ProtectedError(step, "it is the newest checkpoint that can be read", "Use --force")
    if step == max(survey.verified, default=None):
        raise ProtectedError(
            step,
            "it is the newest checkpoint that was verified",
            "Verify a newer one first, or use --force",
        )


def _delete(store: Store, keys: Keys, step: int, survey: Survey) -> Survey:
    claim_for_deletion(store, keys, step)
    rest = survey.without(step)
    store.delete(keys.commit(step))
    forget_verified(store, keys, step)
    store.delete_many(plan_segments(survey.segments.get(step, ()), rest, keys))
    store.delete(keys.claim(step))
    return rest


def _belongs(keys: Keys, key: str, survey: Survey) -> bool:
    """Whether a key among the commit records is one, or stands beside one."""
    if is_foreign(keys, key):
        return True
    step = keys.step_of(key)
    if step is None:
        return False
    if step not in survey.steps:
        return step in survey.importing and key == keys.claim(step)
    # In a directory what is being written, as by somebody who pins it, has an ending of its own.
    beside = (keys.commit(step), keys.claim(step), keys.verified(step))
    return key in beside or key.endswith(UNFINISHED)


def _step(keys: Keys, key: str, *, default: int) -> int:
    step = keys.step_of(key)
    return default if step is None else step
