"""What the trainer does with a GPU: `python -m benchmarks.gpu --part N`, each within eight minutes.

    1, 2, 3   Llama of 1, 3 and 8 billion parameters, samples of 4,096 and 8,192 tokens: a plain
              FSDP2 loop, transformers' Trainer, ours; ours with the loss in chunks, with
              activations recomputed, with both, compiled, with all three, and with the loss in
              chunks and activations offloaded to the host, all of them or what recomputation
              keeps, of which a trace shows how much of the copying is hidden. Both with parameters
              and moments in bfloat16, compiled, by how much is recomputed. Peak memory beside the
              dry run's estimate.
    4         on 1B: what fault tolerance takes of a step: digest, commit, heartbeat; and what a
              snapshot after each step adds
    5         two ranks, of which one is killed: when the other is out, and has its next step
    6         on 1B: linear layers in 8 bits, with one scale for a tensor or for each row, as they
              are and compiled with `fast`, and Transformer Engine in bfloat16 and 8 bits, against
              bfloat16
    7         kernels of 8B by themselves: products of its blocks, by each library that has them,
              and sums of gradients

All of a step is the same for all systems, and theirs alone: each runs in a process of its own, with
the whole GPU, one after the other; the next round has another order. Numbers are medians over the
steps of all rounds, but for the first steps of each process. `--trace` adds a step to each system,
and tells by classes of kernels where it went. What does not fit the GPU, lacks a package, or has no
time left is a reason in place of numbers.

`--device cpu --tiny` runs the same code on a CPU in a minute, but for Transformer Engine's, which
has none there; what it measures says nothing. It exits with 1 where a row breaks.
`--results DIRECTORY` keeps the result there, by parts and GPU. docs/benchmarks.md has the order for
a GPU that is lent for minutes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks._common import end_properly, plan_turns, print_result, say, show_table
from benchmarks._gpu_alone import measure_alone
from benchmarks._gpu_costs import measure_costs
from benchmarks._gpu_loops import MEMORY, SYSTEMS, Skipped, Tell
from benchmarks._gpu_models import (
    Workload,
    flops_per_token,
    own_settings,
    shared_settings,
)
from benchmarks._gpu_recovery import measure_recovery
from tests.support.fabric import check_fork
from trainer.backend import nccl_settings
from trainer.dryrun.machines import beside_tensors
from trainer.dryrun.rank import dry_run
from trainer.errors import ConfigError
from trainer.peaks import peak_flops

PART_SIZES = {1: "1B", 2: "3B", 3: "8B"}
PART_S = 7.5 * 60
"""A system that would begin later is left out."""
SYSTEM_S = 100.0
"""And one that takes longer is ended, on a GPU: what it hangs in would keep the others from it."""
END_S = 10.0
"""For a system's process to end in order."""
ESTIMATES = ("estimate_bytes", "estimate_device_bytes")
"""Keys of `estimate`."""
STEP_TOKENS, MICRO_TOKENS = 32768, 8192
_FAST = {"determinism": "fast", "compile": "on"}
NARROW: dict[str, dict[str, Any]] = {
    "compiled": {},
    "compiled, every 4th recomputed": {"recompute": 4},
    "compiled, every 2nd recomputed": {"recompute": 2},
    "compiled, selective": {"recompute": "selective"},
    "compiled, 0.3 kept": {"recompute": 0.3},
    "compiled, 0.5 kept": {"recompute": 0.5},
    "compiled, recomputed": {"recompute": "full"},
    "all three": {"recompute": "full", "loss_chunk": 1024},
}
"""With bfloat16 state and compiled, what else is changed of the workload, for ours and the plain
loop: recomputation is what holds back MFU there (docs/benchmarks.md)."""

CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "plain, compiled": ("plain", {"compile": "on"}),
    "plain, recomputed": ("plain", {"recompute": "full"}),
    "hugging_face": ("hugging_face", {}),
    "ours": ("ours", {}),
    "ours, fast": ("ours", {"determinism": "fast"}),
    "ours, chunked loss": ("ours", {"loss_chunk": 1024}),
    "ours, recomputed": ("ours", {"recompute": "full"}),
    "ours, both": ("ours", {"recompute": "full", "loss_chunk": 1024}),
    "ours, compiled": ("ours", {"compile": "on"}),
    "ours, fast, compiled": ("ours", _FAST),
    "ours, fast, compiled, chunked loss": ("ours", _FAST | {"loss_chunk": 1024}),
    "ours, all three": ("ours", {"compile": "on", "recompute": "full", "loss_chunk": 1024}),
    "ours, both, bfloat16 state": (
        "ours",
        {"recompute": "full", "loss_chunk": 1024, "state": "bfloat16"},
    ),
    "ours, offloaded": ("ours", {"loss_chunk": 1024, "offload": 2}),
    "ours, both, offloaded": ("ours", {"recompute": "full", "loss_chunk": 1024, "offload": 2}),
    **{
        f"{name}, {row}, bfloat16 state": (system, _FAST | {"state": "bfloat16"} | changes)
        for row, changes in NARROW.items()
        for name, system in (("plain", "plain"), ("ours, fast", "ours"))
    },
}
"""Row -> the system, and what is changed of the workload."""


PRODUCTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("ours", {}),
    "bf16, fast": ("ours", {"determinism": "fast"}),
    **{
        f"{products}, fast, compiled": ("ours", _FAST | {"products": products})
        for products in ("bf16", "tensorwise", "tensorwise, gathered", "rowwise")
    },
    "tensorwise": ("ours", {"products": "tensorwise"}),
    "tensorwise, gathered": ("ours", {"products": "tensorwise, gathered"}),
    "rowwise": ("ours", {"products": "rowwise"}),
    "library, fast": ("ours", {"determinism": "fast", "products": "library"}),
    "library, 8 bits, fast": ("ours", {"determinism": "fast", "products": "library, 8 bits"}),
}
"""Part 6's rows, as CHANGES has them. What 8 bits gain shows compiled, where a rounding is one with
what is before it, and `fast`, as `strict` slows attention alone; Transformer Engine's rows are held
against `bf16, fast`, since it is not compiled. With `compile`, not on a CPU: it takes minutes."""

TINY_ROWS = (
    "plain, recomputed",
    "hugging_face",
    "ours, fast, all three, bfloat16 state",
    "ours, offloaded",
    "tensorwise, gathered",
    "rowwise",
    "library, 8 bits, fast",
)
"""Those that a tiny model has, of either part: they run what the others run, and compile once."""

# What starts the processes of the systems has imported what they use.
multiprocessing.set_forkserver_preload(
    ["benchmarks.gpu", "torch._dynamo", "transformers.models.llama.modeling_llama"]
)


def plan_workloads(
    part: int, device: Any, tiny: bool, micro_tokens: int = MICRO_TOKENS
) -> list[Workload]:
    """What a part trains, in order of the length of its samples."""
    if tiny:
        return [Workload(size="tiny", seq_len=32, samples=4, micro=2, device=device)]
    return [
        Workload(
            size=PART_SIZES.get(part, "1B"),
            seq_len=seq_len,
            samples=STEP_TOKENS // seq_len,
            micro=micro_tokens // seq_len,
            device=device,
        )
        for seq_len in ((4096,) if part == 6 else (4096, 8192))
    ]


# -- one system in a process -----------------------------------------------------------------------


def in_process(
    call: Callable[..., None], *arguments: Any, limit_s: float = SYSTEM_S
) -> dict[str, Any]:
    """What `call` tells in a process of its own, which leaves the GPU empty; or why it did not, and
    whether that is `meant`: a library is missing, or the machine cannot. What it told before it
    failed is kept, with the reason as `cut`.

    Args:
        call: gets a `Tell` before its arguments.
        arguments: for it.
        limit_s: after which it is ended, on a GPU.
    """
    context = multiprocessing.get_context("forkserver")  # it has not started CUDA
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, call, arguments))
    process.start()
    theirs.close()
    until_s = time.monotonic() + limit_s if torch.cuda.is_available() else None
    found: dict[str, Any] = {}
    end: dict[str, Any] | None = {"skipped": f"it took more than {limit_s:g} s"}
    try:
        while ours.poll(until_s and max(0.0, until_s - time.monotonic())):
            told = ours.recv()
            if told is None or "skipped" in told:
                end = told
                break
            found |= told
            say(json.dumps(found))  # a machine that is lent may be taken away
    except EOFError:
        end = {"skipped": "its process ended"}
    process.join(0 if end else END_S)
    process.kill()
    process.join()
    if end:
        say(end["skipped"])
        return found | {"cut": end["skipped"]} if found else end
    return found


def _answer(line: Connection, call: Callable[..., None], arguments: Any) -> None:
    try:
        check_fork()
    except RuntimeError as error:
        line.send({"skipped": str(error)})
        return
    end: dict[str, Any] | None = None
    try:
        call(line.send, *arguments)
    except Skipped as reason:
        end = {"skipped": str(reason), "meant": True}
    except ConfigError as error:  # a library is missing, or the GPU cannot
        end = {"skipped": str(error), "meant": True}
    except torch.OutOfMemoryError:
        end = {"skipped": "out of memory"}
    line.send(end)


def estimate(tell: Tell, work: Workload) -> None:
    """The dry run's answer for ours: what tensors take at most, and what the whole device."""
    peak_bytes = dry_run(work.train(2), replicas=1, device=work.device).peak_bytes
    tell({"estimate_bytes": peak_bytes})
    if work.device != "cpu":
        tell({"estimate_device_bytes": peak_bytes + beside_tensors(peak_bytes, groups=0)})


# -- the parts -------------------------------------------------------------------------------------


def measure_steps(part: int, options: argparse.Namespace) -> dict[str, Any]:
    """All systems on the workloads of a part; or only the rows, the lengths that are asked for."""
    tiny, device, rows, lengths = options.tiny, options.device, options.rows, options.seq_lens
    planned = plan_rows(part, device, tiny)
    planned = {name: row for name, row in planned.items() if not rows or name in rows}
    until_s = time.monotonic() + PART_S
    return {
        f"{work.size} at {work.seq_len}": measure_workload(work, planned, options, until_s)
        for work in plan_workloads(part, device, tiny, options.micro_tokens)
        if not lengths or work.seq_len in lengths
    }


def plan_rows(part: int, device: str, tiny: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """Row -> the system, and what is changed of the workload."""
    rows = PRODUCTS if part == 6 else CHANGES
    return {
        name: row
        for name, row in rows.items()
        if (not tiny or name in TINY_ROWS)
        and (part != 6 or device == "cuda" or "compile" not in row[1])
    }


def measure_workload(
    work: Workload,
    changed: dict[str, tuple[str, dict[str, Any]]],
    options: argparse.Namespace,
    until_s: float,
) -> dict[str, Any]:
    """All systems on one workload, in turns."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in changed}
    for names in plan_turns(list(changed), options.rounds):
        for name in names:
            system, changes = changed[name]
            say(f"{work.size} at {work.seq_len}: {name}")
            if any(run.keys() & {"skipped", "cut"} for run in runs[name]):
                continue
            if time.monotonic() > until_s:
                runs[name].append({"skipped": "no time left"})
                continue
            # In the last round, so that no other row waits for a trace where time runs out.
            trace = options.trace and len(runs[name]) == options.rounds - 1
            arguments = replace(work, **changes), options.steps, trace
            runs[name].append(in_process(SYSTEMS[system], *arguments))
    flops = flops_per_token(work)
    rows = {name: summarise(found, work, flops, options.peak) for name, found in runs.items()}
    for name, row in rows.items():
        system, changes = changed[name]
        wanted = options.estimates and system == "ours" and "skipped" not in row
        if wanted and time.monotonic() < until_s:
            told = in_process(estimate, replace(work, **changes))
            row.update({key: told[key] for key in ESTIMATES if key in told})
    title = f"{work.size} at {work.seq_len}"
    show_table(title, rows)
    kernels = {
        name: run["kernels"]
        for name, found in runs.items()
        for run in found[-1:]
        if "kernels" in run
    }
    show_table(
        f"{title}: ms of a step's kernels",
        {name: found["classes_ms"] for name, found in kernels.items()},
    )
    systems = {
        name: {
            "settings": own_settings(changed[name][0], replace(work, **changed[name][1])),
            **row,
            **({"kernels": kernels[name]} if name in kernels else {}),
        }
        for name, row in rows.items()
    }
    return {"workload": shared_settings(work), "flops_per_token": flops, "systems": systems}


def summarise(
    runs: list[dict[str, Any]], work: Workload, flops: dict[str, float], peak: float | None
) -> dict[str, Any]:
    """Medians over the steps of the runs that came to their end; the reason where none did.

    Args:
        runs: a system's.
        work: what its steps did.
        flops: for one token, by counting.
        peak: operations a second of the GPU at most; None: there is no MFU.
    """
    done = [run for run in runs if "skipped" not in run]
    if not done:
        return runs[0]
    step_s = statistics.median(seconds for run in done for seconds in run["step_s"])
    pace = work.tokens / step_s
    return {
        "step_ms": round(1e3 * step_s, 3),
        "tokens_per_s": round(pace, 1),
        **{f"tflops ({name})": round(pace * each / 1e12, 4) for name, each in flops.items()},
        **{f"mfu ({name})": round(pace * each / peak, 4) for name, each in flops.items() if peak},
        **{key: max(run[key] for run in done) for key in MEMORY if key in done[0]},
        "loss": round(done[-1]["loss"], 4),
        "rounds": len(done),
        **{key: round(done[-1][key], 3) for key in ("hidden",) if done[-1].get(key) is not None},
        **{key: done[-1][key] for key in ("cut",) if key in done[-1]},
    }


def measure_part(part: int, options: argparse.Namespace) -> dict[str, Any]:
    """One part, on the device and with the steps that were asked for."""
    device, tiny = options.device, options.tiny
    if part == 4:
        # The shortest step: of it the same costs are the largest share.
        work = replace(plan_workloads(part, device, tiny)[0], determinism="fast")
        work = replace(work, compile="on" if device == "cuda" else "off")
        told = {"workload": shared_settings(work), "settings": own_settings("ours", work)}
        arguments = work, options.steps, options.rounds
        return told | in_process(measure_costs, *arguments, limit_s=PART_S)
    if part == 5:
        return measure_recovery(device, repeats=1 if tiny else 3)
    if part == 7:
        size, tokens = ("tiny", 64) if tiny else ("8B", options.micro_tokens)
        return {"size": size, "tokens": tokens, **in_process(measure_alone, size, tokens, device)}
    return measure_steps(part, options)


def broken(found: Any, place: str = "") -> Iterator[str]:
    """What ended as it is not meant to, cut or skipped, with its place and the reason.

    Args:
        found: the parts' results, or a piece of them.
        place: of that piece.
    """
    if not isinstance(found, dict):
        return
    reason = found.get("cut") or ("meant" not in found and found.get("skipped"))
    if reason:
        yield f"{place}: {reason}"
    for key, piece in found.items():
        yield from broken(piece, f"{place} {key}".lstrip())


def machine(tell: Tell, device: str) -> None:
    """Hardware and versions. Starts CUDA, which takes memory of the GPU: only in a process."""
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    else:
        facts["device"] = platform.processor() or platform.machine()
    tell(facts)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    nccl_settings.settle(os.environ)  # as in a worker; CUDA reads it once
    add, here = parser.add_argument, "cuda" if torch.cuda.is_available() else "cpu"
    add("--part", type=int, nargs="+", choices=range(1, 8), help="only these (default: all)")
    add("--device", choices=["cpu", "cuda"], default=here, help=f"(default {here})")
    add("--tiny", action="store_true", default=here == "cpu", help="a model of some thousand")
    add("--steps", type=int, default=8, help="of each system in a round (default 8)")
    add("--rounds", type=int, default=2, help="(default 2)")
    names = [*CHANGES, *PRODUCTS]
    add("--rows", nargs="+", default=[], choices=names, metavar="ROW", help="only 'ours', ...")
    add(
        "--seq-lens",
        nargs="+",
        type=int,
        default=[],
        metavar="TOKENS",
        help="only samples of so many (default: 4096 and 8192)",
    )
    add(
        "--micro-tokens",
        type=int,
        default=MICRO_TOKENS,
        metavar="TOKENS",
        help=f"that go through a model at once (default {MICRO_TOKENS})",
    )
    add(
        "--no-estimates",
        dest="estimates",
        action="store_false",
        help="no dry runs, which need no GPU and may follow elsewhere",
    )
    add(
        "--trace",
        action="store_true",
        help="one more step of each row, whose kernels are told by class",
    )
    add("--results", type=Path, help="directory that the result is kept in")
    options = parser.parse_args()
    if options.tiny:
        options.steps, options.rounds, options.trace = 3, 1, True
    return options


def main() -> None:
    """Runs the benchmark."""
    options = parse_arguments()
    end_properly()
    if options.tiny:
        # Threads would share what is too little for one, and wait for each other.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    parts = options.part or ([1, 4, 5, 6, 7] if options.tiny else [1, 2, 3, 4, 5, 6, 7])
    facts = in_process(machine, options.device)
    if "skipped" in facts:
        sys.exit(facts["skipped"])
    on_cuda = options.device == "cuda"
    options.peak = peak_flops(facts["device"], "bfloat16") if on_cuda else None
    found = {str(part): measure_part(part, options) for part in parts}
    result = {"machine": facts, "parts": found}
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        at_once = [] if options.micro_tokens == MICRO_TOKENS else [f"micro_{options.micro_tokens}"]
        name = "_".join(["gpu", *found, *at_once, *str(facts["device"]).split()])
        (options.results / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print_result(result)
    if options.tiny and (reasons := list(broken(found))):
        sys.exit("\n".join(reasons))


if __name__ == "__main__":
    main()
