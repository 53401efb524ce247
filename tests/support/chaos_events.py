"""Events and step records by hand, for tests of what the soak finds in them."""

from __future__ import annotations

from elastic.protocol.causes import Cause
from elastic.protocol.events import (
    CoordinatorStarted,
    Draining,
    FaultFired,
    Profiled,
    RegroupCalled,
    RegroupDone,
    RegroupOutcome,
    ReplicaForming,
    RunEnded,
    RunStarted,
    StepRecord,
    WorkerJoined,
    WorkerLost,
)


def started(time: float) -> RunStarted:
    return RunStarted(time=time, name="r", layout={}, steps=2, start_step=0, versions={})


def joined(time: float, worker: str, node: str = "n") -> WorkerJoined:
    return WorkerJoined(time=time, worker=worker, node=node, pid=1, born_ticks=1)


def forming(time: float, replica: int, *workers: str) -> ReplicaForming:
    return ReplicaForming(time=time, formed=int(time), replica=replica, workers=list(workers))


def roster(
    time: float,
    generation: int,
    outcome: RegroupOutcome,
    lanes: dict[str, list[int]],
    renumbered: dict[str, int] | None = None,
) -> RegroupDone:
    return RegroupDone(
        time=time,
        generation=generation,
        step=0,
        replicas=len(lanes),
        lanes=lanes,
        renumbered=renumbered or {},
        outcome=outcome,
        lost_steps=0,
        repeated_steps=0,
    )


def called(time: float, generation: int) -> RegroupCalled:
    return RegroupCalled(time=time, generation=generation, reason="grow")


def fired(time: float, fault: str, worker: str) -> FaultFired:
    return FaultFired(time=time, fault=fault, step=0, worker=worker)


def lost(
    time: float, worker: str, cause: str = "crash", *, detail: str = "", node: str = "n"
) -> WorkerLost:
    return WorkerLost(
        time=time, worker=worker, node=node, pid=1, slot=None, cause=Cause(cause), detail=detail
    )


def draining(time: float, *workers: str) -> Draining:
    return Draining(time=time, workers=list(workers), node="n", reason="", deadline_s=None)


def anew(time: float) -> CoordinatorStarted:
    return CoordinatorStarted(time=time, pid=2, anew=True)


def profiled(time: float) -> Profiled:
    return Profiled(
        time=time, worker="a", node="n", first=3, last=7, file="f", problem=None, operators=[]
    )


def committed(time: float, generation: int, step: int = 0) -> StepRecord:
    return StepRecord(
        step=step,
        loss=1.0,
        grad_norm=1.0,
        lr=1.0,
        tokens=1,
        time=time,
        generation=generation,
        replicas=1,
        sample_digests=[],
    )


def ended(time: float) -> RunEnded:
    return RunEnded(time=time, step=0, outcome="finished", error=None)
