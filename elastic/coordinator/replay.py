"""What the records of a run tell a coordinator that was started anew in the middle of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from elastic.protocol import events
from elastic.protocol.causes import CRASH, LINK, NODE, PATH, PREEMPTION, RAY_NODE
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import last_step
from trainer.loop.samples import Skip, Skips

_Event = TypeVar("_Event")

_ENDED = (CRASH, PREEMPTION, RAY_NODE)
"""Causes of whom the process has been seen to end, or has left, or went with its node."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The present start of a run, by its records."""

    started: int
    """Workers that started."""
    workers: Mapping[str, events.WorkerJoined]
    """Those of them that were not lost, or are `unheard`."""
    lost: frozenset[str]
    """Those that were, and the others go on without them."""
    written_off: Mapping[str, events.WorkerJoined]
    """Those of them that may live yet: no roster has stood since, and nobody has seen them end."""
    unheard: frozenset[str]
    """Those that were written off with their nodes, and no roster stood since: it may be the
    coordinator that was cut off."""
    draining: frozenset[str]
    """Those whose machines will go."""
    leaving: frozenset[str]
    """Those that were told to end."""
    draining_nodes: frozenset[str]
    """Machines that will go."""
    shunned_nodes: frozenset[str]
    """Machines of workers whose connections failed, or that were to have another seat."""
    generation: int
    """Generation of the newest roster; 0: none stood yet in this start."""
    newest_s: float
    """When that roster began, in seconds since the epoch; 0 where there was none."""
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
    saved: int
    """Step of the newest checkpoint or snapshot that there was, by the records; 0 for none, and
    where the run went back to the seed since."""
    winding_down: bool
    """Whether it was asked to end."""
    until: int | None
    """Steps at which it ends therefore, once there is a roster that knows."""
    fired: tuple[str, ...]
    """Injected faults that went off, as they were ordered."""
    replacements: tuple[events.NodeReplacement, ...]
    """What became of suspect machines, in order."""
    skips: Skips
    """Samples that were passed over since it began."""
    going_back: int | None
    """Step that it was going back to, where no roster has stood since."""
    troubles: tuple[events.TrainingTrouble, ...]
    """What was found of the training, and not gone back behind since; none where the end is
    decided. What is more than a warning is to be acted on still."""


def replay(paths: RunPaths, happened: Sequence[events.Event], start_step: int) -> Replay:
    """What the records of a run say of its present start.

    Args:
        paths: the run directory.
        happened: the events of this start.
        start_step: where this start of the run began.
    """
    rosters = _all(happened, events.RegroupDone)
    newest = rosters[-1] if rosters else None
    lost, unheard, since = _losses(happened)
    # No worker notes that it does not know when its process was started. Such a line would have any
    # process of that id ended; a worker that lives speaks up, whatever the records say.
    joined = {e.worker: e for e in _all(happened, events.WorkerJoined) if e.born_ticks is not None}
    drained = _all(happened, events.Draining)
    by_node = [e for e in drained if e.node is not None]
    by_themselves = [e for e in drained if e.node is None]
    formed = (e.formed for e in _all(happened, events.ReplicaForming))
    restored = (e.generation for e in rosters if e.outcome in ("start", "restore"))
    return Replay(
        started=len(joined),
        workers={worker: e for worker, e in joined.items() if worker not in lost},
        lost=lost,
        written_off={worker: joined[worker] for worker in since if worker in joined},
        unheard=unheard,
        draining=_workers(by_node) - lost,
        leaving=_workers(by_themselves) - lost,
        draining_nodes=frozenset(e.node or "" for e in by_node),
        shunned_nodes=_shunned(happened, joined),
        generation=0 if newest is None else newest.generation,
        newest_s=0.0 if newest is None else newest.time,
        began=0 if newest is None else newest.step,
        restored=max(restored, default=0),
        formations=max(formed, default=0),
        recorded=_recorded(paths, newest, start_step),
        committed=frozenset(e.step for e in _all(happened, events.CheckpointCommitted)),
        saved=_saved(happened, start_step),
        winding_down=bool(_all(happened, events.StopRequested)),
        until=_until(happened),
        fired=tuple(e.fault for e in _all(happened, events.FaultFired)),
        replacements=tuple(_all(happened, events.NodeReplacement)),
        skips=tuple(Skip(*e.skip) for e in _all(happened, events.WentBack) if e.skip),
        going_back=_going_back(happened),
        troubles=_troubles(happened),
    )


def _losses(
    happened: Sequence[events.Event],
) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """See `Replay.lost`, `Replay.unheard` and `Replay.written_off`. Who was unheard and spoke up
    has joined once more."""
    lost, unheard, ended = set[str](), set[str](), set[str]()
    for event in happened:
        if isinstance(event, events.WorkerLost):
            # Whose machine was to go may have left, and has no slot then.
            unseen = event.cause == NODE or (event.cause == PREEMPTION and event.slot is not None)
            (unheard if unseen else lost).add(event.worker)
            if event.cause in _ENDED:
                ended.add(event.worker)
        elif isinstance(event, events.WorkerJoined):
            unheard.discard(event.worker)
        elif isinstance(event, events.RegroupDone):
            lost |= unheard
            unheard.clear()
            ended |= lost
    return frozenset(lost), frozenset(unheard - lost), frozenset(lost - ended)


def replacements_begun(happened: Sequence[events.Event]) -> list[float]:
    """When the replacements of machines began, in seconds since the epoch.

    Args:
        happened: the events of all starts of a run: an hour has room for so many, at any of them.
    """
    told = _all(happened, events.NodeReplacement)
    return [event.time for event in told if event.outcome == "begun"]


def _shunned(
    happened: Sequence[events.Event], joined: Mapping[str, events.WorkerJoined]
) -> frozenset[str]:
    """See `Workers.shun`, and who has it done."""
    seats = [
        event
        for event in _all(happened, events.VerdictReached)
        if (event.step, event.outcome) == ("other_seat", "taken")
    ]
    left = {e.node for e in _all(happened, events.WorkerLost) if e.cause in (LINK, PATH)}
    left.update(joined[w].node for event in seats for w in event.workers if w in joined)
    return frozenset(left.union(*(event.nodes for event in seats)))


def _going_back(happened: Sequence[events.Event]) -> int | None:
    """A roster that was being made when it was decided may have stood for a moment."""
    back: int | None = None
    for event in happened:
        if isinstance(event, events.WentBack):
            back = event.step if back is None else min(back, event.step)
        elif isinstance(event, events.RegroupDone) and event.outcome == "restore":
            back = None
    return back


def _troubles(happened: Sequence[events.Event]) -> tuple[events.TrainingTrouble, ...]:
    """See `Replay.troubles`. What the run goes back behind, for whatever reason, is found again."""
    found: list[events.TrainingTrouble] = []
    for event in happened:
        if isinstance(event, events.TrainingTrouble):
            found.append(event)
        elif isinstance(event, events.EndDecided | events.RunEnded):
            found = []
        elif isinstance(event, events.WentBack) or (
            isinstance(event, events.RegroupDone) and event.outcome == "restore"
        ):
            found = [trouble for trouble in found if trouble.last < event.step]
    return tuple(found)


def _until(happened: Sequence[events.Event]) -> int | None:
    """See `Replay.until`. By the order of the lines: their times may be of two machines."""
    asked, until = False, None
    for event in happened:
        if isinstance(event, events.StopRequested):
            asked = True
        elif isinstance(event, events.RegroupDone) and asked:
            until = event.step
    return until


def _saved(happened: Sequence[events.Event], start_step: int) -> int:
    saved = start_step
    for event in happened:
        if isinstance(event, events.CheckpointCommitted):
            saved = max(saved, event.step)
        elif isinstance(event, events.WentBack):
            saved = min(saved, event.step)
    return saved


def _all(happened: Sequence[events.Event], kind: type[_Event]) -> list[_Event]:
    return [event for event in happened if isinstance(event, kind)]


def _workers(drained: Sequence[events.Draining]) -> frozenset[str]:
    return frozenset(worker for event in drained for worker in event.workers)


def _recorded(paths: RunPaths, newest: events.RegroupDone | None, start_step: int) -> int:
    """The newest roster may have gone back: older records from its step on do not count."""
    if newest is None:
        return start_step
    start_step = min(start_step, newest.step)  # where that was damaged, the run began further back
    begin, generation = newest.step, newest.generation
    last = last_step(
        paths.steps, lambda s: s.step < begin or s.generation >= generation, lenient=True
    )
    return start_step if last is None else max(start_step, last.step + 1)
