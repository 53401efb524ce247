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
    print("asked", flush=True)
    threading.Event().wait()

socket.gethostbyname = no_answer
beats = ("127.0.0.1", int(sys.argv[1]))
health = HealthConfig(preflight=False)
agent = NodeAgent(Coordinator(), "n1", "token", beats, beats, "secret", health)
"""
WAITS = "threading.Event().wait()"
ASKED_TWICE = """
worker = subprocess.Popen(["sleep", "60"])
agent._processes.watch("w0", worker.pid, None, logs=(sys.argv[2],))
threading.Thread(target=lambda: agent.evidence(["w0"]), daemon=True).start()
while agent._reads.acquire(blocking=False):
    agent._reads.release()
print(repr(agent.evidence(["w0"])["w0"].log), flush=True)
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
    log = tmp_path / "its.err"
    os.mkfifo(log)
    command = [sys.executable, "-c", AGENT + ASKED_TWICE, "1", str(log)]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "''"
