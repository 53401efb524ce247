"""A node's agent in a process of its own, and a coordinator that is a socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

DEADLINE_S = 60.0
AGENT = """
import os, socket, subprocess, sys, threading
from elastic.config import HealthConfig
from elastic.node.agent import NodeAgent

class Coordinator:
    def send(self, *call): pass
    def call(self, *call): pass

def no_answer(host):
    os.write(1, b"asked\\n")  # a whole line, beside what the other thread prints
    threading.Event().wait()

socket.gethostbyname = no_answer
beats = ("127.0.0.1", int(sys.argv[1]))
health = HealthConfig(preflight=False)
agent = NodeAgent(Coordinator(), "n1", "token", beats, beats, "secret", health)
"""
WAITS = "threading.Event().wait()"
WORKER = """
worker = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
NO_BEATS = 99  # a descriptor that it does not have
"""
ASKED_TWICE = """
agent._processes.watch("w0", worker.pid, NO_BEATS, logs=(sys.argv[2],))
threading.Thread(target=lambda: agent.evidence(["w0"]), daemon=True).start()
while agent._reads.acquire(blocking=False):
    agent._reads.release()
print(repr(agent.evidence(["w0"])["w0"].log), flush=True)
worker.kill()
os._exit(0)
"""

ASKED_OF_A_DISK_THAT_HANGS = """
import time
from elastic.node import process_watch
process_watch.read_stacks = lambda *_: "its stacks"
agent._processes.watch("w0", worker.pid, NO_BEATS, stacks=(0, worker.pid), logs=(sys.argv[2],))
for _ in range(2):
    began_s = time.monotonic()
    found = agent.evidence(["w0"])["w0"]
    print(found.stacks[:10], repr(found.log), time.monotonic() - began_s, flush=True)
worker.kill()
os._exit(0)
"""

ASKED_OF_A_DISK_THAT_FAILS = """
import time
from elastic.node import agent as of_agent
def last_words(logs):
    raise MemoryError
of_agent.last_words = last_words
agent._processes.watch("w0", worker.pid, NO_BEATS, logs=(sys.argv[2],))
began_s = time.monotonic()
found = agent.evidence(["w0"])["w0"]
print(repr(found.log), time.monotonic() - began_s, flush=True)
worker.kill()
os._exit(0)
"""

ASKED_BESIDE = """
from elastic.node import process_watch
asked, answers = threading.Event(), threading.Event()
def read_stacks(*_):
    asked.set()
    answers.wait()
    return "its stacks"
process_watch.read_stacks = read_stacks
agent._processes.watch("w0", worker.pid, NO_BEATS, stacks=(0, worker.pid), logs=(sys.argv[2],))
found = {}
asking = threading.Thread(target=lambda: found.update(agent.evidence(["w0"])))
asking.start()
asked.wait()
print(repr(list(agent.output([sys.argv[2]], 99).values())), flush=True)
answers.set()
asking.join()
print(repr(found["w0"].stacks + found["w0"].log), flush=True)
worker.kill()
os._exit(0)
"""

ASKED_BEHIND_A_SLOW_READ = """
import time
from elastic.protocol.events import WorkerJoined
def begin_slow_read(rest_s):
    agent._reads.acquire()
    agent._read_s = time.monotonic() - 60
    threading.Timer(rest_s, agent._reads.release).start()
its = dict(node="n1", pid=worker.pid, born_ticks=None, logs=[sys.argv[2]])
ended = WorkerJoined(time=0.0, worker="w0", **its)
while not agent._readings:
    time.sleep(0.01)
begin_slow_read(1.5)
found = agent.last_words([ended])["w0"]
print(repr(found.log), bool(found.readings), flush=True)
agent._reads.acquire()
agent._reads.release()
for ask in (lambda: agent.last_words([ended])["w0"].log, lambda: agent.output([sys.argv[2]], 99)):
    begin_slow_read(0.1)
    print("its words" in str(ask()), flush=True)
worker.kill()
os._exit(0)
"""


def test_an_agent_beats_though_dns_does_not_answer() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as beats:
        beats.bind(("127.0.0.1", 0))
        beats.settimeout(DEADLINE_S)
        command = [sys.executable, "-c", AGENT + WAITS, str(beats.getsockname()[1])]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as agent:
            try:
                assert beats.recv(1000)
                assert agent.stdout is not None and agent.stdout.readline() == b"asked\n"
            finally:
                agent.kill()


def test_one_thread_at_most_waits_for_a_disk_that_hangs(tmp_path: Path) -> None:
    """Here a pipe that nobody writes to: who is asked next leaves the output out."""
    log = log_in(tmp_path)
    os.mkfifo(log)
    assert told_by(ASKED_TWICE, log)[-1] == "''"


def test_a_disk_that_hangs_costs_evidence_the_output_alone_and_its_time_once(
    tmp_path: Path,
) -> None:
    """The read itself hangs, as it does in the kernel; and it never ends."""
    log = log_in(tmp_path)
    os.mkfifo(log)
    first, second = (line.rsplit(" ", 1) for line in told_by(ASKED_OF_A_DISK_THAT_HANGS, log)[-2:])
    assert first[0] == second[0] == "its stacks ''"
    assert float(first[1]) < 2.0
    assert float(second[1]) < 0.9, "nobody waits again for what hangs"


def test_output_that_cannot_be_read_costs_evidence_no_time(tmp_path: Path) -> None:
    log, took_s = told_by(ASKED_OF_A_DISK_THAT_FAILS, log_in(tmp_path))[-1].rsplit(" ", 1)
    assert log == "''" and float(took_s) < 0.9


def test_behind_a_slow_read_the_words_are_waited_for_a_moment_and_the_readings_told(
    tmp_path: Path,
) -> None:
    log = log_in(tmp_path)
    log.write_text("its words\n")
    assert told_by(ASKED_BEHIND_A_SLOW_READ, log)[-3:] == ["'' True", "True", "True"]


def test_workers_that_take_their_time_to_answer_keep_nobody_from_the_disk(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.write_text("its words\n")
    output, evidence = told_by(ASKED_BESIDE, log)[-2:]
    assert output == r"['its words\n']"
    assert evidence.startswith("'its stacks") and "its words" in evidence


def log_in(folder: Path) -> Path:
    """A file of Ray's for a worker, which is not there yet."""
    log = folder / "logs" / "worker-a-b-1.err"
    log.parent.mkdir()
    return log


def told_by(program: str, log: Path) -> list[str]:
    """What an agent says whose own output lies beside `log`, as Ray has it; without what its other
    thread says at any time."""
    command = [sys.executable, "-c", AGENT + WORKER + program, "1", str(log)]
    with log.with_name("worker-c-d-2.err").open("w") as errors:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            timeout=DEADLINE_S,
            check=True,
            text=True,
        )
    return [line for line in done.stdout.splitlines() if line != "asked"]
