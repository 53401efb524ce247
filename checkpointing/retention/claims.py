"""Who decides a checkpoint's fate: a pin keeps it for good, a deletion takes it away, an import
makes it.

All are the same small object beside the commit record, and whoever creates it first has it. So a
pin and a deletion never both succeed, however many processes try at once, and nobody needs a lock:

    pin        creates the claim "pinned"; refused where it says something else
    deletion   creates the claim "deleting" before it touches anything; refused where it is pinned.
               On a full disk it does without
    import     creates the claim "importing" before it writes; refused where there is a claim
    unpin      removes the claim, also one that a killed deletion or import has left
    give_up    claims nothing: a run that goes back, or meets damage, needs the step free; the
               record of a pinned one is moved, and kept for people to delete

A run takes segments that nothing refers to for what killed writers have left. Those of a step that
is claimed for an import it leaves alone; the claim runs out, so that a killed import keeps its
segments for a day and not for ever. Every other claim of a step without a commit record means
nothing, and is swept with the step's leftovers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from checkpointing.errors import (
    MissingError,
    NotCommittedError,
    ProtectedError,
    StoreError,
    StoreUnavailableError,
)
from checkpointing.format.layout import Keys
from checkpointing.read.catalogue import SET_ASIDE, load_manifest, set_aside, set_foreign_aside
from checkpointing.stores import Store

Claim = Literal["pinned", "deleting", "importing"]

IMPORT_S = 24 * 3600.0
"""How long a claim for an import holds."""

_SKEW_S = 3600.0
"""More than two clocks differ that S3 serves: it refuses one that is 15 minutes off."""

_WORD = {"pinned": "is pinned", "deleting": "is being deleted", "importing": "is being imported"}


def pin(store: Store, keys: Keys, step: int) -> None:
    """Keeps the checkpoint of `step` until `unpin`; once more is fine.

    Raises:
        NotCommittedError: there is none, or it is being deleted or imported.
        CorruptError: its manifest cannot be read.
    """
    load_manifest(store, keys, step)
    if not store.put_if_absent(keys.claim(step), _body("pinned")):
        claim = read_claim(store, keys, step)
        if claim == "pinned":
            return
        raise NotCommittedError(step, _taken(claim, "pin it"))
    try:
        load_manifest(store, keys, step)  # a deletion that was ahead of us has let go of its claim
    except NotCommittedError:
        store.delete(keys.claim(step))
        raise


def unpin(store: Store, keys: Keys, step: int) -> bool:
    """Lets go of a checkpoint. Returns whether there was a claim."""
    there = read_claim(store, keys, step) is not None
    store.delete(keys.claim(step))
    return there


def give_up(store: Store, keys: Keys, step: int) -> None:
    """Moves the record of a checkpoint out of the way that a run gives up, so that its step can be
    committed again. Retention deletes it (`set_aside`), unless it is pinned: then only people do.
    """
    why = "given up, and pinned"
    if read_claim(store, keys, step) == "pinned":
        set_foreign_aside(store, keys, step, why)
        return
    set_aside(store, keys, step)
    if read_claim(store, keys, step) == "pinned":  # since we looked; from here on nobody can
        set_foreign_aside(store, keys, step, why, ending=SET_ASIDE)


def pinned_steps(store: Store, keys: Keys) -> frozenset[int]:
    """See `claimed_steps`."""
    return claimed_steps(store, keys)[0]


def claimed_steps(store: Store, keys: Keys) -> tuple[frozenset[int], frozenset[int]]:
    """Steps whose claim is a pin, where one that cannot be read counts as one; and steps whose
    segments belong to an import that may be going on. Each claim is read once."""
    pinned, importing = set[int](), set[int]()
    for step in _claimed(store, keys):
        raw = _read(store, keys, step)
        if _meaning(raw) == "pinned":
            pinned.add(step)
        elif _import_end(raw) > time.time() - _SKEW_S:
            importing.add(step)
    return frozenset(pinned), frozenset(importing)


@contextmanager
def claim_for_import(store: Store, keys: Keys, step: int) -> Iterator[Callable[[], None]]:
    """While the context lasts, no run sweeps the segments of `step`, and nobody else imports it.

    Yields:
        To be called right before the commit. Raises NotCommittedError: the claim has run out or was
        taken away, and segments may be gone.

    Raises:
        NotCommittedError: somebody else has a claim on the step.
    """
    body = json.dumps(
        {"claim": "importing", "by": uuid.uuid4().hex, "until": time.time() + IMPORT_S}
    ).encode()
    there = _read(store, keys, step)
    if 0.0 < _import_end(there) < time.time() - _SKEW_S:  # a killed one's
        store.delete(keys.claim(step))
    if not store.put_if_absent(keys.claim(step), body):
        raise NotCommittedError(step, _taken(read_claim(store, keys, step), "import it"))

    def still_ours() -> None:
        if _read(store, keys, step) != body or _import_end(body) < time.time():
            raise NotCommittedError(
                step, f"the import lost its claim, or took over {IMPORT_S / 3600:.0f} h; repeat it"
            )

    try:
        yield still_ours
    finally:
        with contextlib.suppress(StoreError):  # it runs out
            if _read(store, keys, step) == body:
                store.delete(keys.claim(step))


def claim_for_deletion(store: Store, keys: Keys, step: int) -> None:
    """From here on nobody can pin the checkpoint of `step`. Raises ProtectedError: it is pinned."""
    try:
        if store.put_if_absent(keys.claim(step), _body("deleting")):
            return
    except StoreUnavailableError as error:
        # What makes room must not need any. A pin that is there counts, and a new one would find
        # no room, but by somebody who has some, or makes some, in just this moment.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
    if read_claim(store, keys, step) == "pinned":
        raise ProtectedError(step, "it is pinned", "Unpin it first")


def read_claim(store: Store, keys: Keys, step: int) -> Claim | None:
    """What is claimed about `step`; None for nothing. What cannot be read counts as a pin."""
    return _meaning(_read(store, keys, step))


def _meaning(raw: bytes | None) -> Claim | None:
    if raw is None:
        return None
    if _import_end(raw):
        return "importing"
    return "deleting" if raw == _body("deleting") else "pinned"


def _claimed(store: Store, keys: Keys) -> list[int]:
    found = ((keys.step_of(key), key) for key in store.list(keys.commits))
    return [step for step, key in found if step is not None and key == keys.claim(step)]


def _read(store: Store, keys: Keys, step: int) -> bytes | None:
    try:
        return store.get(keys.claim(step))
    except MissingError:
        return None


def _import_end(raw: bytes | None) -> float:
    """When a claim for an import runs out, in seconds since 1970; 0 for every other one."""
    try:
        body = json.loads(raw or b"{}")
        return float(body["until"]) if body["claim"] == "importing" else 0.0
    except (ValueError, TypeError, KeyError, RecursionError):
        return 0.0


def _taken(claim: Claim | None, wanted: str) -> str:
    word = _WORD[claim] if claim else "was claimed a moment ago"
    return f"it {word}; if whoever did so was killed, `unpin` it and {wanted} again"


def _body(claim: Claim) -> bytes:
    return json.dumps({"claim": claim}).encode()
