"""A look at this machine, with its own kernel log where that may be written to."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.node import health_watch
from elastic.node.health_watch import SAMPLE_S, HealthWatch, own_names, start_health_watch
from health.diagnosis import Facts, diagnose
from health.heartbeat import Record
from health.kernel_log import KMSG
from health.mounts import read_mounts
from health.reading import Reading
from health.verdict import Sign, sign_from_json
from health.worker_load import WorkerState
from tests.support import ROOT
from tests.support.little_memory import little_memory, requires_limit
from tests.support.stand_ins.nvml import NotSupportedError, Nvml, refuse


@pytest.fixture
def idle() -> Iterator[WorkerState]:
    """A worker that does nothing, in a phase in which it waits."""
    process = subprocess.Popen(["sleep", "1000"])
    record = Record(serial=3, step=2, phase=3, phase_s=0, beat_s=0, collectives=0, thread=1, left=0)
    yield WorkerState(worker="w1", pid=process.pid, record=record, waits=True, works=False)
    process.kill()
    process.wait()


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's list of mounts, as a watch reads it."""
    file = tmp_path / "mounts"
    monkeypatch.setattr(health_watch, "read_mounts", partial(read_mounts, file=file))
    return file


def told_of(worker: WorkerState | None) -> tuple[HealthWatch, list[list[Sign]]]:
    told: list[list[Sign]] = []
    states = [] if worker is None else [worker]
    return HealthWatch("n1", lambda: states, told.append, lambda readings: None), told


def about(told: list[list[Sign]], worker: str) -> list[set[str]]:
    """Names of the signs of a worker: this machine may show others of its own."""
    return [{sign.name for sign in signs if sign.worker == worker} for signs in told]


def test_an_idle_worker_is_told_of_once(idle: WorkerState) -> None:
    watch, told = told_of(idle)
    for look in range(20):
        watch.look(1000 + look * SAMPLE_S, 5000 + look * SAMPLE_S)
    assert about(told, "w1").count({"idle"}) == 1
    (sign,) = (sign for signs in told for sign in signs if sign.worker == "w1")
    assert (sign.node, sign.at_s) == ("n1", 5000 + 6 * SAMPLE_S)


def test_a_worker_whose_waiting_stays_near_a_limit_is_told_of_once(idle: WorkerState) -> None:
    """By turns it waits in none and in four of the readings that are kept: 2 % are little."""
    look, told = 0, list[list[Sign]]()

    def states() -> list[WorkerState]:
        waits = look // 120 % 2 == 1 and look % 120 < 4
        record = replace(idle.record, serial=look)
        return [replace(idle, record=record, waits=waits, works=not waits)]

    watch = HealthWatch("n1", states, told.append, lambda readings: None)
    for look in range(3 * 120):
        watch.look(1000 + look * SAMPLE_S, 0.0)
    assert [names for names, _ in groupby(about(told, "w1"))] == [set(), {"waits_little"}]


def test_a_watch_that_begins_says_so_though_nothing_is_wrong() -> None:
    """What the node's agent before has told must not stand for ever, and others must know names."""
    watch, told = told_of(None)
    watch.look(1000.0, 0.0)
    assert len(told) == 1


def test_what_could_not_be_told_is_told_at_the_next_look_and_then_no_more(
    idle: WorkerState,
) -> None:
    told: list[list[Sign]] = []
    fails_at = [1000.0, 1030.0]  # the first look, and the one that sees the worker idle

    def tell(signs: list[Sign]) -> None:
        if now_s in fails_at:
            raise RuntimeError("the coordinator could not take it")
        told.append(signs)

    watch = HealthWatch("n1", lambda: [idle], tell, lambda readings: None)
    for look in range(10):
        now_s = 1000 + look * SAMPLE_S
        watch.look(now_s, 0.0)
        if now_s == 1030.0:
            assert about(told, "w1") == [set()], "told at the second look"
    assert about(told, "w1") == [set(), {"idle"}]


def test_the_readings_of_each_look_are_shown(idle: WorkerState) -> None:
    shown: list[Reading] = []
    watch = HealthWatch("n1", lambda: [idle], lambda signs: None, shown.extend)
    for at_s in (1000.0, 1005.0):
        watch.look(at_s, 0.0)
    assert [r.at_s for r in shown if (r.kind, r.of) == ("worker", "w1")] == [1000.0, 1005.0]


def test_the_disk_that_workers_write_to_is_looked_at_and_no_other(
    tmp_path: Path, mounts: Path, idle: WorkerState
) -> None:
    mounts.write_text(f"/dev/sda1 /boot ext4 ro 0 0\n/dev/sdb1 {tmp_path / 'ray'} ext4 rw 0 0\n")
    writes = replace(idle, logs=(str(tmp_path / "ray/logs/worker.out"),))
    shown: list[Reading] = []
    watch = HealthWatch("n1", lambda: [writes], lambda signs: None, shown.extend)
    for at_s in (1000.0, 1005.0):
        watch.look(at_s, 0.0)
    assert {r.of for r in shown if r.kind == "mount"} == {str(tmp_path / "ray")}


def disks_lost(told: list[list[Sign]]) -> list[str]:
    return [sign.of for sign in told[-1] if sign.name == "disk_lost"]


def test_a_disk_that_takes_no_file_any_more_is_looked_at(
    mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RLIMIT_FSIZE stands for the disk: where nothing can be written, `tempfile` finds no place."""
    monkeypatch.setattr(tempfile, "tempdir", None)  # as of a process that has asked for none yet
    watch, told = told_of(None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for now_s, options in ((1000.0, "rw"), (1005.0, "ro")):
        mounts.write_text(f"/dev/sda1 / ext4 {options} 0 0\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # binds root too
        try:
            watch.look(now_s, 0.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert disks_lost(told) == ["/"]


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_not_read_any_more_shows_nothing(mounts: Path, fails: bool) -> None:
    """As of a disk that was unmounted, and where the instrument fails from now on."""
    watch, told = told_of(None)
    for now_s, options in ((1000.0, "rw"), (1005.0, "ro"), (1010.0, "ro")):
        mounts.write_text(f"/dev/sda1 / ext4 {options} 0 0\n")
        watch.look(now_s, 0.0)
    if fails:
        mounts.unlink()
    else:
        mounts.write_text("overlay / overlay rw 0 0\n")
    for now_s in range(1015, 1070, 5):
        watch.look(now_s, 0.0)
    assert disks_lost(told) == ["/"], "it stands for a minute"
    watch.look(1070.0, 0.0)
    assert disks_lost(told) == []


def test_what_could_not_be_read_at_one_look_is_held_against_the_one_before(mounts: Path) -> None:
    watch, told = told_of(None)
    mounts.write_text("/dev/sda1 / ext4 rw 0 0\n")
    watch.look(1000.0, 0.0)
    mounts.unlink()
    watch.look(1005.0, 0.0)
    mounts.write_text("/dev/sda1 / ext4 ro 0 0\n")
    watch.look(1010.0, 0.0)
    assert disks_lost(told) == ["/"]


def test_a_worker_that_has_ended_is_forgotten(idle: WorkerState) -> None:
    watch, told = told_of(idle)
    for look in range(7):
        watch.look(1000 + look * SAMPLE_S, 0.0)
    os.kill(idle.pid, 9)
    os.waitpid(idle.pid, 0)
    watch.look(1100.0, 0.0)
    assert about(told, "w1") == [set(), {"idle"}, set()]


@pytest.mark.skipif(not os.access(KMSG, os.R_OK | os.W_OK), reason="may not write to /dev/kmsg")
def test_a_line_of_the_kernel_is_told_of(idle: WorkerState) -> None:
    watch, told = told_of(idle)
    KMSG.write_text(f"Out of memory: Killed process {idle.pid} (sleep) total-vm:1kB\n")
    watch.look(1000.0, 5000.0)
    assert about(told, "w1") == [{"oom_killed"}]


@pytest.mark.skipif(not os.access(KMSG, os.R_OK | os.W_OK), reason="may not write to /dev/kmsg")
def test_what_the_kernel_says_of_a_worker_that_has_ended_since_is_told_of(
    idle: WorkerState,
) -> None:
    states, told = [idle], list[list[Sign]]()
    watch = HealthWatch("n1", lambda: [*states], told.append, lambda readings: None)
    watch.look(1000.0, 5000.0)
    KMSG.write_text(f"Out of memory: Killed process {idle.pid} (sleep) total-vm:1kB\n")
    states.clear()
    watch.look(1005.0, 5005.0)
    assert about(told, "w1")[-1] == {"oom_killed"}


_IN_A_CONTAINER = """
import json, os
from elastic.node.health_watch import HealthWatch
from health.heartbeat import Record
from health.kernel_log import KMSG
from health.worker_load import WorkerState
record = Record(serial=3, step=2, phase=3, phase_s=0, beat_s=0, collectives=0, thread=1, left=0)
states = [WorkerState(worker="w1", pid=os.getpid(), record=record, waits=True, works=False)]
told = []
watch = HealthWatch("n1", lambda: states, told.append, lambda readings: None)
KMSG.write_text(f"Out of memory: Killed process {os.getpid()} (mysqld) total-vm:1kB\\n")
watch.look(1000.0, 5000.0)
print(json.dumps([[s.worker, s.role] for s in told[-1] if s.name == "oom_killed"]))
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access(KMSG, os.R_OK | os.W_OK) or which("unshare") is None,
    reason="makes a namespace of processes, and writes to /dev/kmsg",
)
def test_in_a_container_a_number_in_the_kernels_log_is_not_taken_for_a_worker() -> None:
    """There the kernel's processes have other numbers."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", _IN_A_CONTAINER]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120).stdout
    assert json.loads(said) == [[None, "confirmation"]]


@requires_limit
def test_a_worker_that_the_kernel_ends_for_its_memory_is_told_of_without_the_kernels_log() -> None:
    with little_memory(256 << 20) as group:
        command = [*group.join, sys.executable, "-m", "tests.support.watched_victim"]
        said = subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, timeout=120
        ).stdout
    shown = json.loads(said)
    assert shown["status"] == -signal.SIGKILL
    signs = [sign for sign in map(sign_from_json, shown["signs"]) if sign is not None]
    (count,) = (sign for sign in signs if sign.source == "reading")
    assert (count.worker, count.node, count.role) == ("w1", "n1", "root")
    lost = replace(count, name="crash", source="loss", cause="crash", detail="process 7 ended")
    facts = Facts(signs=[lost, count], nodes={"w1": "n1"}, replicas={}, names={})
    (verdict,) = diagnose(facts)
    assert (verdict.cause, verdict.workers) == ("out_of_memory", ("w1",))


def test_a_line_of_a_workers_output_is_told_of(idle: WorkerState, tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text("CUDA error: uncorrectable ECC error encountered, before its watch began\n")
    watch, told = told_of(replace(idle, logs=(str(log),)))
    watch.look(1000.0, 5000.0)
    with log.open("a") as file:
        file.write("ValueError: caught, and printed\nCUDA out of memory, caught as well\n")
        file.write("RuntimeError: CUDA error: uncorrectable ECC error encountered\nhalf a li")
    watch.look(1005.0, 5005.0)
    assert about(told, "w1") == [set(), {"cuda_ecc"}]
    (sign,) = (sign for sign in told[-1] if sign.worker == "w1")
    assert (sign.source, sign.worker, sign.node, sign.at_s) == ("log", "w1", "n1", 5005.0)


def test_the_last_words_of_a_worker_that_has_ended_since_are_told_of(
    idle: WorkerState, tmp_path: Path
) -> None:
    log = tmp_path / "worker.err"
    log.touch()
    states, told = [replace(idle, logs=(str(log),))], list[list[Sign]]()
    watch = HealthWatch("n1", lambda: [*states], told.append, lambda readings: None)
    watch.look(1000.0, 5000.0)
    log.write_text("RuntimeError: CUDA error: uncorrectable ECC error encountered\n")
    states.clear()
    watch.look(1005.0, 5005.0)
    assert about(told, "w1")[-1] == {"cuda_ecc"}


def test_an_instrument_that_fails_leaves_the_others_and_is_told_of_once(
    idle: WorkerState, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(at_s: float) -> list[Reading]:
        raise ValueError("the device answers no more")

    monkeypatch.setattr(health_watch, "read_efa", fail)
    watch, told = told_of(idle)
    for look in range(8):
        watch.look(1000 + look * SAMPLE_S, 0.0)
    assert about(told, "w1")[-1] == {"idle"}
    assert capfd.readouterr().err.count("ValueError: the device answers no more\n") == 1


def nvml_of(gpus: int, **answers: Any) -> Nvml:
    """Of GPUs whose addresses begin at 0000:90:00."""
    return Nvml(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: gpus,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetPciInfo=lambda gpu: SimpleNamespace(busId=f"00000000:{0x90 + gpu:02X}:00.0"),
        nvmlEventSetCreate=refuse,
        **answers,
    )


@pytest.mark.parametrize("broken", ["nvmlDeviceGetCount", "nvmlEventSetCreate"])
def test_the_node_is_looked_at_without_nvml_until_it_starts(
    broken: str, idle: WorkerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a GPU is reset, or the driver comes, after the agent."""
    nvml = nvml_of(1)
    sound = getattr(nvml, broken)

    def fail() -> None:
        raise NotSupportedError if broken.startswith("nvmlDevice") else RuntimeError

    setattr(nvml, broken, fail)
    starts: list[int] = []
    nvml.nvmlInit, nvml.nvmlShutdown = lambda: starts.append(1), starts.pop
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    shown: list[Reading] = []
    told: list[list[Sign]] = []
    watch = HealthWatch("n1", lambda: [idle], told.append, shown.extend)
    for look in range(7):
        watch.look(1000 + look * SAMPLE_S, 0.0)
    assert about(told, "w1")[-1] == {"idle"} and not any(r.kind == "gpu" for r in shown)
    assert not starts, "NVML counts them"
    setattr(nvml, broken, sound)
    for at_s in (1040.0, 1045.0):
        watch.look(at_s, 0.0)
    gpus = [(r.of, r.at_s) for r in shown if r.kind == "gpu"]
    assert gpus == [("0000:90:00", 1040.0), ("0000:90:00", 1045.0)]


@pytest.mark.parametrize(
    ("has_our_pids", "other", "worker"),
    [(True, [3_999_999], "w1"), (False, [3_999_999], None), (False, [], "w1")],
)
def test_a_gpu_is_tied_to_a_worker_by_no_number_that_may_be_another_process(
    has_our_pids: bool,
    other: list[int],
    worker: str | None,
    idle: WorkerState,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a container of its own, with a driver that gives the machine's numbers or translates."""
    pids = {0: [idle.pid], 1: other}
    nvml = nvml_of(
        2,
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: [
            SimpleNamespace(pid=p) for p in pids[gpu]
        ],
        nvmlDeviceGetRemappedRows=lambda gpu: (0, 0, 0, gpu == 0),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(health_watch, "has_our_pids", lambda: has_our_pids)
    shown: list[Reading] = []
    told: list[list[Sign]] = []
    HealthWatch("n1", lambda: [idle], told.append, shown.extend).look(1000.0, 0.0)
    assert [s.worker for s in told[-1] if s.of == "0000:90:00"] == [worker]
    if worker is None:  # any of the GPUs may be its own
        assert all(reading.concerns(idle.pid) for reading in shown if reading.kind == "gpu")


def test_it_looks_on_a_thread_that_holds_nobody_up_and_goes_on_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health_watch, "SAMPLE_S", 0.01)
    asked: list[int] = []
    again = threading.Event()

    def states() -> list[WorkerState]:
        asked.append(1)
        if len(asked) == 1:
            raise OSError("this ends one look, and no more")
        again.set()
        raise SystemExit  # and this the thread

    start_health_watch("n1", states, lambda signs: None, lambda readings: None)
    assert again.wait(30)


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
def test_a_name_that_dns_cannot_have_is_one(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: host)
    assert own_names()[0] == host


def test_a_machine_has_a_name() -> None:
    assert os.uname().nodename in own_names()
    assert all(own_names())
