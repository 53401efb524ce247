"""What a run went back for: it is not to be gone on from. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from checkpointing import Manifest, run_of
from elastic.protocol.events import Event, RegroupDone, WentBack
from elastic.protocol.run_identity import RunIdentity


@dataclass(frozen=True, kw_only=True)
class GivenUp:
    """What the run went back for: what was saved then is not to be gone on from, where whoever had
    to set it aside had no time for it."""

    step: int
    """States of later steps."""
    generation: float
    """Of earlier generations."""

    def holds(self, step: int, generation: int) -> bool:
        """Whether a saved state is one of these."""
        return step > self.step and generation < self.generation


def find_given_up(happened: Iterable[Event]) -> list[GivenUp]:
    """All that a run has given up, by its events."""
    found, steps = list[GivenUp](), list[int]()
    for event in happened:
        if isinstance(event, WentBack):
            steps.append(event.step)
        elif isinstance(event, RegroupDone) and event.outcome in ("start", "restore"):
            found += [GivenUp(step=step, generation=event.generation) for step in steps]
            steps = []
    return found + [GivenUp(step=step, generation=math.inf) for step in steps]


def is_given_up(given_up: Iterable[GivenUp], identity: RunIdentity, manifest: Manifest) -> bool:
    """By this run: an imported one is none of it."""
    own = run_of(manifest) == identity.id
    return own and any(one.holds(manifest.step, manifest.generation) for one in given_up)
