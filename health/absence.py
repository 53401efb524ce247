"""Who has not arrived: what the flight recordings of several workers say together. Pure.

A worker waits in a collective that has not ended. Whoever belongs to its group and has begun fewer
there is not in it yet. That may be because it waits in another one itself: of those who have not
arrived, the ones who wait for nobody hold up the rest.

Who belongs to a group is not recorded on Gloo. It tells the prefix under which its workers have
met. All of these belong to the replica's own group and to those across replicas. Along one
dimension of a replica's mesh only some do, and these count once they have begun a collective there.
Sends and receives are passed over: Gloo records none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from health.flight import entries_of, has_ended, number_of

_MESH = "mesh_"
"""What c10d puts before the name of a mesh's dimension."""
_NAMED = 3
"""So many workers are named in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Absence:
    """Workers that have not begun a collective in which others wait."""

    absent: tuple[str, ...]
    """Those who have not begun it,"""
    unheard: tuple[str, ...]
    """those who belong to the group, and of whom there is no recording,"""
    waiting: tuple[str, ...]
    """and those who wait in it."""
    what: str
    """The collective, without its backend: `all_gather`."""
    number: int
    """In its group, from 1."""
    group: str
    """A dimension of the mesh, the replica, or the group across replicas."""
    prefix: str
    """Which of these: its workers have met under it."""

    def __str__(self) -> str:
        have = "has" if len(self.absent) == 1 else "have"
        wait = "waits" if len(self.waiting) == 1 else "wait"
        return (
            f"{_listed(self.absent)} {have} not begun {self.what} {self.number} of {self.group}, "
            f"in which {_listed(self.waiting)} {wait}"
        )


class _Group(NamedTuple):
    """What tells groups apart in the recordings of all workers."""

    name: str
    description: str
    """What it is, and the prefix under which its workers have met."""

    @property
    def kind(self) -> str:
        return self.description.rpartition(" ")[0]

    @property
    def prefix(self) -> str:
        return self.description.rpartition(" ")[2]


def find_absences(
    recordings: Mapping[str, str], members: Mapping[str, Sequence[str]]
) -> tuple[Absence, ...]:
    """Who has not arrived where, one answer for each group at most: its first collective in which
    somebody waits and somebody else is not. Those that lack the fewest come first.

    Args:
        recordings: worker -> what its flight recorder says; of two workers or more, and what is no
            recording says nothing.
        members: prefix -> the workers that have met under it: of a replica, or of one position in
            all replicas. Groups with other prefixes are past.
    """
    entries = {worker: entries_of(recording) for worker, recording in recordings.items()}
    heard = {worker: _by_group(found) for worker, found in entries.items() if found}
    groups = dict.fromkeys(group for of_one in heard.values() for group in of_one)
    found = (
        _first_absence(group, members[group.prefix], heard)
        for group in groups
        if group.prefix in members
    )
    return tuple(sorted(filter(None, found), key=lambda absence: len(absence.absent)))


def _by_group(entries: Sequence[dict[str, Any]]) -> dict[_Group, list[dict[str, Any]]]:
    """The collectives of a recording by their groups, sends and receives aside."""
    found: dict[_Group, list[dict[str, Any]]] = {}
    for entry in entries:
        if not entry["is_p2p"]:
            found.setdefault(_Group(*entry["process_group"]), []).append(entry)
    return found


def _first_absence(
    group: _Group,
    members: Sequence[str],
    heard: Mapping[str, Mapping[_Group, Sequence[dict[str, Any]]]],
) -> Absence | None:
    """Where the first is in which one waits and another is not."""
    of_group = {worker: heard[worker].get(group, []) for worker in members if worker in heard}
    if group.kind.startswith(_MESH):
        of_group = {worker: entries for worker, entries in of_group.items() if entries}
        unheard: tuple[str, ...] = ()
    else:
        unheard = tuple(worker for worker in members if worker not in heard)
    begun = {w: max(map(number_of, entries), default=0) for w, entries in of_group.items()}
    pending = {
        worker: {number_of(e): e for e in entries if not has_ended(e)}
        for worker, entries in of_group.items()
    }
    for number in sorted({number for numbers in pending.values() for number in numbers}):
        absent = tuple(worker for worker in of_group if begun[worker] < number)
        if absent:
            waiting = tuple(worker for worker in of_group if number in pending[worker])
            what = pending[waiting[0]][number]["profiling_name"]
            return Absence(
                absent=absent,
                unheard=unheard,
                waiting=waiting,
                what=what.rpartition(":")[2],
                number=number,
                group=group.kind.removeprefix(_MESH),
                prefix=group.prefix,
            )
    return None


def _listed(workers: Sequence[str]) -> str:
    more = len(workers) - _NAMED
    if more > 1:
        return f"{', '.join(workers[:_NAMED])} and {more} more"
    return " and ".join(filter(None, [", ".join(workers[:-1]), workers[-1]]))
