"""What determinism costs, and what compilation gives: a micro-batch, forward and backward.

One worker with a small Llama on the CPU, one thread. The systems take turns, micro-batch by
micro-batch:

    fast     determinism="fast"
    strict   determinism="strict"
    compiled determinism="strict", compile="require"

`cpu_s` is the CPU time of a micro-batch, which other processes disturb less than its duration.
`peak_mb` is the most that a micro-batch has had of the CPU's allocator at once: activations, whole
gradients, logits. `first_s` is a first micro-batch with an empty cache of compiled code, `cached_s`
one in a process that finds it filled. `loss_difference` is relative, to `fast`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks._common import print_result, say, scratch, show_table
from elastic import CausalLM, DataConfig, ModelConfig, TrainConfig
from tests.support.measured_peak import peak_of
from trainer.backend import determinism
from trainer.backend.groups import leave_replica_group, make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.dryrun.shape import prepare_shape
from trainer.engine.engine import Engine
from trainer.parallel.compiled import CACHE, keep_compiled
from trainer.parallel.layout import Slot

SAMPLES, SEQ_LEN = 4, 256
CHANGES: dict[str, dict[str, Any]] = {
    "fast": {"determinism": "fast"},
    "strict": {},
    "compiled": {"compile": "require"},
}


def train_config(layers: int, hidden: int) -> TrainConfig:
    """What is learned."""
    settings = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
    }
    task = CausalLM(
        model=ModelConfig(settings=settings),
        data=DataConfig(paths=("no text",), vocab_size=1000),
        seq_len=SEQ_LEN,
    )
    return TrainConfig(task=task, steps=1, global_batch=SAMPLES, lanes=1)


class System:
    """One worker's model, set up as its configuration says."""

    def __init__(self, train: TrainConfig, mesh: Any) -> None:
        self._train, self._task = train, prepare_shape(train)
        self._engine = Engine(
            self._task,
            train,
            slot=Slot(replica=0, rank=0, dims=train.parallel.dims),
            mesh=mesh,
            device="cpu",
            max_replicas=1,
        )
        self._engine.initialize()
        generator = torch.Generator().manual_seed(0)
        self._batch = torch.randint(1000, (SAMPLES, SEQ_LEN + 1), generator=generator)

    def compute(self) -> tuple[float, float]:
        """Loss and seconds of CPU of a micro-batch."""
        determinism.settle(self._train.determinism, "cpu", {})
        start = time.process_time()
        loss, _ = self._task.loss(self._engine.model, self._batch)
        self._engine.backward(loss)
        seconds = time.process_time() - start
        self._engine.model.zero_grad(set_to_none=True)
        return loss.item(), seconds

    def peak_bytes(self) -> int:
        """The most alive at once in a micro-batch, of what it takes."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.compute()
        return peak_of(profiler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with scratch("bits") as directory:
        os.environ[CACHE] = str(directory)
        keep_compiled(os.environ, 1)
        print_result(measure(train_config(options.layers, options.hidden), options.repeats))


def measure(train: TrainConfig, repeats: int) -> dict[str, Any]:
    """All numbers."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=60)
    mesh = make_replica_group(meet, "replica", rank=0, dims=train.parallel.dims, device="cpu")
    systems = {name: System(replace(train, **more), mesh) for name, more in CHANGES.items()}
    losses, first_s = {}, {}
    for name, system in systems.items():
        start = time.perf_counter()
        losses[name], _ = system.compute()
        first_s[name] = time.perf_counter() - start
        say(f"{name}: the first in {first_s[name]:.1f} s")
    torch._dynamo.reset()  # as in a new process, but for the imports
    start = time.perf_counter()
    systems["compiled"].compute()
    cached_s = time.perf_counter() - start
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(repeats):
        for name, system in systems.items():
            times[name].append(system.compute()[1])
    rows = {
        name: {
            "cpu_s": round(statistics.median(times[name]), 4),
            "peak_mb": round(system.peak_bytes() / 1e6, 1),
            "loss_difference": abs(losses[name] / losses["fast"] - 1),
        }
        for name, system in systems.items()
    }
    leave_replica_group()
    show_table("a micro-batch", rows)
    return {**rows, "first_s": round(first_s["compiled"], 1), "cached_s": round(cached_s, 1)}


if __name__ == "__main__":
    main()
