"""Each check on a whole machine and on a broken one. Machines are trees of real files; `fi_info` is
a program in them."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from elastic.cli.doctor import show
from elastic.cli.main import main
from elastic.doctor import gpu_checks, load_checks
from elastic.doctor.affinity_check import judge_affinity
from elastic.doctor.clock import Clock, read_clock
from elastic.doctor.finding import EXIT_STATUS, SEVERITIES, Finding, worst_severity
from elastic.doctor.gpu_checks import given_gpus, judge_gpu_health, judge_no_nvml
from elastic.doctor.machine import Machine, machine_with, this_machine
from elastic.doctor.run import CHECKS, run_checks
from elastic.doctor.system_checks import (
    judge_disks,
    judge_kernel_log,
    judge_ports,
    judge_shared_memory,
)
from health.reading import Reading
from tests.support.aws_machine import PLUGIN_FOLDER, make_machine, write
from tests.support.stand_ins.nvml import Nvml
from trainer.backend.efa_facts import read_efa

GIB = 2**30
KEPT = Clock(synchronised=True, offset_s=-0.002)


def look_at(root: Path, **environment: str) -> Machine:
    return Machine(
        root=root,
        environment=environment,
        facts=read_efa(root, packages=()),
        folders=(),
        memlock_bytes=None,
        open_files=None,
        clock=KEPT,
    )


def findings(machine: Machine) -> dict[str, Finding]:
    return {one.check: one for one in run_checks(machine)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_machine(tmp_path / "machine")


def test_a_whole_machine_needs_nothing(root: Path) -> None:
    found = findings(look_at(root))
    assert {one.severity for one in found.values()} == {"OK"}
    assert not any(one.meaning or one.fix for one in found.values())
    assert found["GPUs"].result == "all 8" and found["EFA devices"].result == "all 32"
    assert found["NCCL plugin"].result == f"in /{PLUGIN_FOLDER}"
    assert found["aws-ofi-nccl"].result == "version 1.17.1"
    assert found["environment"].result == "sets 2 of 2"


def test_a_machine_of_another_kind_needs_nothing(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = findings(look_at(tmp_path, NCCL_NET="Socket"))
    assert {one.severity for one in found.values()} == {"OK"}


def remove(*names: str) -> Callable[[Path], None]:
    def do(root: Path) -> None:
        for name in names:
            for file in list(root.glob(name)):
                shutil.rmtree(file) if file.is_dir() else file.unlink()

    return do


def says(text: str, status: int) -> Callable[[Path], None]:
    def do(root: Path) -> None:
        file = write(
            root / "opt/amazon/efa/bin/fi_info", f"#!/bin/sh\necho '{text}'\nexit {status}"
        )
        file.chmod(0o755)

    return do


def has(name: str, text: str) -> Callable[[Path], None]:
    def do(root: Path) -> None:
        write(root / name, text)

    return do


LIBRARY = f"{PLUGIN_FOLDER}/libnccl-net.so"
NCCL = "usr/lib/x86_64-linux-gnu/libnccl.so.2.*"
INSTALLED = "opt/amazon/efa_installed_packages"
OLD_DRIVER = has("sys/module/nvidia/version", "470.82.01")
OLD_INSTALLER = has(INSTALLED, "# EFA installer version: 1.29.0\n")
OLD_LIBFABRIC = has(INSTALLED, "libfabric-aws-1.17.1amzn3.0-1.x86_64")
OLD_PLUGIN = has(LIBRARY, "aws-ofi-nccl 1.7.2-aws")


@pytest.mark.parametrize(
    ("check", "severity", "result", "break_it"),
    [
        ("GPUs", "ISOLATE", "7 of 8", remove("proc/driver/nvidia/gpus/0000:53*")),
        (
            "GPUs",
            "REBOOT",
            "0 of 8, no driver is loaded",
            remove("proc/driver/nvidia", "sys/module/nvidia"),
        ),
        ("EFA devices", "ISOLATE", "0 of 32", remove("sys/class/infiniband/rdmap*")),
        ("EFA devices", "MONITOR", "31 of 32", remove("sys/class/infiniband/rdmap79s0")),
        ("EFA devices", "RESET", "32 of 32, 0 in /dev/infiniband", remove("dev/infiniband")),
        ("EFA provider", "RESET", "fi_info says: fi_getinfo: -61", says("fi_getinfo: -61", 61)),
        ("EFA provider", "RESET", "fi_info says: provider: tcp", says("provider: tcp", 0)),
        ("EFA provider", "RESET", "fi_info says: provider: efa", says("provider: efa", 1)),
        ("NCCL plugin", "RESET", "no libnccl-net.so", remove(LIBRARY)),
        (
            "NCCL plugin",
            "RESET",
            f"in /{PLUGIN_FOLDER}, where the loader does not look",
            remove("etc/ld.so.conf.d/*"),
        ),
        ("aws-ofi-nccl", "RESET", "version 1.7.2", OLD_PLUGIN),
        ("EFA installer", "RESET", "version 1.29.0", OLD_INSTALLER),
        ("libfabric", "RESET", "version 1.17.1", OLD_LIBFABRIC),
        ("GPU driver", "RESET", "version 470.82.01", OLD_DRIVER),
    ],
)
def test_what_is_broken_is_named(
    check: str, severity: str, result: str, break_it: Callable[[Path], None], root: Path
) -> None:
    break_it(root)
    found = findings(look_at(root))[check]
    assert (found.severity, found.result) == (severity, result)
    assert found.meaning and found.fix


@pytest.mark.parametrize(
    ("driver", "cuda", "severity"),
    [
        ("575.57.08", 13, "RESET"),
        ("580.65.06", 13, "OK"),
        ("575.57.08", 12, "OK"),
        ("575.57.08", None, "OK"),
        ("470.82.01", 13, "RESET"),
    ],
)
def test_a_driver_is_held_against_the_cuda_that_torch_has_brought(
    driver: str, cuda: int | None, severity: str, root: Path
) -> None:
    has("sys/module/nvidia/version", driver)(root)
    machine = look_at(root)
    machine = replace(machine, facts=replace(machine.facts, cuda=cuda))
    assert findings(machine)["GPU driver"].severity == severity


def test_a_compatibility_package_stands_in_for_a_driver(root: Path) -> None:
    has("sys/module/nvidia/version", "575.57.08")(root)
    machine = look_at(root)
    machine = replace(machine, facts=replace(machine.facts, cuda=13))
    found = findings(machine)["GPU driver"]
    assert found.severity == "RESET" and "CUDA 13" in found.meaning
    has("usr/local/cuda-13.0/compat/libcuda.so.1", "ELF")(root)
    assert findings(machine)["GPU driver"].severity == "OK"


def test_where_the_gpus_lie(root: Path) -> None:
    halves = [f"NUMA node {node}: 4 GPUs, 16 EFA devices" for node in (0, 1)]
    assert findings(look_at(root))["affinity"].result == ", ".join(halves)
    for device in list((root / "sys/class/infiniband").glob("rdmap*")):
        write(device / "device/numa_node", "0\n")
    found = findings(look_at(root))["affinity"]
    assert found.severity == "MONITOR" and "network card" in found.fix
    assert found.result.endswith("; no EFA device beside the GPUs of NUMA node 1")
    # A container that was given half of the GPUs asks for no more.
    remove("dev/nvidia[4-7]")(root)
    found = findings(look_at(root))["affinity"]
    assert (found.severity, found.result) == ("OK", "NUMA node 0: 4 GPUs, 32 EFA devices")
    remove("sys/bus/pci/devices/*")(root)
    assert findings(look_at(root))["affinity"].result == "the machine tells no NUMA nodes"


def test_the_processors_beside_the_gpus() -> None:
    gpus, cpus = {0: 4, 1: 4}, {0: {0, 1}, 1: {2, 3}}
    assert judge_affinity(gpus, {}, cpus, {1, 2}).severity == "OK"
    found = judge_affinity(gpus, {0: 2}, cpus, {0, 1})
    assert found.severity == "MONITOR" and found.fix.count("; ") == 1
    assert found.result.endswith("; no CPU beside the GPUs of NUMA node 1 may be used")
    # What the machine does not tell is not held against it.
    assert judge_affinity(gpus, {-1: 2}, {0: set(), 1: set()}, {0}).severity == "OK"
    assert judge_affinity({}, {}, {}, {0}).result == "no GPU"


@pytest.mark.parametrize(
    ("version", "severity"),
    [
        ("2.18.3", "RESET"),
        ("2.18.5", "OK"),
        ("2.28.3", "MONITOR"),
        ("2.28.8", "MONITOR"),
        ("2.28.9", "OK"),
    ],
)
def test_the_versions_of_nccl(version: str, severity: str, tmp_path: Path) -> None:
    machine = look_at(make_machine(tmp_path / "machine", nccl=version))
    assert findings(machine)["NCCL"].severity == severity


def test_a_program_that_is_missing_is_named(root: Path) -> None:
    remove("opt/amazon/efa/bin/fi_info")(root)
    found = findings(look_at(root))["EFA provider"]
    assert found.severity == "RESET" and found.result.endswith("bin/fi_info is missing")


def test_the_users_path_of_libraries_counts(root: Path) -> None:
    remove("etc/ld.so.conf.d/*")(root)
    machine = look_at(root, LD_LIBRARY_PATH=f"/opt/amazon/efa/lib:/{PLUGIN_FOLDER}/")
    assert findings(machine)["NCCL plugin"].severity == "OK"


@pytest.mark.parametrize(
    ("named", "severity"),
    [
        ("libnccl-net.so", "OK"),
        ("ours", "OK"),
        ("none,ours", "OK"),
        (f"/{LIBRARY}", "OK"),
        ("/opt/gone/libnccl-net.so", "RESET"),
        ("libnccl-net-gone.so", "RESET"),
        ("none", "RESET"),
        ("", "RESET"),
    ],
)
def test_a_plugin_that_the_user_names_must_be_there(root: Path, named: str, severity: str) -> None:
    write(root / PLUGIN_FOLDER / "libnccl-net-ours.so", "an ELF")
    found = findings(look_at(root, NCCL_NET_PLUGIN=named))["NCCL plugin"]
    assert found.severity == severity
    assert found.result.startswith(f"NCCL_NET_PLUGIN={named}")


def test_the_users_harm_is_named(root: Path) -> None:
    machine = look_at(root, NCCL_NET="Socket", FI_PROVIDER="tcp", NCCL_SOCKET_IFNAME="ens32")
    found = findings(machine)["environment"]
    assert (found.severity, found.result) == ("MONITOR", "FI_PROVIDER=tcp, NCCL_NET=Socket")
    assert found.fix == "Unset FI_PROVIDER, NCCL_NET"


@pytest.mark.parametrize(
    ("memlock", "devices", "severity"),
    [
        (None, 32, "OK"),
        (16 * GIB, 32, "OK"),
        (16 * GIB - 1, 32, "RESET"),
        (8192 * 1024, 0, "OK"),  # without EFA nothing is locked
    ],
)
def test_memory_that_may_be_locked(
    memlock: int | None, devices: int, severity: str, tmp_path: Path
) -> None:
    root = make_machine(tmp_path / "machine", devices=devices)
    machine = replace(look_at(root), memlock_bytes=memlock)
    assert findings(machine)["memlock"].severity == severity


@pytest.mark.parametrize(("free", "severity"), [(5128, "OK"), (2559, "MONITOR")])
def test_huge_pages_where_the_user_wants_them(free: int, severity: str, root: Path) -> None:
    write(root / "proc/meminfo", f"HugePages_Free:  {free}\nHugepagesize:       2048 kB\n")
    assert findings(look_at(root))["huge pages"].result == "not needed"
    found = findings(look_at(root, FI_EFA_USE_HUGE_PAGE="1"))["huge pages"]
    assert found.severity == severity


@pytest.mark.parametrize(
    ("size", "gpus", "severity"),
    [
        (8 * GIB, 8, "OK"),
        (8 * GIB - 1, 8, "RESET"),
        (GIB, 0, "OK"),
        (64 * 2**20, 0, "RESET"),  # Docker's default
    ],
)
def test_shared_memory(size: int, gpus: int, severity: str) -> None:
    assert judge_shared_memory(size, gpus).severity == severity


@pytest.mark.parametrize(
    ("clock", "result"),
    [
        (KEPT, "kept, off by 0.002 s"),
        (None, "not known"),
        (Clock(synchronised=True, offset_s=-0.2), "off by 0.2 s"),
        (Clock(synchronised=False, offset_s=0.0), "not synchronised"),
    ],
)
def test_the_clock(clock: Clock | None, result: str, root: Path) -> None:
    found = findings(replace(look_at(root), clock=clock))["clock"]
    assert found.result == result
    assert found.severity == ("OK" if clock in (KEPT, None) else "MONITOR")


def test_the_kernel_tells_of_its_clock() -> None:
    clock = read_clock()
    assert clock is not None and abs(clock.offset_s) < 60  # a wrong layout would read anything


def test_disks() -> None:
    whole, full = "/data", "/tmp"
    room = (whole, 100 * 10**9, 10**12)
    assert judge_disks([room]).severity == "OK"
    assert judge_disks([room]).result == "free: /data 100 of 1000 GB"
    found = judge_disks([room, (full, 10**9, 10**11)])
    assert found.severity == "MONITOR" and found.fix.startswith("Free space in /tmp:")
    assert judge_disks([(full, 499 * 10**6, 10**9)]).severity == "MONITOR"


@pytest.mark.parametrize(
    ("values", "severity"),
    [
        ({}, "OK"),
        ({"recovery_action": 0.0, "remap_pending": 0.0}, "OK"),
        ({"ecc_uncorrected_aggregate": 2.0}, "MONITOR"),
        ({"remap_pending": 1.0, "ecc_uncorrected_volatile": 1.0}, "RESET"),
        ({"recovery_action": 1.0}, "RESET"),
        ({"recovery_action": 2.0, "remap_pending": 1.0}, "REBOOT"),
        ({"recovery_action": 7.0}, "REBOOT"),  # of a driver later than the table
        ({"remap_failed": 1.0, "recovery_action": 2.0}, "ISOLATE"),
        ({"lost": 1.0}, "ISOLATE"),
    ],
)
def test_what_nvml_knows_of_errors(values: dict[str, float], severity: str) -> None:
    well = Reading(kind="gpu", of="0000:53:00", at_s=0.0, values={"lost": 0.0})
    found = judge_gpu_health([well, Reading(kind="gpu", of="0000:54:00", at_s=0.0, values=values)])
    assert found.severity == severity
    assert ("0000:54:00" in found.result) == (severity != "OK") and "0000:53" not in found.result


def test_a_gpu_that_nvml_gives_no_hold_of_has_gone_if_it_was_given() -> None:
    silent = Reading(kind="gpu", of="index 0", at_s=0.0, values={"lost": 0.0, "unanswered": 1.0})
    found = judge_gpu_health([silent], at_driver_start=1)
    assert found.severity == "ISOLATE" and found.result.startswith("1 of 1 GPUs have gone")
    assert judge_gpu_health([silent]).result == "no GPU"


def test_what_the_kernel_has_said_isolates_nobody() -> None:
    xid = "NVRM: Xid (PCI:0000:05:00): 54, pid=1, external power cables"
    harmless = "NVRM: Xid (PCI:0000:05:00): 43, pid=1, Ch 8"
    assert judge_kernel_log(["a line", harmless]).severity == "OK"
    found = judge_kernel_log(["a line", xid, "EXT4-fs: Remounting filesystem read-only"])
    assert found.severity == "MONITOR" and "xid_54: " in found.result
    assert found.fix.endswith("replace_node")


@pytest.mark.parametrize(
    ("ports", "files", "severity"),
    [
        (10_000, None, "OK"),
        (28_232, 65_536, "OK"),
        (9_999, None, "MONITOR"),
        (28_232, 1024, "MONITOR"),
    ],
)
def test_ports_and_files(ports: int, files: int | None, severity: str) -> None:
    assert judge_ports(ports, files).severity == severity


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above(root: Path) -> None:
    missing = root / "runs/first"
    (found,) = run_checks(replace(look_at(root), folders=(missing,)), {"disks": CHECKS["disks"]})
    (above,) = run_checks(replace(look_at(root), folders=(root,)), {"disks": CHECKS["disks"]})
    assert (found.severity, found.fix == "") == (above.severity, above.fix == "")
    assert found.result.startswith(f"free: {missing} (not there yet, in {root}) ")


def test_a_folder_below_a_link_to_nowhere_is_not_judged_by_the_one_above(root: Path) -> None:
    link = root / "scratch"
    link.symlink_to(root / "gone")
    machine = replace(look_at(root), folders=(link / "runs",))
    (found,) = run_checks(machine, {"disks": CHECKS["disks"]})
    assert found.severity == "MONITOR"
    assert found.result == f"{link}/runs: FileNotFoundError: {link} is a link to nowhere"


def test_a_folder_that_is_out_of_reach_hides_no_other(root: Path) -> None:
    file = write(root / "file", "")
    machine = replace(look_at(root), folders=(file / "runs", Path("/dev/shm")))
    (found,) = run_checks(machine, {"disks": CHECKS["disks"]})
    assert found.result.startswith("free: /dev/shm ")
    assert found.result.endswith(f"; {file}/runs: NotADirectoryError: Not a directory")
    assert found.severity == "MONITOR" and "Look at the mount" in found.fix


@pytest.mark.parametrize(
    ("settings", "severity", "result"),
    [
        ([], "OK", "no raylet here"),
        ([None], "MONITOR", "on (RAY_memory_monitor_refresh_ms not set)"),
        (["0"], "OK", "off"),
        (["0", "250"], "MONITOR", "on (RAY_memory_monitor_refresh_ms 0, 250)"),
    ],
)
def test_rays_memory_monitor_ends_the_wrong_ones(
    root: Path, settings: list[str | None], severity: str, result: str
) -> None:
    """By the environment of each raylet; that of others says nothing."""
    for pid, (name, setting) in enumerate([("python", None), *(("raylet", s) for s in settings)]):
        write(root / f"proc/{pid}/comm", f"{name}\n")
        own = "" if setting is None else f"RAY_memory_monitor_refresh_ms={setting}\0"
        write(root / f"proc/{pid}/environ", f"HOME=/root\0{own}LANG=C\0")
    found = findings(look_at(root))["memory monitor"]
    assert (found.severity, found.result) == (severity, result)


def test_in_a_pod_rays_memory_monitor_is_left_on(root: Path) -> None:
    """The kernel may end all of it."""
    write(root / "proc/1/comm", "raylet\n")
    write(root / "proc/1/environ", "KUBERNETES_SERVICE_HOST=10.0.0.1\0")
    found = findings(look_at(root))["memory monitor"]
    assert (found.severity, found.result) == ("OK", "on, in a pod")


def test_a_check_that_hangs_holds_up_nobody(root: Path) -> None:
    never = threading.Event()

    def hang(_machine: Machine) -> Finding:
        never.wait()
        raise AssertionError

    checks = {"hangs": hang, "instance": CHECKS["instance"]}
    stuck, passed = run_checks(look_at(root), checks, bound_s=0.2)
    never.set()
    assert (stuck.check, stuck.result, stuck.severity) == ("hangs", "no answer in 0.2 s", "MONITOR")
    assert passed.result == "p5.48xlarge"


def test_every_check_says_its_own_name(root: Path) -> None:
    assert [one.check for one in run_checks(look_at(root))] == list(CHECKS)


def test_this_machine_can_be_examined() -> None:
    found = run_checks(this_machine({}, ()))
    assert [one.check for one in found] == list(CHECKS)
    assert not any("check could not be done" in one.meaning for one in found)


def test_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remove("dev/infiniband")(root)
    assert show(run_checks(look_at(root)), as_json=True) == EXIT_STATUS["RESET"] == 3
    found = json.loads(capsys.readouterr().out)
    assert [one["check"] for one in found] == list(CHECKS)
    assert all(one.keys() == {"check", "result", "severity", "fix"} for one in found)
    assert all(one["severity"] in SEVERITIES for one in found)
    assert all(isinstance(value, str) for one in found for value in one.values())


def test_json_with_the_reasons(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = look_at(root, NCCL_SOCKET_IFNAME="ens32")
    show(run_checks(machine), as_json=True, explained=machine)
    found = json.loads(capsys.readouterr().out)
    assert [one["check"] for one in found["checks"]] == list(CHECKS)
    yours = {one["name"]: one["yours"] for one in found["environment"]}
    assert yours == {"FI_EFA_USE_HUGE_PAGE": None, "NCCL_SOCKET_IFNAME": "ens32"}
    assert all(one["reason"] and one["source"] for one in found["environment"])


def test_the_table_and_the_reasons(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remove("dev/infiniband")(root)
    machine = look_at(root, NCCL_SOCKET_IFNAME="lo")
    assert show(run_checks(machine), as_json=False, explained=machine) == 3
    shown = capsys.readouterr().out
    head, *rows = shown.partition("\n\n")[0].splitlines()
    assert head.split() == ["check", "severity", "result"]
    (at,) = [at for at, row in enumerate(rows) if row.startswith("EFA devices")]
    devices, meaning, fix = rows[at : at + 3]
    assert devices.split()[2] == "RESET" and meaning.startswith("  ")
    assert fix.startswith("  fix: Give the container /dev/infiniband")
    assert len([row for row in rows if not row.startswith(" ")]) == len(CHECKS)
    assert max(map(len, rows)) < 160
    assert "NCCL_SOCKET_IFNAME=^lo,docker,veth,eni,pod-id-link, yours stays: lo" in shown
    assert "harm: NCCL_SOCKET_IFNAME=lo: " in shown
    assert "FI_EFA_FORK_SAFE\n    every plugin since 1.2 sets it" in shown
    _, strict, survival = shown.rsplit("\n\n", 2)
    assert "train.determinism='strict', the default:" in strict
    assert all(f"  {name}\n" in strict for name in ("NCCL_ALGO=Ring", "NCCL_NVLS_ENABLE=0"))
    assert "NCCL_ALGO" not in survival and "  TORCH_NCCL_BLOCKING_WAIT=0\n" in survival
    assert "  CUDA_DEVICE_MAX_CONNECTIONS=32 or more\n" in survival


def test_a_machine_with_nothing_to_do_ends_with_0(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(run_checks(look_at(root)), as_json=False) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == 1 + len(CHECKS) and "environment for" not in shown


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status = main(["doctor", "--json", "--storage", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)
    assert status == EXIT_STATUS[worst_severity(one["severity"] for one in found)]
    (disks,) = [one for one in found if one["check"] == "disks"]
    assert str(tmp_path) in disks["result"]


@pytest.mark.parametrize("full", [[], ["--full"]])
def test_a_disk_that_takes_nothing_is_a_finding_and_no_end(full: list[str]) -> None:
    """RLIMIT_FSIZE stands for the disk; it binds root, too. The loads have no place to meet."""
    command = [sys.executable, "-m", "elastic.cli.main", "doctor", "--json", *full]
    done = subprocess.run(
        command,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        env={**os.environ, "TMPDIR": "/dev/shm"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = {one["check"]: one for one in json.loads(done.stdout)}
    assert done.returncode == EXIT_STATUS[worst_severity(o["severity"] for o in found.values())]
    assert found["disks"]["result"].startswith("free: /dev/shm ")
    for load in ("matrix burn", "disk speed") if full else ():
        assert found[load]["severity"] == "MONITOR"
        assert "No usable temporary directory" in found[load]["result"]


def test_the_folder_of_temporary_files_is_that_of_tempfile(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    for setting, folder in (
        ({}, "/tmp"),
        ({"TMP": "/b"}, "/b"),
        ({"TMPDIR": "/dev/shm"}, "/dev/shm"),
    ):
        for name, value in setting.items():
            monkeypatch.setenv(name, value)
        assert machine_with([])[0].folders == (Path(folder),)


def test_of_a_cluster_no_environment_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--cluster", "--explain"])
    assert "--explain: not allowed with argument --cluster" in capsys.readouterr().err


def test_a_directory_may_be_a_url(tmp_path: Path) -> None:
    machine, stores = machine_with([f"file://{tmp_path}", "s3://bucket/runs"])
    assert machine.folders[-1] == tmp_path and stores == ("s3://bucket/runs",)


def driver_with_eight(root: Path) -> None:
    for minor in range(8):
        about = root / f"proc/driver/nvidia/gpus/0000:{0x53 + minor:02x}:00.0/information"
        about.parent.mkdir(parents=True)
        about.write_text(f"Model: \t NVIDIA H100\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n")
    (root / "dev").mkdir()


def test_gpus_that_a_container_was_not_given_have_not_gone(tmp_path: Path) -> None:
    """Without NVIDIA's runtime hook, as with CDI, nothing hides the driver's list from it."""
    driver_with_eight(tmp_path)
    for name in ("nvidia2", "nvidia5", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert len(given_gpus(tmp_path)) == 2
    assert given_gpus(tmp_path / "nothing") == []


_WRITE_ONLY = Path("/sys/bus/cpu/drivers_probe")
"""Nobody may read it, root neither."""


@pytest.mark.skipif(not _WRITE_ONLY.exists(), reason="no such file in this sysfs")
def test_gpus_that_a_cgroup_lets_nobody_open_have_not_gone(tmp_path: Path) -> None:
    """Their files are there. One that was given and answers no more is counted."""
    driver_with_eight(tmp_path)
    for minor in range(8):
        (tmp_path / f"dev/nvidia{minor}").symlink_to(_WRITE_ONLY)
    assert given_gpus(tmp_path) == []
    for minor in (2, 5):
        (tmp_path / f"dev/nvidia{minor}").unlink()
    (tmp_path / "dev/nvidia2").touch()
    (tmp_path / "dev/nvidia5").symlink_to("nvidia5")  # opening it fails for another reason
    assert len(given_gpus(tmp_path)) == 2


def test_a_container_whose_cgroup_has_lost_its_rules_has_the_gpus_that_it_was_given(
    tmp_path: Path,
) -> None:
    """`systemctl daemon-reload` may do so: it may open neither they nor the driver's control."""
    if not _WRITE_ONLY.exists():
        pytest.skip("no such file in this sysfs")
    driver_with_eight(tmp_path)
    for name in ("nvidia2", "nvidia5", "nvidiactl"):
        (tmp_path / "dev" / name).symlink_to(_WRITE_ONLY)
    assert len(given_gpus(tmp_path)) == 2


@pytest.mark.parametrize("refused", ["nvmlInit", "nvmlDeviceGetCount"])
def test_gpus_of_which_nvml_does_not_start_ask_for_a_reboot(
    refused: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted by the driver's files, and loaded: nothing passes on the CPU instead."""
    nvml = ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})  # type: ignore[attr-defined]

    def refuse() -> None:
        raise nvml.NVMLError("Driver/library version mismatch")

    starts: list[int] = []
    nvml.nvmlInit = lambda: starts.append(1)  # type: ignore[attr-defined]
    nvml.nvmlShutdown = starts.pop  # type: ignore[attr-defined]
    setattr(nvml, refused, refuse)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_checks, "given_gpus", lambda _: given_gpus(root))
    machine = replace(look_at(root), root=Path("/"))
    assert gpu_checks.check_gpus(machine).result == "all 8"
    finding = gpu_checks.check_gpu_health(machine)
    assert finding.severity == "REBOOT"
    assert finding.result == "8 GPUs, and NVML does not start: Driver/library version mismatch"
    assert load_checks.devices_of(machine) == [f"cuda:{number}" for number in range(8)]
    assert not starts


@pytest.mark.parametrize("check", [gpu_checks.check_gpus, gpu_checks.check_gpu_health])
def test_nvml_is_given_back(
    check: Callable[[Machine], Finding], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts its starts, and an agent that looks at its machine lives on."""
    starts: list[int] = []
    nvml = Nvml(
        nvmlInit=lambda: starts.append(1), nvmlShutdown=starts.pop, nvmlDeviceGetCount=lambda: 0
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    check(replace(look_at(root), root=Path("/")))
    assert not starts


def test_without_a_gpu_nvml_need_not_start() -> None:
    assert judge_no_nvml("NVML Shared Library Not Found", 0).severity == "OK"
    assert judge_no_nvml("", 8).severity == "OK", "its package is not installed"
