"""A run as numbers for Prometheus, from its events and steps as they are written down. Pure.

What grows is a gauge that holds the sum, as in Ray Train's metrics: a coordinator that is started
anew counts on from the records.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from elastic.protocol import events
from elastic.protocol.causes import known_causes
from elastic.reporting.incidents import find_incidents
from elastic.reporting.speed import workers_per_replica
from trainer.peaks import peak_flops

RECENT_STEPS = 20
"""Speed is measured over so many steps, and the time since the last of them."""

_PHASES = ("decide", "abort", "roster", "first_step")

_SUSPECT = ("told", "held_back", "begun", "failed")
"""Outcomes of a `NodeReplacement` after which the machine is suspect still."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What is told of a metric."""

    help: str
    """What it is."""
    tags: tuple[str, ...] = ()
    """Its labels, beside the run's."""


METRICS: dict[str, Metric] = {
    "elastic_heartbeat_timestamp_seconds": Metric(
        help="When the coordinator told of the run last, in seconds since the epoch."
    ),
    "elastic_over": Metric(help="1 once this start of the run is over, else 0."),
    "elastic_step": Metric(help="Steps committed."),
    "elastic_planned_steps": Metric(help="Steps the run will have."),
    "elastic_step_timestamp_seconds": Metric(
        help="When the last step was committed, or else this start began."
    ),
    "elastic_loss": Metric(help="Training loss of the last step, nats per token."),
    "elastic_grad_norm": Metric(help="Gradient norm of the last step, before clipping."),
    "elastic_tokens_per_second": Metric(
        help=f"Tokens per second of the last {RECENT_STEPS} steps, stalls included."
    ),
    "elastic_mfu": Metric(
        help="Model FLOP/s over what the GPUs of the replicas can do, stalls included.",
        tags=("counting",),
    ),
    "elastic_replicas": Metric(help="Replicas that train."),
    "elastic_min_replicas": Metric(help="Fewest replicas that the run trains with."),
    "elastic_max_replicas": Metric(help="Replicas of the full layout."),
    "elastic_workers": Metric(help="Workers that live."),
    "elastic_spares": Metric(help="Workers that wait for a place."),
    "elastic_planned_spares": Metric(help="Spares that the run was to have."),
    "elastic_workers_lost": Metric(help="Workers lost in this start, by cause.", tags=("cause",)),
    "elastic_regroups": Metric(help="Regroups called in this start, by reason.", tags=("reason",)),
    "elastic_lost_seconds": Metric(
        help="Seconds that losses of workers took from training, by phase of the recovery.",
        tags=("phase",),
    ),
    "elastic_lost_steps": Metric(help="Committed steps that had to be done again."),
    "elastic_skipped_steps": Metric(help="Steps with a loss or gradient that was not finite."),
    "elastic_saved_step": Metric(help="Steps in the newest checkpoint of this start."),
    "elastic_saved_timestamp_seconds": Metric(
        help="When the newest checkpoint was committed, or else this start began."
    ),
    "elastic_budget_spent": Metric(
        help="Share of a budget of HealthConfig that is used up since the last step.",
        tags=("budget",),
    ),
    "elastic_suspect_nodes": Metric(help="Machines that are suspect."),
    "elastic_node_signs": Metric(
        help="Signs of a fault that a node shows now.", tags=("node", "sign")
    ),
    "elastic_verdicts": Metric(
        help="Verdicts in this start, by cause, step of the ladder and what became of it.",
        tags=("cause", "step", "outcome"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A metric's value."""

    name: str
    """A key of `METRICS`."""
    value: float
    """It."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Its labels, beside the run's."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What membership knows, and the records do not say."""

    workers: int
    """Workers that live."""
    spares: int
    """Those of them that wait for a place."""
    spent: Mapping[str, tuple[int, int]]
    """Budget -> what is used up of it, and the budget."""
    over: bool
    """Whether this start of the run is over."""


class Meter:
    """Takes the records of one start of a run.

    Args:
        started: its first event.
        min_replicas: fewest replicas that it trains with.
    """

    def __init__(self, started: events.RunStarted, min_replicas: int) -> None:
        self._started, self._min_replicas = started, min_replicas
        self._steps: deque[events.StepRecord] = deque(maxlen=RECENT_STEPS)
        self._loss = _Losses()
        self._saved: events.CheckpointCommitted | None = None
        self.replicas = 0
        """Replicas of the newest roster."""
        self._devices: set[str] = set()
        self._suspects: dict[str, bool] = {}
        # Zeros, too: Prometheus sees no rise in what begins with 1.
        self._sums: Counter[tuple[str, tuple[str, ...]]] = Counter(
            {
                **{("elastic_workers_lost", (cause,)): 0 for cause in known_causes()},
                **{("elastic_regroups", (why,)): 0 for why in get_args(events.RegroupReason)},
                ("elastic_lost_steps", ()): 0,
                ("elastic_skipped_steps", ()): 0,
            }
        )
        self._signs: Counter[tuple[str, str]] = Counter()

    # -- facts -------------------------------------------------------------------------------------

    def take(self, event: events.Event) -> None:
        """Something happened."""
        self._loss.take(event)
        match event:
            case events.WorkerJoined():
                self._devices.add(event.device)
            case events.WorkerLost():
                self._count("elastic_workers_lost", event.cause)
            case events.RegroupCalled():
                self._count("elastic_regroups", event.reason)
            case events.RegroupDone():
                self.replicas = event.replicas
                self._sums["elastic_lost_steps", ()] += event.lost_steps
            case events.StepSkipped():
                self._count("elastic_skipped_steps")
            case events.CheckpointCommitted():
                self._saved = event
            case events.NodeReplacement():
                self._suspects[event.node] = event.outcome in _SUSPECT
            case events.SignsChanged():
                self._take_signs(event)
            case events.VerdictReached():
                self._count("elastic_verdicts", event.cause, event.step, event.outcome)

    def _count(self, name: str, *tags: str) -> None:
        self._sums[name, tags] += 1

    def _take_signs(self, event: events.SignsChanged) -> None:
        for key in self._signs:  # what has gone is told as 0
            if key[0] == event.node:
                self._signs[key] = 0
        self._signs.update((event.node, str(sign.get("name"))) for sign in event.signs)

    def replay(self, happened: Iterable[events.Event], last: events.StepRecord | None) -> None:
        """Takes up what was counted before: the events of this start, and its last step. How long
        the first step after each roster took is in steps that are not read again."""
        for event in happened:
            self.take(event)
        self._loss.close([])
        if last is not None:
            self.take_step(last)

    def take_step(self, record: events.StepRecord) -> None:
        """A step was written down."""
        self._steps.append(record)
        self._loss.take_step(record)

    # -- numbers -----------------------------------------------------------------------------------

    @property
    def stepped(self) -> float | None:
        """When the last step was committed; None before the first one."""
        return self._steps[-1].time if self._steps else None

    @property
    def step_s(self) -> float | None:
        """Time of a step, over the last ones; None before the second one."""
        if len(self._steps) < 2:
            return None
        return (self._steps[-1].time - self._steps[0].time) / (len(self._steps) - 1)

    def samples(self, now: float, steps: int, standing: Standing) -> Iterator[Sample]:
        """All that is known.

        Args:
            now: in seconds since the epoch.
            steps: committed.
            standing: what the records do not say.
        """
        yield from _plain(self._numbers(now, steps, standing))
        rate = self._tokens_per_s(now)
        if rate is not None:
            yield Sample(name="elastic_tokens_per_second", value=rate)
            for counting, mfu in self._mfu(rate).items():
                yield Sample(name="elastic_mfu", value=mfu, tags={"counting": counting})
        for phase, seconds in self._loss.seconds.items():
            yield Sample(name="elastic_lost_seconds", value=seconds, tags={"phase": phase})
        for budget, (used, most) in standing.spent.items():
            yield Sample(name="elastic_budget_spent", value=used / most, tags={"budget": budget})
        for (name, values), count in self._sums.items():
            tags = dict(zip(METRICS[name].tags, values, strict=True))
            yield Sample(name=name, value=count, tags=tags)
        for (node, sign), count in self._signs.items():
            yield Sample(name="elastic_node_signs", value=count, tags={"node": node, "sign": sign})

    def _numbers(self, now: float, steps: int, standing: Standing) -> dict[str, float]:
        started, layout, saved = self._started, self._started.layout, self._saved
        last = self._steps[-1] if self._steps else None
        numbers: dict[str, float] = {
            "elastic_heartbeat_timestamp_seconds": now,
            "elastic_over": standing.over,
            "elastic_step": steps,
            "elastic_planned_steps": started.steps,
            "elastic_step_timestamp_seconds": last.time if last else started.time,
            "elastic_replicas": self.replicas,
            "elastic_min_replicas": self._min_replicas,
            "elastic_max_replicas": layout["replicas"],
            "elastic_workers": standing.workers,
            "elastic_spares": standing.spares,
            "elastic_planned_spares": layout["spares"],
            "elastic_saved_timestamp_seconds": saved.time if saved else started.time,
            "elastic_suspect_nodes": sum(self._suspects.values()),
        }
        if last is not None:
            numbers |= {"elastic_loss": last.loss, "elastic_grad_norm": last.grad_norm}
        if saved is not None:
            numbers["elastic_saved_step"] = saved.step
        return numbers

    def _tokens_per_s(self, now: float) -> float | None:
        """Falls while no step is committed. None before the second step."""
        if len(self._steps) < 2:
            return None
        first, *others = self._steps
        step_s = (others[-1].time - first.time) / len(others)
        still_s = max(0.0, now - others[-1].time - step_s)  # beyond the step that is under way
        elapsed_s = others[-1].time - first.time + still_s
        return sum(step.tokens for step in others) / elapsed_s if elapsed_s > 0 else None

    def _mfu(self, tokens_per_s: float) -> dict[str, float]:
        """By counting; empty where it is not known what the GPUs can do."""
        if len(self._devices) != 1 or not self.replicas:
            return {}
        peak = peak_flops(next(iter(self._devices)), self._started.precision)
        if peak is None:
            return {}
        workers = self.replicas * workers_per_replica(self._started.layout)
        each = tokens_per_s / workers
        return {how: n * each / peak for how, n in self._started.flops_per_token.items()}


def _plain(numbers: Mapping[str, float]) -> Iterator[Sample]:
    return (Sample(name=name, value=value) for name, value in numbers.items())


class _Losses:
    """What losses of workers took from training, by the report's own reckoning of incidents."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(_PHASES, 0.0)
        """Phase -> seconds, of incidents that are over."""
        self._open: list[events.Event] = []

    def take(self, event: events.Event) -> None:
        lost = isinstance(event, events.WorkerLost) and event.slot is not None
        kinds = events.RegroupCalled | events.RegroupGathered | events.RegroupDone
        if lost or isinstance(event, kinds):
            self._open.append(event)

    def take_step(self, record: events.StepRecord) -> None:
        """The first step after a roster ends what came before that."""
        if self._open:
            self.close([record])

    def close(self, steps: Sequence[events.StepRecord]) -> None:
        """Counts what has come to a roster, before the first of `steps` where there are any."""
        over = [
            index
            for index, event in enumerate(self._open)
            if isinstance(event, events.RegroupDone)
            and all(event.time <= step.time for step in steps)
        ]
        if not over:
            return
        done, self._open = self._open[: over[-1] + 1], self._open[over[-1] + 1 :]
        for incident in find_incidents(done, steps):
            for phase in _PHASES:
                self.seconds[phase] += getattr(incident, f"{phase}_s") or 0.0
