"""What happened in a run, as typed events, and its committed steps, as records.

Each goes to a plain JSON object and back (`event_log.py` has the files they lie in): no pickle, no
NaN literals. What another version wrote can be read too: an unknown kind, or a kind that lacks a
field without a default, becomes an `UnknownEvent`, and fields this version does not know are
ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal

from elastic.protocol.causes import Cause
from health.verdict import Step

RegroupReason = Literal["fault", "grow", "heal", "drain", "move", "repair", "stop"]
RegroupOutcome = Literal["start", "repeat", "finish_step", "boundary", "restore"]
ReplacementOutcome = Literal[
    "told", "held_back", "cleared", "begun", "rebooted", "returned", "replaced", "failed"
]
RemedyOutcome = Literal["told", "taken", "held_back"]
TroubleKind = Literal["nonfinite", "loss_spike", "norm_spike", "no_progress"]
RunOutcome = Literal["finished", "stopped", "failed", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run; `kind` is the class name in snake_case."""

    kind: ClassVar[str] = "event"

    time: float
    """When it happened, in seconds since the epoch, on the clock of the node that saw it: keep the
    nodes' clocks together, as NTP does."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def to_json(self) -> dict[str, Any]:
        """The event as a plain JSON object, `kind` first."""
        return {"kind": self.kind, **_fields_to_json(self)}


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A run began, or was continued: from here on steps and generations belong to a new start."""

    name: str
    """Name of the run."""
    layout: dict[str, int]
    """Sizes: `replicas` and `spares` (the most), `shard`, `tensor`, `lanes`."""
    steps: int
    """Steps the run will have in the end, counted from step 0."""
    start_step: int
    """First step to do: 0, or where the run is continued."""
    versions: dict[str, str]
    """Versions of what the run stands on, such as `torch` and `ray`."""
    settings: dict[str, str] | None = None
    """What its bits depend on beside the model: `precision`, `reduction`, `determinism`,
    `attention` (kernels that may be taken), `compile`; and of the layout what its sizes do not say:
    the `strategy` that it comes to, `reshard_after_forward` (True, False or workers) and
    `workers_per_node`. Records of earlier versions lack some."""
    redone_steps: int = 0
    """Steps that were committed before and will be done again: those after the last saved state."""
    precision: str = ""
    """Number format of the computation."""
    flops_per_token: dict[str, float] = field(default_factory=dict)
    """Operations of the model for one token, by how they are counted (`trainer.models.flops`)."""
    terms: str = "tokens"
    """What the loss counts and records call tokens: "tokens", or "terms" of a task that is not of
    text. Records of earlier versions lack it."""
    store: str | None = None
    """URL of the store that its checkpoints go to; empty: to the run directory. Records of before
    2026-11-26 do not say: None."""
    store_settings: dict[str, str] = field(default_factory=dict)
    """What the URL does not say of it: `SETTINGS` of `S3Config` that were set. Records of earlier
    versions lack them."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorStarted(Event):
    """The run's coordinator came up, at the start or anew after it was lost."""

    pid: int
    """Its process id on the driver's node."""
    anew: bool
    """Whether it took up the run from what its workers know."""


@dataclass(frozen=True, kw_only=True)
class WorkerJoined(Event):
    """A worker reported for duty; it has no slot yet."""

    worker: str
    """Name of the worker, unique in the run."""
    node: str
    """Node it runs on."""
    pid: int
    """Its process id on that node."""
    born_ticks: int | None
    """When that process was started, in clock ticks since the node was."""
    device: str = ""
    """Its GPU, as CUDA names it; empty on a CPU."""
    logs: list[str] = field(default_factory=list)
    """Files on the node that its output goes to."""
    heartbeat_fd: int | None = None
    """Descriptor of its heartbeat in that process."""


@dataclass(frozen=True, kw_only=True)
class WorkerRefused(Event):
    """A worker gets no place, as its versions are not those of the run's workers. Its machine is
    sound: nothing speaks against it in another run, whose versions they may be."""

    worker: str
    """Name of the worker."""
    node: str
    """Node it runs on."""
    detail: str
    """Both versions of what differs, and what to do."""


@dataclass(frozen=True, kw_only=True)
class WorkerLost(Event):
    """A worker is gone, or was declared gone."""

    worker: str
    """Name of the worker."""
    node: str
    """Node it ran on."""
    pid: int
    """Its process id on that node."""
    slot: str | None
    """Place it held, such as "replica 1 shard 0 tensor 0"; None for a spare."""
    cause: Cause
    """What happened to it."""
    detail: str
    """The evidence in one line."""


@dataclass(frozen=True, kw_only=True)
class CrossGroupLost(Event):
    """A collective across replicas has failed, or its group could not be made: the first news of a
    roster, as its worker saw it, and what workers of other nodes said before they were called."""

    generation: int
    """Generation of the roster."""
    slot: str | None
    """Place of the worker; None where its replica is gone by now."""
    reason: str
    """What its backend said."""
    worker: str | None = None
    """Who saw it; None: nobody, as all wait for each other, or the record is an old one."""
    node: str | None = None
    """Node of that worker, where it is known."""


@dataclass(frozen=True, kw_only=True)
class LinksTested(Event):
    """The connections between workers were tried: by the workers of a roster, since collectives
    across replicas had failed again and again with nobody lost; or by the agents of the nodes of a
    replica that stood still."""

    generation: int
    """Generation of the roster."""
    count: int
    """Connections that did not carry a large message."""
    failed: list[str]
    """Some of them, or all: from whom to whom, and what came."""
    removed: list[str]
    """Workers that are taken out for it, each with a `worker_lost` of its own."""


@dataclass(frozen=True, kw_only=True)
class RegroupCalled(Event):
    """The coordinator called all workers together for a new roster."""

    generation: int
    """Generation of the roster to come."""
    reason: RegroupReason
    """Why. `grow`: a formed replica enters, without lanes. `heal`: newcomers have the state and get
    lanes, or a heal failed and is begun again. `drain`: machines that will go are left. `move`: a
    replica on several nodes is left, in favour of one that has formed on a single one. `repair`:
    workers have come for what is left of a replica, which is built whole beside the steps."""


@dataclass(frozen=True, kw_only=True)
class RegroupGathered(Event):
    """Those who were called have let go of their step and wait for the new roster. `time` is when
    the last of them came, not when it was written down."""

    generation: int
    """Generation of the roster to come."""


@dataclass(frozen=True, kw_only=True)
class RegroupDone(Event):
    """The new roster stands and training goes on."""

    generation: int
    """Generation of the roster."""
    step: int
    """Step at which training goes on."""
    replicas: int
    """Replicas alive in this roster."""
    lanes: dict[str, list[int]]
    """Lanes of each replica, by the replica's number as text."""
    renumbered: dict[str, int]
    """Number under which a successor formed, as text -> number of the replica that left, which the
    successor has from this roster on."""
    outcome: RegroupOutcome
    """What became of the interrupted step."""
    lost_steps: int
    """Committed steps that must be done again, because all copies of their state are gone."""
    repeated_steps: int
    """Steps that had begun, were not committed, and are done again: 0 or 1."""
    save_cut_off: bool = False
    """Whether a checkpoint that was due at `step` lacks parts; one is made in its place."""


@dataclass(frozen=True, kw_only=True)
class ReplicaForming(Event):
    """Workers were given the slots of a replica and are building it."""

    formed: int
    """Number of the formation; unique in the run."""
    replica: int
    """Number of the replica, until a roster has it `renumbered`."""
    workers: list[str]
    """Its workers, in the order of its slots."""


@dataclass(frozen=True, kw_only=True)
class ReplicaHealed(Event):
    """A replica received the state of a healthy one and has caught up with it."""

    generation: int
    """Generation of the roster in which it healed."""
    replica: int
    """Number of the replica."""
    source: int
    """Number of the replica that sent the state."""
    bytes: int
    """State received by all its workers together."""
    seconds: float
    """From its place in the roster until its last worker had caught up."""
    catch_up_steps: int
    """The most steps that it was behind: committed meanwhile, and not applied yet."""


@dataclass(frozen=True, kw_only=True)
class HealFailed(Event):
    """A replica did not get the state of a healthy one; it is tried again, from another where there
    is one."""

    slot: str
    """Place of the worker that did not get it."""
    source: int
    """Number of the replica that sent the state."""
    reason: str
    """Why."""


@dataclass(frozen=True, kw_only=True)
class Draining(Event):
    """Machines will go: their workers leave training after a step, with nothing repeated."""

    workers: list[str]
    """The workers on them."""
    node: str | None
    """The machine, where all of it will go; None for single workers."""
    reason: str
    """Who said so."""
    deadline_s: float | None
    """Seconds from then until they are gone; None: not known."""


@dataclass(frozen=True, kw_only=True)
class BelowMinimum(Event):
    """Too few whole replicas are alive; training waits for workers."""

    alive: int
    """Whole replicas alive."""
    needed: int
    """Whole replicas the layout asks for at least."""
    missing: str
    """What is missing, in words."""


@dataclass(frozen=True, kw_only=True)
class FaultFired(Event):
    """An injected fault went off."""

    fault: str
    """The fault as it was ordered, such as "kill@60"."""
    step: int
    """Step in which it went off."""
    worker: str
    """Worker it hit."""


@dataclass(frozen=True, kw_only=True)
class CheckpointCommitted(Event):
    """A checkpoint became visible in the store, complete."""

    step: int
    """Steps it contains: training would go on with this step."""
    generation: int
    """Generation that wrote it."""
    bytes: int
    """Size of the checkpoint."""
    seconds: float
    """From the copy of the state to the commit."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSkipped(Event):
    """A checkpoint that was due was not written."""

    step: int
    """Step at which it was due."""
    reason: str
    """Why."""


@dataclass(frozen=True, kw_only=True)
class RetentionFailed(Event):
    """Old checkpoints could not be deleted, and stay. Told once until they can be again."""

    reason: str
    """Why."""


@dataclass(frozen=True, kw_only=True)
class RestoreWaits(Event):
    """Nobody reaches the store of the checkpoint that is to be read, and it may come back: it is
    tried again for some time. Told once for each time that it is away."""

    step: int
    """Steps that the checkpoint contains."""
    reason: str
    """What the store says, or that it does not answer."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """A checkpoint could not be read by any worker that tried. Where its bytes are at fault it does
    not count any more."""

    step: int
    """Steps it contained."""
    reason: str
    """Why: the key and the check that failed."""


@dataclass(frozen=True, kw_only=True)
class SnapshotTaken(Event):
    """A snapshot in the nodes' memory is complete."""

    step: int
    """Steps it contains."""
    generation: int
    """Generation that took it."""
    bytes: int
    """Size of one copy."""
    copies: int
    """Nodes that each part of it lies on, at least."""
    seconds: float
    """From the copy of the state until every part lay on its nodes."""


@dataclass(frozen=True, kw_only=True)
class SnapshotSkipped(Event):
    """A snapshot that was due was not taken."""

    step: int
    """Step at which it was due."""
    reason: str
    """Why."""


@dataclass(frozen=True, kw_only=True)
class SnapshotFailed(Event):
    """A snapshot could not be read, and does not count any more."""

    step: int
    """Steps it contained."""
    reason: str
    """Why."""


@dataclass(frozen=True, kw_only=True)
class AgentEnded(Event):
    """The process of a node's agent has ended. Another one takes the node's workers up, unless that
    keeps happening: then the node is lost."""

    node: str
    """The node."""
    detail: str
    """What Ray says of it."""


@dataclass(frozen=True, kw_only=True)
class HelperKilled(Event):
    """An uploader or a snapshot holder was frozen; its node's agent killed it. What it was doing is
    asked of the next one."""

    node: str
    """Ray's id of its node."""
    helper: str
    """Which it was."""
    detail: str
    """What showed that it was frozen."""


@dataclass(frozen=True, kw_only=True)
class SignsChanged(Event):
    """What a node's instruments and its kernel's log show is not what it was. Evidence for a
    verdict (`health/diagnosis.py`)."""

    node: str
    """Ray's id of the node."""
    names: list[str]
    """What other machines may call it: host name, address, instance id."""
    signs: list[dict[str, Any]]
    """All that stands now (`health.verdict.Sign`); none: all is well again."""


@dataclass(frozen=True, kw_only=True)
class StragglersFound(Event):
    """Workers were slower than the others for several rounds running (`health/stragglers.py`)."""

    step: int
    """Steps that the run had committed."""
    workers: list[str]
    """They; of one machine, or of one replica."""
    nodes: list[str]
    """Their machine; none: they are on several, and it cannot be told which one is slow."""
    score: float
    """Of the slowest, in the latest round: the time that its own part of a step takes at the
    others' pace, over the time that it takes."""
    part: str
    """Where it loses most: `data`, `compute` or `optimizer`."""
    detail: str
    """The evidence, in words."""


@dataclass(frozen=True, kw_only=True)
class NodeChecking(Event):
    """One of the checks that load a node begins (`health.preflight="full"`)."""

    node: str
    """Ray's id of the node."""
    check: str
    """Its name."""
    number: int
    """Which one it is, from 1 on."""
    total: int
    """How many there are."""


@dataclass(frozen=True, kw_only=True)
class NodeChecked(Event):
    """Something is out of order on a node, as the checks say that are made before its workers get a
    place; with `health.preflight="full"` also that nothing is."""

    node: str
    """Ray's id of the node."""
    findings: list[dict[str, str]]
    """What is not as it should be (`elastic/doctor/finding.py`)."""
    isolated: str
    """Why no worker may work there; empty where they may."""


@dataclass(frozen=True, kw_only=True)
class NodeReplacement(Event):
    """What becomes of a machine that is suspect: the last of these for a node is how it ended."""

    node: str
    """Ray's id of the node."""
    machine: str
    """The machine's name, which outlives Ray: an instance, a Kubernetes node, an address."""
    outcome: ReplacementOutcome
    """`told`: it stays, as `health.replace_nodes` is "tell"; `held_back`: not now; `cleared`:
    nothing speaks against it any more; `begun`: the run leaves it; `rebooted`; `returned`: from
    that; `replaced`; `failed`."""
    reason: str
    """What speaks against it."""
    detail: str
    """What was done, or why it was not."""
    step: Step = "replace_node"
    """The step of the ladder that was due (`health/ladder.py`)."""


@dataclass(frozen=True, kw_only=True)
class VerdictReached(Event):
    """The coordinator knows what is wrong, and what became of the step of the ladder that is due.
    With all that came later in view, the report may say more."""

    cause: str
    """Name of a cause."""
    workers: list[str]
    """The workers at fault."""
    nodes: list[str]
    """Ray's ids of the machines at fault, where it is them."""
    evidence: list[str]
    """What shows it, the strongest first."""
    confidence: str
    """`likely` or `certain`."""
    fingerprint: str
    """Tells the fault from others, wherever it comes up again."""
    committed: int
    """Steps that the run had committed."""
    step: Step
    """The step of the ladder that is due."""
    outcome: RemedyOutcome
    """`told`: it was not taken, as `health.replace_nodes` is "tell"; `taken`; `held_back`."""
    detail: str
    """What was done, or why it was not."""
    tried: bool = False
    """It counts as a try: the same fault, come back with no step committed in between, takes the
    next step. Of the same fault of several machines at once one does."""


BY_HAND = "elastic stop"
"""Why somebody's `StopRequested` came."""


@dataclass(frozen=True, kw_only=True)
class StopRequested(Event):
    """The run was asked to end: it saves, and ends, after the step that is under way."""

    reason: str
    """By what: `BY_HAND`, or the signal that its driver was sent."""


@dataclass(frozen=True, kw_only=True)
class StepSkipped(Event):
    """A step had a non-finite loss or gradient and did not reach the weights."""

    step: int
    """The step."""
    loss: float
    """Its loss in nats per token, perhaps not finite."""
    grad_norm: float
    """Its gradient norm, perhaps not finite."""


@dataclass(frozen=True, kw_only=True)
class StepsTimed(Event):
    """Where the time of some steps that followed each other went, on the lead."""

    step: int
    """The last of them."""
    steps: int
    """How many."""
    seconds: dict[str, float]
    """Mean of a step by part (`trainer.loop.clock`); they add up to its time."""


@dataclass(frozen=True, kw_only=True)
class Profiled(Event):
    """A profile of steps has ended, on the lead. There are several where a regroup came between."""

    worker: str
    """The lead."""
    node: str
    """Its node, where the trace lies."""
    first: int
    """The first step that it holds."""
    last: int
    """The last one."""
    file: str
    """The trace, in Chrome's format."""
    problem: str | None
    """Why it lacks steps that were asked for, or is not there."""
    operators: list[dict[str, Any]]
    """The dearest ones: `name`, `calls`, `cpu_ms` and `gpu_ms` of their own."""
    attention: list[str] = field(default_factory=list)
    """The kernels that attention has taken, as `cudnn` or `flash`; none in older records."""
    device_ms: dict[str, float] = field(default_factory=dict)
    """On a GPU, of all its streams: `busy`, `collectives`, and those with nothing beside them,
    `exposed`; nothing in older records."""


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """The model was measured on the validation data."""

    step: int
    """Steps done before the measurement."""
    val_loss: float
    """Validation loss in nats per token."""
    tokens: int
    """Tokens it was measured on."""


@dataclass(frozen=True, kw_only=True)
class WentBack(Event):
    """What all replicas held was given up, and so was what was saved of it: the run goes back."""

    step: int
    """Step of the checkpoint that it goes back to; 0: the seed."""
    before: int
    """Steps that were recorded by then."""
    reason: str
    """Why."""
    skip: list[int] = field(default_factory=list)
    """Data that are passed over: the step that first takes others, and how many global batches;
    none: the same data are taken again."""


@dataclass(frozen=True, kw_only=True)
class TrainingTrouble(Event):
    """The losses or gradient norms of some steps were not what they should be."""

    trouble: TroubleKind
    """What: `nonfinite`, `loss_spike`, `norm_spike` or `no_progress`."""
    first: int
    """The first step that shows it."""
    last: int
    """The last one."""
    detail: str
    """The evidence in one line."""
    action: Literal["warn", "stop", "skip_data"]
    """What is done about it (`health.training`)."""


@dataclass(frozen=True, kw_only=True)
class ReplicasCompared(Event):
    """The replicas' weights and optimizer states were compared."""

    step: int
    """Steps done before the comparison."""
    equal: bool
    """Whether they were bitwise equal: those of all shard and tensor ranks."""
    generation: int = 0
    """Generation of their roster."""
    replicas: int = 2
    """How many had state. One alone is equal to itself, which shows nothing. Records of former
    versions do not say."""


@dataclass(frozen=True, kw_only=True)
class LedgerChecked(Event):
    """Every step of this start took just the samples that it should have taken."""

    steps: int
    """Steps that were checked, each as it was recorded."""


@dataclass(frozen=True, kw_only=True)
class EndDecided(Event):
    """The run is over: its workers are told so. What becomes of it until they have left, another
    coordinator must know."""

    error: str | None
    """The error that ends it, if one does."""
    cause: Cause | None = None
    """As in `RunEnded`."""


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """The run came to its end, good or bad."""

    step: int
    """Steps done."""
    outcome: RunOutcome
    """How it ended."""
    error: str | None
    """The error that ended it, if one did."""
    cause: Cause | None = None
    """The cause that came back, whatever was tried against it, if that ended it."""


@dataclass(frozen=True, kw_only=True)
class UnknownEvent(Event):
    """An event of another version, kept as it was read."""

    data: dict[str, Any]
    """The JSON object, `kind` and `time` included."""

    def to_json(self) -> dict[str, Any]:
        """The object as it was read."""
        return dict(self.data)


_KINDS: dict[str, type[Event]] = {
    c.kind: c for c in Event.__subclasses__() if c is not UnknownEvent
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One committed step."""

    step: int
    """Index of the step, from 0."""
    loss: float
    """Training loss in nats per token."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    lr: float
    """Learning rate of the step."""
    tokens: int
    """Tokens of the step, over all lanes."""
    time: float
    """When it was committed, in seconds since the epoch."""
    generation: int
    """Generation of the roster that did it."""
    replicas: int
    """Replicas that took part."""
    sample_digests: list[int]
    """A digest of the samples used, one for each lane."""
    gradients: bytes = b""
    """See `Commit`; for the coordinator alone, and not in the files."""

    def to_json(self) -> dict[str, Any]:
        """The record as a plain JSON object."""
        plain = _fields_to_json(self)
        del plain["gradients"]
        return plain


def plain_number(value: float) -> float | str:
    """A float as JSON may hold it: non-finite ones become "nan", "inf" or "-inf"."""
    return value if math.isfinite(value) else str(value)


def event_from_json(data: Mapping[str, Any]) -> Event:
    """The event that `data` describes, or an `UnknownEvent` when this version has no such event.
    Raises ValueError: its time, or another float, is no number."""
    cls = _KINDS.get(str(data.get("kind")))
    known = _known_fields(cls, data) if cls else None
    if cls is None or known is None:
        return UnknownEvent(time=_number("time", data.get("time", 0.0)), data=dict(data))
    return cls(**known)


def step_from_json(data: Mapping[str, Any]) -> StepRecord | None:
    """The step that `data` describes; None where a field is missing. Raises ValueError: a float is
    no number."""
    known = _known_fields(StepRecord, data)
    return None if known is None else StepRecord(**known)


def _fields_to_json(record: Event | StepRecord) -> dict[str, Any]:
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return {k: plain_number(v) if isinstance(v, float) else v for k, v in values.items()}


def _known_fields(
    cls: type[Event] | type[StepRecord], data: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The constructor arguments for `cls` in `data`; None when one without a default is missing."""
    needed, floats = _FIELDS[cls]
    if not needed <= data.keys():
        return None
    return {
        name: _number(name, data[name]) if is_float else data[name]
        for name, is_float in floats.items()
        if name in data
    }


def _number(name: str, value: Any) -> float:
    """A float of a record. Non-finite ones were written as text, see `plain_number`."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is no number but {value!r}") from error


def _fields_of(cls: type[Event] | type[StepRecord]) -> tuple[frozenset[str], dict[str, bool]]:
    """The fields without a default, and of all of them whether they are floats."""
    known = fields(cls)
    needed = frozenset(f.name for f in known if f.default is f.default_factory is MISSING)
    return needed, {f.name: f.type == "float" for f in known}


# Looked up once: a run has a million records of few classes.
_FIELDS = {cls: _fields_of(cls) for cls in (*_KINDS.values(), StepRecord)}
