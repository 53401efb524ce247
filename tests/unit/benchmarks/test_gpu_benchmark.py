"""What `benchmarks.gpu` reckons with."""

from __future__ import annotations

import math
import multiprocessing
import time
from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks._common import plan_turns
from benchmarks._gpu_costs import measure_costs, spread
from benchmarks._gpu_loops import Tell, train_hugging_face
from benchmarks._gpu_models import Workload, flops_per_token, own_settings, shared_settings
from benchmarks.gpu import CHANGES, PRODUCTS, in_process, plan_rows, plan_workloads, summarise
from trainer.errors import ConfigError

TINY = Workload(size="tiny", seq_len=32, samples=4, micro=2, device="cpu")


def test_each_round_begins_with_another_system() -> None:
    assert plan_turns(["a", "b", "c"], 2) == [["a", "b", "c"], ["b", "c", "a"]]


def test_all_workloads_of_a_part_have_as_many_tokens() -> None:
    works = plan_workloads(2, "cuda", tiny=False)
    assert [(work.size, work.seq_len) for work in works] == [("3B", 4096), ("3B", 8192)]
    assert {work.tokens for work in works} == {32768}
    assert {work.micro * work.seq_len for work in works} == {8192}


def test_medians_are_over_the_steps_of_all_rounds() -> None:
    runs = [
        {"step_s": [1.0, 2.0], "peak_bytes": 5, "loss": 3.0},
        {"step_s": [2.0, 4.0, 4.0], "peak_bytes": 7, "loss": 2.0},
    ]
    found = summarise(runs, TINY, {"6N": 1e12}, peak=128e12)
    assert found["step_ms"] == 2000.0
    assert found["tokens_per_s"] == found["tflops (6N)"] == 64.0
    assert found["mfu (6N)"] == 0.5
    assert (found["peak_bytes"], found["loss"], found["rounds"]) == (7, 2.0, 2)


def test_of_memory_the_most_of_all_rounds_counts() -> None:
    taken = {"step_s": [1.0], "loss": 1.0, "peak_bytes": 3}
    runs = [
        taken | {"reserved_bytes": 5, "device_bytes": 9},
        taken | {"reserved_bytes": 6, "device_bytes": 8},
    ]
    found = summarise(runs, TINY, {}, peak=None)
    assert (found["peak_bytes"], found["reserved_bytes"], found["device_bytes"]) == (3, 6, 9)


def test_8b_counts_as_in_the_report_whose_number_is_the_goal() -> None:
    """KempnerForge, 2026-04-05: 10,471 tokens a second on one H200 are 57.8 %."""
    work = Workload(size="8B", seq_len=4096, samples=8, micro=2, device="cuda")
    flops = flops_per_token(work)
    assert flops["with table"] == pytest.approx(54.62e9, rel=1e-4)
    assert 10_471 * flops["with table"] / 989e12 == pytest.approx(0.578, abs=5e-4)
    assert flops["with table"] - flops["attention"] == 6 * 128256 * 4096


def test_a_table_that_is_the_head_counts_once() -> None:
    work = Workload(size="1B", seq_len=4096, samples=8, micro=2, device="cuda")
    flops = flops_per_token(work)
    assert flops["with table"] == flops["attention"]


def test_each_row_tells_its_own_settings() -> None:
    work = Workload(size="8B", seq_len=4096, samples=8, micro=2, device="cuda")
    shared = {"size": "8B", "seq_len": 4096, "samples": 8, "micro": 2, "device": "cuda"}
    assert shared_settings(work) == shared
    for system, changes in [*CHANGES.values(), *PRODUCTS.values()]:
        told = own_settings(system, replace(work, **changes))
        assert told["system"] == system
        if system == "ours":
            assert set(told).isdisjoint(shared)
            assert {name: told[name] for name in changes} == changes
    assert "determinism" not in own_settings("plain", work), "it promises nothing"


def test_a_system_that_never_ran_says_why() -> None:
    assert summarise([{"skipped": "out of memory"}], TINY, {}, None) == {"skipped": "out of memory"}


@pytest.mark.parametrize("part", [1, 6])
def test_the_rows_of_a_tiny_model_use_all_that_the_others_use(part: int) -> None:
    def used(rows: dict[str, tuple[str, dict[str, Any]]]) -> set[str]:
        return {word for system, changes in rows.values() for word in (system, *changes)}

    whole, tiny = (plan_rows(part, "cpu", tiny=tiny) for tiny in (False, True))
    assert used(tiny) == used(whole)
    assert len(tiny) < len(whole)


def test_each_compiled_row_of_narrow_state_has_its_like_in_the_plain_loop() -> None:
    """Else a ratio would be of what is recomputed, not of the systems."""
    rows, ours = plan_rows(3, "cuda", tiny=False), "ours, fast, "
    narrow = {row for row in rows if row.startswith(ours) and row.endswith("bfloat16 state")}
    amounts = {None, 2, 4, 0.3, 0.5, "full", "selective"}
    assert {rows[row][1].get("recompute") for row in narrow} == amounts
    for row in narrow:
        assert rows[f"plain, {row.removeprefix(ours)}"] == ("plain", rows[row][1])


@pytest.mark.slow
def test_transformers_trainer_takes_the_steps_that_it_is_asked_for() -> None:
    """It needs a package that only this benchmark does."""
    found = in_process(train_hugging_face, TINY, 4, True)
    assert len(found["step_s"]) == 2, found  # two warm up, and one is looked at
    assert found["kernels"]["classes_ms"] == {}, "a CPU has none"
    assert found["loss"] == pytest.approx(math.log(320), rel=0.05), "it has learned nothing yet"


def test_the_spread_is_that_of_the_blocks_medians() -> None:
    assert spread([[1.0, 1.0, 9.0], [1.1, 1.0, 1.2], [1.05]]) == pytest.approx(0.1)


@pytest.mark.slow
def test_fault_tolerance_is_one_number_that_says_what_it_leaves_out() -> None:
    found = in_process(measure_costs, TINY, 3, 2)
    parts_ms, step_ms = found["fault_tolerance_ms"], found["step_ms"]
    assert set(parts_ms) == {"digest", "commit", "marks", "beats"}
    assert min(parts_ms.values()) >= 0, "what is called a bound is made no smaller by noise"
    assert set(step_ms) == {"bare", "heartbeat", "snapshot"}
    share = sum(parts_ms.values()) / step_ms["bare"]
    rounded = pytest.approx(share, rel=0.01, abs=5e-5)
    assert found["fault_tolerance_share"] == rounded
    assert found["turns"] == 2
    assert any("over replicas" in what for what in found["left_out"])


def test_a_system_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = in_process(sleep_for_ever, limit_s=1.0)
    assert found == {"skipped": "it took more than 1 s"}
    assert multiprocessing.active_children() == []


def test_what_a_system_told_before_its_trace_hung_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = {"step_s": [1.0, 1.0], "peak_bytes": 5, "loss": 3.0}
    began_s = time.monotonic()
    first = in_process(tell_and_end, numbers, {"kernels": {}})
    limit_s = 5.0 + 3 * (time.monotonic() - began_s)  # it imports what there is to import first
    assert first == numbers | {"kernels": {}}
    assert in_process(tell_and_raise, numbers) == numbers | {"cut": "its process ended"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = in_process(tell_and_sleep, numbers, limit_s=limit_s)
    assert found == numbers | {"cut": f"it took more than {limit_s:g} s"}
    row = summarise([found], TINY, {}, peak=None)
    assert (row["step_ms"], row["cut"]) == (1000.0, f"it took more than {limit_s:g} s")


def sleep_for_ever(tell: Tell) -> None:
    """A system of the benchmark."""
    time.sleep(1000)
    raise AssertionError


def tell_and_end(tell: Tell, *found: dict[str, Any]) -> None:
    """One that comes to its end."""
    for each in found:
        tell(each)


def tell_and_raise(tell: Tell, numbers: dict[str, Any]) -> None:
    """One whose trace fails."""
    tell(numbers)
    raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")


def tell_and_sleep(tell: Tell, numbers: dict[str, Any]) -> None:
    """One whose trace hangs."""
    tell(numbers)
    sleep_for_ever(tell)


def raise_at_once(tell: Tell, *_: Any) -> None:
    """One that is broken."""
    raise RuntimeError("a row of the benchmark is broken")


def refuse(tell: Tell, *_: Any) -> None:
    """One that a machine cannot have."""
    raise ConfigError("train.converters", "TransformerEngine()", "no kernels", "Leave it out")


@pytest.mark.parametrize(("tiny", "said"), [(True, "1 tiny at 32 systems plain: "), (False, None)])
def test_a_tiny_model_s_broken_row_fails_and_one_that_is_refused_does_not(
    monkeypatch: pytest.MonkeyPatch, tiny: bool, said: str | None
) -> None:
    rows: dict[str, tuple[str, dict[str, Any]]] = {"plain": ("plain", {}), "ours": ("ours", {})}
    options = Namespace(
        tiny=tiny,
        device="cpu",
        part=[1],
        rows=[],
        seq_lens=[],
        micro_tokens=gpu.MICRO_TOKENS,
        rounds=1,
        steps=1,
        trace=False,
        estimates=False,
        results=None,
    )
    for name, value in {
        "SYSTEMS": {"plain": raise_at_once, "ours": refuse},
        "plan_rows": lambda *_: rows,
        "plan_workloads": lambda *_: [TINY],
        "parse_arguments": lambda: options,
        "end_properly": lambda: None,
    }.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if said is None:
        gpu.main()
    else:
        with pytest.raises(SystemExit) as ended:
            gpu.main()
        assert ended.value.code == f"{said}its process ended"


def test_a_row_that_was_cut_is_broken() -> None:
    found = {"4": {"bare": 1.0, "cut": "it took more than 5 s"}, "6": {"skipped": "no time left"}}
    assert list(gpu.broken(found)) == ["4: it took more than 5 s", "6: no time left"]


@pytest.mark.parametrize("failure", [{"skipped": "out of memory"}, {}])
def test_a_dry_run_that_fails_takes_no_row_s_numbers(
    monkeypatch: pytest.MonkeyPatch, failure: dict[str, Any]
) -> None:
    def answer(call: Any, *_: Any) -> dict[str, Any]:
        estimated = failure or {"estimate_bytes": 7}
        return estimated if call is gpu.estimate else {"step_s": [1.0], "loss": 3.0}

    monkeypatch.setattr(gpu, "in_process", answer)
    options = Namespace(rounds=1, steps=1, trace=False, estimates=True, peak=None)
    found = gpu.measure_workload(TINY, {"ours": ("ours", {})}, options, math.inf)
    row = found["systems"]["ours"]
    assert row["step_ms"] == 1000.0
    assert row.get("estimate_bytes") == (None if failure else 7)
    assert "skipped" not in row
