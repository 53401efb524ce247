"""Activations that wait on the host, with a horizon of 1, 2 and 4 blocks, against none.

A Llama of eight small blocks takes steps on the CPU through the trainer's own loop, one worker.
Where "the device" and the host are one memory nothing is really saved, so two numbers are shown:
`device_mb`, by a dry run, is what a step's peak holds of activations on the device; `host_mb` is
what the real steps had on the host. The copies are real, by a thread. `hidden` is the share of
their seconds that the computing thread did not stand waiting: the median of the steps. It means
little where the two threads have no core each. How soon a copy is begun is counted in
test_offload.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks._common import print_result, say, show_table
from tests.support.measured_peak import make_loop, take_step
from tests.support.small_llama import SETTINGS, small_train
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import OffloadConfig, TrainConfig
from trainer.dryrun.rank import dry_run
from trainer.dryrun.shape import prepare_shape
from trainer.engine.engine import Engine
from trainer.parallel.host_memory import Flight, HostMemory, ThreadMemory

HORIZONS = (1, 2, 4)
LAYERS, SEQ_LEN = 8, 256


def main() -> None:
    """Runs the benchmark; the last line on stdout is one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=__doc__)
    parser.add_argument("--steps", type=int, default=5, help="of each, after one (5)")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for recompute in ("full", None):
        for horizon in (None, *HORIZONS):
            what = "recomputed" if recompute else "kept"
            name = f"{what}, {f'horizon {horizon}' if horizon else 'none'}"
            rows[name] = measure(settings(recompute, horizon), steps)
            say(f"{name}: {rows[name]}")
    show_table(f"{LAYERS} blocks, {SEQ_LEN} tokens", rows)
    print_result({"steps": steps, "rows": rows})


def settings(recompute: Any, horizon: int | None) -> TrainConfig:
    """Of one run."""
    offload = None if horizon is None else OffloadConfig(horizon=horizon, least_bytes=2**16)
    train = small_train(recompute=recompute, offload=offload, loss_chunk=128)
    model = {**SETTINGS, "num_hidden_layers": LAYERS}
    task = replace(train.task, model=replace(train.task.model, settings=model), seq_len=SEQ_LEN)
    return replace(train, task=task)


def measure(train: TrainConfig, steps: int) -> dict[str, Any]:
    """Numbers of one run."""
    foretold = dry_run(train, replicas=1, device="cpu")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=600)
    host = Timed()
    with patch.object(Engine, "_make_host", lambda engine: _if_offloaded(engine, host)):
        loop = make_loop(0, meet, prepare_shape(train), train, 1)
    seconds, losses, hidden = [], [], []
    for _ in range(steps + 1):
        times = host.times = Times()
        begun_s = time.perf_counter()
        losses.append(take_step(loop).loss)
        seconds.append(time.perf_counter() - begun_s)
        if times.copied_s:
            hidden.append(1 - times.waited_s / times.copied_s)
    del loop
    leave_replica_group()
    return {
        "device_mb": round(foretold.components["activations"] / 1e6, 1),
        "host_mb": round(host.held_bytes / 1e6, 1),
        "step_s": round(statistics.median(seconds[1:]), 3),
        "copies": times.copies,
        "hidden": round(statistics.median(hidden[1:]), 3) if hidden else None,
        "loss": losses[-1],
    }


def _if_offloaded(engine: Engine, host: HostMemory) -> HostMemory | None:
    return None if engine.train_config.offload is None else host


@dataclass
class Times:
    """What the copies of a step took."""

    copies: int = 0
    copied_s: float = 0.0
    waited_s: float = 0.0


class Timed(ThreadMemory):
    """Host memory that measures its copies and the waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.times = Times()

    def _copy(self, block: torch.Tensor, values: torch.Tensor, *, back: bool) -> Flight:
        times = self.times
        begun = self._thread.submit(time.perf_counter)
        flight = super()._copy(block, values, back=back)
        ended = self._thread.submit(time.perf_counter)
        ended.add_done_callback(
            lambda _: _add(times, ended.result() - begun.result())  # on the thread that copies
        )
        times.copies += 1
        return _TimedFlight(times, flight)


def _add(times: Times, seconds: float) -> None:
    times.copied_s += seconds


class _TimedFlight:
    def __init__(self, times: Times, flight: Flight) -> None:
        self._times, self._flight, self._awaited = times, flight, False

    def wait(self) -> None:
        if self._awaited:
            return
        self._awaited = True
        begun_s = time.perf_counter()
        self._flight.wait()
        self._times.waited_s += time.perf_counter() - begun_s

    def drop(self) -> None:
        self._flight.drop()


if __name__ == "__main__":
    main()
