"""What others may ask of the coordinator (`elastic/coordinator/actor.py`), by who asks.

Make each call by `Remote[CoordinatorApi]`. `Remote.call` repeats a call where the coordinator is
started anew, so all of them are idempotent.
"""

from __future__ import annotations

from typing import Any, Protocol

from checkpointing import CheckpointError, Receipt
from elastic.doctor.finding import Finding
from elastic.protocol.causes import Cause
from elastic.protocol.events import Event, RunOutcome, StepRecord
from elastic.protocol.messages import (
    Answer,
    Death,
    Helper,
    Identity,
    LinkTest,
    Recorded,
    Report,
    Signal,
    Standing,
    Stop,
)
from elastic.protocol.rpc import Remote
from elastic.protocol.saves import HeldSnapshot, UploaderApi
from health.verdict import Sign


class UnheardError(Exception):
    """A worker calls a coordinator that was started anew, and has not said where it stands: its
    line did not break, for it was not in a call when the last one was lost."""


class WorkerCalls(Protocol):
    """Calls that workers make while they train."""

    async def hello(self, identity: Identity) -> None:
        """A worker has started: its process is watched from now on."""

    async def resume(self, standing: Standing) -> None:
        """A worker that has lost its line to the coordinator says where it stands. One that was
        started anew learns so what it must know, and then goes on as if nothing had happened."""

    async def join(self, report: Report) -> Answer:
        """A worker reports what it has and waits for what to do. No worker joins unwatched."""

    async def watch(self, worker: str, seen: int) -> Signal | None:
        """Waits for a call to `worker` later than signal `seen`; None when the run is over.

        Raises:
            UnheardError: the coordinator was started anew, and does not know where it stands.
        """

    async def built(self, worker: str, formed: int) -> None:
        """A worker that follows has built its part of formation `formed` beside the steps."""

    async def trouble(
        self, worker: str, step: int | None, detail: str, cause: Cause, formed: int | None
    ) -> str:
        """An exception ended a worker's step, or, where that is given, its building of formation
        `formed` beside the steps; for `cause` unless a peer was lost. Was one?

        Returns:
            "peer": join again; "own": the worker is written off and must exit.
        """

    async def fail(
        self,
        error: str,
        worker: str | None = None,
        cause: Cause | None = None,
        generation: int | None = None,
    ) -> None:
        """Ends the run with an error; see `Stop` for `cause`. What `worker` says does not count
        where it was written off, nor what it met in roster `generation` once that is given up, or
        the run is going back."""

    async def record(self, steps: list[StepRecord], happened: list[Event]) -> Recorded:
        """Committed steps from the lead worker, events from any; steps known already are passed
        by."""

    async def claim_fault(self, index: int, slot: int, step: int, worker: str) -> bool:
        """Whether injected fault `index` hits the worker in `slot` now."""

    async def caught_up(
        self, worker: str, generation: int, size: int, seconds: float, steps: int
    ) -> None:
        """In roster `generation` a newcomer's worker has received `size` bytes of state, in
        `seconds`, and made up for `steps` steps."""

    async def heal_failed(self, worker: str, generation: int, reason: str) -> None:
        """In roster `generation` a newcomer's worker did not get the state."""

    async def cross_lost(self, worker: str, generation: int, reason: str) -> None:
        """The group across replicas of roster `generation` has failed for a worker that nobody has
        called away: all of the roster are."""

    async def links_tested(self, worker: str, test: LinkTest) -> None:
        """A worker has tried its connections to the others of its cross group."""

    async def compare(self, worker: str, generation: int, slot: str, digest: str) -> None:
        """A worker's state at the end, in roster `generation`: those in `slot` of all replicas must
        agree."""

    async def corrupt(self, worker: str, generation: int, detail: str, spread: bool) -> None:
        """A worker's state is, or was, not what it should be: it leaves. `spread`: gradients may
        have been computed from it, and all replicas go back."""

    async def spread(self, generation: int, detail: str) -> None:
        """A replica's state is not what it should be, and gradients may have been computed from it:
        all go back. Its own worker says `corrupt`, if it lives so long."""

    async def undecided(self, generation: int, step: int, detail: str) -> None:
        """The replicas differ before `step`, and no majority shows which is right."""


class SaveCalls(Protocol):
    """Calls about checkpoints and snapshots, from workers and uploaders."""

    async def uploader(self, node: str) -> Remote[UploaderApi]:
        """The actor that writes the saves of the workers on `node`."""

    async def receipt(
        self, receipt: Receipt, training_state: dict[str, Any], started: float, writers: int
    ) -> None:
        """A part of a checkpoint is written; the receipt of the last of `writers` commits it."""

    async def save_failed(self, step: int, generation: int, reason: str) -> None:
        """A checkpoint could not be written by the workers of a roster. Unless it was the last one,
        the run goes on."""

    async def saved(self, step: int) -> bool:
        """Whether a checkpoint of `step` is committed."""

    async def newest_saved(self) -> tuple[int, int] | None:
        """Step and generation of the checkpoint that the next one may refer to, if any."""

    async def checkpoint_failed(
        self, worker: str, step: int, generation: int, error: CheckpointError
    ) -> None:
        """A worker of a roster cannot read the checkpoint of `step`, and neither can whoever has
        tried in its place."""

    async def snapshot_part(
        self,
        receipt: Receipt,
        training_state: dict[str, Any],
        node: str,
        started: float,
        writers: int,
    ) -> None:
        """One of `writers` parts of a snapshot is written to the memory of `node`."""

    async def snapshot_skipped(self, step: int, generation: int, reason: str) -> None:
        """A part of a snapshot could not be written; the run goes on."""

    async def snapshot(self, step: int) -> HeldSnapshot | None:
        """Where the snapshot of `step` lies; None where it is not to be had any more."""

    async def snapshot_failed(self, step: int, generation: int, reason: str) -> None:
        """A worker of a roster cannot read the snapshot of `step`."""


class NodeCalls(Protocol):
    """Calls about machines, from node agents, helpers, and those who hear that a machine goes."""

    async def beat(self, node: str, token: str, deaths: list[Death]) -> bool:
        """A node's agent says that the node is there, and which workers died since its last word.

        Returns:
            False: the node was written off; the agent ends its workers and leaves.
        """

    async def helper_started(self, node: str, helper: Helper) -> None:
        """A helper of a node has started: it is watched from now on."""

    async def helper_killed(self, node: str, helper: str, detail: str) -> None:
        """A helper was frozen, and its node's agent has killed it."""

    async def signs_changed(self, node: str, names: list[str], signs: list[Sign]) -> None:
        """All that the instruments of a node and its kernel's log show now. `names`: what other
        machines may call it."""

    async def node_checking(self, node: str, check: str, number: int, total: int) -> None:
        """One of the checks that load a node begins, before its workers get a place."""

    async def node_checked(self, node: str, findings: list[Finding]) -> None:
        """The checks that are made before the workers of a node get a place are done."""

    async def drain(self, node: str, deadline: float | None, reason: str) -> None:
        """A machine will go, by `deadline` in seconds since the epoch: its workers leave training
        after a step, and those that start on it get no slot."""

    async def drain_worker(self, worker: str, reason: str) -> None:
        """A worker was told to end: it leaves training after a step, and then ends."""


class DriverCalls(Protocol):
    """Calls that the driver and Ray Train's controller make."""

    async def expect(self, workers: int) -> None:
        """The controller has machines for so many of the first workers, and is about to start them:
        no others are waited for."""

    async def hellos(self) -> int:
        """Workers that have started so far."""

    async def silent(self, workers: list[tuple[str, int]]) -> list[tuple[str, int]] | None:
        """Those of these, each given by node and process, that are no workers of the run: they have
        not said hello, or were written off. None: a coordinator that was started anew does not know
        yet."""

    async def ended_silent(self, workers: list[tuple[str, int]], silent_s: float) -> None:
        """Ray Train's controller ends these, each given by node and process, as they have not said
        hello in so long."""

    async def ended(self, workers: list[tuple[str, int]]) -> list[float | None]:
        """Ray Train's controller has seen the end of these, each given by node and process. Returns
        for how many seconds each had been there, since its hello; None: it had not said it."""

    async def wind_down(self, reason: str) -> None:
        """The run is to end: it does after the step that is under way, and is saved there."""

    async def awake(self) -> None:
        """Returns at once: calls are answered."""

    async def verdict(self) -> Stop | None:
        """How the run ended; None while it goes on."""

    async def over(self) -> None:
        """Returns when the run has ended."""

    async def end(self, outcome: RunOutcome, error: str | None) -> None:
        """Writes the last event and closes the records."""


class CoordinatorApi(WorkerCalls, SaveCalls, NodeCalls, DriverCalls, Protocol):
    """All of them."""
