"""A node's agent in a process of its own, and a coordinator that is a socket."""

from __future__ import annotations

import socket
import subprocess
import sys

from tests.support import ROOT

DEADLINE_S = 60.0
AGENT = """
import socket, sys, threading
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
threading.Event().wait()
"""


def test_an_agent_beats_though_dns_does_not_answer() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as beats:
        beats.bind(("127.0.0.1", 0))
        beats.settimeout(DEADLINE_S)
        command = [sys.executable, "-c", AGENT, str(beats.getsockname()[1])]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as agent:
            try:
                assert beats.recv(1000)
                assert agent.stdout is not None and agent.stdout.readline() == b"asked\n"
            finally:
                agent.kill()
