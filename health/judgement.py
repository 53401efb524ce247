"""From readings to signs: what is out of order on a machine? Pure.

Each judge takes the readings of one thing over `WINDOW_S`, in order. Rules that count take the
first of them as their base: a machine that has counted errors for months is not ill for it.
Figures without a named source are our own guesses, and are marked so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

from health.reading import UNREACHED, Kind, Reading
from health.verdict import Role, Sign, Step, Subject
from health.xids import known_xids, recovery_of

WINDOW_S = 600.0
"""How far back readings are kept. Source: gpud's rule for slowed clocks."""

_REFILL_PER_S = 1.0
"""Of every bucket."""

# Source: aws/eks-node-monitoring-agent, monitors/networking/efa/efa.go (2026-08-18).
EFA_BURSTS: dict[str, float] = {
    "rx_drops": 100,
    "rdma_write_wr_err": 100,
    "rdma_read_wr_err": 100,
    "unresponsive_remote_events": 100,
    "impaired_remote_conn_events": 100,
    "retrans_timeout_events": 100,
    "retrans_pkts": 1_000,
    "retrans_bytes": 1_000_000,
}
_ABOUT_THE_REMOTE = ("unresponsive_remote_events", "impaired_remote_conn_events")

# Invented.
NIC_BURSTS: dict[str, float] = {
    "rx_errors": 100,
    "tx_errors": 100,
    "rx_dropped": 1_000,
    "tx_dropped": 1_000,
}
# Invented.
_PCIE_BURST = 100

_FLAPS = 3
"""Times that a link went down within the window. Source: gpud, of InfiniBand; for NVLinks that the
driver recovered it is a guess."""

_NVLINK_SAMPLES, _NVLINK_BAD = 30, 15
"""Readings, and those of them with new errors. Source: nvidia-resiliency-ext."""

_HARDWARE_SLOWDOWN = 0x08 | 0x40 | 0x80
"""NVML's bits for clocks that the hardware has slowed: in general, for heat, for power."""
_SLOWED_SHARE = 0.6
"""Of the readings in the window. Source: gpud."""

_ASKED_READINGS = 3
"""In a row: a driver that asks for so long means it. Invented."""

_UNANSWERED_READINGS = 3
"""In a row: a driver that is busy for a moment answers again. Invented."""

_LOST_READINGS = 3
"""In a row: a disk that was read-only for so long is not in somebody's hands. Invented."""

_STORAGE_HUNG_S = 15.0
"""Source: nvidia-resiliency-ext."""
_STORAGE_SLOW_S, _STORAGE_READINGS = 1.0, 12
"""A file system that takes so long to say how much room it has, over so many readings. Invented."""

_KILLED_S = 30.0
"""From the kernel's count of a process that it ends, until that has given its memory back and is
gone, and until both were seen. Invented."""

_STILL_S = 30.0
"""A worker in one phase for so long has stopped, or its step is a long one. Invented."""
_IDLE, _BUSY = 0.02, 0.9
"""Shares of the time. Invented."""
_WAIT_READINGS = 60
"""Readings, before a worker's share of waiting counts. Invented."""
_WAITS_LITTLE, _WAITS_MUCH = 0.02, 0.2
"""Shares of these. Invented."""
_LITTLE_ENDS, _MUCH_ENDS = 0.05, 0.14
"""Shares at which they stand no more. A share near a limit comes and goes by chance, and each time
is an event of all that its node shows. Invented."""


def judge(
    histories: Mapping[tuple[Kind, str], Sequence[Reading]],
    node: str,
    at_s: float,
    gone: Collection[str] = (),
    before: Iterable[Sign] = (),
) -> list[Sign]:
    """What is out of order on a node.

    Args:
        histories: the readings of each thing within the window, in order, the last of them of now,
            but for Xids; none is empty.
        node: the node.
        at_s: now, in seconds since the epoch.
        gone: workers whose processes have ended since the look before.
        before: what stood then.
    """
    gpu_of = {
        pid: series
        for (kind, _), series in histories.items()
        if kind == "gpu"
        for pid in series[-1].pids
    }
    stood = {(sign.name, sign.of) for sign in before}
    # Where NVML names no process, any of the GPUs may be a worker's own.
    untold = not gpu_of and any(kind == "gpu" for kind, _ in histories)
    found: list[Sign] = []
    for (kind, _), series in histories.items():
        say = _Say(series[-1], node, at_s)
        if kind == "gpu":
            found += _judge_gpu(series, say)
        elif kind == "xid":
            found += _judge_xids(series, say)
        elif kind == "efa":
            found += _judge_efa(series, say)
        elif kind == "nic":
            found += _judge_nic(series, say)
        elif kind == "mount":
            found += _judge_mount(series, say)
        elif kind == "storage":
            found += _judge_storage(series, say)
        elif kind == "memory":
            found += _judge_oom_kills(series, gone, say)
        else:
            gpus = [gpu_of[pid] for pid in series[-1].pids if pid in gpu_of]
            found += _judge_worker(series, gpus[0] if gpus else None, untold, stood, say)
    return found


class _Say:
    """Makes the signs of one thing.

    Args:
        latest: the latest reading of it.
        node: where it is.
        at_s: now, in seconds since the epoch.
    """

    def __init__(self, latest: Reading, node: str, at_s: float) -> None:
        self._latest, self._node, self._at_s = latest, node, at_s

    def __call__(
        self,
        name: str,
        detail: str,
        *,
        role: Role,
        cause: str,
        subject: Subject,
        worker: str | None = None,
        remedy: Step | None = None,
        decisive: bool = False,
        repeated: bool = False,
    ) -> Sign:
        of = self._latest.of
        return Sign(
            name=name,
            source="reading",
            role=role,
            cause=cause,
            subject=subject,
            detail=f"{self._latest.kind} {of}: {detail}",
            of=of,
            worker=of if self._latest.kind == "worker" else worker,
            node=self._node,
            at_s=self._at_s,
            decisive=decisive,
            repeated=repeated,
            remedy=remedy,
        )


# -- counters --------------------------------------------------------------------------------------


def find_overflow(series: Sequence[Reading], name: str, burst: float) -> float | None:
    """The largest rise of a counter that its token bucket could not take; None where it took all.

    The bucket is full at the first reading and fills by one a second. A counter that falls was
    reset.
    """
    tokens, worst = burst, None
    for before, after in _pairs(series, name):
        tokens = min(burst, tokens + (after.at_s - before.at_s) * _REFILL_PER_S)
        rise = after.values[name] - before.values[name]
        if rise > tokens:
            worst = max(worst or 0.0, rise)
        elif rise > 0:
            tokens -= rise
    return worst


def _pairs(series: Sequence[Reading], name: str) -> Iterable[tuple[Reading, Reading]]:
    return pairwise(reading for reading in series if name in reading.values)


def _rises(series: Sequence[Reading], name: str) -> list[float]:
    return [rise for a, b in _pairs(series, name) if (rise := b.values[name] - a.values[name]) > 0]


def _judge_efa(series: Sequence[Reading], say: _Say) -> Iterable[Sign]:
    for name, burst in EFA_BURSTS.items():
        rise = find_overflow(series, name, burst)
        if rise is not None:
            yield say(
                f"efa_{name}",
                f"{name} rose by {rise:,.0f} at once (its bucket holds {burst:,.0f})",
                role="cascade" if name in _ABOUT_THE_REMOTE else "confirmation",
                cause="link",
                subject="link",
            )


def _judge_nic(series: Sequence[Reading], say: _Say) -> Iterable[Sign]:
    for name, burst in NIC_BURSTS.items():
        rise = find_overflow(series, name, burst)
        if rise is not None:
            detail = f"{name} rose by {rise:,.0f} at once (its bucket holds {burst:,.0f})"
            yield say(f"nic_{name}", detail, role="confirmation", cause="link", subject="link")
    flaps = sum(_rises(series, "carrier_down_count"))
    if flaps >= _FLAPS:
        detail = f"the link went down {flaps:.0f} times in {_span_s(series):.0f} s"
        yield say("link_flaps", detail, role="confirmation", cause="link", subject="link")


# -- machines --------------------------------------------------------------------------------------


def _judge_mount(series: Sequence[Reading], say: _Say) -> Iterable[Sign]:
    """Never decisive: somebody may have made it so for a moment."""
    read_only = [bool(reading.values["read_only"]) for reading in series]
    if read_only[-1] and not all(read_only):
        yield say(
            "disk_lost",
            "it became read-only",
            role="root",
            cause="node",
            subject="storage",
            remedy="replace_node",
            repeated=all(read_only[-_LOST_READINGS:]),
        )


def _judge_storage(series: Sequence[Reading], say: _Say) -> Iterable[Sign]:
    """A suspect and no more: a file server that all share is no machine's fault."""
    latest = series[-1].values
    if not latest["answered"] and latest["answer_s"] >= _STORAGE_HUNG_S:
        yield say(
            "storage_hung",
            f"it has not answered for {latest['answer_s']:.0f} s",
            role="confirmation",
            cause="hang",
            subject="storage",
        )
    # One that we may not ask, or that lies under another, has always failed.
    if latest["failed"] and latest["worked"]:
        yield say(
            "storage_failed",
            "it answers with an error (`stat -f` says which), and did not before",
            role="confirmation",
            cause="storage",
            subject="storage",
        )
    took = [
        reading.values["answer_s"]
        for reading in series
        if reading.values["answered"] and not reading.values["failed"]
    ]
    if len(took) >= _STORAGE_READINGS and median(took) >= _STORAGE_SLOW_S:
        yield say(
            "storage_slow",
            f"it takes {median(took):.1f} s to answer",
            role="confirmation",
            cause="slow",
            subject="storage",
        )


def _judge_oom_kills(series: Sequence[Reading], gone: Collection[str], say: _Say) -> Iterable[Sign]:
    """The count names no process: workers that ended at that time were those, if they have crashed.
    Where none did it was another one, such as a loader's, whose end a worker may tell of."""
    before = sum(series[-1].at_s - reading.at_s > _KILLED_S for reading in series)
    recent = series[max(0, before - 1) :]  # with the one that the first rise is from
    killed = sum(_rises(recent, "oom_kills"))
    if not killed:
        return
    workers: Collection[str | None] = gone or (None,)
    for worker in workers:
        yield say(
            "oom_killed",
            f"memory ran out, and the kernel ended {killed:.0f} "
            f"{'process' if killed == 1 else 'processes'} within {_span_s(recent):.0f} s",
            role="root" if worker else "confirmation",
            cause="out_of_memory",
            subject="worker",
            worker=worker,
        )


def _judge_gpu(series: Sequence[Reading], say: _Say) -> Iterable[Sign]:
    values = series[-1].values
    if values.get("lost"):
        yield say(
            "gpu_lost",
            "the driver cannot reach it any more",
            role="root",
            cause="gpu_error",
            subject="gpu",
            remedy="reboot",
            decisive=True,
        )
        return
    silent = [reading.values.get("unanswered") for reading in series[-_UNANSWERED_READINGS:]]
    if len(silent) == _UNANSWERED_READINGS and all(silent):
        # One that was never reached may be so for hours, and explains no loss of now.
        never = series[-1].of.startswith(UNREACHED)
        yield say(
            "unanswered",
            "NVML gives nothing but errors of it",
            role="confirmation" if never else "root",
            cause="gpu_error",
            subject="gpu",
            remedy="reboot",
        )
    yield from _judge_memory(series, say)
    asked = [int(reading.values.get("recovery_action", 0)) for reading in series]
    if asked[-1]:
        name, remedy = recovery_of(asked[-1])
        yield say(
            "recovery_action",
            f"the driver asks for: {name}",
            role="root",
            cause="gpu_error",
            subject="gpu",
            remedy=remedy,
            repeated=len(asked) >= _ASKED_READINGS and all(asked[-_ASKED_READINGS:]),
        )
    yield from _judge_gpu_links(series, say)
    slowed = [
        int(reading.values.get("throttle_reasons", 0)) & _HARDWARE_SLOWDOWN != 0
        for reading in series
    ]
    share = sum(slowed) / len(slowed)
    if share >= _SLOWED_SHARE and _span_s(series) >= 0.9 * WINDOW_S:
        detail = f"the hardware slows its clocks {share:.0%} of the time"
        yield say("throttled", detail, role="confirmation", cause="slow", subject="gpu")


def _judge_xids(series: Sequence[Reading], say: _Say) -> Iterable[Sign]:
    """As of a line of the kernel's log, by the same name."""
    times, looks = Counter[str](), Counter[str]()
    for reading in series:
        times.update({number: round(count) for number, count in reading.values.items()})
        looks.update(list(reading.values))  # of one fault each link may tell, all at once
    for number, count in times.items():
        xid = known_xids().get(int(number))
        if xid is None or xid.role is None:
            continue
        # Whether such an error of an NVLink is fatal stands in the log's words alone.
        either = xid.action == "WORKFLOW_NVLINK5_ERR"
        yield say(
            f"xid_{number}",
            f"the driver has told of Xid {number}" + (f" {count} times" if count > 1 else ""),
            role="confirmation" if either else xid.role,
            cause="gpu_error",
            subject="gpu",
            remedy=None if either else xid.remedy,
            repeated=looks[number] > 1,
        )


def _judge_memory(series: Sequence[Reading], say: _Say) -> Iterable[Sign]:
    """Source of the remedies: gpud, leptonai/gpud (2026-08-22)."""
    values = series[-1].values
    uncorrected = _rises(series, "ecc_uncorrected_volatile")
    if uncorrected:
        yield say(
            "ecc_uncorrected",
            f"{sum(uncorrected):.0f} errors in its memory that could not be corrected",
            role="root",
            cause="gpu_error",
            subject="gpu",
            remedy="reset_gpu",
            repeated=len(uncorrected) > 1,
        )
    if values.get("remap_failed"):
        yield say(
            "remap_failed",  # for good: as for the doctor, the GPU has failed
            "rows of its memory could not be replaced",
            role="root",
            cause="gpu_error",
            subject="gpu",
            remedy="replace_node",
            decisive=True,
        )
    elif values.get("remap_pending"):
        yield say(
            "remap_pending",
            "rows of its memory will be replaced when it is reset",
            role="confirmation",
            cause="gpu_error",
            subject="gpu",
            remedy="reset_gpu",
        )


def _judge_gpu_links(series: Sequence[Reading], say: _Say) -> Iterable[Sign]:
    bad = len(_rises(series[-_NVLINK_SAMPLES - 1 :], "nvlink_errors"))
    if bad >= _NVLINK_BAD:
        detail = f"new NVLink errors in {bad} of {_NVLINK_SAMPLES} readings"
        yield say("nvlink_errors", detail, role="confirmation", cause="gpu_error", subject="link")
    # One event may count once for each of a GPU's links: what counts is how often it happened.
    recovered = len(_rises(series, "nvlink_recoveries"))
    if recovered >= _FLAPS:
        detail = f"its NVLinks were recovered {recovered} times in {_span_s(series):.0f} s"
        yield say(
            "nvlink_recoveries", detail, role="confirmation", cause="gpu_error", subject="link"
        )
    rise = find_overflow(series, "pcie_replays", _PCIE_BURST)
    if rise is not None:
        detail = f"PCIe replays rose by {rise:,.0f} at once"
        yield say("pcie_replays", detail, role="confirmation", cause="gpu_error", subject="link")


# -- workers ---------------------------------------------------------------------------------------


def _judge_worker(
    series: Sequence[Reading],
    gpu: Sequence[Reading] | None,
    untold: bool,
    stood: Collection[tuple[str, str]],
    say: _Say,
) -> Iterable[Sign]:
    """`untold`: it may be on a GPU, and nobody knows on which. `stood`: signs of the look before,
    by their names and what they are of."""
    yield from _judge_still(_still(series), gpu, untold, say)
    yield from _judge_waiting(series, stood, say)


def _still(series: Sequence[Reading]) -> Sequence[Reading]:
    """The latest readings between which the worker has entered no phase."""
    marks = series[-1].values["marks"]
    begin = len(series) - 1
    while begin and series[begin - 1].values["marks"] == marks:
        begin -= 1
    return series[begin:]


def _judge_still(
    still: Sequence[Reading], gpu: Sequence[Reading] | None, untold: bool, say: _Say
) -> Iterable[Sign]:
    """What a worker does while it gets nowhere. Alone it says nothing: whether those that wait are
    idle or busy depends on the backend. Who differs from the others is told in `diagnosis.py`."""
    in_step = still[-1].values["waits"] or still[-1].values["works"]
    seconds = _span_s(still)
    if not in_step or seconds < _STILL_S:
        return
    if all(reading.values["in_kernel"] for reading in still[1:]):
        yield say(
            "in_kernel",
            f"for {seconds:.0f} s in a call to the kernel that no signal ends",
            role="confirmation",
            cause="hang",
            subject="worker",
        )
    if untold:  # its process, held against the GPUs of others, would make a difference of none
        return
    share, whose = _activity(still, gpu)
    if share <= _IDLE or share >= _BUSY:
        yield say(
            "idle" if share <= _IDLE else "busy",
            f"for {seconds:.0f} s in one phase, {whose} at {share:.0%}",
            role="confirmation",
            cause="hang",
            subject="worker",
        )


def _activity(still: Sequence[Reading], gpu: Sequence[Reading] | None) -> tuple[float, str]:
    """The share of the time in which a worker did something, and by what that is measured."""
    begin_s = still[0].at_s
    used = [
        reading.values["utilization_percent"] / 100
        for reading in gpu or ()
        if reading.at_s > begin_s and "utilization_percent" in reading.values
    ]
    if used:
        return sum(used) / len(used), "its GPU"
    cpu_s = still[-1].values["cpu_s"] - still[0].values["cpu_s"]
    return cpu_s / _span_s(still), "its process"


def _judge_waiting(
    series: Sequence[Reading], stood: Collection[tuple[str, str]], say: _Say
) -> Iterable[Sign]:
    """Whether a worker waits for others, or the others for it."""
    steps = [r.values for r in series if r.values["waits"] or r.values["works"]]
    if len(steps) < _WAIT_READINGS or series[0].values["marks"] == series[-1].values["marks"]:
        return
    share = sum(values["waits"] for values in steps) / len(steps)
    of = series[-1].of
    little = share <= (_LITTLE_ENDS if ("waits_little", of) in stood else _WAITS_LITTLE)
    if little or share >= (_MUCH_ENDS if ("waits_much", of) in stood else _WAITS_MUCH):
        yield say(
            "waits_little" if little else "waits_much",
            f"it waits for other replicas in {share:.0%} of {len(steps)} readings",
            role="confirmation",
            cause="slow",
            subject="worker",
        )


def _span_s(series: Sequence[Reading]) -> float:
    return series[-1].at_s - series[0].at_s
