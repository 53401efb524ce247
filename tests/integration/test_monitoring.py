"""A run that loses a worker, as Ray's metrics endpoint and a Prometheus with our rules see it."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic.node.gpu_gauges import GpuGauges
from elastic.protocol.pulse import Pulse, read_pulse
from elastic.reporting.event_log import read_steps
from health.reading import Reading
from tests.support.endpoints import (
    MONITORING,
    PROMETHEUS,
    PROMTOOL,
    get,
    metrics_address,
    requires_prometheus,
    scraping,
)
from tests.support.gated_run import HALF, STEPS, gated_trainer
from tests.support.watching import events_of, wait_until

pytestmark = pytest.mark.slow

H100 = {"lost": 0.0, "temperature_c": 41.0, "power_w": 118.7, "sm_clock_mhz": 1980.0}
"""Made up, as NVML would show one that is idle."""

ONLY_WITH = ("gpu", "mfu", "node_signs", "verdicts")
"""Series that this run does not have: its machine has neither GPU nor fault."""


@dataclass
class Seen:
    """What was seen of the run while it waited in the middle."""

    samples: list[tuple[str, dict[str, str], float]] = field(default_factory=list)
    pulse: Pulse | None = None
    losses: list[float] = field(default_factory=list)
    rules: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def value(self, name: str, **labels: str) -> float:
        """Of the one series with these labels."""
        (found,) = (
            value for n, tags, value in self.samples if n == name and labels.items() <= tags.items()
        )
        return found


def expressions() -> list[str]:
    """All of the dashboard, with every filter at "All"."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    found = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    return [re.sub(r"\$\w+", ".*", expression) for expression in found]


def scraped(seen: Seen) -> bool:
    """Whether the endpoint shows the run where it waits, and a GPU of a node's agent."""
    GpuGauges("n1").show([Reading(kind="gpu", of="0000:53:00", at_s=0.0, values=H100)])
    families = text_string_to_metric_families(get(f"http://{metrics_address()}/metrics"))
    seen.samples = [(s.name, dict(s.labels), s.value) for f in families for s in f.samples]
    told = {(name, value) for name, _, value in seen.samples}
    names = {name for name, value in told if value > 0}
    # Ray may export in the middle of a pulse.
    return {("ray_elastic_step", HALF + 1), ("ray_elastic_saved_step", HALF)} <= told and {
        "ray_elastic_lost_seconds",
        "ray_elastic_gpu_power_w",
    } <= names


def ask(seen: Seen, directory: Path) -> None:
    """What a Prometheus makes of it."""
    with scraping(metrics_address(), directory) as prometheus:
        wait_until(lambda: prometheus.query("ray_elastic_step"), pause_s=0.5)

        def judged() -> bool:
            (group,) = prometheus.ask("rules")["groups"]
            seen.rules = group["rules"]
            return all(rule["health"] != "unknown" for rule in seen.rules)

        wait_until(judged, pause_s=0.5)
        seen.answers = {one: prometheus.query(one) for one in expressions()}


@pytest.fixture(scope="module")
def seen(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    directory = tmp_path_factory.mktemp("monitoring")
    root, gate, found = directory / "gated", directory / "gate", Seen()
    problems: list[BaseException] = []

    def look() -> None:
        try:
            wait_until(lambda: scraped(found), 200.0, pause_s=1.0)
            found.pulse = read_pulse(root / "pulse.json")
            found.losses = [step.loss for step in read_steps(root / "steps.jsonl")]
            if PROMETHEUS is not None:
                ask(found, directory)
        except BaseException as error:
            problems.append(error)
        finally:
            gate.touch()

    looker = threading.Thread(target=look)
    looker.start()
    gated_trainer(str(directory), str(gate), 2, spares=1, faults="kill@3:0").fit()
    looker.join()
    if problems:
        raise problems[0]
    assert events_of(root, "fault_fired")
    last = read_pulse(root / "pulse.json")
    assert last is not None and last.steps == STEPS, "it tells of its end, too"
    yield found


def test_rays_endpoint_shows_the_run(seen: Seen) -> None:
    run = {"ray_train_run_name": "gated"}
    assert len(seen.losses) == HALF + 1
    assert seen.value("ray_elastic_loss", **run) == pytest.approx(seen.losses[-1])
    assert seen.value("ray_elastic_planned_steps", **run) == STEPS
    assert seen.value("ray_elastic_workers_lost", cause="crash", **run) == 1
    assert seen.value("ray_elastic_workers_lost", cause="hang", **run) == 0
    assert seen.value("ray_elastic_lost_seconds", phase="roster", **run) > 0
    assert seen.value("ray_elastic_saved_step", **run) == HALF
    assert seen.value("ray_elastic_planned_spares", **run) == 1
    assert seen.value("ray_elastic_gpu_power_w", node="n1", gpu="0000:53:00") == H100["power_w"]


def test_the_pulse_says_the_same(seen: Seen) -> None:
    assert seen.pulse is not None
    assert (seen.pulse.steps, seen.pulse.planned_steps) == (HALF + 1, STEPS)
    assert seen.pulse.planned_spares == 1
    assert seen.pulse.spent["max_crashes"][1] == 50


@requires_prometheus
def test_prometheus_takes_the_rules_and_answers_the_dashboard(seen: Seen) -> None:
    assert len(seen.rules) == 10
    assert {rule["health"] for rule in seen.rules} == {"ok"}, seen.rules
    firing = {rule["name"] for rule in seen.rules if rule["state"] == "firing"}
    assert not firing, "the run is well"
    empty = [one for one, series in seen.answers.items() if not series]
    assert [one for one in empty if not any(part in one for part in ONLY_WITH)] == []
    (step,) = next(series for one, series in seen.answers.items() if "elastic_step{" in one)
    assert float(step["value"][1]) == HALF + 1


@requires_prometheus
def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    tests = MONITORING / "alerts_test.yml"
    done = subprocess.run([PROMTOOL, "test", "rules", str(tests)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
