"""`elastic watch`: looks after a run from outside, by its directory alone."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from elastic.cli.arguments import count, positive
from elastic.cli.show import human_time
from elastic.errors import WebhookError, WebhookRefusedError
from elastic.protocol.events import Event, event_from_json
from elastic.protocol.pulse import PULSE_S, Pulse, read_pulse
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.alerts import (
    KINDS,
    Alert,
    Limits,
    News,
    Told,
    Watched,
    decide_watch_status,
    find_alerts,
    plan_news,
    take_back,
    unanswered,
)
from elastic.reporting.follower import Follower
from elastic.reporting.webhook import Webhook

WEBHOOK_VARIABLE = "ELASTIC_WEBHOOK"
"""Arguments of a process can be seen by all users of its machine; its environment cannot."""

LAST_WORD_S = 600.0
"""How long the webhook is tried when the run is over. Nobody looks after that."""

LEAST_BOUND_S = 5.0
"""A look may take as long as the next one is off, and so long at least: storage has its moments."""

_Seen = tuple[Pulse | None, list[Event], bool]
"""The pulse, what happened since the look before, and whether the run was begun anew."""

_EPILOG = f"""\
alerts:
  failed            the run ended with an error
  dead              no pulse (written every {PULSE_S:g} s) for --dead seconds; or no answer from the
                    directory so far, for --dead seconds, with --once for --interval
  stalled           no step for --stalled seconds, or 20 steps where that is longer; before the
                    first step three times as long
  restart_storm     --storm restarts within 10 minutes: workers, the coordinator, the run
  spares_exhausted  no spare for 2 minutes, where the run was to have some
  budget_low        80 % of a budget of HealthConfig are used up
  unsaved           two checkpoints in a row were not written

exit status: 0 the run ended well, or is well (--once); 1 it failed, or something is wrong with it
(--once); 93 it failed, and starting it again is useless; 2 bad input

The machine needs the run's directory, no Ray, and a clock that is together with the run's.
"""


def add_to(commands: Any) -> None:
    """Adds the command to the parsers of `commands`."""
    watch = commands.add_parser(
        "watch",
        help="look after a run, and tell when something is wrong with it",
        description="Looks after a run from outside until it ends, by its directory alone. A line, "
        "and a POST to the webhook, when an alert comes, goes, or has stood for another hour.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    watch.add_argument("run", metavar="RUN", type=Path, help="the run's directory")
    watch.add_argument("--once", action="store_true", help="one look")
    watch.add_argument("--json", action="store_true", help="a JSON object for each look")
    watch.add_argument(
        "--webhook",
        metavar="URL",
        help=f"where alerts are POSTed as JSON (default: ${WEBHOOK_VARIABLE}, which is the way for "
        "a URL that is a secret)",
    )
    for name, default, what in (
        ("interval", 30.0, "seconds between two looks; one may take as long, and 5 at least"),
        ("stalled", 600.0, "seconds without a step that are an alert"),
        ("dead", 120.0, "seconds without a pulse that are an alert"),
    ):
        watch.add_argument(
            f"--{name}",
            type=positive,
            default=default,
            metavar="S",
            help=f"{what} (default: {default:g})",
        )
    watch.add_argument(
        "--storm",
        type=count,
        default=5,
        metavar="N",
        help="restarts within 10 minutes that are an alert (default: 5)",
    )
    watch.set_defaults(action=watch_run)


def watch_run(options: argparse.Namespace) -> int:
    """`watch`"""
    url = options.webhook or os.environ.get(WEBHOOK_VARIABLE)
    limits = Limits(stalled_s=options.stalled, dead_s=options.dead, storm=options.storm)
    patience_s = 0.0 if options.once else options.dead
    view = _View(RunPaths(root=options.run), limits, patience_s)
    listener = None if not url else _Listener(Webhook(url), view.name)
    told: Told = {}
    while True:
        view.look(max(options.interval, LEAST_BOUND_S))
        now = time.time()
        alerts = view.alerts(now)
        news, told = plan_news(told, alerts, now)
        status = decide_watch_status(view.watched, alerts)
        over = view.watched.ended is not None
        if options.json:
            print(json.dumps(view.to_json(now, alerts, status)), flush=True)
        else:
            _print(view, news, now, summary=options.once or over)
        if listener is not None and not listener.tell(alerts, now) and over and not options.once:
            listener.insist(alerts, options.interval)
        if options.once or over:
            return status
        time.sleep(options.interval)


class _View:
    """A run as its directory shows it. Only threads of its own read there: a mount that hangs holds
    whoever asks it, in the kernel.

    Args:
        paths: the run's.
        limits: from when on something is wrong.
        patience_s: how long the first look may take before that is wrong.
    """

    def __init__(self, paths: RunPaths, limits: Limits, patience_s: float) -> None:
        self.name = Path(os.path.abspath(paths.root)).name  # by its text: no file system is asked
        self.watched = Watched()
        self._paths, self._limits, self._patience_s = paths, limits, patience_s
        self._events = Follower(paths.events, event_from_json, from_start=True, kinds=KINDS)
        self._pulse: Pulse | None = None
        self._began_s = time.monotonic()
        self._answered = False
        """The directory has, once."""
        self._reading: Future[_Seen] | None = None
        """A look that is under way."""

    def look(self, bound_s: float) -> None:
        """Sees what is there now. Where the directory is out of reach, or does not answer within
        `bound_s`, what was seen last stands, and grows old; no other thread asks it meanwhile.

        Raises:
            FileNotFoundError: it is no run's directory.
        """
        if self._reading is None:
            self._reading = Future()
            # A daemon: this process can end while it hangs.
            what = (self._reading,)
            threading.Thread(target=self._read, args=what, name="look", daemon=True).start()
        if not wait([self._reading], bound_s).done:
            return
        answer, self._reading = self._reading, None
        pulse, happened, anew = answer.result()
        self._answered = True
        self._pulse = pulse or self._pulse
        if anew:
            self.watched = Watched()
        for event in happened:
            self.watched.take(event)

    def _read(self, answer: Future[_Seen]) -> None:
        try:
            if not self._answered and not self._paths.events.is_file():
                root = self._paths.root
                raise FileNotFoundError(
                    f"{root} is no run's directory: it has no events.jsonl. Name storage_path/name"
                )
            # The pulse first: an end that is in the records by then is seen.
            pulse = read_pulse(self._paths.pulse)
            happened = self._events.take()
            answer.set_result((pulse, happened, self._events.anew))
        except Exception as error:
            answer.set_exception(error)

    def alerts(self, now: float) -> list[Alert]:
        """What is wrong at `now`, in seconds since the epoch, by what was seen last."""
        if self._answered:
            return find_alerts(self.watched, self._pulse, self._limits, now)
        waited_s = time.monotonic() - self._began_s
        return [unanswered(waited_s)] if waited_s > self._patience_s else []

    def to_json(self, now: float, alerts: Sequence[Alert], status: int) -> dict[str, Any]:
        ended = self.watched.ended
        return {
            "run": self.name,
            "time": now,
            "outcome": None if ended is None else ended.outcome,
            "pulse": None if self._pulse is None else asdict(self._pulse),
            "alerts": [asdict(alert) for alert in alerts],
            "status": status,
        }

    def summary(self) -> str:
        """How the run stands, in words."""
        ended, pulse = self.watched.ended, self._pulse
        if ended is not None:
            return f"{ended.outcome}, {ended.step} steps"
        if pulse is None:
            return "it has not told of itself yet"
        return (
            f"{pulse.steps} of {pulse.planned_steps} steps, {pulse.replicas} replicas, "
            f"{pulse.spares} of {pulse.planned_spares} spares"
        )


def _print(view: _View, news: Sequence[News], now: float, *, summary: bool) -> None:
    for one in news:
        gone = "" if one.state == "firing" else " no more; it was"
        line = f"{one.alert.kind}{gone}: {one.alert.detail}"
        print(f"{human_time(now)} {view.name}: {line}", flush=True)
    if summary:
        print(f"{human_time(now)} {view.name}: {view.summary()}", flush=True)


class _Listener:
    """Whoever hears of a run by a webhook: of what was not taken, again at the next look.

    Args:
        webhook: where news are sent.
        run: the run's name.
    """

    def __init__(self, webhook: Webhook, run: str) -> None:
        self._webhook, self._run = webhook, run
        self._told: Told = {}
        self._refused = False
        """No later try will help."""

    def tell(self, alerts: Sequence[Alert], now: float) -> bool:
        """Sends what is new, up to the first that is not taken: a try takes long, and a look is
        due. Returns whether all of it was taken; where not, the watch goes on."""
        before = self._told
        news, self._told = plan_news(before, alerts, now)
        taken = True
        for one in news:
            if not taken:
                self._told = take_back(before, self._told, one.alert.kind)
                continue
            data = {"run": self._run, "time": now, "state": one.state, **asdict(one.alert)}
            try:
                self._webhook.send(data)
            except WebhookError as error:
                print(f"elastic: {error}", file=sys.stderr, flush=True)
                self._told, taken = take_back(before, self._told, one.alert.kind), False
                self._refused = isinstance(error, WebhookRefusedError)
        return taken

    def insist(self, alerts: Sequence[Alert], pause_s: float) -> None:
        """The last word: tries again until it is taken, for `LAST_WORD_S`; not where it never will
        be."""
        deadline = time.monotonic() + LAST_WORD_S
        while not self._refused and time.monotonic() < deadline:
            time.sleep(pause_s)
            if self.tell(alerts, time.time()):
                return
