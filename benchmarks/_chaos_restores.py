"""Restores that were not needed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from elastic.protocol.events import (
    Event,
    RegroupDone,
    ReplicaForming,
    ReplicaHealed,
    StepRecord,
    WorkerLost,
)


def find_needless_restores(
    happened: Sequence[Event], steps: Sequence[StepRecord], workers: int
) -> list[int]:
    """Generations that went back to a saved state although the living held a whole copy.

    A worker holds its part of the state once a step is committed in a roster in which it has lanes,
    or once its replica has healed: until it is lost, takes a place in a new replica, or a step is
    committed without it. A doubtful one does not count, so whatever is found is a fault of ours.

    Args:
        happened: all events of one start of a run.
        steps: its step records, those of lost steps included.
        workers: of one replica.
    """
    copies = _Copies(steps, workers)
    return [event.generation for event in happened if copies.see(event)]


class _Copies:
    """Who holds what, as events go by."""

    def __init__(self, steps: Sequence[StepRecord], workers: int) -> None:
        self._committed = {step.generation: step.time for step in reversed(steps)}
        self._workers = workers
        self._members: dict[int, list[str]] = {}
        self._rank: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        """Worker -> generation that it was in last."""
        self._due: dict[str, int] = {}
        """Worker -> generation in which a commit makes it a holder."""
        self._holders: set[str] = set()
        self._dropped = False
        """A formation took apart a whole copy, or what would be one if nothing else was left."""

    def see(self, event: Event) -> TypeGuard[RegroupDone]:
        """Takes in an event. Returns whether it is a needless restore."""
        self._prove(event.time)
        match event:
            case ReplicaForming():
                self._dropped |= self._whole(event.time)
                self._members[event.replica] = event.workers
                self._rank.update({worker: i for i, worker in enumerate(event.workers)})
                self._holders -= set(event.workers)
            case ReplicaHealed():
                self._holders |= {w for w in self._members[event.replica] if w in self._rank}
            case WorkerLost():
                self._holders.discard(event.worker)
                self._due.pop(event.worker, None)
                self._rank.pop(event.worker, None)
                self._dropped = False
            case RegroupDone():
                needless = self._dropped or self._whole(event.time)
                self._seat(event)
                return needless and event.outcome == "restore"
        return False

    def _prove(self, now: float) -> None:
        proven = {w for w, g in self._due.items() if self._committed.get(g, now) < now}
        self._holders |= proven
        self._due = {w: g for w, g in self._due.items() if w not in proven}

    def _whole(self, now: float) -> bool:
        newest = max((g for g, time in self._committed.items() if time < now), default=0)
        current = {w for w in self._holders if self._seen.get(w, 0) >= newest}
        return len({self._rank[worker] for worker in current}) == self._workers

    def _seat(self, event: RegroupDone) -> None:
        if event.outcome == "restore":
            self._holders.clear()
        self._dropped, self._due = False, {}
        for formed_as, now in event.renumbered.items():
            self._members[now] = self._members.pop(int(formed_as))
        for index, lanes in event.lanes.items():
            for worker in self._members[int(index)]:
                if worker in self._rank:
                    self._seen[worker] = event.generation
                    if lanes:
                        self._due[worker] = event.generation
