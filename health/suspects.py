"""What speaks against each machine, over all runs; it counts for less as it grows older. Pure.

A verdict such as a corrupt state makes a machine suspect for a day. What may have been the program
as well makes it so only when it comes again within the day.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

HALF_LIFE_S = 86_400.0
"""After which a mark counts half."""
SUSPECT = 0.5
"""From this score on a machine is suspect."""
INCIDENT_S = 10.0
"""Marks within so many seconds are one: all workers of a machine are lost with it."""
REBOOTED, REBOOTED_WEIGHT = "rebooted", 0.3
"""What a reboot leaves of the marks against a machine: not enough to make it suspect. Whatever
speaks against it within the day calls for another machine, though: it is no part of an incident.
Source: gpud, which asks for an inspection where an Xid comes back after reboots."""
_AHEAD_S = 3600.0
"""The clocks of two machines may differ by so much. A mark from later than that would not fade."""
_FORGOTTEN = 0.01
"""A mark that counts for less is dropped."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One thing that speaks against a machine."""

    time: float
    """When it happened, in seconds since the epoch."""
    weight: float
    """What it counts when it is new: above 0.5 it makes a machine suspect by itself."""
    cause: str
    """Cause of the loss."""
    run: str
    """Name of the run that it happened in."""
    detail: str
    """The evidence in one line."""


Record = Mapping[str, Sequence[Mark]]
"""Machine -> its marks, in the order in which they came."""


def score(marks: Sequence[Mark], now: float) -> float:
    """What speaks against a machine at `now`, in seconds since the epoch."""
    return math.fsum(_worth(mark, now) for mark in marks)


def is_suspect(marks: Sequence[Mark], now: float) -> bool:
    """Whether it is enough."""
    return score(marks, now) >= SUSPECT


def add_mark(record: Record, machine: str, mark: Mark) -> dict[str, tuple[Mark, ...]]:
    """The record with another mark, and without what is too old to matter."""
    kept = {
        name: tuple(one for one in marks if _worth(one, mark.time) >= _FORGOTTEN)
        for name, marks in record.items()
    }
    own = kept.get(machine, ())
    if own and _is_one_incident(own[-1], mark):
        own, mark = own[:-1], max(own[-1], mark, key=lambda one: one.weight)
    kept[machine] = (*own, mark)
    return {name: marks for name, marks in kept.items() if marks}


def add_marks(record: Record, more: Record) -> dict[str, tuple[Mark, ...]]:
    """The record with the marks of another one, each as by `add_mark`."""
    added = {machine: tuple(marks) for machine, marks in record.items()}
    for machine, marks in more.items():
        for mark in marks:
            added = add_mark(added, machine, mark)
    return added


def _is_one_incident(before: Mark, mark: Mark) -> bool:
    close = abs(mark.time - before.time) <= INCIDENT_S
    return close and REBOOTED not in (before.cause, mark.cause)


def _worth(mark: Mark, now: float) -> float:
    """The clocks of two machines may differ: what seems to come is new."""
    return mark.weight * 0.5 ** (max(0.0, now - mark.time) / HALF_LIFE_S)


def date_back(record: Record, now: float, written: float) -> dict[str, tuple[Mark, ...]]:
    """The record to be weighed at `now`: a mark from more than an hour later is taken for one of
    when the record was `written`, so that it fades. Not to be kept: `now` may be what is wrong."""
    then = min(now, written)
    return {
        name: tuple(replace(m, time=then) if m.time > now + _AHEAD_S else m for m in marks)
        for name, marks in record.items()
    }


def to_json(record: Record) -> dict[str, Any]:
    """A record as a plain JSON object."""
    return {"machines": {name: [asdict(mark) for mark in marks] for name, marks in record.items()}}


def from_json(data: object) -> dict[str, tuple[Mark, ...]]:
    """The record that `data`, which is what `to_json` gives, describes, without machines that
    nothing speaks against.

    Raises:
        ValueError: it describes none.
    """
    machines = data.get("machines") if isinstance(data, Mapping) else None
    if not isinstance(machines, Mapping):
        raise ValueError("it has no object 'machines'")
    record = {str(name): _marks(str(name), marks) for name, marks in machines.items()}
    return {name: marks for name, marks in record.items() if marks}


def _marks(machine: str, marks: object) -> tuple[Mark, ...]:
    if not isinstance(marks, list):
        raise ValueError(f"the marks of {machine} are no list")
    return tuple(_mark(machine, one) for one in marks)


def _mark(machine: str, data: object) -> Mark:
    kinds = {field.name: float if field.type == "float" else str for field in fields(Mark)}
    if not isinstance(data, Mapping) or data.keys() != kinds.keys():
        raise ValueError(f"a mark of {machine} has not the fields {', '.join(kinds)}")
    for name, kind in kinds.items():
        value = data[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        sane = number and 0 <= value <= sys.float_info.max
        if not (sane if kind is float else isinstance(value, str)):
            raise ValueError(f"{name} of a mark of {machine} is {value!r}")
    return Mark(**data)
