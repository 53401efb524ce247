"""From records to numbers, by a run that is played by hand on a clock of round seconds."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from elastic.protocol import events
from elastic.protocol.causes import Cause
from elastic.reporting.incidents import find_incidents
from elastic.reporting.meter import Meter, Standing
from elastic.reporting.metrics import METRICS
from tests.support import ROOT

MONITORING = ROOT / "examples" / "monitoring"
LAYOUT = {"replicas": 2, "shard": 2, "tensor": 1, "lanes": 2, "spares": 1}
STANDING = Standing(
    workers=5, spares=1, spent={"max_crashes": (1, 50), "max_hangs": (8, 10)}, over=False
)


def started() -> events.RunStarted:
    return events.RunStarted(
        time=100.0,
        name="r",
        layout=LAYOUT,
        steps=50,
        start_step=0,
        versions={},
        precision="bfloat16",
        flops_per_token={"6N": 6e9},
    )


def signs(*names: str) -> events.SignsChanged:
    shown = [{"name": name} for name in names]
    return events.SignsChanged(time=110.0, node="n", names=["host"], signs=shown)


def step(number: int, time: float, loss: float = 2.5) -> events.StepRecord:
    return events.StepRecord(
        step=number,
        loss=loss,
        grad_norm=0.5,
        lr=1e-3,
        tokens=1000,
        time=time,
        generation=1,
        replicas=2,
        sample_digests=[],
    )


def joined(device: str) -> events.WorkerJoined:
    return events.WorkerJoined(
        time=101.0, worker="w", node="n", pid=1, born_ticks=None, device=device
    )


def lost(time: float, cause: str = "crash", slot: str | None = "replica 1") -> events.WorkerLost:
    return events.WorkerLost(
        time=time, worker="w", node="n", pid=1, slot=slot, cause=Cause(cause), detail="gone"
    )


def roster(time: float, generation: int = 2) -> events.RegroupDone:
    return events.RegroupDone(
        time=time,
        generation=generation,
        step=3,
        replicas=1,
        lanes={"0": [0, 1]},
        renumbered={},
        outcome="repeat",
        lost_steps=0,
        repeated_steps=1,
    )


def called(time: float, generation: int = 2) -> events.RegroupCalled:
    return events.RegroupCalled(time=time, generation=generation, reason="fault")


def gathered(time: float, generation: int = 2) -> events.RegroupGathered:
    return events.RegroupGathered(time=time, generation=generation)


def metered(*records: events.Event | events.StepRecord) -> Meter:
    meter = Meter(started(), 1)
    for record in records:
        if isinstance(record, events.StepRecord):
            meter.take_step(record)
        else:
            meter.take(record)
    return meter


def numbers(meter: Meter, now: float = 200.0, steps: int = 3) -> dict[str, float]:
    """Name with labels -> value; each is there once."""
    samples = list(meter.samples(now, steps, STANDING))
    told = {
        sample.name + "".join(f"|{value}" for value in sample.tags.values()): sample.value
        for sample in samples
    }
    assert len(told) == len(samples)
    for sample in samples:
        assert tuple(sample.tags) == METRICS[sample.name].tags
    return told


def test_before_the_first_step_time_counts_from_the_start() -> None:
    told = numbers(metered(), steps=0)
    assert told["elastic_step"] == 0 and "elastic_loss" not in told
    assert told["elastic_step_timestamp_seconds"] == 100.0
    assert told["elastic_saved_timestamp_seconds"] == 100.0
    assert told["elastic_heartbeat_timestamp_seconds"] == 200.0
    assert told["elastic_workers_lost|crash"] == 0
    assert told["elastic_budget_spent|max_hangs"] == pytest.approx(0.8)
    assert (told["elastic_spares"], told["elastic_planned_spares"]) == (1, 1)


def test_steps_give_loss_speed_and_a_speed_that_falls_while_nothing_is_committed() -> None:
    meter = metered(step(0, 110.0), step(1, 112.0), step(2, 114.0, loss=math.nan))
    told = numbers(meter, now=115.0)
    assert math.isnan(told["elastic_loss"])
    assert told["elastic_tokens_per_second"] == pytest.approx(500.0)
    assert numbers(meter, now=136.0)["elastic_tokens_per_second"] == pytest.approx(2000 / 24)
    assert (meter.stepped, meter.step_s) == (114.0, 2.0)
    assert metered(step(0, 110.0)).step_s is None
    assert metered(step(0, 110.0), step(1, 112.0)).step_s == 2.0
    meter.take_step(step(3, 7_314.0))
    assert meter.step_s == 2.0, "a standstill of two hours is no pace"


def test_mfu_is_by_the_peak_of_the_gpus_that_work() -> None:
    steps = [replace(step(n, 110.0 + n), replicas=1) for n in range(2)]
    on_gpus = metered(joined("NVIDIA H100 80GB HBM3"), roster(105.0), *steps)
    told = numbers(on_gpus, now=111.0)
    # One replica of two workers: 1,000 tokens/s x 6e9 over 2 x 989 TFLOP/s (NVIDIA's data sheet).
    assert told["elastic_mfu|6N"] == pytest.approx(1000 * 6e9 / (2 * 989e12), rel=0.01)
    assert "elastic_mfu|6N" not in numbers(metered(joined(""), roster(105.0), step(0, 110.0)))


def test_mfu_counts_for_each_step_the_gpus_that_did_it() -> None:
    """A step of half the replicas takes twice as long."""
    meter = metered(joined("NVIDIA H100 80GB HBM3"), step(0, 110.0), step(1, 111.0))
    meter.take(roster(111.5))  # one replica of the two
    meter.take_step(replace(step(2, 113.0), replicas=1))
    told = numbers(meter, now=113.0)
    assert told["elastic_mfu|6N"] == pytest.approx(1000 * 6e9 / (2 * 2 * 989e12), rel=0.01)


def test_mfu_of_float32_is_by_the_peak_of_tf32_where_a_run_is_fast() -> None:
    fast = replace(started(), precision="float32", settings={"determinism": "fast"})
    meter = Meter(fast, 1)
    for event in (joined("NVIDIA H100 80GB HBM3"), roster(105.0)):
        meter.take(event)
    for n in range(2):
        meter.take_step(replace(step(n, 110.0 + n), replicas=1))
    told = numbers(meter, now=111.0)
    assert told["elastic_mfu|6N"] == pytest.approx(1000 * 6e9 / (2 * 494.7e12))


def test_what_a_loss_took_is_told_by_phase_once_training_goes_on() -> None:
    story: list[events.Event | events.StepRecord] = [
        step(2, 110.0),
        lost(111.0),
        called(111.5),
        gathered(113.5),
        roster(114.5),
    ]
    before = numbers(metered(*story))
    assert before["elastic_lost_seconds|abort"] == 0
    after = numbers(metered(*story, step(3, 118.5)))
    phases = {phase: after[f"elastic_lost_seconds|{phase}"] for phase in ("decide", "abort")}
    assert phases == {"decide": 0.5, "abort": 2.0}
    assert after["elastic_lost_seconds|roster"] == 1.0
    assert after["elastic_lost_seconds|first_step"] == 4.0
    assert after["elastic_workers_lost|crash"] == 1 and after["elastic_regroups|fault"] == 1
    assert after["elastic_replicas"] == 1


def test_the_sums_are_those_of_the_reports_incidents() -> None:
    records: list[events.Event | events.StepRecord] = [step(0, 100.0)]
    for n in range(1, 4):
        at = 100.0 + 20 * n
        records += [lost(at), lost(at + 0.1, "node"), called(at + 0.5, 2 * n)]
        records += [gathered(at + 1.5, 2 * n), roster(at + 2.0, 2 * n)]
        # The next loss is noted before the step that ends this incident.
        records += [lost(at + 2.5), called(at + 2.6, 2 * n + 1), step(n, at + 2.4)]
        records += [gathered(at + 3.0, 2 * n + 1), roster(at + 3.5, 2 * n + 1), step(n, at + 5.0)]
    told = numbers(metered(*records))
    happened = [record for record in records if isinstance(record, events.Event)]
    steps: Sequence[events.StepRecord] = sorted(
        (record for record in records if isinstance(record, events.StepRecord)),
        key=lambda record: record.time,
    )
    incidents = find_incidents(happened, steps)
    assert len(incidents) == 6
    for phase in ("decide", "abort", "roster", "first_step"):
        expected = sum(getattr(incident, f"{phase}_s") for incident in incidents)
        assert told[f"elastic_lost_seconds|{phase}"] == pytest.approx(expected), phase


def test_losses_with_no_step_between_are_told_of_once() -> None:
    first = lost(101.0), called(101.0), gathered(101.0), roster(105.0)
    second = lost(106.0), called(106.0, 3), gathered(106.0, 3), roster(130.0, 3)
    told = numbers(metered(step(0, 100.0), *first, *second, step(1, 132.0)))
    phases = ("decide", "abort", "roster", "first_step")
    assert sum(told[f"elastic_lost_seconds|{phase}"] for phase in phases) == 132.0 - 101.0


def test_a_coordinator_started_anew_counts_on() -> None:
    happened = [lost(111.0), called(111.5), gathered(113.5), roster(114.5)]
    meter = metered()
    meter.replay(happened, step(900, 5_000.0))
    for record in (lost(6_000.0), called(6_001.0, 3), gathered(6_001.0, 3), roster(6_001.0, 3)):
        meter.take(record)
    meter.take_step(step(901, 6_003.0))
    told = numbers(meter)
    assert told["elastic_workers_lost|crash"] == 2
    assert told["elastic_lost_seconds|abort"] == 2.0
    assert told["elastic_lost_seconds|decide"] == 1.5
    assert told["elastic_lost_seconds|first_step"] == 2.0, "not all the time since then"


def test_a_lost_spare_takes_no_time() -> None:
    told = numbers(metered(step(0, 110.0), lost(111.0, slot=None), step(1, 112.0)))
    assert told["elastic_workers_lost|crash"] == 1
    assert told["elastic_lost_seconds|decide"] == 0


def test_steps_that_are_not_applied_and_those_that_are_lost_are_counted() -> None:
    skipped = events.StepSkipped(time=111.0, step=3, loss=math.nan, grad_norm=1.0)
    told = numbers(metered(skipped, skipped, replace(roster(112.0), lost_steps=7)))
    assert (told["elastic_skipped_steps"], told["elastic_lost_steps"]) == (2, 7)


def test_a_sign_that_is_gone_is_told_as_0() -> None:
    told = numbers(metered(signs("ecc", "ecc", "hot"), signs("hot")))
    assert told["elastic_node_signs|n|ecc"] == 0 and told["elastic_node_signs|n|hot"] == 1


def test_restarts_count_a_machine_of_many_workers_once() -> None:
    """As `elastic watch` does: it is no storm."""
    eight = [lost(110.0 + at, cause="node") for at in range(8)]
    anew = events.CoordinatorStarted(time=150.0, pid=1, anew=True)
    told = numbers(metered(*eight, lost(130.0), lost(140.0, slot=None), anew))
    assert told["elastic_restarts"] == 3
    assert told["elastic_workers_lost|node"] == 8


def test_a_node_whose_workers_are_lost_shows_nothing_until_one_comes_again() -> None:
    """A machine that is gone takes back nothing of what it has shown."""
    meter = metered(signs("hot"))
    shown = [numbers(meter)["elastic_node_signs|n|hot"]]
    for event in (joined("H100"), lost(111.0), joined("H100")):
        meter.take(event)
        shown.append(numbers(meter)["elastic_node_signs|n|hot"])
    assert shown == [1, 1, 0, 1]


def test_a_machine_is_suspect_until_it_is_replaced_or_cleared() -> None:
    def becomes(node: str, outcome: events.ReplacementOutcome) -> events.NodeReplacement:
        return events.NodeReplacement(
            time=110.0, node=node, machine=node, outcome=outcome, reason="", detail=""
        )

    meter = metered(becomes("a", "told"), becomes("b", "begun"), becomes("c", "held_back"))
    assert numbers(meter)["elastic_suspect_nodes"] == 3
    meter.take(becomes("b", "replaced"))
    meter.take(becomes("c", "cleared"))
    assert numbers(meter)["elastic_suspect_nodes"] == 1


def test_verdicts_and_checkpoints_are_counted() -> None:
    verdict = events.VerdictReached(
        time=110.0,
        cause="gpu_error",
        workers=[],
        nodes=["n"],
        evidence=[],
        confidence="certain",
        fingerprint="f",
        committed=3,
        step="reboot",
        outcome="told",
        detail="",
    )
    saved = events.CheckpointCommitted(time=150.0, step=3, generation=1, bytes=1, seconds=0.1)
    told = numbers(metered(verdict, verdict, saved))
    assert told["elastic_verdicts|gpu_error|reboot|told"] == 2
    assert (told["elastic_saved_step"], told["elastic_saved_timestamp_seconds"]) == (3, 150.0)


@pytest.mark.parametrize("file", ["alerts.yml", "alerts_test.yml", "dashboard.json"])
def test_rules_and_dashboard_ask_for_metrics_that_there_are(file: str) -> None:
    asked = set(re.findall(r"ray_(elastic_\w+)", (MONITORING / file).read_text()))
    gpu = {name for name in asked if name.startswith("elastic_gpu_")}
    assert asked - gpu and asked - gpu <= METRICS.keys()
    read = (ROOT / "health" / "gpu.py").read_text()
    assert [name for name in gpu if f'"{name.removeprefix("elastic_gpu_")}"' not in read] == []


def test_every_metric_stands_in_the_manual() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert [name for name in METRICS if f"`{name.removeprefix('elastic_')}`" not in page] == []
