"""A run that is profiled, with faults in the middle of the steps that were asked for."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from elastic import Steps
from tests.support.tiny import fit, tiny_trainer
from tests.support.watching import events_of


def test_a_regroup_begins_a_profile_anew(cluster: None, text: Path, tmp_path: Path) -> None:
    outcome = fit(
        tiny_trainer(text, tmp_path, steps=20, profile=Steps(4, 9), faults="kill@7.forward:1")
    )
    assert outcome.report["faults_fired"] == 1
    root = tmp_path / "run"
    (told,) = events_of(root, "profiled")
    assert (told["first"], told["last"]) == (7, 9) and "steps 4 to 6" in told["problem"]
    assert [Path(told["file"])] == list((root / "profile").iterdir())
    with gzip.open(told["file"], "rt") as file:
        assert any(e["name"] == "aten::mm" for e in json.load(file)["traceEvents"])
    text_of_report = (root / "report.txt").read_text()
    assert "profile of steps 7 to 9" in text_of_report and "GPU ms" in text_of_report
    assert len(outcome.report["profiles"]) == 1
    # Two generations, each less its first step and its last one.
    timed = events_of(root, "steps_timed")
    assert [event["steps"] for event in timed] == [5, 11]
    assert outcome.report["timed_steps"] == 16
    assert set(outcome.report["flops_per_s_per_worker"]) == {"6N", "attention", "causal"}
    assert outcome.report["mfu"] == {}
