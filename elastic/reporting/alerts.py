"""What is wrong with a run, as whoever sees only its directory can tell. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from elastic.exit_status import FAILED, decide_status_of
from elastic.membership.failure import INCIDENT_S
from elastic.protocol import events
from elastic.protocol.pulse import Pulse
from elastic.reporting.brief import brief

Kind = Literal[
    "failed", "dead", "stalled", "restart_storm", "spares_exhausted", "budget_low", "unsaved"
]

KINDS = (
    events.RunStarted,
    events.RunEnded,
    events.CoordinatorStarted,
    events.WorkerLost,
    events.CheckpointCommitted,
    events.CheckpointSkipped,
)
"""Of events, that `Watched` looks at."""

STORM_S = 600.0
"""Restarts within so many seconds are counted together."""
LONG_STEPS = 20
"""A run whose steps are long is stalled after so many of them, where that is more."""
FIRST_STEP = 3
"""Before the first step it may take so many times as long: machines are waited for, blocks are
compiled."""
SPARELESS_S = 120.0
"""Ray starts a lost worker anew, and it is a spare again, within less."""
BUDGET_LOW = 0.8
"""Share of a budget of `HealthConfig` that may be used up."""
UNSAVED = 2
"""So many checkpoints in a row may not fail: one lacks parts where its writer is lost."""
_AGAIN = "the same command goes on with the run, unless it has resume='never'"
REPEAT_S = 3600.0
"""An alert that still stands is told again after so long, as nvidia-resiliency-ext's watcher
does."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """Something is wrong."""

    kind: Kind
    """What."""
    detail: str
    """The fact, the numbers, and where to look."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """From when on it is."""

    stalled_s: float
    """With no step committed."""
    dead_s: float
    """With no pulse."""
    storm: int
    """Restarts within `STORM_S`."""


class Watched:
    """What the records of a run say of it."""

    def __init__(self) -> None:
        self.started: events.RunStarted | None = None
        """The last start."""
        self.ended: events.RunEnded | None = None
        """The end of that."""
        self.restarts: list[float] = []
        """When workers with a slot were lost, all that go together once; and when the coordinator
        or the run was started again. In seconds since the epoch."""
        self.saved: int | None = None
        """Steps of the last checkpoint."""
        self.unsaved: dict[int, str] = {}
        """Steps of those that were due since and are not written -> why."""

    def take(self, event: events.Event) -> None:
        """Something happened; in the order of the records."""
        again = False
        match event:
            case events.RunStarted():
                again = self.started is not None
                self.started, self.ended = event, None
                self.unsaved.clear()  # it may have been started again for that
            case events.RunEnded():
                self.ended = event
            case events.CoordinatorStarted():
                again = event.anew
            case events.WorkerLost():
                last = self.restarts[-1] if self.restarts else float("-inf")
                again = event.slot is not None and event.time - last > INCIDENT_S
            case events.CheckpointCommitted():
                self.saved = event.step
                self.unsaved.clear()
            case events.CheckpointSkipped():
                self.unsaved[event.step] = event.reason
        if again:
            self.restarts.append(event.time)


def find_alerts(watched: Watched, pulse: Pulse | None, limits: Limits, now: float) -> list[Alert]:
    """What is wrong with a run at `now`, in seconds since the epoch.

    Args:
        watched: its records.
        pulse: its last one, if there is one.
        limits: from when on something is wrong.
        now: on a clock that is together with those of the run's machines.
    """
    started, ended = watched.started, watched.ended
    if started is None:
        return []
    if ended is not None:
        return [_failed(ended)] if ended.outcome == "failed" else []
    if pulse is not None and pulse.time < started.time:
        pulse = None  # of an earlier start
    silent_s = now - (started.time if pulse is None else pulse.time)
    if silent_s > limits.dead_s:
        return [_dead(silent_s)]
    found = [
        _stalled(started, pulse, limits, now),
        _storm(watched.restarts, limits, now),
        _unsaved(watched),
    ]
    if pulse is not None:
        found += [_spareless(pulse, now), _budget(pulse)]
    return [alert for alert in found if alert is not None]


def unanswered(waited_s: float) -> Alert:
    """What is wrong where the run's directory has shown nothing so far."""
    return Alert(
        kind="dead",
        detail=f"its directory has not answered for {waited_s:.0f} s, and nothing was seen of it "
        f"before: its file system hangs, or is slow. Look at its mount; a slow one needs a longer "
        f"--dead, or --interval with --once",
    )


def _failed(ended: events.RunEnded) -> Alert:
    error = brief(ended.error or "no error is recorded")
    useless = decide_status_of(ended.cause) != FAILED
    what = "a retry is useless" if useless else _AGAIN
    return Alert(kind="failed", detail=f"it failed after {ended.step} steps: {error} ({what})")


def _dead(silent_s: float) -> Alert:
    return Alert(
        kind="dead",
        detail=f"no pulse for {silent_s:.0f} s, and no end in the records: its coordinator is "
        f"lost, or this directory out of reach. Look at `ray status`; {_AGAIN}",
    )


def _stalled(
    started: events.RunStarted, pulse: Pulse | None, limits: Limits, now: float
) -> Alert | None:
    stepped = None if pulse is None else pulse.stepped
    step_s = None if pulse is None else pulse.step_s
    if stepped is None:
        since, limit_s = started.time, FIRST_STEP * limits.stalled_s
    else:
        since, limit_s = stepped, max(limits.stalled_s, LONG_STEPS * (step_s or 0.0))
    if now - since <= limit_s:
        return None
    steps = started.start_step if pulse is None else pulse.steps
    return Alert(
        kind="stalled",
        detail=f"no step for {now - since:.0f} s, more than {limit_s:.0f}, with {steps} committed. "
        f"Look at the last lines of events.jsonl, and at `ray status`",
    )


def _storm(restarts: Sequence[float], limits: Limits, now: float) -> Alert | None:
    count = sum(time > now - STORM_S for time in restarts)
    if count < limits.storm:
        return None
    return Alert(
        kind="restart_storm",
        detail=f"{count} restarts within {STORM_S:.0f} s, of workers, the coordinator or the run. "
        f"Look at `worker_lost` in events.jsonl",
    )


def _unsaved(watched: Watched) -> Alert | None:
    if len(watched.unsaved) < UNSAVED:
        return None
    step, reason = list(watched.unsaved.items())[-1]
    first, *_ = reason.splitlines() or [""]
    newest = "there is none" if watched.saved is None else f"the newest is of {watched.saved} steps"
    return Alert(
        kind="unsaved",
        detail=f"{len(watched.unsaved)} checkpoints in a row were not written, and {newest}; of "
        f"that of {step} steps: {first}. Look at `checkpoint_skipped` in events.jsonl",
    )


def _spareless(pulse: Pulse, now: float) -> Alert | None:
    since = pulse.spareless_since
    if since is None or now - since <= SPARELESS_S:
        return None
    return Alert(
        kind="spares_exhausted",
        detail=f"none of {pulse.planned_spares} spares for {now - since:.0f} s, with "
        f"{pulse.replicas} replicas. Add machines, or look at why they do not come: `ray status`",
    )


def _budget(pulse: Pulse) -> Alert | None:
    low = [
        f"health.{name}: {used} of {most}"
        for name, (used, most) in pulse.spent.items()
        if used >= BUDGET_LOW * most
    ]
    if not low:
        return None
    return Alert(
        kind="budget_low",
        detail=f"{', '.join(low)} are used up since step {pulse.steps}; the run ends with the last",
    )


def decide_watch_status(watched: Watched, alerts: Sequence[Alert]) -> int:
    """With which status a look at the run ends."""
    if watched.ended is not None and watched.ended.outcome == "failed":
        return decide_status_of(watched.ended.cause)
    return FAILED if alerts else 0


@dataclass(frozen=True, kw_only=True)
class News:
    """An alert to be told of."""

    alert: Alert
    """It."""
    state: Literal["firing", "resolved"]
    """Whether it stands, or has gone."""


Told = dict[Kind, tuple[float, Alert]]
"""When an alert that stood was told last, and what."""


def plan_news(told: Told, alerts: Iterable[Alert], now: float) -> tuple[list[News], Told]:
    """What to tell now.

    Args:
        told: so far.
        alerts: those that stand.
        now: in seconds since the epoch.

    Returns:
        The news, and what is `told` from now on.
    """
    standing = {alert.kind: alert for alert in alerts}
    news = [
        News(alert=alert, state="resolved")
        for kind, (_, alert) in told.items()
        if kind not in standing
    ]
    known = {kind: one for kind, one in told.items() if kind in standing}
    for kind, alert in standing.items():
        if kind not in known or now - known[kind][0] >= REPEAT_S:
            news.append(News(alert=alert, state="firing"))
            known[kind] = (now, alert)
    return news, known


def take_back(before: Told, after: Told, kind: Kind) -> Told:
    """What is told where nobody took the news of `kind`: it is news again.

    Args:
        before: what was told before.
        after: what would be told with the news.
        kind: whose news are lost.
    """
    others = {other: one for other, one in after.items() if other != kind}
    return others | ({kind: before[kind]} if kind in before else {})
