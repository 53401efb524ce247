"""A file system that does not answer, as the kernel has it, and what follows."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from health.judgement import WINDOW_S, judge
from health.reading import Reading
from health.storage import EVERY_S, StorageWatch, network_mounts
from health.verdict import Sign
from tests.support.watching import wait_until

DEADLINE_S = 30.0
_LIBC = ctypes.CDLL(None, use_errno=True)
MNT_DETACH = 2

MOUNTS = """\
/dev/vda / ext4 rw,relatime 0 0
proc /proc proc rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
fs-1.efs.eu-west-1.amazonaws.com:/ /data nfs4 rw,hard 0 0
10.0.0.1@tcp:/fsx /fsx lustre rw 0 0
mountpoint-s3 /s3 fuse ro 0 0
s3fs /old-s3 fuse.s3fs rw 0 0
/dev/sdb1 /stick fuseblk rw 0 0
fusectl /sys/fs/fuse/connections fusectl rw 0 0
weka/fs /weka wekafs rw 0 0
host /shared virtiofs rw 0 0
10.0.0.2:/a\\040b /mnt/my\\040share\\134\x85 nfs rw 0 0
"""


def test_network_mounts_are_told_from_disks(tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    assert network_mounts(tmp_path / "mounts") == [
        "/data",
        "/fsx",
        "/s3",
        "/old-s3",
        "/weka",
        "/shared",
        "/mnt/my share\\\x85",
    ]


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[str]:
    """A file system of a process that never answers."""
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no FUSE here: {error}")
    place = str(tmp_path)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    arguments = (b"test", place.encode(), b"fuse.test", 0, options.encode())
    if _LIBC.mount(*arguments) != 0:
        os.close(device)
        pytest.skip(f"may not mount: {os.strerror(ctypes.get_errno())}")
    yield place
    os.close(device)  # who waits is told that it is gone
    _LIBC.umount2(place.encode(), MNT_DETACH)


def test_a_mount_that_hangs_holds_up_a_process_and_nobody_else(hung: str) -> None:
    assert hung in network_mounts()
    watch = StorageWatch(lambda: [hung, "/"])
    assert watch.look(1000.0) == []
    wait_until(lambda: bool(_by_mount(watch, 1000.0)["/"].values["answered"]), DEADLINE_S)
    before = threading.active_count()
    began_s = time.monotonic()
    readings = [_by_mount(watch, 1000.0 + now_s)[hung] for now_s in range(0, 120, 5)]
    assert time.monotonic() - began_s < 5.0
    assert [reading.values["answered"] for reading in readings] == [0.0] * 24
    assert readings[-1].values["answer_s"] == 115.0
    assert threading.active_count() <= before + 1, "the one that hangs is not asked again"
    assert {sign.name for sign in _judged(readings[:3])} == set()
    (sign,) = _judged(readings)
    assert (sign.name, sign.subject, sign.role) == ("storage_hung", "storage", "confirmation")
    assert sign.detail == f"storage {hung}: it has not answered for 115 s"


def _by_mount(watch: StorageWatch, now_s: float) -> dict[str, Reading]:
    return {reading.of: reading for reading in watch.look(now_s)}


def _judged(series: list[Reading]) -> list[Sign]:
    return [*judge({("storage", series[0].of): series}, "n1", 7.0)]


@pytest.mark.parametrize(("answer_s", "signs"), [(0.01, set()), (2.0, {"storage_slow"})])
def test_a_mount_that_takes_long_is_a_suspect(answer_s: float, signs: set[str]) -> None:
    values = {"answer_s": answer_s, "answered": 1.0, "failed": 0.0}
    series = [Reading(kind="storage", of="/data", at_s=5.0 * i, values=values) for i in range(20)]
    assert {sign.name for sign in judge({("storage", "/data"): series}, "n1", 7.0)} == signs


def test_an_answer_that_is_an_error_is_neither_quick_nor_slow() -> None:
    """Here a file stands where a folder should, for which the kernel has an error, too."""
    watch = StorageWatch(lambda: ["/", f"{__file__}/below"])
    watch.look(0.0)
    wait_until(lambda: all(r.values["answered"] for r in watch.look(1.0)), DEADLINE_S)
    well, failed = watch.look(1.0)
    assert (well.values["failed"], failed.values["failed"]) == (0.0, 1.0)
    slow = replace(failed, values={**failed.values, "answer_s": 2.0, "worked": 1.0})
    assert {sign.name for sign in _judged([failed] * 20)} == set(), "it did from the start on"
    assert {sign.name for sign in _judged([well, *[slow] * 20, well])} == set()
    (sign,) = _judged([well, *[slow] * 20])
    assert (sign.name, sign.role, sign.cause) == ("storage_failed", "confirmation", "storage")


def test_a_mount_that_has_answered_well_once_fails_for_as_long_as_it_does() -> None:
    """Also when that has left the window."""
    answers = [True, False, False]
    watch = StorageWatch(lambda: ["/data"], lambda mount: answers.pop(0))
    for now_s in (0.0, WINDOW_S, 2 * WINDOW_S):
        watch.look(now_s)
        wait_until(lambda: bool(watch.look(now_s)[0].values["answered"]), DEADLINE_S)  # noqa: B023
        (reading,) = watch.look(now_s)
        assert reading.values["worked"] == 1.0
    (sign,) = _judged([reading] * 20)
    assert sign.name == "storage_failed"


def test_each_mount_is_asked_now_and_then() -> None:
    asked: list[str] = []
    answered = threading.Semaphore(0)

    def ask(mount: str) -> bool:
        asked.append(mount)
        answered.release()
        return True

    watch = StorageWatch(lambda: ["/data"], ask)
    for now_s in (0.0, 5.0, EVERY_S - 1, EVERY_S, EVERY_S + 5):
        watch.look(now_s)
        if now_s in (0.0, EVERY_S):
            assert answered.acquire(timeout=DEADLINE_S)
            wait_until(lambda: bool(watch.look(now_s)[0].values["answered"]), DEADLINE_S)  # noqa: B023
    assert asked == ["/data", "/data"]


def test_a_question_that_could_not_be_put_says_nothing_and_is_put_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where no process can be started."""
    asked: list[str] = []

    def ask(mount: str) -> bool:
        asked.append(mount)
        if len(asked) <= 4:
            raise BlockingIOError("Resource temporarily unavailable")
        return True

    watch = StorageWatch(lambda: ["/data", "/home"], ask)
    watch.look(0.0)
    wait_until(lambda: watch.look(EVERY_S) == [] and len(asked) == 4, DEADLINE_S)

    def answered() -> float:
        return sum(reading.values["answered"] for reading in watch.look(2 * EVERY_S))

    wait_until(lambda: answered() == 2, DEADLINE_S)
    assert len(asked) == 6
    (told,) = caplog.messages
    assert told.endswith(" is not asked whether it answers: Resource temporarily unavailable")


def test_where_there_is_no_stat_nothing_is_said_of_mounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    watch = StorageWatch(lambda: ["/data"])
    watch.look(0.0)
    wait_until(lambda: watch.look(1.0) == [], DEADLINE_S)
    (told,) = caplog.messages
    assert told == (
        "/data is not asked whether it answers: [Errno 2] No such file or directory: 'stat'"
    )


def test_a_process_that_was_killed_brings_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stat = tmp_path / "stat"
    stat.write_text("#!/bin/sh\nkill -9 $$\n")
    stat.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    watch = StorageWatch(lambda: ["/data"])
    watch.look(0.0)
    wait_until(lambda: watch.look(1.0) == [], DEADLINE_S)
    (told,) = caplog.messages
    assert told == "/data is not asked whether it answers: stat was killed by signal 9"
