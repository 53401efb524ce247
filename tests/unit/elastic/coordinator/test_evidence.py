"""What was found is kept in a folder an incident, and never stands in the run's way."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator import evidence, workers
from elastic.coordinator.evidence import keep_evidence
from elastic.protocol.causes import HANG
from elastic.protocol.events import WorkerLost
from elastic.protocol.messages import Death, Evidence
from health.flight import find_pending
from health.reading import Reading
from tests.support.coordinator_desk import CoordinatorDesk
from tests.support.watching import wait_until

PENDING = {
    "process_group": ["3", "fsdp replica/1"],
    "profiling_name": "gloo:all_reduce",
    "collective_seq_id": 12,
    "p2p_seq_id": 0,
    "is_p2p": False,
    "input_sizes": [[4]],
    "retired": False,
    "state": "scheduled",
}


def test_a_folder_an_incident(tmp_path: Path) -> None:
    incidents = tmp_path / "incidents"
    for step in (4, 9):
        found = {"w1": Evidence(stacks="in loop"), "w0": Evidence(stacks="in wait")}
        keep_evidence(incidents, {"w1": "it loops"}, found, step=step)
    assert sorted(path.name for path in incidents.iterdir()) == ["001", "002"]
    manifest = json.loads((incidents / "002" / "manifest.json").read_text())
    assert (manifest["accused"], manifest["step"]) == ({"w1": "it loops"}, 9)
    assert (incidents / "002" / "w0.txt").read_text() == "in wait"
    assert manifest["files"].keys() == {"w0.txt", "w1.txt"}


@pytest.mark.parametrize(
    ("what", "is_p2p", "told"),
    [("nccl:all_reduce", False, 1), ("nccl:send 0->1", True, 0), ("nccl:coalesced", True, 1)],
)
def test_sends_and_receives_of_a_batch_wait_for_nobody_by_themselves(
    what: str, is_p2p: bool, told: int
) -> None:
    """NCCL's recorder never learns their ends, but that of the batch."""
    trace = json.dumps({"entries": [{**PENDING, "profiling_name": what, "is_p2p": is_p2p}]})
    assert len(find_pending(trace)) == told


def test_all_that_was_found_has_a_file_and_a_line_in_the_manifest(tmp_path: Path) -> None:
    gpu = Reading(kind="gpu", of="0000:53:00", at_s=5.0, values={"power_w": 71.0}, pids=(7,))
    trace = json.dumps({"entries": [{**PENDING, "retired": True}, PENDING]})
    found = Evidence(stacks="in loop", log="last words", collectives=trace, readings=(gpu,))
    keep_evidence(tmp_path, {"w1": "it loops"}, {"w1": found})
    folder = tmp_path / "001"
    manifest = json.loads((folder / "manifest.json").read_text())
    written = {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert manifest["files"].keys() == written
    assert written == {"w1.txt", "w1.log", "w1.collectives.json", "readings.json"}
    assert (folder / "w1.log").read_text() == "last words"
    readings = json.loads((folder / "readings.json").read_text())
    assert readings["w1"][0]["values"] == {"power_w": 71.0}
    (pending,) = manifest["pending_collectives"]["w1"]
    assert (pending["group"], pending["number"]) == ("3 fsdp replica/1", 12)


def test_nothing_is_written_elsewhere_whatever_the_name_of_a_worker(tmp_path: Path) -> None:
    """It may be of records that others have written to."""
    incidents, elsewhere = tmp_path / "run" / "incidents", tmp_path / "elsewhere"
    incidents.parent.mkdir()
    for worker in (str(elsewhere), "../../../elsewhere"):
        keep_evidence(incidents, {worker: "process 7 ended"}, {worker: Evidence(log="its words")})
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert len(list(incidents.glob("*/elsewhere.log"))) == 2


def test_what_is_found_at_once_has_a_folder_each(tmp_path: Path) -> None:
    accused = [f"w{number:02}" for number in range(32)]
    together = threading.Barrier(len(accused))

    def keep(worker: str) -> None:
        together.wait(30)
        keep_evidence(tmp_path, {worker: "it loops"}, {})

    with ThreadPoolExecutor(len(accused)) as pool:
        list(pool.map(keep, accused))
    kept = [json.loads(path.read_text()) for path in tmp_path.glob("*/manifest.json")]
    assert sorted(worker for one in kept for worker in one["accused"]) == accused


def test_a_slow_storage_holds_up_nobody_whose_peer_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor those who ask on asyncio's threads, such as whether a raylet has ended."""
    answers = threading.Event()

    def keep(incidents: Path, *found: Any) -> None:
        assert answers.wait(30)
        keep_evidence(incidents, *found)

    monkeypatch.setattr(workers, "keep_evidence", keep)
    desk = CoordinatorDesk(tmp_path / "run")

    async def play() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        found = Evidence(stacks="in loop")
        await desk.workers.lose_all([Death(worker="b", cause=HANG, detail="", evidence=found)])
        assert [lost.worker for lost in desk.happened(WorkerLost)] == ["b"]
        await asyncio.wait_for(asyncio.to_thread(os.getpid), 20)
        answers.set()
        kept = desk.paths.incidents / "001" / "manifest.json"
        await asyncio.to_thread(wait_until, kept.exists)

    asyncio.run(play())
    desk.records.end("interrupted", None).result()
    assert (desk.paths.incidents / "001" / "b.txt").read_text() == "in loop"


def test_the_first_ones_are_kept_and_the_last_of_them_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(evidence, "MOST_FOLDERS", 4)
    told = []
    for number in range(1, 7):
        keep_evidence(tmp_path, {f"w{number}": "it loops"}, {})
        told.append([record.getMessage() for record in caplog.records])
        caplog.clear()
    kept = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*/manifest.json"))]
    assert [list(manifest["accused"]) for manifest in kept] == [["w1"], ["w2"], ["w3"], ["w4"]]
    assert told[0] == told[2] == told[4] == told[5] == []
    (lesser,), (all_,) = told[1], told[3]
    assert lesser.startswith(f"{tmp_path / '002'} is the last of 2 folders for last words and slow")
    assert all_.startswith(f"{tmp_path / '004'} is the last of 4 folders for what is found")


def test_where_nothing_can_be_written_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "incidents").write_text("a file in the folder's place")
    keep_evidence(tmp_path / "incidents", {"w1": "it loops"}, {})
    assert "not kept" in caplog.text
