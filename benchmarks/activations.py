"""What recomputation, a chunked loss and compilation take of memory, and what they do to the loss.

A small Llama takes the same steps of random text on the CPU for each of them, through the trainer's
own loop, one worker, one thread. `peak_mb` is the most that the last of the steps has had of the
allocator at once, beside what stood before it (parameters, moments, the lane's gradient): by the
events of torch's profiler, which knows nothing of how a dry run counts. `foretold_mb` is what a dry
run says of the same. `loss_difference` and `norm_difference`, of the gradient's norm, are relative
to the plain run, the largest of all steps.

The exit status is 1 where a loss or a norm differs by more than `TOLERANCE`.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks._common import print_result, say, scratch, show_table
from benchmarks._random_text import prepared
from tests.support.measured_peak import make_loop, peak_of, take_step
from tests.support.small_llama import SETTINGS, small_train
from trainer.backend.groups import leave_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import TrainConfig
from trainer.dryrun.rank import dry_run
from trainer.parallel.compiled import CACHE, keep_compiled
from trainer.replication.step_commit import Commit

SEQ_LEN, CHUNK = 256, 128
TOLERANCE = 1e-5
"""Of losses and gradient norms, relative: roundings of float32 that some steps carry on."""

PLAIN = "plain"
CHANGES: dict[str, dict[str, Any]] = {
    PLAIN: {},
    'recompute="full"': {"recompute": "full"},
    'recompute="selective"': {"recompute": "selective"},
    "recompute=2": {"recompute": 2},
    f"loss_chunk={CHUNK}": {"loss_chunk": CHUNK},
    'compile="require"': {"compile": "require"},
    "0.5, compiled": {"recompute": 0.5, "compile": "require"},
    "full, chunked": {"recompute": "full", "loss_chunk": CHUNK},
    "full, chunked, compiled": {"recompute": "full", "loss_chunk": CHUNK, "compile": "require"},
    "0.2, chunked, compiled": {"recompute": 0.2, "loss_chunk": CHUNK, "compile": "require"},
}
_STATE = ("parameters", "gradients", "optimizer")
"""Components of a dry run that stand before a step."""


def main() -> int:
    """Runs the benchmark; the last line on stdout is one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activations", description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}
    taken: dict[str, list[Commit]] = {}
    with scratch("activations") as directory:
        os.environ[CACHE] = str(directory)
        keep_compiled(os.environ, 1)
        for name, changes in CHANGES.items():
            rows[name], taken[name] = measure(settings(options.layers, changes), options.steps)
            rows[name] |= differences(taken[name], taken[PLAIN])
            say(f"{name}: {rows[name]}")
    for row in rows.values():
        row["of_plain"] = round(row["peak_mb"] / rows[PLAIN]["peak_mb"], 3)
    show_table(f"{options.layers} blocks, {SEQ_LEN} tokens", rows)
    worst = max(max(r["loss_difference"], r["norm_difference"]) for r in rows.values())
    print_result({**vars(options), "tolerance": TOLERANCE, "worst": worst, "rows": rows})
    return int(worst > TOLERANCE)


def settings(layers: int, changes: dict[str, Any]) -> TrainConfig:
    """Of one run."""
    train = small_train(**changes)
    model = replace(train.task.model, settings={**SETTINGS, "num_hidden_layers": layers})
    return replace(train, task=replace(train.task, model=model, seq_len=SEQ_LEN))


def measure(train: TrainConfig, steps: int) -> tuple[dict[str, Any], list[Commit]]:
    """Memory of one run, and its steps."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=600)
    loop = make_loop(0, meet, prepared(train), train, 1)
    commits = [take_step(loop) for _ in range(steps - 1)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        commits.append(take_step(loop))
    assert loop.loader is not None
    loop.loader.close()
    del loop
    leave_replica_group()
    return {
        "peak_mb": round(peak_of(seen) / 1e6, 1),
        "foretold_mb": foretold_mb(train),
    }, commits


def foretold_mb(train: TrainConfig) -> float:
    """What a step takes beside the state, by a dry run."""
    components = dry_run(train, replicas=1, device="cpu").components
    return round(sum(n for name, n in components.items() if name not in _STATE) / 1e6, 1)


def differences(commits: list[Commit], plain: list[Commit]) -> dict[str, float]:
    """The largest of all steps."""
    pairs = list(zip(commits, plain, strict=True))
    return {
        "loss_difference": max(abs(one.loss / other.loss - 1) for one, other in pairs),
        "norm_difference": max(abs(one.grad_norm / other.grad_norm - 1) for one, other in pairs),
    }


if __name__ == "__main__":
    sys.exit(main())
