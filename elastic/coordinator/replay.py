"""What the records of a run tell a coordinator that was started anew in the middle of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic.protocol import events
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import read_events, read_steps


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The present start of a run, by its records."""

    started: int
    """Workers that started."""
    workers: Mapping[str, events.WorkerJoined]
    """Those of them that were not lost."""
    draining: frozenset[str]
    """Those whose machines will go."""
    leaving: frozenset[str]
    """Those that were told to end."""
    draining_nodes: frozenset[str]
    """Machines that will go."""
    generation: int
    """Generation of the newest roster; 0: none stood yet in this start."""
    began: int
    """Step that it began at."""
    restored: int
    """Generation of the newest roster that began from a checkpoint or from the seed."""
    formations: int
    """Replicas that began to form."""
    recorded: int
    """Steps that count and are in the records."""
    committed: frozenset[int]
    """Steps of checkpoints that are known to be committed."""
    fired: tuple[str, ...]
    """Injected faults that went off, as they were ordered."""


def replay(paths: RunPaths, start_step: int) -> Replay:
    """Reads the records of a run.

    Args:
        paths: the run directory.
        start_step: where this start of the run began.
    """
    happened = _this_start(read_events(paths.events))
    lost = {e.worker for e in happened if isinstance(e, events.WorkerLost)}
    drained = [e for e in happened if isinstance(e, events.Draining)]
    rosters = [e for e in happened if isinstance(e, events.RegroupDone)]
    joined = {e.worker: e for e in happened if isinstance(e, events.WorkerJoined)}
    return Replay(
        started=len(joined),
        workers={worker: e for worker, e in joined.items() if worker not in lost},
        draining=frozenset(w for e in drained if e.node is not None for w in e.workers) - lost,
        leaving=frozenset(w for e in drained if e.node is None for w in e.workers) - lost,
        draining_nodes=frozenset(e.node for e in drained if e.node is not None),
        generation=rosters[-1].generation if rosters else 0,
        began=rosters[-1].step if rosters else 0,
        restored=max(
            (e.generation for e in rosters if e.outcome in ("start", "restore")), default=0
        ),
        formations=max(
            (e.formed for e in happened if isinstance(e, events.ReplicaForming)), default=0
        ),
        recorded=_recorded(read_steps(paths.steps), rosters, start_step),
        committed=frozenset(e.step for e in happened if isinstance(e, events.CheckpointCommitted)),
        fired=tuple(e.fault for e in happened if isinstance(e, events.FaultFired)),
    )


def _this_start(happened: Sequence[events.Event]) -> Sequence[events.Event]:
    starts = [i for i, e in enumerate(happened) if isinstance(e, events.RunStarted)]
    return happened[starts[-1] if starts else 0 :]


def _recorded(
    steps: Sequence[events.StepRecord], rosters: Sequence[events.RegroupDone], start_step: int
) -> int:
    """The newest roster may have gone back: older records from its step on do not count."""
    if not rosters:
        return start_step
    newest = rosters[-1]
    start_step = min(start_step, newest.step)  # where that was damaged, the run began further back
    counting = [s for s in steps if s.step < newest.step or s.generation >= newest.generation]
    return max([start_step, *(s.step + 1 for s in counting)])
