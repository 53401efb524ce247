"""What is read of a machine: trees as the kernel shows them, and this machine."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from health.efa import COUNTERS, read_efa
from health.gpu import Gpus, bus_address
from health.heartbeat import Record
from health.kernel_log import KMSG, KernelLog, open_kernel_log, parse_record
from health.mounts import PROC, read_mounts
from health.nic import read_nics
from health.oom_kills import read_oom_kills
from health.worker_load import WorkerState, read_worker
from health.xid_events import XidEvents
from tests.support.nvml_names import names_asked
from tests.support.stand_ins.nvml import (
    LostError,
    NoPermissionError,
    NotSupportedError,
    Nvml,
    refuse,
    require_reset,
)
from tests.support.watching import wait_until


def device(root: Path, name: str, vendor: str, kind: str, **counters: int) -> None:
    """An RDMA device with a port, as sysfs has it."""
    counted = root / name / "ports/1/hw_counters"
    counted.mkdir(parents=True)
    (root / name / "device").mkdir()
    (root / name / "device/vendor").write_text(f"{vendor}\n")
    (root / name / "device/device").write_text(f"{kind}\n")
    for counter, value in counters.items():
        (counted / counter).write_text(f"{value}\n")


def test_efa_is_told_from_other_devices(tmp_path: Path) -> None:
    device(tmp_path, "rdmap16s27", "0x1d0f", "0xefa2", rx_drops=7, retrans_bytes=9, lifespan=12)
    device(tmp_path, "mlx5_0", "0x15b3", "0x101b", rx_drops=8)
    device(tmp_path, "ena_0", "0x1d0f", "0xec20", rx_drops=8)
    device(tmp_path, "other_0", "0x15b3", "0xefa2", rx_drops=8)
    (reading,) = read_efa(3.0, tmp_path)
    assert (reading.kind, reading.of, reading.at_s) == ("efa", "rdmap16s27 port 1", 3.0)
    assert reading.values == {"rx_drops": 7.0, "retrans_bytes": 9.0}
    assert set(reading.values) <= set(COUNTERS)
    assert read_efa(0.0, tmp_path / "none") == []


def test_a_counter_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    """As of an EFA device that is going: the file is there, and empty or not to be read."""
    device(tmp_path, "rdmap16s27", "0x1d0f", "0xefa2", rx_drops=7)
    counted = tmp_path / "rdmap16s27/ports/1/hw_counters"
    (counted / "retrans_pkts").mkdir()
    (counted / "retrans_bytes").touch()
    (reading,) = read_efa(3.0, tmp_path)
    assert reading.values == {"rx_drops": 7.0}


def test_interfaces(tmp_path: Path) -> None:
    (tmp_path / "eth0/statistics").mkdir(parents=True)
    (tmp_path / "eth0/statistics/rx_errors").write_text("4\n")
    (tmp_path / "eth0/statistics/tx_errors").touch()
    (tmp_path / "eth0/carrier_down_count").write_text("2\n")
    (tmp_path / "lo/statistics").mkdir(parents=True)
    (reading,) = read_nics(1.0, tmp_path)
    assert reading.of == "eth0"
    assert reading.values == {"rx_errors": 4.0, "carrier_down_count": 2.0}


def test_the_interfaces_of_this_machine() -> None:
    found = {reading.of for reading in read_nics(0.0)}
    assert found == {p.name for p in Path("/sys/class/net").iterdir() if p.name != "lo"}
    assert all("rx_errors" in reading.values for reading in read_nics(0.0))


def test_mounts_of_disks_that_are_written_to_the_last_at_each_place(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/sda1 / ext4 rw,relatime,errors=remount-ro 0 0\n"
        "proc /proc proc ro 0 0\n"
        "/dev/sdb1 /data ext4 ro,errors=remount-ro 0 0\n"
        "/dev/sdc1 /data xfs rw 0 0\n"
        "/dev/sdd1 /old ext4 ro,relatime 0 0\n"
        "/dev/sde1 /staged ext4 ro,relatime 0 0\n"
        "tmpfs /tmp tmpfs rw 0 0\n"
        "/dev/sdf1 /my\\040logs ext4 ro 0 0\n"
    )
    written = [Path(path) for path in ("/home/me", "/data", "/old/a/b", "/tmp/ray", "/my logs/1")]
    found = {one.of: one.values["read_only"] for one in read_mounts(0.0, written, mounts)}
    assert found == {"/": 0.0, "/data": 0.0, "/old": 1.0, "/my logs": 1.0}


def test_mounts_of_this_machine() -> None:
    disks = [line.split()[1] for line in PROC.read_text().splitlines() if line.startswith("/dev/")]
    found = read_mounts(0.0, [Path(place) / "x" for place in disks])
    assert {reading.of for reading in found} == {*disks}


@pytest.mark.parametrize(
    ("cgroup", "counts", "counted"),
    [
        ("0::/pod/box", {"cg/pod/box/memory.events": 2, "cg/pod/memory.events": 9}, 2.0),
        ("0::/pod/box", {"cg/memory.events": 2, "proc/vmstat": 9}, 2.0),  # mounted as a root
        ("4:cpu,memory:/box\n0::/", {"cg/memory/box/memory.oom_control": 2}, 2.0),
        ("4:memory:/box\n1:cpu:/", {"cg/memory/memory.oom_control": 2, "cg/memory.events": 9}, 2.0),
        ("0::/", {"proc/vmstat": 2}, 2.0),  # the first group has no count
        ("0::/pod/box", {}, None),
    ],
)
def test_processes_that_the_kernel_has_ended_for_memory(
    tmp_path: Path, cgroup: str, counts: dict[str, int], counted: float | None
) -> None:
    for name, count in {**counts, "proc/self/cgroup": 0}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"under_oom 0\noom_kill {count}\noom_kill_local 7\n")
    (tmp_path / "proc/self/cgroup").write_text(f"{cgroup}\n")
    found = read_oom_kills(3.0, tmp_path / "proc", tmp_path / "cg")
    assert [(r.kind, r.values["oom_kills"]) for r in found] == (
        [] if counted is None else [("memory", counted)]
    )


def test_this_machine_counts_them() -> None:
    (reading,) = read_oom_kills(0.0)
    assert Path(reading.of).is_file() and reading.values["oom_kills"] >= 0


def state(pid: int) -> WorkerState:
    record = Record(serial=9, step=1, phase=1, phase_s=0, beat_s=0, collectives=0, thread=1, left=0)
    return WorkerState(worker="w1", pid=pid, record=record, waits=False, works=True)


@pytest.fixture
def busy_and_idle() -> Iterator[list[int]]:
    """A process that computes, and one that sleeps."""
    commands = ["sh", "-c", "while :; do :; done"], ["sleep", "1000"]
    processes = [subprocess.Popen(command) for command in commands]
    yield [process.pid for process in processes]
    for process in processes:
        process.kill()
        process.wait()


def cpu_s(pid: int) -> float:
    reading = read_worker(state(pid), time.monotonic())
    assert reading is not None and reading.pids == (pid,)
    assert reading.values["marks"] == 9 and reading.values["in_kernel"] == 0
    return reading.values["cpu_s"]


def test_who_computes_has_processor_time_and_who_sleeps_has_none(busy_and_idle: list[int]) -> None:
    busy, idle = busy_and_idle
    wait_until(lambda: cpu_s(busy) > 0.2, 20.0)
    assert cpu_s(idle) < 0.1


def test_of_a_worker_that_is_gone_nothing_is_read() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert read_worker(state(process.pid), 0.0) is None


def test_the_text_of_a_kernel_record() -> None:
    record = b"4,812,99,-;NVRM: Xid (PCI:0000:05:00): 79; gone\n SUBSYSTEM=pci\n DEVICE=+pci:0\n"
    assert parse_record(record) == "NVRM: Xid (PCI:0000:05:00): 79; gone"
    assert parse_record(b"\xff\xfe") == ""


@pytest.mark.skipif(not os.access(KMSG, os.R_OK | os.W_OK), reason="may not write to /dev/kmsg")
def test_the_kernel_log_is_read_from_its_opening_on() -> None:
    def write(text: str) -> None:
        KMSG.write_text(text)

    write("elastictrainer test: before\n")
    log = KernelLog()
    assert log.read() == []
    write("elastictrainer test: after\n")
    assert "elastictrainer test: after" in log.read()
    assert not any("elastictrainer" in line for line in log.read())
    log.close()


def test_where_the_kernel_log_may_not_be_read_there_is_none(tmp_path: Path) -> None:
    assert open_kernel_log(tmp_path / "kmsg") is None


# -- GPUs: NVML is not here, so what stands for it answers as its documentation says ---------------


def gpus(nvml: type[Nvml] = Nvml, **answers: Any) -> Gpus:
    """Two, of which the first is another container's."""

    def open_gpu(index: int) -> str:
        if index == 0:
            raise NoPermissionError
        return f"gpu {index}"

    return Gpus(
        nvml(  # type: ignore[arg-type]
            nvmlDeviceGetCount=lambda: 2,
            nvmlDeviceGetHandleByIndex=answers.pop("nvmlDeviceGetHandleByIndex", open_gpu),
            nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId="00000000:9B:00.0"),
            **answers,
        )
    )


def test_a_bus_address_is_that_of_the_kernel_log() -> None:
    assert bus_address("00000000:9B:00.0") == "0000:9b:00"
    assert bus_address("00000009:01:00.0") == "0009:01:00"


REACHED = {"lost": 0.0, "unanswered": 0.0}

LINKS = {0: 0, 5: 2, 17: 1}
"""Errors of the NVLinks that there are."""


def fields(handle: str, asked: Sequence[Any]) -> list[SimpleNamespace]:
    """Where no link is named, its first is meant."""
    links = [field[1] if isinstance(field, tuple) else 0 for field in asked]
    return [
        SimpleNamespace(
            nvmlReturn=0 if link in LINKS else 3,
            valueType=1,
            value=SimpleNamespace(uiVal=LINKS.get(link), ullVal=99),
        )
        for link in links
    ]


def test_what_a_gpu_has_is_read_and_the_rest_is_left_out() -> None:
    (reading,) = gpus(
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=97),
        nvmlDeviceGetPowerUsage=lambda handle: 412_000,
        nvmlDeviceGetRemappedRows=lambda handle: (4, 3, 0, 1),
        nvmlDeviceGetFieldValues=fields,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=7)],
    ).read(5.0)
    assert (reading.of, reading.pids) == ("0000:9b:00", (7,))
    assert reading.values == {
        "lost": 0.0,
        "unanswered": 0.0,
        "utilization_percent": 97.0,
        "power_w": 412.0,
        "remap_pending": 0.0,
        "remap_failed": 1.0,
        "nvlink_errors": 3.0,
        "nvlink_recoveries": 3.0,
        "recovery_action": 0.0,
    }


ECC = {
    ("NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC"): 2,
    ("NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_AGGREGATE_ECC"): 5,
    ("NVML_MEMORY_ERROR_TYPE_CORRECTED", "NVML_VOLATILE_ECC"): 11,
}
FIELDS = {
    ("NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS", 0): 2,
    ("NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS", 17): 1,
    ("NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS", 5): 4,
    "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION": 1,
}
"""Of one link or of the GPU. All are long numbers."""


def long_fields(handle: str, asked: Sequence[Any]) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(
            nvmlReturn=0 if field in FIELDS else 3,
            valueType=3,
            value=SimpleNamespace(uiVal=99, ullVal=FIELDS.get(field)),
        )
        for field in asked
    ]


ALL_THAT_IS_ASKED: dict[str, Any] = {
    "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=97, memory=41),
    "nvmlDeviceGetPowerUsage": lambda handle: 412_000,
    "nvmlDeviceGetClockInfo": lambda handle, clock: {"NVML_CLOCK_SM": 1755}[clock],
    "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x48,
    "nvmlDeviceGetTemperature": lambda handle, sensor: {"NVML_TEMPERATURE_GPU": 61}[sensor],
    "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(
        total=80, reserved=1, free=29, used=50
    ),
    "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: ECC[kind, counter],
    "nvmlDeviceGetRemappedRows": lambda handle: (4, 3, 0, 1),
    "nvmlDeviceGetPcieReplayCounter": lambda handle: 7,
    "nvmlDeviceGetFieldValues": long_fields,
    "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=7)],
}


def test_each_value_is_that_of_its_question() -> None:
    (reading,) = gpus(**ALL_THAT_IS_ASKED).read(5.0)
    assert reading.values == {
        **REACHED,
        "utilization_percent": 97.0,
        "power_w": 412.0,
        "sm_clock_mhz": 1755.0,
        "throttle_reasons": 72.0,
        "temperature_c": 61.0,
        "memory_used_bytes": 50.0,
        "ecc_uncorrected_volatile": 2.0,
        "ecc_uncorrected_aggregate": 5.0,
        "ecc_corrected_volatile": 11.0,
        "remap_pending": 0.0,
        "remap_failed": 1.0,
        "pcie_replays": 7.0,
        "nvlink_errors": 3.0,
        "nvlink_recoveries": 4.0,
        "recovery_action": 1.0,
    }


def test_nvidias_package_has_what_we_ask_it_for() -> None:
    """What it lacks would be left out in silence, as of an older one."""
    recorded = json.loads(Path(__file__).with_name("nvml_names.json").read_text())["names"]
    assert names_asked() == {*recorded}, "python -m tests.support.nvml_names WHEEL"
    for name, answer in ALL_THAT_IS_ASKED.items():
        assert len(inspect.signature(answer).parameters) == len(recorded[name]), name


def test_the_nvlinks_of_gpus_before_blackwell_are_asked_one_by_one() -> None:
    """Those have no field of errors, and Blackwell has no other counters. A link that is down is
    not asked; nor is found out anew, at each look, which way works."""
    counters = {
        ("NVML_NVLINK_ERROR_DL_REPLAY", 0): 4,
        ("NVML_NVLINK_ERROR_DL_CRC_FLIT", 11): 2,
        ("NVML_NVLINK_ERROR_DL_RECOVERY", 11): 1,
    }
    calls: list[str] = []
    starts = [True]

    def unknown_fields(handle: str, asked: Sequence[Any]) -> list[SimpleNamespace]:
        calls.append("fields")
        return [SimpleNamespace(nvmlReturn=3) for _ in asked]

    def state(handle: str, link: int) -> int:
        calls.append("state")
        return refuse() if link >= 12 else int(link != 5)

    def count(handle: str, link: int, counter: str) -> int:
        assert link < 12 and link != 5
        calls.append(counter)
        return refuse() if counter.endswith("CRC_DATA") else counters.get((counter, link), 0)

    a100 = gpus(
        nvmlDeviceGetFieldValues=unknown_fields,
        nvmlDeviceGetNvLinkState=lambda handle, link: 0 if starts else state(handle, link),
        nvmlDeviceGetNvLinkErrorCounter=count,
    )
    assert [one.values for one in a100.read(0.0)] == [REACHED], "no link is up yet"
    starts.clear()
    nothing_new = {**REACHED, "nvlink_errors": 6.0, "nvlink_recoveries": 1.0}
    assert [one.values for one in a100.read(5.0)] == [nothing_new]
    calls.clear()
    counters["NVML_NVLINK_ERROR_DL_REPLAY", 0] = 5
    assert [one.values for one in a100.read(10.0)] == [{**nothing_new, "nvlink_errors": 7.0}]
    assert calls.count("fields") == 1, "of the recovery action"
    assert "state" not in calls and calls.count("NVML_NVLINK_ERROR_DL_RECOVERY") == 11


def test_of_a_gpu_that_is_lost_nothing_else_is_said() -> None:
    def lose(handle: str) -> Any:
        raise LostError

    (reading,) = gpus(
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=97),
        nvmlDeviceGetMemoryInfo=lose,
    ).read(5.0)
    assert reading.values == {"lost": 1.0}


def test_a_gpu_that_must_be_reset_says_so_by_an_error() -> None:
    """What it still answers counts; of a graver action the driver tells by its field."""
    actions = [0, 2]

    def action(handle: str, asked: Sequence[Any]) -> list[SimpleNamespace]:
        if asked != ["NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"]:
            return require_reset()
        return [SimpleNamespace(nvmlReturn=0, valueType=1, value=SimpleNamespace(uiVal=actions[0]))]

    ill = gpus(
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=97),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=7)],
        nvmlDeviceGetFieldValues=action,
        nvmlDeviceGetRemappedRows=require_reset,
    )
    (reading,) = ill.read(5.0)
    told = {**REACHED, "utilization_percent": 97.0, "recovery_action": 1.0}
    assert (reading.values, reading.pids) == (told, (7,))
    actions.pop(0)
    assert [one.values["recovery_action"] for one in ill.read(10.0)] == [2.0]


def test_a_gpu_that_has_answered_and_answers_nothing_any_more_is_told_from_one_that_cannot() -> (
    None
):
    working = [True]
    ill = gpus(
        nvmlDeviceGetTemperature=lambda handle, sensor: 61 if working else refuse(),
        nvmlDeviceGetPowerUsage=lambda handle: 412_000,
    )
    assert [one.values["unanswered"] for one in ill.read(5.0)] == [0.0]
    working.clear()
    assert [one.values["unanswered"] for one in ill.read(10.0)] == [1.0]
    working.append(True)
    assert [one.values["unanswered"] for one in ill.read(15.0)] == [0.0]
    never = gpus(nvmlDeviceGetPowerUsage=lambda handle: 412_000)
    assert [one.values["unanswered"] for one in never.read(5.0)] == [0.0]
    reset = gpus(nvmlDeviceGetTemperature=lambda *_: 61 if working else require_reset())
    reset.read(5.0)
    working.clear()
    assert [one.values for one in reset.read(10.0)] == [{**REACHED, "recovery_action": 1.0}]


def test_a_gpu_that_cannot_be_reached_from_the_start_on_is_told_of_until_it_is() -> None:
    def lose() -> str:
        raise LostError

    opens = {0: lose, 1: refuse}
    found = gpus(nvmlDeviceGetHandleByIndex=lambda index: opens[index]())
    assert [(one.of, one.values) for one in found.read(5.0)] == [
        ("index 0", {"lost": 1.0}),
        ("index 1", {"lost": 0.0, "unanswered": 1.0}),
    ]
    assert not found.handles
    opens[1] = lambda: "gpu 1"
    assert [one.of for one in found.read(10.0)] == ["index 0", "0000:9b:00"]
    assert [one.of for one in found.read(15.0)] == ["index 0", "0000:9b:00"]


def test_what_an_older_package_of_nvml_does_not_know_is_left_out() -> None:
    class Older(Nvml):
        def __getattr__(self, name: str) -> Any:
            if name in ("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", "nvmlDeviceGetRemappedRows"):
                raise AttributeError(name)
            return super().__getattr__(name)

    (reading,) = gpus(Older, nvmlDeviceGetPowerUsage=lambda handle: 412_000).read(5.0)
    assert reading.values == {**REACHED, "power_w": 412.0}


class NoneLeftError(NotSupportedError):
    pass


def none_left(*_: Any) -> Any:
    raise NoneLeftError


class Events(Nvml):
    """Tells a GPU's Xids, each once, as `nvmlEventSetWait_v2` does."""

    NVMLError_Timeout = NoneLeftError
    nvmlEventTypeXidCriticalError = 8

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvmlEvent"):
            raise AttributeError(name)  # of an older package
        return super().__getattr__(name)


def event(xid: int, kind: int = 8) -> SimpleNamespace:
    return SimpleNamespace(eventType=kind, eventData=xid)


def test_the_xids_of_each_gpu_are_read_once() -> None:
    waiting: dict[str, list[Any]] = {"set 1": [], "set 2": [event(1)]}
    sets = iter(waiting)
    registered: list[tuple[str, int, str]] = []

    def wait(events: str, timeout_ms: int) -> SimpleNamespace:
        assert timeout_ms == 0
        return waiting[events].pop(0) if waiting[events] else none_left()

    events = XidEvents(
        Events(  # type: ignore[arg-type]
            nvmlEventSetCreate=lambda: next(sets),
            nvmlDeviceRegisterEvents=lambda *given: registered.append(given),
            nvmlEventSetWait_v2=wait,
        ),
        {"0000:9b:00": "gpu 1", "0000:9c:00": "gpu 2"},
    )
    assert registered == [("gpu 1", 8, "set 1"), ("gpu 2", 8, "set 2")]
    waiting["set 1"] = [event(94), event(63, kind=2), event(79), event(94)]
    first, second = events.read(5.0)
    assert (first.kind, first.of, first.values) == ("xid", "0000:9b:00", {"94": 2.0, "79": 1.0})
    assert (second.of, second.values) == ("0000:9c:00", {"1": 1.0})
    assert events.read(10.0) == []


def test_the_xids_of_a_gpu_that_is_reached_later_are_read_from_then_on() -> None:
    asked: list[str] = []
    gpus = {"0000:9b:00": "gpu 1"}

    def register(handle: str, *_: Any) -> None:
        asked.append(handle)
        if handle == "gpu 1":
            refuse()

    waiting = [event(79)]
    nvml = Events(
        nvmlEventSetCreate=lambda: "set",
        nvmlDeviceRegisterEvents=register,
        nvmlEventSetWait_v2=lambda *_: waiting.pop() if waiting else none_left(),
    )
    events = XidEvents(nvml, gpus)  # type: ignore[arg-type]
    assert events.read(5.0) == []
    gpus["0000:9c:00"] = "gpu 2"
    assert [(one.of, one.values) for one in events.read(10.0)] == [("0000:9c:00", {"79": 1.0})]
    assert events.read(15.0) == []
    assert asked == ["gpu 1", "gpu 2"], "each once: the first has no events"


def test_an_error_of_one_gpu_is_told_once_and_hides_no_xid(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither its own of before nor another GPU's; that none is left is no error."""
    sets = iter(["set 1", "set 2"])
    waiting = {"set 1": [event(79)], "set 2": [event(94)]}

    def wait(events: str, _: int) -> Any:
        if waiting[events]:
            return waiting[events].pop()
        return refuse() if events == "set 1" else none_left()

    nvml = Events(
        nvmlEventSetCreate=lambda: next(sets),
        nvmlDeviceRegisterEvents=lambda *_: None,
        nvmlEventSetWait_v2=wait,
    )
    events = XidEvents(nvml, {"0000:9b:00": "gpu 1", "0000:9c:00": "gpu 2"})  # type: ignore[arg-type]
    assert [one.values for one in events.read(5.0)] == [{"79": 1.0}, {"94": 1.0}]
    assert events.read(10.0) == []
    (told,) = caplog.messages
    assert "0000:9b:00" in told and "NotSupportedError" in told


def test_a_storm_of_xids_holds_no_look_up() -> None:
    answers = dict(nvmlEventSetCreate=lambda: "set", nvmlDeviceRegisterEvents=lambda *_: None)
    storm = Events(nvmlEventSetWait_v2=lambda *_: event(31), **answers)
    (reading,) = XidEvents(storm, {"0000:9b:00": "gpu"}).read(5.0)  # type: ignore[arg-type]
    assert reading.values == {"31": 100.0}


@pytest.mark.parametrize(
    "answers",
    [
        {},  # an older package
        {"nvmlEventSetCreate": refuse},
        {"nvmlEventSetCreate": lambda: "set", "nvmlDeviceRegisterEvents": refuse},
        {"nvmlEventSetCreate": lambda: "set", "nvmlDeviceRegisterEvents": lambda *_: None},
    ],
)
def test_where_nvml_has_no_events_there_are_none(answers: dict[str, Any]) -> None:
    events = XidEvents(Events(**answers), {"0000:9b:00": "gpu"})  # type: ignore[arg-type]
    assert events.read(5.0) == []
