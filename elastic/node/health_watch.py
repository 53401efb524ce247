"""What a node's instruments show, the logs of its kernel and of Ray, and its workers' output, told
to the coordinator when it changes.

    every SAMPLE_S:  read ──► judge ──► what stands, with what was seen a while ago ──► tell changes

Evidence and no more: nobody is ended here. It runs on a thread that nobody waits for, since a GPU
that is gone may hold up whoever asks for it. Where this fails, the node goes on without.
"""

from __future__ import annotations

import contextlib
import platform
import socket
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from elastic.protocol.causes import OUT_OF_MEMORY, USER_ERROR
from health.efa import read_efa
from health.gpu import Gpus, close_nvml, keep_our_pids, open_nvml
from health.judgement import WINDOW_S, judge
from health.kernel_log import has_our_pids, open_kernel_log
from health.log_tail import LogTail
from health.mounts import read_mounts, temporary_folder
from health.nic import read_nics
from health.oom_kills import read_oom_kills
from health.process import output_files
from health.reading import Kind, Reading
from health.signatures import find_sign
from health.standing import Standing
from health.storage import StorageWatch
from health.verdict import Sign
from health.worker_load import WorkerState, read_worker
from health.xid_events import XidEvents

SAMPLE_S = 5.0
"""Between two looks."""

_RAISED = frozenset({USER_ERROR, OUT_OF_MEMORY})
"""Causes that an exception's class tells."""

_ASSET_TAG = Path("/sys/class/dmi/id/board_asset_tag")
"""On EC2 the instance's id; EFA's errors call machines by it."""


def start_health_watch(
    node: str,
    states: Callable[[], list[WorkerState]],
    tell: Callable[[list[Sign]], None],
    keep: Callable[[Sequence[Reading]], None],
) -> None:
    """Looks at this node every `SAMPLE_S`, on a thread, until the process ends. See `HealthWatch`.

    Even to open a GPU's driver may take for ever, so nothing of it is done by the caller.
    """

    def run() -> None:
        watch = HealthWatch(node, states, tell, keep, raylets_log())
        while True:
            watch.look(time.monotonic(), time.time())
            time.sleep(SAMPLE_S)

    threading.Thread(target=run, name="health-watch", daemon=True).start()


class HealthWatch:
    """Looks at a node.

    Args:
        node: Ray's id of this node.
        states: what is known of the workers on it.
        tell: takes all signs that stand, whenever they change; of the first look also none, for
            what an agent before this one has told stands no more. Where it raises, it is given them
            again at the next look.
        keep: takes the readings of each look.
        raylet: what Ray's own process on this node writes to, where that is a file.
    """

    def __init__(
        self,
        node: str,
        states: Callable[[], list[WorkerState]],
        tell: Callable[[list[Sign]], None],
        keep: Callable[[Sequence[Reading]], None],
        raylet: Path | None = None,
    ) -> None:
        self._node, self._states, self._tell, self._keep_latest = node, states, tell, keep
        self._tails: dict[str, LogTail] = {}
        """Of the files that workers write to."""
        self._kernel_log = open_kernel_log()
        self._raylet = None if raylet is None else LogTail(raylet)
        self._instruments: list[Callable[[float], list[Reading]]] = [
            read_efa,
            read_nics,
            self._read_mounts,
            read_oom_kills,
            StorageWatch().look,
        ]
        self._has_nvml = False
        """NVML's two are among the instruments."""
        self._histories: dict[tuple[Kind, str], deque[Reading]] = defaultdict(deque)
        self._before: list[WorkerState] = []
        """The workers of the look before."""
        self._standing = Standing()
        self._has_told = False
        """Whether what stands was told."""
        self._failed: set[str] = set()
        """What has failed and was told of: each once."""

    def look(self, now_s: float, at_s: float) -> None:
        """One look. Where it fails the next one may not.

        Args:
            now_s: now, on the monotonic clock.
            at_s: now, in seconds since the epoch.
        """
        with self._going_on("a look"):
            self._look(now_s, at_s)

    def _look(self, now_s: float, at_s: float) -> None:
        states = self._states()
        readings = self._read(states, now_s)
        self._keep_latest(readings)
        self._keep(readings, now_s)
        histories = {
            key: list(series)
            for key, series in self._histories.items()
            # What was not read now is not as it was then. Xids alone come only when there are some.
            if key[0] == "xid" or series[-1].at_s >= now_s
        }
        pids = {state.pid for state in states}
        gone = [state for state in self._before if state.pid not in pids]
        self._before = states
        ended = [state.worker for state in gone]
        signs = judge(histories, self._node, at_s, ended, self._standing.signs)
        known = [*gone, *states]
        signs += self._hear_node(known, at_s) + self._hear_workers(known, at_s)
        users = self._gpu_users(states)
        signs = [
            replace(s, worker=s.worker or users.get(s.of)) if s.subject == "gpu" else s
            for s in signs
        ]
        if self._standing.take(signs, now_s) or not self._has_told:
            self._has_told = False  # where this fails, it is told at the next look
            self._tell(self._standing.signs)
            self._has_told = True

    def _read(self, states: Iterable[WorkerState], now_s: float) -> Sequence[Reading]:
        workers = [read_worker(state, now_s) for state in states]
        readings = [reading for reading in workers if reading is not None]
        with self._going_on("NVML"):
            self._open_nvml()
        for read in self._instruments:
            with self._going_on(read.__qualname__):
                readings += read(now_s)
        return readings if has_our_pids() else keep_our_pids(readings, {s.pid for s in states})

    def _open_nvml(self) -> None:
        """At the first look at which it starts: a driver may come, or recover, after the agent."""
        nvml = None if self._has_nvml else open_nvml()
        if nvml is None:
            return
        try:
            gpus = Gpus(nvml)
            self._instruments += [gpus.read, XidEvents(nvml, gpus.handles).read]
        except Exception:
            close_nvml(nvml)
            raise
        self._has_nvml = True

    def _read_mounts(self, now_s: float) -> list[Reading]:
        """Of what is written to for sure: where Ray keeps the workers' output, and where all have
        their temporary files."""
        written = [*map(Path, self._tails), temporary_folder()]
        return read_mounts(now_s, {path.resolve() for path in written})

    @contextlib.contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        """What fails is missing from reports, and no more: the rest of the node is looked at, and
        what stood is not taken to stand for ever."""
        try:
            yield
        except Exception:
            if what not in self._failed:
                self._failed.add(what)
                traceback.print_exc()

    def _keep(self, readings: Iterable[Reading], now_s: float) -> None:
        for reading in readings:
            self._histories[reading.kind, reading.of].append(reading)
        for key, series in list(self._histories.items()):
            while series and now_s - series[0].at_s > WINDOW_S:
                series.popleft()
            if not series:
                del self._histories[key]

    def _gpu_users(self, states: Iterable[WorkerState]) -> dict[str, str]:
        """Address of a GPU -> the worker that uses it, where it is known to be one."""
        pids = {state.pid: state.worker for state in states}
        latest = [series[-1] for (kind, _), series in self._histories.items() if kind == "gpu"]
        found = {gpu.of: [pids[pid] for pid in gpu.pids if pid in pids] for gpu in latest}
        return {gpu: workers[0] for gpu, workers in found.items() if len(workers) == 1}

    def _hear_node(self, states: Iterable[WorkerState], at_s: float) -> list[Sign]:
        """Signs in the kernel's log, and in that of Ray's own process: its memory monitor ends
        workers before the kernel would."""
        pids = {state.pid: state.worker for state in states}
        found: list[Sign | None] = []
        if self._kernel_log is not None:
            known = pids if has_our_pids() else None
            lines = self._kernel_log.read()
            found += [find_sign(line, "kernel", self._node, at_s, known) for line in lines]
        if self._raylet is not None:
            lines = self._raylet.read()
            found += [find_sign(line, "raylet", self._node, at_s, pids) for line in lines]
        return [sign for sign in found if sign is not None]

    def _hear_workers(self, states: Iterable[WorkerState], at_s: float) -> list[Sign]:
        logs = {log: state.worker for state in states for log in state.logs}
        self._tails = {log: self._tails.get(log) or LogTail(Path(log)) for log in logs}
        return [
            sign
            for log, tail in self._tails.items()
            for sign in hear_worker(logs[log], tail, self._node, at_s)
        ]


def hear_worker(worker: str, tail: LogTail, node: str, at_s: float) -> list[Sign]:
    """Signs in what a worker has written since the last look. What it raises is told with its loss;
    a line about that may be of an exception that its code has caught.

    Args:
        worker: that writes there.
        tail: of its file.
        node: where it runs.
        at_s: now, in seconds since the epoch.
    """
    found = (find_sign(line, "worker", node, at_s, {}, writer=worker) for line in tail.read())
    return [sign for sign in found if sign is not None and sign.cause not in _RAISED]


def raylets_log() -> Path | None:
    """What this node's raylet writes to: it lies where Ray keeps the output of this process; None
    where Ray does not."""
    found = (Path(name).with_name("raylet.out") for name in output_files())
    return next((path for path in found if path.is_file()), None)


def own_names() -> list[str]:
    """What other machines may call this one: its host name, its address, its instance id. It asks
    DNS for the address, which may take minutes."""
    host = platform.node()
    names = [host]
    with contextlib.suppress(OSError, UnicodeError):  # DNS does not know it, or cannot write it
        names.append(socket.gethostbyname(host))
    with contextlib.suppress(OSError):  # a container that may not see it
        names.append(_ASSET_TAG.read_text().strip())
    return [name for name in names if name]
