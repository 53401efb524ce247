"""What was found is kept in a folder an incident, and never stands in the run's way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic.coordinator import evidence
from elastic.coordinator.evidence import keep_evidence


def test_a_folder_an_incident(tmp_path: Path) -> None:
    incidents = tmp_path / "incidents"
    for step in (4, 9):
        keep_evidence(incidents, {"w1": "it loops"}, {"w1": "in loop", "w0": "in wait"}, step=step)
    assert sorted(path.name for path in incidents.iterdir()) == ["001", "002"]
    manifest = json.loads((incidents / "002" / "manifest.json").read_text())
    assert (manifest["accused"], manifest["step"]) == ({"w1": "it loops"}, 9)
    assert (incidents / "002" / "w0.txt").read_text() == "in wait"


def test_the_first_ones_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "MOST_FOLDERS", 2)
    for worker in ("w1", "w2", "w3"):
        keep_evidence(tmp_path, {worker: "it loops"}, {})
    kept = [json.loads((tmp_path / n / "manifest.json").read_text()) for n in ("001", "002")]
    assert [list(manifest["accused"]) for manifest in kept] == [["w1"], ["w2"]]
    assert not (tmp_path / "003").exists()


def test_where_nothing_can_be_written_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "incidents").write_text("a file in the folder's place")
    keep_evidence(tmp_path / "incidents", {"w1": "it loops"}, {})
    assert "not kept" in caplog.text
