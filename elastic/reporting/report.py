"""What a run did and what its faults cost, as one object, a text and a JSON file.

`build_report` is pure; `write_report` puts `report.json` and `report.txt` into the run directory,
each complete or not at all. The JSON holds the fields of `Report` in their order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from checkpointing.whole_file import write_whole
from elastic.protocol.causes import known_causes
from elastic.protocol.events import (
    CheckpointCommitted,
    CheckpointSkipped,
    Evaluated,
    Event,
    FaultFired,
    LedgerChecked,
    NodeChecked,
    NodeReplacement,
    Profiled,
    RegroupCalled,
    RegroupDone,
    ReplicasCompared,
    RunEnded,
    RunStarted,
    StepRecord,
    StepSkipped,
    StepsTimed,
    VerdictReached,
    WorkerRefused,
    plain_number,
)
from elastic.protocol.versions import describe_change
from elastic.reporting.incidents import (
    Gap,
    Incident,
    Start,
    incidents_of,
    split_at_starts,
    touching,
)
from elastic.reporting.speed import find_speed, mean_parts
from elastic.reporting.verdicts import Advice, find_verdicts
from trainer.parallel.strategy import after_a_loss, beyond_the_lanes

REPORT_JSON = "report.json"
REPORT_TEXT = "report.txt"

_MOST_LINES = 50
"""Of a kind in the text: incidents, verdicts, remedies."""

_E = TypeVar("_E", bound=Event)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run in numbers. None stands for what was not measured."""

    name: str
    """Name of the run."""
    outcome: str
    """Outcome of the last start of the run; "unfinished" when its end was never written."""
    steps: int
    """Committed steps, those done again counted once."""
    planned_steps: int
    """Steps the run was to have."""
    first_loss: float | None
    """Training loss of the first step, nats per token."""
    final_loss: float | None
    """Training loss of the last step, nats per token."""
    val_loss: float | None
    """The last validation loss, nats per token."""
    tokens: int
    """Tokens of the committed steps."""
    terms: str
    """What is called tokens here; see `RunStarted`."""
    wall_s: float
    """From each start of the run to the last sign of it, summed; time between is not counted."""
    tokens_per_s: float | None
    """Tokens over the time between committed steps, stalls included, start-up not."""
    tokens_per_s_per_worker: float | None
    """Median over the steps of the last start with no regroup: tokens of a step over its time and
    over the workers of the replicas that did it. A worker is a GPU, or a slot of a CPU."""
    flops_per_s_per_worker: dict[str, float]
    """That many tokens times the model's operations for one, by how those are counted: `6N`,
    `attention` and `causal` (docs/run-directory.md), or `given` by the task."""
    mfu: dict[str, float]
    """Model FLOP/s utilisation: their share of what the GPU can do in the run's precision, by
    counting. Empty on CPUs, on GPUs of several kinds, and of one that `trainer/peaks.py` lacks."""
    step_parts_s: dict[str, float]
    """Mean time of a step on the lead by part (`trainer/loop/clock.py`), over the steps of the last
    start that were timed; empty where none was."""
    timed_steps: int
    """How many those were."""
    profiles: tuple[dict[str, Any], ...]
    """What came of `train.profile`: trace, steps, and the dearest operators."""
    median_step_s: float | None
    """Median time between consecutive committed steps of the last start with no regroup in between;
    where there are none, of all starts. See `Gap.step_s`."""
    longest_stall_s: float | None
    """Largest time between consecutive committed steps, less the median of their start and the time
    of lost steps. A stop and a new start of the run are not a stall."""
    effective_time: float | None
    """1 - disturbed / elapsed. `elapsed` is the time between consecutive committed steps, summed,
    which leaves out start-up and the time between a stop and the next start. `disturbed` is, summed
    over the gaps between committed steps that an incident or a regroup runs through, what they
    take beyond the median step time of their start; the time of lost steps lies in these gaps. Both
    count the time from the first roster of a start to the last regroup before its first step, and
    from its last step to the last regroup after it. Other jitter does not count, nor does a lost
    spare, so an undisturbed run has 1.0."""
    restarts: int
    """Times that the run was started again after it had stopped."""
    redone_steps: int
    """Steps done again because the run had stopped after its last saved state."""
    regroups: int
    """Regroups other than those that start the run."""
    repeated_steps: int
    """Steps that were begun, not committed, and done again."""
    lost_steps: int
    """Committed steps that had to be done again."""
    skipped_steps: int
    """Steps not applied because their loss or gradient was not finite."""
    faults_fired: int
    """Injected faults that went off."""
    checkpoints: int
    """Checkpoints committed."""
    skipped_checkpoints: int
    """Steps of which one was due and none was written."""
    replicas_equal: bool | None
    """Whether all comparisons found the replicas bitwise equal; None without one of two or more."""
    ledger_steps: int | None
    """Steps of the last start that were found to have taken just the samples due; None where it did
    not end well."""
    incidents: tuple[Incident, ...]
    """All losses of workers, in order."""
    verdicts: tuple[Advice, ...]
    """What was wrong at each of them, and what helps."""
    checked: tuple[NodeChecked, ...]
    """What was out of order on machines before their workers got a place: the last word on each."""
    refused: tuple[WorkerRefused, ...]
    """Workers that got no place for their versions, each once."""
    replacements: tuple[NodeReplacement, ...]
    """How it ended with each machine that was suspect, in the order in which they became so."""
    remedies: tuple[VerdictReached, ...]
    """Verdicts that the run came to as it ran, and what it did about each, in order."""
    layout: dict[str, int]
    """Sizes of the layout at the last start."""
    store: str | None
    """URL of the store that its checkpoints went to at the last start; empty: to the run directory;
    None: its records do not say."""
    versions: dict[str, str]
    """Versions of what the run stood on at the last start."""
    version_changes: tuple[str, ...]
    """Of each start that went on with other versions than the one before: from which step on, and
    which. From there on bits may be others than without it."""
    settings: dict[str, str]
    """What was set at the last start; see `RunStarted`."""

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON: no NaN literals, fields in their order."""
        return {k: _plain(v) for k, v in asdict(self).items()}


def build_report(events: Sequence[Event], steps: Sequence[StepRecord]) -> Report:
    """Sum a run up.

    Args:
        events: all events of the run, as `read_events` gives them.
        steps: its steps, as `read_steps` gives them: each step once, in order.
    """
    starts = split_at_starts(events, steps)
    last = starts[-1]
    gaps = [gap for start in starts for gap in start.gaps]
    incidents = incidents_of(starts, steps)
    started = _of(events, RunStarted)
    regroups = _of(events, RegroupDone)
    ledgers = _of(events, LedgerChecked)
    speed = find_speed(last)
    timed_steps, step_parts_s = mean_parts(_of(last.events, StepsTimed))
    ends = _of(last.events, RunEnded)
    evaluated = _of(events, Evaluated)
    compared = [event for event in _of(events, ReplicasCompared) if event.replicas > 1]
    committed = _of(events, CheckpointCommitted)
    unsaved = {e.step for e in _of(events, CheckpointSkipped)} - {e.step for e in committed}
    return Report(
        name=started[-1].name if started else "",
        outcome=ends[-1].outcome if ends else "unfinished",
        steps=len(steps),
        planned_steps=started[-1].steps if started else 0,
        first_loss=steps[0].loss if steps else None,
        final_loss=steps[-1].loss if steps else None,
        val_loss=evaluated[-1].val_loss if evaluated else None,
        tokens=sum(s.tokens for s in steps),
        terms=started[-1].terms if started else RunStarted.terms,
        wall_s=sum(map(_wall_s, starts)),
        tokens_per_s=_ratio(sum(g.tokens for g in gaps), _elapsed_s(gaps)),
        tokens_per_s_per_worker=speed.tokens_per_s,
        flops_per_s_per_worker=speed.flops_per_s,
        mfu=speed.mfu,
        step_parts_s=step_parts_s,
        timed_steps=timed_steps,
        profiles=tuple(_without_kind(e) for e in _of(events, Profiled)),
        median_step_s=last.gaps[0].step_s if last.gaps else None,
        longest_stall_s=max((g.stall_s for g in gaps), default=None),
        effective_time=_effective_time(starts, gaps, incidents),
        restarts=max(0, len(started) - 1),
        redone_steps=sum(e.redone_steps for e in started),
        regroups=sum(e.outcome != "start" for e in regroups),
        repeated_steps=sum(e.repeated_steps for e in regroups),
        lost_steps=sum(e.lost_steps for e in regroups),
        skipped_steps=len({e.step for e in _of(events, StepSkipped)}),
        faults_fired=len(_of(events, FaultFired)),
        checkpoints=len(committed),
        skipped_checkpoints=len(unsaved),
        replicas_equal=all(e.equal for e in compared) if compared else None,
        ledger_steps=ledgers[-1].steps if ledgers else None,
        incidents=tuple(incidents),
        verdicts=tuple(find_verdicts(events, steps, incidents)),
        checked=tuple({e.node: e for e in _of(events, NodeChecked)}.values()),
        refused=tuple({e.worker: e for e in _of(events, WorkerRefused)}.values()),
        replacements=tuple({e.node: e for e in _of(events, NodeReplacement)}.values()),
        remedies=tuple(_of(events, VerdictReached)),
        layout=started[-1].layout if started else {},
        store=started[-1].store if started else None,
        versions=started[-1].versions if started else {},
        version_changes=tuple(_version_changes(started)),
        settings=(started[-1].settings or {}) if started else {},
    )


def _version_changes(started: Sequence[RunStarted]) -> Iterator[str]:
    """See `Report.version_changes`. One that begins from the seed goes on from nothing."""
    for before, now in pairwise(started):
        changed = describe_change(before.versions, now.versions)
        if changed and now.start_step > 0:
            yield f"from step {now.start_step} on: {changed}"


def report_text(report: Report) -> str:
    """The report for people: a few lines and a table of incidents, ending in a newline. Of very
    many incidents it shows the last ones: a driver prints it."""
    lines = [
        f"{report.name}: {report.outcome}, {report.steps} of {report.planned_steps} steps "
        f"in {_seconds(report.wall_s)}",
        *(f"  {label:<10} {text}" for label, text in _facts(report).items()),
    ]
    if report.step_parts_s:
        lines += ["", f"a step on the lead, mean of {report.timed_steps}:"]
        lines += _table(_PART_COLUMNS, _part_rows(report.step_parts_s))
    for profile in report.profiles:
        lines += ["", *_profile_lines(profile)]
    if report.incidents:
        shown = report.incidents[-_MOST_LINES:]
        lines += ["", *_table(_INCIDENT_COLUMNS, [_incident_row(i) for i in shown])]
        lines += _left_out(report.incidents)
        lines += ["", *_explained(shown)]
    if report.verdicts:
        lines += ["", *_latest([_verdict_line(one) for one in report.verdicts])]
    beyond = [one for one in report.remedies if one.step not in ("retry", "new_process")]
    if beyond:
        lines += ["", *_latest([format_remedy(one) for one in beyond])]
    if found := [line for one in report.checked for line in format_checked(one)]:
        lines += ["", *_latest(found)]
    if report.refused:
        lines += ["", *_latest([format_refused(one) for one in report.refused])]
    if report.replacements:
        lines += ["", *_latest([format_replacement(one) for one in report.replacements])]
    return "\n".join(lines) + "\n"


def _latest(lines: Sequence[str]) -> list[str]:
    return [*lines[-_MOST_LINES:], *_left_out(lines)]


def _left_out(all_of_a_kind: Sequence[object]) -> list[str]:
    left = len(all_of_a_kind) - _MOST_LINES
    return [f"({left} before these, in {REPORT_JSON})"] if left > 0 else []


_PART_COLUMNS = ("part", "ms", "share")


def _part_rows(parts_s: Mapping[str, float]) -> list[tuple[str, ...]]:
    whole_s = sum(parts_s.values())
    return [
        (part, f"{1e3 * seconds:.2f}", _percent(_ratio(seconds, whole_s)))
        for part, seconds in (*parts_s.items(), ("all", whole_s))
        if seconds > 0
    ]


_OPERATOR_COLUMNS = ("operator", "calls", "CPU ms", "GPU ms")


def _profile_lines(profile: Mapping[str, Any]) -> list[str]:
    """What a profile found."""
    head = f"profile of steps {profile['first']} to {profile['last']} on {profile['worker']}: "
    head += profile["file"] + (f" ({profile['problem']})" if profile["problem"] else "")
    rows = [
        (o["name"][:60], str(o["calls"]), f"{o['cpu_ms']:.2f}", f"{o['gpu_ms']:.2f}")
        for o in profile["operators"]
    ]
    attention = ", ".join(profile["attention"])
    taken = [f"attention takes {attention}"] if attention else []
    device = profile["device_ms"]
    if device:
        taken.append(
            f"the GPU worked for {device['busy']:.1f} ms; collectives ran for "
            f"{device['collectives']:.1f} of these, {device['exposed']:.1f} with nothing beside"
        )
    return [head, *_table(_OPERATOR_COLUMNS, rows), *taken]


def format_remedy(event: VerdictReached) -> str:
    """A verdict and what was done about it, in one line."""
    whom = _some(event.nodes or event.workers)
    done = event.outcome.replace("_", " ") + (f" ({event.detail})" if event.detail else "")
    shown = "".join(line.splitlines()[-1] for line in event.evidence[:1] if line)
    return f"{event.cause}, {whom}: {event.step.replace('_', ' ')}: {done}: {shown}"


def format_checked(event: NodeChecked) -> list[str]:
    """What is out of order on a machine, a line each; what only slows is in the events."""
    lines = [
        f"node {event.node}: {one['severity']}: {one['check']}: {one['result']}; {one['fix']}"
        for one in event.findings
        if one["severity"] != "MONITOR"
    ]
    if event.isolated:
        lines.append(f"node {event.node}: no worker works there: {event.isolated}")
    return lines


def format_refused(event: WorkerRefused) -> str:
    """A worker that got no place, and its node, in one line."""
    return f"{event.worker} on node {event.node} gets no place: {event.detail}"


def format_replacement(event: NodeReplacement) -> str:
    """What becomes of a suspect machine, in one line."""
    outcome = event.outcome.replace("_", " ")
    return f"suspect machine {event.machine} ({event.reason}): {outcome}: {event.detail}"


def write_report(run_dir: str | os.PathLike[str], report: Report) -> None:
    """Write `report.json` and `report.txt` into the run directory, each by an atomic rename."""
    data = json.dumps(report.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(Path(run_dir) / REPORT_JSON, data + "\n")
    write_whole(Path(run_dir) / REPORT_TEXT, report_text(report))


def _without_kind(event: Event) -> dict[str, Any]:
    data = event.to_json()
    del data["kind"]
    return data


def _of(events: Sequence[Event], cls: type[_E]) -> list[_E]:
    return [e for e in events if isinstance(e, cls)]


def _wall_s(start: Start) -> float:
    """See `Report.wall_s`; 0 without events."""
    signs = [e.time for e in start.events] + [s.time for s in start.steps]
    return max(signs) - start.events[0].time if start.events else 0.0


def _elapsed_s(gaps: Sequence[Gap]) -> float:
    return sum(g.seconds for g in gaps)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _effective_time(
    starts: Sequence[Start], gaps: Sequence[Gap], incidents: Sequence[Incident]
) -> float | None:
    """See `Report.effective_time`."""
    spans = [i.span for i in incidents if i.regrouped] + _regroup_spans(starts)
    disturbed = {gap for span in spans for gap in touching(gaps, *span)}
    outside_s = sum(end - begin for begin, end in _outside_gaps(starts, spans))
    lost_s = sum(g.excess_s for g in disturbed) + outside_s
    lost = _ratio(lost_s, _elapsed_s(gaps) + outside_s)
    return None if lost is None else 1.0 - lost


def _regroup_spans(starts: Sequence[Start]) -> list[tuple[float, float]]:
    """From call to roster, or to the end, of every regroup but those that start the run."""
    spans = []
    for start in starts:
        called = {e.generation: e.time for e in _of(start.events, RegroupCalled)}
        for done in _of(start.events, RegroupDone):
            begin = called.pop(done.generation, done.time)
            if done.outcome != "start":
                spans.append((begin, done.time))
        spans += [(begin, start.events[-1].time) for begin in called.values()]
    return spans


def _outside_gaps(
    starts: Sequence[Start], spans: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Of each start of the run, the time that regroups took before its first step and after its
    last."""
    found = []
    begins = [*(start.events[0].time for start in starts[1:]), float("inf")]
    for start, next_start in zip(starts, begins, strict=True):
        rosters = _of(start.events, RegroupDone)
        if not rosters:
            continue
        first, done = start.events[0].time, start.steps
        ends = [end for begin, end in spans if first <= begin < next_start]
        before = [end for end in ends if not done or end <= done[0].time]
        found.append((rosters[0].time, max(before, default=0.0)))
        if done:
            found.append((done[-1].time, max(ends, default=0.0)))
    return [(begin, end) for begin, end in found if end > begin]


_INCIDENT_COLUMNS = (
    "step", "cause", "lost", "outcome", "detect", "decide", "abort", "roster", "1st step", "stall",
    "rejoin", "heal", "made up", "redone",
)  # fmt: skip


def _incident_row(incident: Incident) -> tuple[str, ...]:
    times = (
        incident.detect_s, incident.decide_s, incident.abort_s, incident.roster_s,
        incident.first_step_s, incident.stall_s, incident.rejoin_s, incident.heal_s,
    )  # fmt: skip
    return (
        str(incident.step),
        incident.cause,
        _some(incident.slots) or "spare " + _some(incident.workers),
        incident.outcome,
        *(_seconds(t) for t in times),
        _whole(incident.catch_up_steps),
        str(incident.lost_steps + incident.repeated_steps),
    )


def _explained(incidents: Sequence[Incident]) -> list[str]:
    """What the causes in the table mean."""
    known = known_causes()
    found = dict.fromkeys(cause for i in incidents for cause in i.cause.split(", "))
    return [f"{cause}: {known[cause].text}" for cause in found if cause in known]


def _verdict_line(one: Advice) -> str:
    """What was wrong, with whom, what shows it, and what helps."""
    verdict = one.verdict
    whom = f"node {_some(verdict.nodes)}" if verdict.nodes else _some(verdict.workers)
    remedy = "" if one.remedy is None else f"; remedy: {one.remedy.replace('_', ' ')}"
    shown = " | ".join(line.splitlines()[-1] for line in verdict.evidence[:_MOST_EVIDENCE] if line)
    return f"step {one.step}: {verdict.cause}, {whom} ({verdict.confidence}){remedy}: {shown}"


def _beyond_the_lanes(report: Report) -> dict[str, str]:
    replicas = report.layout.get("replicas", 1)
    told = beyond_the_lanes(replicas, report.layout.get("lanes", replicas))
    return {} if told is None else {"lanes": told}


def _some(names: Sequence[str], most: int = 2) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _facts(report: Report) -> dict[str, str]:
    layout = ", ".join(f"{k} {v}" for k, v in report.layout.items())
    return {
        "loss": f"{_number(report.first_loss)} → {_number(report.final_loss)}"
        + ("" if report.val_loss is None else f", validation {_number(report.val_loss)}"),
        "speed": f"{_whole(report.tokens_per_s)} {report.terms}/s, "
        f"{report.tokens:,} {report.terms}, "
        f"median step {_seconds(report.median_step_s)}",
        **_compute(report),
        "effective": f"{_percent(report.effective_time)} of the time, "
        f"longest stall {_seconds(report.longest_stall_s)}",
        "steps": f"{report.repeated_steps} repeated, {report.lost_steps} lost, "
        f"{report.skipped_steps} skipped",
        **_restarts(report),
        "events": f"regroups {report.regroups}, faults fired {report.faults_fired}, "
        f"checkpoints {report.checkpoints}"
        + (f" and {report.skipped_checkpoints} NOT WRITTEN" if report.skipped_checkpoints else ""),
        **({"saved in": report.store} if report.store else {}),
        "replicas": _EQUALITY[report.replicas_equal],
        "ledger": "-" if report.ledger_steps is None else f"{report.ledger_steps} steps exact",
        "layout": f"{layout}: {after_a_loss(report.layout.get('replicas', 1))}" if layout else "-",
        **_beyond_the_lanes(report),
        "versions": ", ".join(f"{k} {v}" for k, v in report.versions.items()) or "-",
        **({"changed": "; ".join(report.version_changes)} if report.version_changes else {}),
        "settings": ", ".join(f"{k} {v}" for k, v in report.settings.items()) or "-",
    }


def _compute(report: Report) -> dict[str, str]:
    """What each worker does; of a run whose model nobody has counted, nothing."""
    if not report.flops_per_s_per_worker:
        return {}
    counted = report.flops_per_s_per_worker.items()
    found = ", ".join(f"{flops / 1e12:.4g} ({how})" for how, flops in counted)
    shares = ", ".join(f"{100 * share:.1f} % ({how})" for how, share in report.mfu.items())
    return {
        "a worker": f"{_whole(report.tokens_per_s_per_worker)} {report.terms}/s, TFLOP/s {found}"
        + (f", MFU {shares}" if shares else "")
    }


def _restarts(report: Report) -> dict[str, str]:
    """Nothing of a run that was started once."""
    if report.restarts == 0:
        return {}
    return {"restarts": f"{report.restarts}, {report.redone_steps} steps done again"}


_MOST_EVIDENCE = 3
"""Pieces of evidence in a line; `report.json` has all."""

_EQUALITY = {None: "not compared", True: "bitwise equal", False: "NOT EQUAL"}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f} s" if value < 10 else f"{value:.1f} s"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with left-aligned columns, under a rule."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _plain(value: object) -> object:
    """`value` with non-finite floats as text and tuples as lists, all the way down."""
    if isinstance(value, float):
        return plain_number(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
