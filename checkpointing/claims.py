"""Who decides a checkpoint's fate: a pin keeps it for good, a deletion takes it away.

Both are the same small object beside the commit record, and whoever creates it first has it. So a
pin and a deletion never both succeed, however many processes try at once, and nobody needs a lock:

    pin        creates the claim "pinned"; refused where it says "deleting"
    deletion   creates the claim "deleting" before it touches anything; refused where it is pinned
    unpin      removes the claim, also one that a killed deletion has left

A claim of a step without a commit record means nothing, and is swept with the step's leftovers.
"""

from __future__ import annotations

import json
from typing import Literal

from checkpointing.commit import load_manifest
from checkpointing.errors import MissingError, NotCommittedError, ProtectedError
from checkpointing.layout import Keys
from checkpointing.stores import Store

Claim = Literal["pinned", "deleting"]


def pin(store: Store, keys: Keys, step: int) -> None:
    """Keeps the checkpoint of `step` until `unpin`; once more is fine.

    Raises:
        NotCommittedError: there is none, or it is being deleted.
        CorruptError: its manifest cannot be read.
    """
    load_manifest(store, keys, step)
    if not store.put_if_absent(keys.claim(step), _body("pinned")):
        if read_claim(store, keys, step) == "pinned":
            return
        raise NotCommittedError(
            step,
            "it is being deleted; if whoever did so was killed, `unpin` it and pin it again",
        )
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


def pinned_steps(store: Store, keys: Keys) -> frozenset[int]:
    """Steps whose claim is a pin; one that cannot be read counts as one."""
    found = ((keys.step_of(key), key) for key in store.list(keys.commits))
    claimed = [step for step, key in found if step is not None and key == keys.claim(step)]
    return frozenset(s for s in claimed if read_claim(store, keys, s) == "pinned")


def claim_for_deletion(store: Store, keys: Keys, step: int) -> None:
    """From here on nobody can pin the checkpoint of `step`. Raises ProtectedError: it is pinned."""
    if store.put_if_absent(keys.claim(step), _body("deleting")):
        return
    if read_claim(store, keys, step) == "pinned":
        raise ProtectedError(step, "it is pinned", "Unpin it first")


def read_claim(store: Store, keys: Keys, step: int) -> Claim | None:
    """What is claimed about `step`; None for nothing. What cannot be read counts as a pin."""
    try:
        raw = store.get(keys.claim(step))
    except MissingError:
        return None
    return "deleting" if raw == _body("deleting") else "pinned"


def _body(claim: Claim) -> bytes:
    return json.dumps({"claim": claim}).encode()
