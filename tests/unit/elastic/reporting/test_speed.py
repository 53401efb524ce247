"""What each worker computes, from events and steps."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.protocol.events import (
    Event,
    RegroupDone,
    RunStarted,
    StepRecord,
    StepsTimed,
    WorkerJoined,
)
from elastic.reporting.incidents import split_at_starts
from elastic.reporting.speed import Speed, find_speed, mean_parts

H100 = "NVIDIA H100 80GB HBM3"
FLOPS = {"6N": 6e9, "attention": 8e9}
LAYOUT = {"replicas": 3, "shard": 4, "pipeline": 1, "tensor": 2, "lanes": 6, "spares": 5}


def started(**changes: Any) -> RunStarted:
    given: dict[str, Any] = {"precision": "bfloat16", "flops_per_token": FLOPS, **changes}
    plain: dict[str, Any] = {"time": 0.0, "layout": LAYOUT, **given}
    return RunStarted(name="run", steps=9, start_step=0, versions={}, **plain)


def joined(device: str, worker: str = "w0") -> WorkerJoined:
    return WorkerJoined(time=1.0, worker=worker, node="n", pid=1, born_ticks=1, device=device)


def step(number: int, time: float, replicas: int) -> StepRecord:
    return StepRecord(
        step=number, loss=1.0, grad_norm=1.0, lr=1e-3, tokens=2_400_000, time=time, generation=1,
        replicas=replicas, sample_digests=[],
    )  # fmt: skip


STEPS = [step(0, 10.0, 3), step(1, 12.0, 3), step(2, 30.0, 2), step(3, 33.0, 2), step(4, 60.0, 2)]


def regroup(time: float) -> RegroupDone:
    return RegroupDone(
        time=time, generation=2, step=3, replicas=2, lanes={}, renumbered={}, outcome="repeat",
        lost_steps=0, repeated_steps=1,
    )  # fmt: skip


def speed(*events: Event) -> Speed:
    happened = [*events, regroup(20.0), regroup(40.0)]
    return find_speed(split_at_starts(happened, STEPS)[-1])


def test_a_workers_share_is_of_those_that_did_the_step_and_a_regroup_does_not_count() -> None:
    """2.4 million tokens in 2 s on 24 workers, in 3 s on 16: 50,000 a second each."""
    found = speed(started(), joined(H100))
    assert found.tokens_per_s == pytest.approx(50_000)
    assert found.flops_per_s == pytest.approx({"6N": 3e14, "attention": 4e14})
    assert found.mfu == pytest.approx({"6N": 3 / 9.89, "attention": 4 / 9.89})


@pytest.mark.parametrize("devices", [("",), ("NVIDIA T4",), (H100, "NVIDIA H200"), ()])
def test_without_one_known_gpu_there_is_no_mfu(devices: tuple[str, ...]) -> None:
    found = speed(started(), *map(joined, devices))
    assert found.flops_per_s and found.mfu == {}


def test_the_peak_is_that_of_the_precision() -> None:
    found = speed(started(precision="float32"), joined(H100))
    assert found.mfu["6N"] == pytest.approx(3e14 / 67e12)


@pytest.mark.parametrize(("precision", "peak"), [("float32", 494.7e12), ("bfloat16", 989e12)])
def test_float32_is_computed_in_tf32_where_a_run_is_fast(precision: str, peak: float) -> None:
    found = speed(started(precision=precision, settings={"determinism": "fast"}), joined(H100))
    assert found.mfu["6N"] == pytest.approx(3e14 / peak)


def test_a_run_that_was_resumed_is_as_fast_as_since_its_last_start() -> None:
    """2.4 million tokens in 1 s on 24 workers; then in 4 s on 12 others: 50,000 a second each."""
    resumed = started(time=40.0, layout={**LAYOUT, "shard": 2}, precision="float32")
    happened = [started(), joined(H100), resumed, joined("NVIDIA A100-SXM4-80GB", "w1")]
    steps = [step(n, float(n), 3) for n in range(1, 21)]
    again = [step(21, 50.0, 3), step(22, 54.0, 3)]
    found = find_speed(split_at_starts(happened, [*steps, *again])[-1])
    assert found.tokens_per_s == pytest.approx(50_000)
    assert found.mfu["6N"] == pytest.approx(3e14 / 19.5e12)
    begun = find_speed(split_at_starts(happened, steps)[-1])
    assert begun == Speed(tokens_per_s=None, flops_per_s={}, mfu={})


def test_without_two_steps_nothing_is_known() -> None:
    found = find_speed(split_at_starts([started(), joined(H100)], [])[-1])
    assert found == Speed(tokens_per_s=None, flops_per_s={}, mfu={})


def test_windows_weigh_by_their_steps() -> None:
    timed = [
        StepsTimed(time=1.0, step=50, steps=50, seconds={"data": 1.0, "compute": 2.0}),
        StepsTimed(time=2.0, step=60, steps=10, seconds={"data": 4.0, "compute": 2.0}),
    ]
    steps, parts_s = mean_parts(timed)
    assert steps == 60 and parts_s == pytest.approx({"data": 1.5, "compute": 2.0})
    assert mean_parts([]) == (0, {})
