"""Systems that train in turns on one machine: a block of steps each, the others stopped meanwhile.

A system is a process and all below it. Its workers begin each step at a `Gate`, which holds them
back between two blocks and takes the time of each; so the loops round it are what they are
without it. Between its turns the whole system is stopped by a signal, whatever it does beside the
steps, so that it takes nothing from the others, and what it does beside its own steps is counted.

    Turns.block   continue ── settle ── go ──────────────► times of all workers ── stop ── CPU time
    Gate.step                            block of steps ──►
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from benchmarks._common import say, show_table
from benchmarks._processes import processes_below
from health.process import parse_cpu_ticks, read_stat
from trainer.tasks.causal_lm import PreparedCausalLM

SETTLE_S = 0.1
"""After a stop clocks have run on: what is overdue comes first, and outside the steps."""
START_S = 300.0
END_S = 60.0
_TICKS_A_S = os.sysconf("SC_CLK_TCK")


# -- in a worker -----------------------------------------------------------------------------------


class Gate:
    """A worker's way from one block of steps to the next.

    Args:
        address: path of the parent's socket.
    """

    def __init__(self, address: str) -> None:
        self._line, self._left, self._begun_s = Client(address), 0, time.perf_counter()
        self.loss: Any = None
        """Of the latest step: (sum, terms)."""
        self._line.send(os.getpid())

    def step(self) -> None:
        """A step begins. Waits where the last one was the last of its block."""
        if self._left == 0:
            wall_s = time.perf_counter() - self._begun_s
            self._line.send((wall_s, self.loss and float(self.loss[0]) / self.loss[1]))
            self._left = self._line.recv()
            self._begun_s = time.perf_counter()
        self._left -= 1


@functools.cache
def gate(address: str) -> Gate:
    """This process's one."""
    return Gate(address)


@dataclass(frozen=True, kw_only=True)
class GatedLM(PreparedCausalLM):
    """A language model that is trained in turns. A step has one micro-batch of each worker, so its
    loss is where a step begins. Implements Task and PreparedTask."""

    address: str
    """Path of the parent's socket."""

    def prepare(self, train: Any, cache_dir: str) -> GatedLM:
        """See Task."""
        return self

    def loss(self, model: Any, batch: Any) -> Any:
        """See PreparedTask."""
        gate(self.address).step()
        loss, terms = super().loss(model, batch)
        gate(self.address).loss = loss.detach(), terms
        return loss, terms


# -- in the parent ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Block:
    """Steps that a system did in a turn."""

    wall_s: float
    """Of its slowest worker."""
    workers_cpu_s: float
    """CPU seconds of its workers, all their threads."""
    beside_cpu_s: float
    """CPU seconds of all its other processes."""
    actors_cpu_s: dict[str, float]
    """Those of them that are actors, and the driver: class, or "driver" -> CPU seconds."""
    awake_s: float
    """How long it was let go on, from one stop to the next."""
    loss: float
    """Of the last step, mean over the workers."""


class Turns(contextlib.AbstractContextManager["Turns"]):
    """One system in its turns; the parent's side. On entry it starts, and comes to its first step;
    on exit it ends.

    Args:
        address: path for the socket that its workers come to.
        process: of the system.
        workers: how many it has.
    """

    def __init__(self, address: str, process: SpawnProcess, workers: int) -> None:
        self._address, self._process, self._count = address, process, workers
        self._lines: list[Connection] = []
        self._workers: list[int] = []
        self._cpu_s: dict[int, float] = {}

    def __enter__(self) -> Turns:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(self._address)
            door.listen(self._count)
            self._process.start()
            try:
                self._begin(door)
            except BaseException:
                self.__exit__()
                raise
        return self

    def _begin(self, door: socket.socket) -> None:
        self._lines = [self._let_in(door) for _ in range(self._count)]
        self._workers = [line.recv() for line in self._lines]
        for line in self._lines:
            line.recv()
        self._stop()

    def _let_in(self, door: socket.socket) -> Connection:
        door.settimeout(1.0)
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s and self._process.is_alive():
            with contextlib.suppress(socket.timeout):
                return Connection(door.accept()[0].detach())
        raise RuntimeError(f"{self._process.name} did not come to its first step")

    def block(self, steps: int) -> Block:
        """Lets it do so many steps.

        Raises:
            EOFError: a worker is gone.
        """
        awake_since_s = time.perf_counter()
        for pid in self._processes():
            _send(pid, signal.SIGCONT)
        time.sleep(SETTLE_S)
        for line in self._lines:
            line.send(steps)
        found = [line.recv() for line in self._lines]
        awake_s = time.perf_counter() - awake_since_s
        spent_s = self._stop()
        beside_s = {pid: s for pid, s in spent_s.items() if pid not in self._workers}
        return Block(
            wall_s=max(wall_s for wall_s, _ in found),
            workers_cpu_s=sum(spent_s[pid] for pid in self._workers),
            beside_cpu_s=sum(beside_s.values()),
            actors_cpu_s=self._by_actor(beside_s),
            awake_s=awake_s,
            loss=sum(loss for _, loss in found) / len(found),
        )

    def _by_actor(self, spent_s: Mapping[int, float]) -> dict[str, float]:
        """See Block.actors_cpu_s."""
        by_class_s: dict[str, float] = {}
        for pid, seconds in spent_s.items():
            name = "driver" if pid == self._process.pid else actor_class(pid)
            if name is not None:
                by_class_s[name] = by_class_s.get(name, 0.0) + seconds
        return by_class_s

    def _stop(self) -> dict[int, float]:
        """Returns the CPU seconds of each process since the last stop."""
        for pid in reversed(self._processes()):
            _send(pid, signal.SIGSTOP)
        before, self._cpu_s = self._cpu_s, cpu_s(self._processes())
        return {pid: s - before.get(pid, 0.0) for pid, s in self._cpu_s.items()}

    def _processes(self) -> list[int]:
        """Its processes, the workers first: who watches them must never see them stopped."""
        others = set(processes_below(self._process.pid)) - set(self._workers)
        return [*self._workers, *others]

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as left:
            for pid in self._processes():
                _send(pid, signal.SIGCONT)
                with contextlib.suppress(ProcessLookupError):
                    left.callback(_kill, os.pidfd_open(pid))
            self._process.terminate()
            self._process.join(END_S)


def take_turns(systems: Mapping[str, Turns], turns: int, steps: int) -> dict[str, list[Block]]:
    """So many turns of each system, of so many steps; each time another one begins."""
    found: dict[str, list[Block]] = {name: [] for name in systems}
    names = list(systems)
    for number in range(turns):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            found[name].append(systems[name].block(steps))
    return found


def take_rounds(
    running: contextlib.ExitStack,
    systems: Mapping[str, Turns],
    ratios: Callable[[Mapping[str, Sequence[Block]]], dict[str, dict[str, float]]],
    *,
    rounds: int,
    turns: int,
    steps: int,
) -> list[dict[str, list[Block]]]:
    """Starts the systems, each with a turn that does not count, and has them take turns.

    Args:
        running: ends them.
        systems: by their names.
        ratios: of a round, which are shown.
        rounds: so many.
        turns: of each system in a round.
        steps: in a turn.
    """
    for name, system in systems.items():
        running.enter_context(system)
        system.block(steps)
        say(f"{name} has begun")
    found = []
    for number in range(rounds):
        found.append(take_turns(systems, turns, steps))
        show_table(f"round {number + 1} of {rounds}", ratios(found[-1]))
    check_same(found[0])  # later on their rounding has grown
    return found


def check_same(found: Mapping[str, Sequence[Block]]) -> None:
    """All systems compute the same, as long as their rounding has not grown. The first is what the
    others are held against."""
    losses = {name: [block.loss for block in blocks] for name, blocks in found.items()}
    for first, *others in zip(*losses.values(), strict=True):
        worst = max(abs(loss / first - 1) for loss in others)
        assert worst < 1e-3, f"the systems do not compute the same: {losses}"


def actor_class(pid: int) -> str | None:
    """The class of the Ray actor that a process is; None for one that is none."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
        kind, _, name = title.partition("::")
        if kind == "ray" and not name.startswith(("IDLE", "_")):
            return name.split(".")[0]
    return None


def cpu_s(pids: Sequence[int]) -> dict[int, float]:
    """CPU seconds so far of each process that is there."""
    found = {}
    for pid in pids:
        if (stat := read_stat(pid)) is not None:
            found[pid] = parse_cpu_ticks(stat) / _TICKS_A_S
    return found


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
