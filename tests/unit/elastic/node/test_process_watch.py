"""Real processes that end, stop, or hold the interpreter's lock."""

from __future__ import annotations

import mmap
import os
import platform
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastic.node import process_watch
from elastic.node.process_watch import ProcessWatch, last_words
from elastic.protocol.causes import CRASH, HANG, NODE
from elastic.protocol.messages import Death
from health.process import read_born_ticks, read_state
from health.progress import Place
from health.stacks import Offer
from tests.support import ROOT
from tests.support.rays_output import writes_beside
from tests.support.watching import wait_until

DEADLINE_S = 30.0
LINUX = tuple(map(int, platform.release().split(".")[:2]))
FREEZE_TIMEOUT_S = 0.5
WORKER = """
import sys
from health.heartbeat import Heartbeat
from trainer.loop.phases import COMPUTING, PHASES
heartbeat = Heartbeat(lambda: 12, COMPUTING)
{mark}
print(heartbeat.fd, flush=True)
sys.stdin.readline()
{then}
"""
IN_BACKWARD = 'heartbeat.mark(4, PHASES.index("backward"))'
LEAVE_A_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=[1000]).start()
ctypes.CDLL(None).pthread_exit(None)
"""
HOLD_THE_LOCK = "import ctypes; ctypes.PyDLL(None).sleep(1000)"

Start = Callable[..., tuple["subprocess.Popen[bytes]", int]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that beats, and once it gets a line does what it was given."""
    started: list[subprocess.Popen[bytes]] = []

    def run(then: str, mark: str = IN_BACKWARD) -> tuple[subprocess.Popen[bytes], int]:
        command = [sys.executable, "-c", WORKER.format(mark=mark, then=then)]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    yield run
    for process in started:
        process.kill()
        process.communicate()


def deaths(watch: ProcessWatch, enough: Callable[[list[Death]], bool] = bool) -> list[Death]:
    """What a node agent would report, until that is enough."""
    found: list[Death] = []
    deadline = time.monotonic() + DEADLINE_S
    while not enough(found):
        assert time.monotonic() < deadline
        found += watch.ended(0.05)
        found += watch.frozen(time.monotonic())
    return found


def stays_quiet(watch: ProcessWatch, for_s: float) -> bool:
    end = time.monotonic() + for_s
    return deaths(watch, lambda found: bool(found) or time.monotonic() > end) == []


def test_a_process_that_ends_is_reported_once(start: Start) -> None:
    watch, (process, fd) = ProcessWatch(FREEZE_TIMEOUT_S), start("")
    watch.watch("w0", process.pid, fd)
    process.kill()
    expected = Death(worker="w0", cause=CRASH, detail=f"process {process.pid} ended by SIGKILL")
    assert deaths(watch) == [expected]
    assert stays_quiet(watch, 0.3)


@pytest.mark.skipif(LINUX < (6, 15), reason="the kernel does not say how a process ended")
@pytest.mark.parametrize(
    ("then", "how"),
    [
        ("import os; os.kill(os.getpid(), 11)", "by SIGSEGV"),
        ("sys.exit(7)", "with status 7"),
        ("import os; os.kill(os.getpid(), 40)", "by signal 40"),
    ],
)
def test_how_a_process_ended_is_said_where_the_kernel_tells(
    start: Start, then: str, how: str
) -> None:
    """Its parent takes notice of it at once, as Ray's node does."""
    watch, (process, fd) = ProcessWatch(FREEZE_TIMEOUT_S), start(then)
    watch.watch("w0", process.pid, fd)
    process.communicate(b"\n")
    expected = Death(worker="w0", cause=CRASH, detail=f"process {process.pid} ended {how}")
    assert deaths(watch) == [expected]


@pytest.mark.parametrize(
    ("then", "how"),
    [
        ("import os; os.kill(os.getpid(), 11)", " by SIGSEGV"),
        ("sys.exit(7)", " with status 7"),
        ("", ""),  # 0, which stands for what may not be read, too
    ],
)
def test_how_a_process_ended_is_said_before_its_parent_takes_notice(
    start: Start, then: str, how: str
) -> None:
    watch, (process, fd) = ProcessWatch(FREEZE_TIMEOUT_S), start(then)
    watch.watch("w0", process.pid, fd)
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    wait_until(lambda: read_state(process.pid) == "Z")
    found = watch.ended(DEADLINE_S)
    assert found == [Death(worker="w0", cause=CRASH, detail=f"process {process.pid} ended{how}")]


def test_a_large_process_is_lost_when_it_begins_to_end(start: Start) -> None:
    """It gives its memory back first, and closes its connections after that."""
    take = f"""import mmap
memory = mmap.mmap(-1, 2 << 30, flags={mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS:d})
memory.madvise({mmap.MADV_NOHUGEPAGE:d})
for at in range(0, len(memory), 4096): memory[at] = 1"""
    watch, (process, fd) = ProcessWatch(FREEZE_TIMEOUT_S), start("", f"{IN_BACKWARD}\n{take}")
    watch.watch("w0", process.pid, fd)
    assert watch.ended(0) == []
    pidfd = os.pidfd_open(process.pid)
    process.kill()
    found: list[Death] = []
    while not found:
        ended, _, _ = select.select([pidfd], [], [], 0)
        if ended:
            pytest.skip("it ended while this test had no core")
        found = watch.ended(0)
    os.close(pidfd)
    assert found == [
        Death(worker="w0", cause=CRASH, detail=f"process {process.pid} ended by SIGKILL")
    ]
    assert watch.ended(DEADLINE_S) == watch.ended(0.1) == [], "and is told of once"


def test_a_process_that_was_gone_is_reported() -> None:
    watch, process = ProcessWatch(FREEZE_TIMEOUT_S), subprocess.Popen(["true"])
    process.wait()
    watch.watch("w0", process.pid, None)
    expected = Death(worker="w0", cause=CRASH, detail="its process was gone when the watch began")
    assert deaths(watch) == [expected]


def test_a_process_that_ended_and_was_not_waited_for_is_reported(start: Start) -> None:
    """The kernel keeps its id until then, and gives a descriptor for it."""
    watch, (process, fd) = ProcessWatch(FREEZE_TIMEOUT_S), start("")
    born = read_born_ticks(process.pid)
    process.kill()
    wait_until(lambda: read_state(process.pid) == "Z")
    watch.watch("w0", process.pid, fd, born)
    expected = Death(worker="w0", cause=CRASH, detail=f"process {process.pid} ended by SIGKILL")
    assert deaths(watch) == [expected]


def test_a_process_that_has_the_id_of_one_that_ended_is_left_alone(start: Start) -> None:
    watch, (process, fd) = ProcessWatch(FREEZE_TIMEOUT_S), start("")
    born = read_born_ticks(process.pid)
    assert born is not None
    watch.watch("w0", process.pid, fd, born - 1)
    expected = Death(worker="w0", cause=CRASH, detail="its process was gone when the watch began")
    assert watch.ended(0) == [expected]
    watch.signal("w0", signal.SIGKILL)
    os.kill(process.pid, signal.SIGSTOP)
    assert stays_quiet(watch, 2 * FREEZE_TIMEOUT_S)
    assert process.poll() is None


def test_a_process_that_is_watched_twice_is_reported_once(start: Start) -> None:
    """The second time may bring its heartbeat: a coordinator that was started anew learns of it
    from the worker itself."""
    watch, (process, fd) = ProcessWatch(FREEZE_TIMEOUT_S), start("")
    born = read_born_ticks(process.pid)
    watch.watch("w0", process.pid, None, born)
    assert watch.places() == {"w0": None}
    for heartbeat in (fd, fd, None):
        watch.watch("w0", process.pid, heartbeat, born)
    assert watch.places()["w0"] is not None
    watch.watch("w0", process.pid, fd, born, logs=("its output",))
    assert watch.states()[0].logs == ("its output",), "the records know its heartbeat alone"
    process.kill()
    assert [death.worker for death in deaths(watch)] == ["w0"]
    assert stays_quiet(watch, 0.3)


def test_a_heartbeat_that_cannot_be_opened_is_told_of_once(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """And is tried again. That of a process that has ended is no news."""
    watch, (process, fd), (ended, ended_fd) = ProcessWatch(DEADLINE_S), start(""), start("")
    ended.kill()
    ended.wait(DEADLINE_S)
    watch.watch("w1", ended.pid, ended_fd)
    killed, killed_fd = start("")
    watch.watch("w2", killed.pid, None)
    killed.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    watch.watch("w2", killed.pid, killed_fd)
    assert caplog.messages == []
    for _ in range(2):
        watch.watch("w0", process.pid, 999)
    (told,) = caplog.messages
    assert f"the heartbeat of w0, process {process.pid}, cannot be opened: [Errno 2]" in told
    watch.watch("w0", process.pid, fd)
    assert watch.places()["w0"] is not None and len(caplog.messages) == 1


@pytest.mark.parametrize("heartbeat", [True, False])
def test_a_stopped_process_is_killed_and_reported_with_what_it_did(
    start: Start, heartbeat: bool
) -> None:
    watch, (process, fd) = ProcessWatch(FREEZE_TIMEOUT_S), start("")
    watch.watch("w0", process.pid, fd if heartbeat else None)
    assert stays_quiet(watch, 2 * FREEZE_TIMEOUT_S)
    os.kill(process.pid, signal.SIGSTOP)
    where = "; it was in phase backward of step 4" if heartbeat else ""
    (death,) = deaths(watch)
    assert (death.worker, death.cause) == ("w0", HANG)
    assert death.detail == (
        f"process {process.pid} is frozen: stopped by a signal (state T in 2 samples){where}"
    )
    assert death.evidence is not None
    assert f"{process.pid} python: T " in death.evidence.stacks
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert stays_quiet(watch, 0.3)


def test_a_frozen_process_is_killed_though_its_output_cannot_be_read(
    start: Start, tmp_path: Path
) -> None:
    """As on a disk that hangs: here a pipe that nobody writes to."""
    watch, (process, fd) = ProcessWatch(FREEZE_TIMEOUT_S), start("")
    log = tmp_path / "logs" / "worker-a-b-1.err"
    log.parent.mkdir()
    os.mkfifo(log)
    watch.watch("w0", process.pid, fd, logs=(str(log),))
    reads = threading.Thread(target=last_words, args=[[str(log)]], daemon=True)
    with writes_beside(log):
        reads.start()
        os.kill(process.pid, signal.SIGSTOP)
        found: list[Death] = []
        looks = threading.Thread(target=lambda: found.extend(deaths(watch)), daemon=True)
        looks.start()
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
        looks.join(DEADLINE_S)
        assert [(death.worker, death.cause) for death in found] == [("w0", HANG)]
        assert reads.is_alive(), "it is stuck, as this thread would have been"
        os.close(os.open(log, os.O_WRONLY | os.O_NONBLOCK))
        reads.join(DEADLINE_S)


def is_later(first: Place, now: Place | None) -> bool:
    """It counts on, as soon as that is more than what was taken off for want of a core."""
    assert now is not None and now.mark == first.mark
    return now.in_phase_s > first.in_phase_s


def test_where_a_worker_is_in_its_work(start: Start) -> None:
    watch = ProcessWatch(FREEZE_TIMEOUT_S)
    process, fd = start("")
    assert not watch.places()
    watch.watch("w1", process.pid, fd)
    first = watch.places()["w1"]
    assert first is not None
    assert (first.phase, first.collectives) == ("phase backward of step 4", 12)
    assert 0 < first.in_phase_s < DEADLINE_S
    wait_until(lambda: is_later(first, watch.places()["w1"]))


def test_several_workers_are_asked_at_once_what_they_do_and_hold_up_nothing_else(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may take its time to answer, and one that is stopped does."""
    watch, workers = ProcessWatch(FREEZE_TIMEOUT_S), ("w1", "w2", "w3")
    together = threading.Barrier(len(workers))

    def read(pid: int, offer: Offer) -> str:
        together.wait(DEADLINE_S)
        return f"of {watch.pid_of('w1')}\n"

    monkeypatch.setattr(process_watch, "read_stacks", read)
    started = [start("") for _ in workers]
    for worker, (process, fd) in zip(workers, started, strict=True):
        watch.watch(worker, process.pid, fd, stacks=(fd, process.pid))
    with ThreadPoolExecutor(len(workers)) as pool:
        found = list(pool.map(watch.evidence, workers))
    assert all(one and one.stacks.startswith(f"of {started[0][0].pid}\n") for one in found)


def step_by_step(steps: str) -> str:
    return f"""
import time
forward, reduce = PHASES.index("forward"), PHASES.index("reduce")
evaluation, checkpoint = PHASES.index("evaluation"), PHASES.index("checkpoint")
{steps}
print(flush=True)
sys.stdin.readline()
"""


def place_after(
    watch: ProcessWatch,
    process: subprocess.Popen[bytes],
    worker: str = "w0",
    held_s: float = 0.0,
) -> Place:
    """Where it is when it has done its steps, looked at as often as an agent does, which was held
    up before for `held_s`."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    done = select.poll()  # takes any descriptor; `select` only the first thousand
    done.register(process.stdout, select.POLLIN)
    while not done.poll(100):
        watch.frozen(time.monotonic() - held_s)
    found = watch.places()[worker]
    assert found is not None
    return found


def test_where_a_worker_is_in_its_step(start: Start) -> None:
    """Its first two steps, in which its code may be compiled, say nothing of those that follow."""
    watch = ProcessWatch(DEADLINE_S)
    steps = """
heartbeat.mark(5, forward); time.sleep(1.5)
heartbeat.mark(6, forward); time.sleep(1.2)
heartbeat.mark(6, reduce); time.sleep(2.0)
heartbeat.mark(7, forward); time.sleep(2.4)
heartbeat.leave()
heartbeat.mark(7, forward)
"""
    process, fd = start(step_by_step(steps))
    watch.watch("w0", process.pid, fd)
    assert watch.places()["w0"].bound == "shared"  # type: ignore[union-attr]
    now = place_after(watch, process)
    assert (now.mark, now.phase) == (6, "phase forward of step 7")
    assert now.bound == "pace" and not now.waits
    # The stay in step 6: not that in step 5, the wait, or what was left.
    assert 1.0 < now.longest_s < 1.9


def test_a_newcomer_has_its_first_steps_before_it_when_it_is_given_lanes(start: Start) -> None:
    """Without them it passes the rest of many steps: its data is opened, and its kernels are
    loaded, in the first that it computes in. That it waits for others is known before."""
    steps = """
for step in range(5, 40):
    for phase in ("reduce", "before_commit", "in_commit", "after_commit"):
        heartbeat.mark(step, PHASES.index(phase))
    time.sleep(0.2 * (step == 5))
heartbeat.mark({step}, PHASES.index("{phase}")); time.sleep(0.5)
"""
    found = {}
    for step, phase in [(40, "reduce"), (40, "before_commit"), (40, "forward")]:
        process, fd = start(
            step_by_step(steps.format(step=step, phase=phase)),
            'heartbeat.mark(4, PHASES.index("heal_target"))',
        )
        watch = ProcessWatch(DEADLINE_S)
        watch.watch("w0", process.pid, fd)
        found[phase] = place_after(watch, process).bound
    assert found == {"reduce": "pace", "before_commit": "shared", "forward": "shared"}


def test_first_steps_count_from_where_the_run_goes_back_to(start: Start) -> None:
    watch = ProcessWatch(DEADLINE_S)
    steps = """
heartbeat.mark(900, forward); time.sleep(0.3)
heartbeat.leave()
heartbeat.mark(500, forward); time.sleep(0.3)
heartbeat.mark(502, {phase})
"""
    for phase in ("forward", "reduce"):
        process, fd = start(step_by_step(steps.format(phase=phase)))
        watch.watch(phase, process.pid, fd)
        assert place_after(watch, process, phase).bound == "pace"


def test_a_batch_of_an_evaluation_may_not_take_long_once_two_are_known(start: Start) -> None:
    """The first ones may read data from far. How long they took says nothing of steps."""
    watch = ProcessWatch(DEADLINE_S)
    steps = """
heartbeat.mark(5, evaluation); time.sleep(1.3)
heartbeat.mark(5, evaluation); time.sleep(0.5)
heartbeat.mark(5, {last}); time.sleep(1.0)
"""
    found = []
    for last in ("evaluation", "checkpoint"):
        process, fd = start(step_by_step(steps.format(last=last)))
        watch.watch(last, process.pid, fd)
        found.append(place_after(watch, process, last))
    evaluates, saves = found
    assert evaluates.bound == "pace" and not evaluates.waits
    assert 1.2 < evaluates.longest_s < 2.0
    assert saves.bound == "shared" and saves.longest_s == 0.0
    process, fd = start(step_by_step("heartbeat.mark(5, evaluation); time.sleep(0.5)"))
    watch.watch("new", process.pid, fd)
    assert place_after(watch, process, "new").bound == "shared"


def test_a_worker_that_has_long_worked_counts_at_once(start: Start) -> None:
    """To the agent of a coordinator that was started anew."""
    process, fd = start(
        step_by_step("for step in range(60):\n    heartbeat.mark(step, forward)\n" * 2)
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    process.stdout.readline()
    watch = ProcessWatch(DEADLINE_S)
    watch.watch("w0", process.pid, fd)
    found = watch.places()["w0"]
    assert found is not None and found.bound == "pace"


def test_time_without_a_core_is_not_counted(start: Start) -> None:
    watch = ProcessWatch(DEADLINE_S)
    steps = """
import os
os.sched_setaffinity(0, [0])
heartbeat.mark(8, forward)
begin = time.monotonic()
while time.monotonic() - begin < 2.0: pass
"""
    processes = [start(step_by_step(steps)) for _ in range(4)]  # on one core
    for process, _ in processes[1:]:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
    watch.watch("w0", processes[0][0].pid, processes[0][1])
    assert place_after(watch, processes[0][0]).in_phase_s < 1.5


def test_time_in_which_the_watch_was_held_up_is_not_counted(start: Start) -> None:
    """The whole container may have been paused. What follows counts again."""
    watch = ProcessWatch(DEADLINE_S)
    process, fd = start(step_by_step("heartbeat.mark(8, forward)"))
    watch.watch("w0", process.pid, fd)

    def in_phase_s() -> float:
        place = watch.places()["w0"]
        assert place is not None
        return place.in_phase_s

    watch.frozen(time.monotonic())
    wait_until(lambda: in_phase_s() > 0.3)
    watch.frozen(time.monotonic() - 1000.0)
    assert in_phase_s() == 0.0
    assert place_after(watch, process, held_s=1000.0).phase == "phase forward of step 8"
    wait_until(lambda: in_phase_s() > 0.3)


def test_a_pause_counts_neither_in_a_phase_that_it_found_begun(start: Start) -> None:
    """Nobody had looked since that began."""
    watch = ProcessWatch(DEADLINE_S)
    process, fd = start("")
    begun_s = time.monotonic()
    watch.frozen(begun_s)
    watch.watch("w0", process.pid, fd)
    wait_until(lambda: time.monotonic() > begun_s + 0.3)
    watch.frozen(time.monotonic() - 1000.0)
    place = watch.places()["w0"]
    assert place is not None and place.in_phase_s < 0.3


def test_a_process_that_keeps_the_interpreters_lock_is_killed(start: Start) -> None:
    watch, (process, fd) = ProcessWatch(FREEZE_TIMEOUT_S), start(HOLD_THE_LOCK)
    watch.watch("w0", process.pid, fd)
    assert stays_quiet(watch, 2 * FREEZE_TIMEOUT_S)
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    (death,) = deaths(watch)
    assert (death.worker, death.cause) == ("w0", "hang")
    assert "no heartbeat for" in death.detail
    assert process.wait(DEADLINE_S) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("mark", "where"),
    [
        ('heartbeat.mark(4, PHASES.index("compile"))', "it was in phase compile of step 4"),
        ("", "it was about to begin"),
        (f"{IN_BACKWARD}; heartbeat.build_beside(True)", "it was in phase backward of step 4"),
    ],
    ids=["a model is compiled", "libraries and CUDA are loaded", "a part is built beside"],
)
def test_the_lock_may_be_held_for_longer_while(start: Start, mark: str, where: str) -> None:
    watch, (process, fd) = (
        ProcessWatch(FREEZE_TIMEOUT_S),
        start(f"print(flush=True); {HOLD_THE_LOCK}", mark),
    )
    watch.watch("w0", process.pid, fd)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    process.stdout.readline()
    held_s = time.monotonic()
    (death,) = deaths(watch)
    assert time.monotonic() - held_s > 5 * FREEZE_TIMEOUT_S
    assert where in death.detail


def test_all_are_killed_where_the_node_is_cut_off(start: Start) -> None:
    watch = ProcessWatch(FREEZE_TIMEOUT_S)
    processes = [start("") for _ in range(2)]
    for index, (process, fd) in enumerate(processes):
        watch.watch(f"w{index}", process.pid, fd)
    cut_off = watch.kill_all(NODE, "cut off")
    assert cut_off == [Death(worker=f"w{i}", cause=NODE, detail="cut off") for i in range(2)]
    assert watch.kill_all(NODE, "cut off") == []
    assert [process.wait(DEADLINE_S) for process, _ in processes] == [-signal.SIGKILL] * 2
    assert stays_quiet(watch, 0.3)


def test_a_signal_reaches_the_named_worker_only(start: Start) -> None:
    watch = ProcessWatch(FREEZE_TIMEOUT_S)
    (first, first_fd), (second, second_fd) = start(""), start("")
    watch.watch("w0", first.pid, first_fd)
    watch.watch("w1", second.pid, second_fd)
    watch.signal("w1", signal.SIGTERM)
    expected = Death(worker="w1", cause=CRASH, detail=f"process {second.pid} ended by SIGTERM")
    assert deaths(watch) == [expected]
    assert first.poll() is None
    watch.signal("w1", signal.SIGTERM)  # gone: nothing to do


def test_a_process_whose_threads_take_their_time_to_end_has_crashed(start: Start) -> None:
    """Its first thread is gone; the pidfd waits for the others."""
    process, fd = start(LEAVE_A_THREAD)
    watch = ProcessWatch(DEADLINE_S)
    watch.watch("w", process.pid, fd)
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    detail = f"process {process.pid} ended"
    assert deaths(watch) == [Death(worker="w", cause=CRASH, detail=detail)]
