"""Who was lost in a run, and whether its faults account for it. Pure.

A fault costs the worker that it hits, for the cause that it is, and nobody else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

from benchmarks._chaos import OF_COORDINATOR, Deed, Layout
from elastic.protocol.causes import COLLECTIVE, HANG, LINK, PATH
from elastic.protocol.events import (
    CoordinatorStarted,
    Draining,
    Event,
    FaultFired,
    RegroupCalled,
    RegroupDone,
    ReplicaForming,
    RunEnded,
    StepRecord,
    WorkerJoined,
    WorkerLost,
)
from elastic.protocol.faults import Fault
from trainer.loop.phases import STEP_PHASES

_E = TypeVar("_E", bound=Event)

CAUSES = {"kill": "crash", "freeze": "hang", "raise": "user_error"}
TOGETHER_S = 5.0
"""How long a fault that is to hit several workers waits for those that do not come
(elastic/coordinator/fault_injection.py)."""
_JUDGED_S = 2.0
"""By then it is settled whose fault an exception was (`Coordinator.trouble`)."""
_AT_END = ("checkpoint", "evaluation", "shutdown")
"""Phases that every worker with lanes comes to at the end of a run."""
_LATE_S = 10.0
"""What happens to a worker that the run does not need, so shortly before its end, may go unseen."""


# -- losses ----------------------------------------------------------------------------------------


def find_wrong_causes(
    happened: Sequence[Event], faults: Sequence[Fault], deeds: Sequence[Deed] = ()
) -> list[str]:
    """Injected faults whose worker was not lost, or for another cause than it should. At shutdown
    nobody counts any more.

    Args:
        happened: all events of one start of a run.
        faults: those that were ordered.
        deeds: what was done to its machines and its coordinator.
    """
    ordered = {str(fault): fault for fault in faults if fault.phase != "shutdown"}
    losses = {e.worker: e for e in _of(WorkerLost, happened)}
    wrong = []
    for fired in _of(FaultFired, happened):
        fault, loss = ordered.get(fired.fault), losses.get(fired.worker)
        if fault is None:
            continue
        if loss is None and not _may_live(fired, fault, happened, deeds):
            wrong.append(f"{fired.fault} on {fired.worker}: not lost")
        elif loss is not None and loss.cause not in _causes(loss, fault, happened, deeds):
            wrong.append(f"{fired.fault} on {fired.worker}: {loss.cause}")
    return wrong


def find_unexplained_losses(happened: Sequence[Event], deeds: Sequence[Deed] = ()) -> list[str]:
    """Workers that were lost although no fault had hit them and their machine was there, and those
    that nobody found frozen and that were killed because they did not follow a call: such a one
    has held the others up for `regroup_timeout_s`.

    Args:
        happened: all events of one start of a run.
        deeds: what was done to its machines.
    """
    hit: set[str] = set()
    found = []
    for event in happened:
        if isinstance(event, FaultFired):
            hit.add(event.worker)
        elif isinstance(event, WorkerLost):
            lagged = event.cause == "hang" and "is frozen" not in event.detail
            cut_off = _peer_cut_off(event, happened, deeds)
            gone = cut_off or _machine_gone(event, deeds)
            if (lagged and not cut_off) or not (event.worker in hit or gone):
                reason = event.detail.strip().splitlines() or [""]
                found.append(f"{event.worker}: {event.cause}, {reason[-1]}")
    return found


def _causes(
    loss: WorkerLost, fault: Fault, happened: Sequence[Event], deeds: Sequence[Deed]
) -> set[str]:
    """What the loss of a worker that a fault has hit may be put down to."""
    causes = {CAUSES[fault.kind]}
    if _machine_gone(loss, deeds):
        causes |= {"node", "ray_node", "crash", "preemption", LINK, PATH}
    if fault.kind == "kill" and any(loss.worker in e.workers for e in _of(Draining, happened)):
        causes.add("preemption")
    return causes


def _may_live(
    fired: FaultFired, fault: Fault, happened: Sequence[Event], deeds: Sequence[Deed]
) -> bool:
    """Whether a worker that a fault has hit need not be lost: the coordinator was killed before the
    worker had its answer; the run ended without one that it did not need; the exception was put
    down to the loss of a peer."""
    unheard = any(
        deed.action.kind in OF_COORDINATOR and 0 <= deed.began - fired.time < TOGETHER_S
        for deed in deeds
    )
    over = any(e.time - fired.time < _LATE_S for e in _of(RunEnded, happened))
    unneeded = fault.spare or fault.phase == "build"
    return unheard or (over and unneeded) or (fault.kind == "raise" and _broken(fired, happened))


def _broken(fired: FaultFired, happened: Sequence[Event]) -> bool:
    """Whether the replica of a worker was broken by something else than exceptions when it was hit,
    or so soon after that its own exception passes for a consequence."""
    until = fired.time + _JUDGED_S
    own = _replica_of(fired.worker, fired.time, happened)
    if own is None:
        return False
    since = [e for e in happened if own.time < e.time <= until]
    peers = set(own.workers) - {fired.worker}
    lost = {e.worker for e in _of(WorkerLost, since) if e.cause != "user_error"}
    drained = {worker for e in _of(Draining, since) for worker in e.workers}
    return bool(lost & peers or drained & set(own.workers))


def _replica_of(worker: str, time: float, happened: Sequence[Event]) -> ReplicaForming | None:
    """The last formation until `time` that a worker was in."""
    formed = [e for e in _of(ReplicaForming, happened) if e.time <= time]
    return next((e for e in reversed(formed) if worker in e.workers), None)


def _machine_gone(loss: WorkerLost, deeds: Sequence[Deed]) -> bool:
    return any(
        loss.node in deed.nodes
        and deed.began <= loss.time
        and (deed.action.kind == "remove" or _cut_off(loss, deed))
        for deed in deeds
    )


def _cut_off(loss: WorkerLost, deed: Deed) -> bool:
    """Whether a worker was lost as its machine, or its connection to another, was cut off."""
    kind = deed.action.kind
    fits = kind == "link" or (kind == "mtu" and loss.cause in (LINK, PATH))
    return fits and loss.time <= deed.ended + _LATE_S


def _peer_cut_off(loss: WorkerLost, happened: Sequence[Event], deeds: Sequence[Deed]) -> bool:
    """Whether a worker was lost for a collective of its replica, which reached to a machine whose
    connections were cut off: it failed, or still waited for a packet to be sent again when the
    connections were good again. Which end of them is at fault is not looked for (decision 034)."""
    if loss.cause not in (COLLECTIVE, HANG):
        return False
    own = _replica_of(loss.worker, loss.time, happened)
    workers = [] if own is None else own.workers
    nodes = {e.node for e in _of(WorkerJoined, happened) if e.worker in workers}
    return any(
        nodes & set(deed.nodes)
        and deed.action.kind in ("link", "mtu")
        and deed.began <= loss.time <= deed.ended + _LATE_S
        for deed in deeds
    )


# -- faults that did not go off --------------------------------------------------------------------


def find_unfired(
    happened: Sequence[Event], faults: Sequence[Fault], layout: Layout
) -> list[tuple[Fault, int | None]]:
    """The faults that did not go off, with each slot that they did not hit; None stands for a
    spare. Most have a good reason: the slot was not taken again, or there was no such recovery."""
    return [
        (fault, target)
        for fault in faults
        for target in (fault.targets(layout.slots) or (None,))
        if target not in _hit(fault, happened, layout)
    ]


def find_missed_faults(
    happened: Sequence[Event],
    steps: Sequence[StepRecord],
    faults: Sequence[Fault],
    layout: Layout,
) -> list[str]:
    """Faults that should have gone off and did not.

    A fault in a step has had its chance where, at its step or later, a roster in which all replicas
    had lanes did a step from one commit to the next, nobody was called, and no other fault had hit
    it. One at a checkpoint, an evaluation or the shutdown has had it where the slot was taken, with
    lanes, at the end. Whether there was a chance for one at a spare or in a recovery does not show.

    Args:
        happened: all events of one start of a run that has finished.
        steps: its step records, those of lost steps included.
        faults: those that were ordered.
        layout: sizes.
    """
    unfired = find_unfired(happened, faults, layout)
    waiting = [fault for fault, _ in unfired]
    missed = []
    for fault, slot in unfired:
        before = [f for f in faults[: faults.index(fault)] if f.step == fault.step]
        if slot is None or any(f in waiting for f in before) or _counts(fault, happened):
            continue
        ready = max((e.time for f in before for e in _firings(f, happened)), default=0.0)
        if fault.phase in STEP_PHASES:
            free = _free_steps(str(slot // layout.workers), happened, steps, faults)
            chance = any(s.step >= fault.step and begun >= ready for begun, s in free)
        else:
            chance = fault.phase in _AT_END and _taken_at_end(slot, ready, happened, layout)
        if chance:
            missed.append(f"{fault} did not hit slot {slot}")
    return missed


def _firings(fault: Fault, happened: Sequence[Event]) -> list[FaultFired]:
    return [event for event in _of(FaultFired, happened) if event.fault == str(fault)]


def _hit(fault: Fault, happened: Sequence[Event], layout: Layout) -> set[int | None]:
    """The slots in which a fault went off; {None} for one that has hit a spare."""
    firings = _firings(fault, happened)
    if fault.spare:
        return {None for _ in firings}
    return {_slot(e.worker, e.time, happened, layout) for e in firings}


def _slot(worker: str, time: float, happened: Sequence[Event], layout: Layout) -> int | None:
    """The slot of a worker at a time; None where it has had none."""
    for replica, workers in reversed(_replicas(time, happened)):
        if worker in workers:
            return replica * layout.workers + workers.index(worker)
    return None


def _replicas(time: float, happened: Sequence[Event]) -> list[tuple[int, list[str]]]:
    """The formations until `time`, in their order: number of the replica at `time`, its workers."""
    formed: list[tuple[int, list[str]]] = []
    for event in happened:
        if event.time <= time and isinstance(event, ReplicaForming):
            formed.append((event.replica, event.workers))
        elif event.time <= time and isinstance(event, RegroupDone):
            # Who had the new number before has left.
            anew = {int(old): new for old, new in event.renumbered.items()}
            stay = [f for f in formed if f[0] not in anew.values()]
            formed = [(anew.get(replica, replica), workers) for replica, workers in stay]
    return formed


def _counts(fault: Fault, happened: Sequence[Event]) -> bool:
    """Whether a fault that has gone off in part counts as gone off: to a coordinator started anew
    it does."""
    anew = any(e.anew for e in _of(CoordinatorStarted, happened))
    return anew and bool(_firings(fault, happened))


def _free_steps(
    replica: str,
    happened: Sequence[Event],
    steps: Sequence[StepRecord],
    faults: Sequence[Fault],
) -> Iterator[tuple[float, StepRecord]]:
    """The steps in each of which a fault could hit `replica`, with the time when they began."""
    in_steps = {str(fault) for fault in faults if fault.phase in STEP_PHASES}
    for roster in _of(RegroupDone, happened):
        if replica not in roster.lanes or not all(roster.lanes.values()):
            continue
        ends = [
            e.time
            for e in happened
            if (isinstance(e, RegroupCalled) and e.generation > roster.generation)
            or (isinstance(e, FaultFired) and e.fault in in_steps and e.time >= roster.time)
        ]
        own = [step for step in steps if step.generation == roster.generation]
        for before, step in pairwise(own):
            if step.time < min(ends, default=float("inf")):
                yield before.time, step


def _taken_at_end(slot: int, ready: float, happened: Sequence[Event], layout: Layout) -> bool:
    """Whether a worker that was not lost had the slot, with lanes, in the last roster, which is no
    older than `ready`."""
    roster = _of(RegroupDone, happened)[-1]
    replica, rank = divmod(slot, layout.workers)
    formed = [w for number, w in _replicas(roster.time, happened) if number == replica]
    lost = {e.worker for e in _of(WorkerLost, happened)}
    taken = bool(roster.lanes.get(str(replica))) and formed[-1][rank] not in lost
    return taken and roster.time >= ready


def _of(kind: type[_E], happened: Sequence[Event]) -> list[_E]:
    return [event for event in happened if isinstance(event, kind)]
