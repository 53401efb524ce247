"""Why a worker is lost: the one table of causes.

Decisions and pictures read a cause's entry, never its name; so a cause is added here, or from
outside by `register_cause`, and nowhere else. Every process of a run that meets an added cause must
know it: those are found as entry points of the group `elastictrainer.causes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Literal, NewType, get_args

Cause = NewType("Cause", str)
"""Name of a registered cause; it goes into events and reports."""

Budget = Literal["max_crashes", "max_hangs", "max_preemptions"]
"""Fields of HealthConfig that bound losses without progress."""

PLUGINS = "elastictrainer.causes"
"""Entry points of this group name modules that register causes as they are imported."""


@dataclass(frozen=True, kw_only=True)
class CauseEntry:
    """What follows from a cause."""

    text: str
    """What has happened, for those who read a report; a sentence without its full stop."""
    budget: Budget
    """Bounds the losses of this cause, and of others with the same budget, without progress."""
    color: str
    """Of its marks in `run.png`, as matplotlib has it."""
    by_departure: bool = False
    """On a machine that was announced to go, it is a preemption: the machine went."""
    lasts: bool = False
    """Its process is of no use any more, whatever else was lost at that time: it ends itself, and
    does not go on as a survivor."""
    against_machine: float = 0.0
    """What a loss of this cause counts against the machine (`health/suspects.py`): above 0.5 it is
    suspect at once, 0.6 for six hours; below that when it comes again."""
    by_program: bool = False
    """A program can cause it as well: with no step in between it follows the work, here or on other
    machines, and says nothing more against them."""
    repeats: bool = False
    """It would come again: the same step in another replica, or in the same one formed anew, ends
    the run (`health.max_same_step_errors`)."""
    needs_change: bool = False
    """A run that has ended so ends so again, on whatever machines, unless somebody changes the
    code, the data or the settings (`elastic/exit_status.py`)."""


_ENTRIES: dict[str, CauseEntry] = {}


def register_cause(name: str, entry: CauseEntry) -> Cause:
    """Adds a cause.

    Returns:
        What to lose workers for.

    Raises:
        ValueError: the name is taken by another entry, or its budget is none.
    """
    if _ENTRIES.get(name, entry) != entry:
        raise ValueError(f"a cause {name!r} is registered already: {_ENTRIES[name]}")
    if entry.budget not in get_args(Budget):
        raise ValueError(f"cause {name!r}: no budget {entry.budget!r}; use one of {Budget}")
    _ENTRIES[name] = entry
    return Cause(name)


def known_causes() -> dict[str, CauseEntry]:
    """Name -> entry, those of plugins included."""
    _load_plugins()
    return dict(_ENTRIES)


def entry_of(cause: str) -> CauseEntry:
    """The entry of a cause. One that this process does not know, as from the log of another
    version, is taken for a crash."""
    if cause not in _ENTRIES:
        _load_plugins()
    return _ENTRIES.get(cause, _ENTRIES[CRASH])


def _load_plugins() -> None:
    for plugin in entry_points(group=PLUGINS):
        plugin.load()


CRASH = register_cause(
    "crash",
    CauseEntry(text="its process ended", budget="max_crashes", color="#c8322b", by_departure=True),
)
HANG = register_cause(
    "hang",
    CauseEntry(text="it was frozen or stuck, and killed", budget="max_hangs", color="#8a4fbf"),
)
NODE = register_cause(
    "node",
    CauseEntry(
        text="its machine was lost",
        budget="max_crashes",
        color="#7a4a21",
        by_departure=True,
        against_machine=1.0,
    ),
)
RAY_NODE = register_cause(
    "ray_node",
    CauseEntry(
        text="Ray's node there ended or fell silent, and the machine's kernel answers",
        budget="max_crashes",
        color="#5f9ea0",
        by_departure=True,
        against_machine=0.3,
        by_program=True,  # a container that ran out of memory ends so, with all its processes
    ),
)
PREEMPTION = register_cause(
    "preemption",
    CauseEntry(
        text="its machine was taken away, as announced",
        budget="max_preemptions",
        color="#b8860b",
    ),
)
USER_ERROR = register_cause(
    "user_error",
    CauseEntry(
        text="user code raised",
        budget="max_crashes",
        color="#c22f7e",
        repeats=True,
        needs_change=True,
    ),
)
OUT_OF_MEMORY = register_cause(
    "out_of_memory",
    CauseEntry(
        text="its memory, or its GPU's, ran out",
        budget="max_crashes",
        color="#d2691e",
        repeats=True,
    ),
)
GPU_ERROR = register_cause(
    "gpu_error",
    CauseEntry(
        text="its GPU or the driver failed",
        budget="max_crashes",
        color="#556b2f",
        against_machine=0.3,
        by_program=True,  # a kernel that reads where it may not shows so, too
        lasts=True,
    ),
)
GPU_MEMORY = register_cause(
    "gpu_memory",
    CauseEntry(
        text="its GPU's memory lost bits (uncorrectable ECC error)",
        budget="max_crashes",
        color="#8fbc3b",
        against_machine=0.6,
        lasts=True,
    ),
)
DEVICE_ASSERT = register_cause(
    "device_assert",
    CauseEntry(
        text="a check in a GPU's kernel failed, as of an index out of range",
        budget="max_crashes",
        color="#b56576",
        lasts=True,
        repeats=True,
        needs_change=True,
    ),
)
COMPILER = register_cause(
    "compiler",
    CauseEntry(  # not `needs_change`: it may be the machine that lacks a compiler
        text="torch's compiler failed",
        budget="max_crashes",
        color="#8b6b9e",
        repeats=True,
    ),
)
COLLECTIVE = register_cause(
    "collective",
    CauseEntry(
        text="a collective of its replica failed, and no worker was lost",
        budget="max_hangs",
        color="#4169e1",
    ),
)
LINK = register_cause(
    "link",
    CauseEntry(
        text="large messages did not pass between it and others, and nobody was lost",
        budget="max_hangs",
        color="#008b8b",
        against_machine=1.0,
    ),
)
PATH = register_cause(
    "path",
    CauseEntry(
        text="large messages did not pass between its machine and one other: either may be bad",
        budget="max_hangs",
        color="#3fa7d6",
        against_machine=0.3,  # until it comes again, with another machine
    ),
)
NETWORK = register_cause(
    "network",
    CauseEntry(
        text="NCCL took TCP there, although its machine has EFA",
        budget="max_crashes",
        color="#1f3a93",
        against_machine=1.0,
        by_program=True,  # an image without EFA's plugin shows so on each machine
        lasts=True,  # NCCL reads its environment once
    ),
)
HEAL = register_cause(
    "heal",
    CauseEntry(  # nothing against its machine: the source's, or the network, may be the bad one
        text="it did not get the state from other replicas, again and again",
        budget="max_crashes",
        color="#b0a030",
    ),
)
STORAGE = register_cause(
    "storage",
    CauseEntry(
        text="its machine could not read a checkpoint, tokens or run directory that others read",
        budget="max_crashes",
        color="#4682b4",
        against_machine=0.3,  # a network file system's cache may be old, once
    ),
)
DATA = register_cause(
    "data",
    CauseEntry(  # neither `repeats` nor against its machine: all read the same storage
        text="what it reads could not be read for a while: the storage faltered, for all",
        budget="max_crashes",
        color="#c49c94",
    ),
)
CORRUPTION = register_cause(
    "corruption",
    CauseEntry(
        text="its state was not that of the others",
        budget="max_crashes",
        color="#23787a",
        against_machine=1.0,
    ),
)
SLOW = register_cause(
    "slow",
    CauseEntry(text="it was slower than the others", budget="max_hangs", color="#708090"),
)
"""Of verdicts only: nobody is ended for it."""
