"""Who does something else than most, by what the threads that train are doing. Pure.

In a run most workers wait in the same place for the ones that keep them. The largest group of equal
stacks is healthy; those outside of it hold up the others, or wait inside a replica for one that
does, and what they share names it. That is evidence for people: a verdict goes by what was begun.

Source: ByteRobust (arXiv 2509.16293), which evicts the parallel group that outliers share.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePath

DEPTH = 8
"""Innermost calls that make two stacks equal: what is outside of them is the same loop, or another
layer of the same model."""

_FRAME = re.compile(r'^  File "(.+)", line \d+ in (.+)$', re.MULTILINE)
_THREADS = re.compile(r"^(?:(?:Current thread|Thread) 0x|Stack \()", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class StackGroup:
    """Workers that do the same."""

    workers: tuple[str, ...]
    stack: tuple[str, ...]
    """Files and functions, the latest call first. Lines differ in a loop, and do not count."""


@dataclass(frozen=True, kw_only=True)
class StackGroups:
    """What all workers that were asked are doing."""

    groups: tuple[StackGroup, ...]
    """The largest first."""
    outliers: tuple[str, ...]
    """The workers outside of that; nobody where another group is as large."""
    in_common: str | None
    """What several outliers share, and not all who were asked: the prefix of a replica, or of a
    group across replicas. None: nothing, or there are not several."""
    unread: tuple[str, ...]
    """Those that wrote no stack of a thread that trains: they are stopped, had no core in time, or
    do not train."""


def find_stack_groups(
    stacks: Mapping[str, str], home: str, members: Mapping[str, Collection[str]]
) -> StackGroups:
    """Groups workers by their stacks.

    Args:
        stacks: worker -> what faulthandler wrote of its threads, perhaps twice.
        home: function that the thread that trains is in, and no other.
        members: prefix -> the workers that have met under it.
    """
    keys = {worker: parse_stack(text, home) for worker, text in stacks.items()}
    alike: dict[tuple[str, ...], list[str]] = {}
    for worker, key in keys.items():
        if key:
            alike.setdefault(key, []).append(worker)
    groups = [StackGroup(workers=tuple(workers), stack=key) for key, workers in alike.items()]
    groups.sort(key=lambda group: -len(group.workers))
    several = len(groups) > 1 and len(groups[0].workers) > len(groups[1].workers)
    outliers = tuple(w for group in groups[1:] for w in group.workers) if several else ()
    return StackGroups(
        groups=tuple(groups),
        outliers=outliers,
        in_common=_in_common(outliers, stacks, members),
        unread=tuple(worker for worker, key in keys.items() if not key),
    )


def parse_stack(text: str, home: str) -> tuple[str, ...]:
    """The innermost calls of the thread that is in the function `home`, as file and function, the
    latest call first; of the last such thread in the text. Nothing where there is none."""
    for thread in reversed(_THREADS.split(text)):
        frames: list[tuple[str, str]] = _FRAME.findall(thread)
        functions = [function for _, function in frames]
        if home in functions:
            inner = frames[: functions.index(home)][:DEPTH]
            return tuple(f"{_short(file)} {function}" for file, function in inner)
    return ()


def _short(file: str) -> str:
    """Without what differs between machines."""
    return "/".join(PurePath(file).parts[-2:])


def _in_common(
    outliers: Collection[str], asked: Collection[str], members: Mapping[str, Collection[str]]
) -> str | None:
    """The smallest of `members` that has all outliers, and not all who were asked."""
    if len(outliers) < 2:
        return None
    shared = [
        prefix
        for prefix, workers in members.items()
        if {*outliers} <= {*workers} and not {*asked} <= {*workers}
    ]
    return min(shared, key=lambda prefix: len(members[prefix]), default=None)
