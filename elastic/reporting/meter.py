"""A run as numbers for Prometheus, from its events and steps as they are written down. Pure.

What grows is a gauge that holds the sum, as in Ray Train's metrics: a coordinator that is started
anew counts on from the records.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import get_args

from elastic.protocol import events
from elastic.protocol.causes import known_causes
from elastic.reporting.alerts import Watched
from elastic.reporting.lost_time import LostTime
from elastic.reporting.metrics import METRICS, RECENT_STEPS, Sample
from elastic.reporting.speed import find_peak, workers_per_replica

_SUSPECT = ("told", "held_back", "begun", "failed")
"""Outcomes of a `NodeReplacement` after which the machine is suspect still."""


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
        self._lost_time = LostTime()
        self._saved: events.CheckpointCommitted | None = None
        self.replicas = 0
        """Replicas of the newest roster."""
        self._watched = Watched()
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
        self._workers: dict[str, set[str]] = {}

    # -- facts -------------------------------------------------------------------------------------

    def take(self, event: events.Event) -> None:
        """Something happened."""
        self._lost_time.take(event)
        self._watched.take(event)
        match event:
            case events.WorkerJoined():
                self._devices.add(event.device)
                self._workers.setdefault(event.node, set()).add(event.worker)
            case events.WorkerLost():
                self._count("elastic_workers_lost", event.cause)
                self._workers.get(event.node, set()).discard(event.worker)
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
        self._lost_time.close([])
        if last is not None:
            self.take_step(last)

    def take_step(self, record: events.StepRecord) -> None:
        """A step was written down."""
        self._steps.append(record)
        self._lost_time.take_step(record)

    # -- numbers -----------------------------------------------------------------------------------

    @property
    def stepped(self) -> float | None:
        """When the last step was committed; None before the first one."""
        return self._steps[-1].time if self._steps else None

    @property
    def step_s(self) -> float | None:
        """Median time of a step, over the last ones: one may hold a standstill of hours. None
        before the second one."""
        if len(self._steps) < 2:
            return None
        return median(after.time - before.time for before, after in pairwise(self._steps))

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
            for counting, mfu in self._mfu(now).items():
                yield Sample(name="elastic_mfu", value=mfu, tags={"counting": counting})
        for phase, seconds in self._lost_time.seconds.items():
            yield Sample(name="elastic_lost_seconds", value=seconds, tags={"phase": phase})
        for budget, (used, most) in standing.spent.items():
            yield Sample(name="elastic_budget_spent", value=used / most, tags={"budget": budget})
        for (name, values), count in self._sums.items():
            tags = dict(zip(METRICS[name].tags, values, strict=True))
            yield Sample(name=name, value=count, tags=tags)
        for (node, sign), count in self._signs.items():
            left = not self._workers.get(node, True)  # one that is gone takes nothing back
            tags = {"node": node, "sign": sign}
            yield Sample(name="elastic_node_signs", value=0 if left else count, tags=tags)

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
            "elastic_restarts": len(self._watched.restarts),
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
        elapsed_s = self._steps[-1].time - self._steps[0].time + self._still_s(now)
        return self._tokens / elapsed_s if elapsed_s > 0 else None

    @property
    def _tokens(self) -> int:
        """Of the last steps but the first of them, which only begins the time of the others."""
        return sum(after.tokens for _, after in pairwise(self._steps))

    def _still_s(self, now: float) -> float:
        """Since the last step, beyond the one that is under way."""
        elapsed_s = self._steps[-1].time - self._steps[0].time
        return max(0.0, now - self._steps[-1].time - elapsed_s / (len(self._steps) - 1))

    def _mfu(self, now: float) -> dict[str, float]:
        """By counting, of two steps at least; empty where it is not known what the GPUs can do. A
        step's time is that of the replicas that did it."""
        peak = (
            find_peak(next(iter(self._devices)), self._started) if len(self._devices) == 1 else None
        )
        replica_s = self._still_s(now) * self.replicas + sum(
            (after.time - before.time) * after.replicas for before, after in pairwise(self._steps)
        )
        if peak is None or not replica_s > 0:
            return {}
        each = self._tokens / (replica_s * workers_per_replica(self._started.layout))
        return {how: n * each / peak for how, n in self._started.flops_per_token.items()}


def _plain(numbers: Mapping[str, float]) -> Iterator[Sample]:
    return (Sample(name=name, value=value) for name, value in numbers.items())
