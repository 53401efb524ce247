from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from elastic.cli.main import main
from elastic.protocol import events
from elastic.protocol.causes import CRASH
from elastic.reporting.suspect_file import SuspectFile
from health.suspects import Mark
from health.verdict import Sign


def test_machines_are_listed_the_worst_first_and_forgotten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, now = SuspectFile(tmp_path), time.time()
    for machine, weight, ago_s in (("i-weak", 0.3, 0), ("i-old", 1.0, 0), ("i-old", 1.0, 86_400)):
        file.add(
            machine, Mark(time=now - ago_s, weight=weight, cause="link", run="r7", detail="64 B")
        )
    assert main(["nodes", "list", str(tmp_path)]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["machine", "score", "suspect"]
    assert first.split()[:4] == ["i-old", "1.50", "suspect", "2"]
    assert second.split()[:4] == ["i-weak", "0.30", "-", "1"] and second.split()[-4:] == [
        "link",
        "r7",
        "64",
        "B",
    ]
    assert main(["nodes", "list", str(tmp_path), "--json"]) == 0
    machines = json.loads(capsys.readouterr().out)["machines"]
    assert [(one["machine"], one["suspect"]) for one in machines] == [
        ("i-old", True),
        ("i-weak", False),
    ]
    assert main(["nodes", "clear", str(tmp_path), "i-old"]) == 0
    assert capsys.readouterr().out == "1 machine forgotten\n"
    assert file.read().keys() == {"i-weak"}
    assert main(["nodes", "clear", str(tmp_path)]) == 0
    assert file.read() == {}


def test_a_machine_with_nothing_against_it_is_not_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SuspectFile(tmp_path).path.write_text('{"machines": {"i-one": []}}')
    assert main(["nodes", "list", str(tmp_path)]) == 0
    assert "i-one" not in capsys.readouterr().out


@pytest.mark.parametrize("time", [10**400, -1e300], ids=["huge", "negative"])
def test_a_time_that_is_none_is_one_line_of_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], time: float
) -> None:
    mark = {"time": time, "weight": 1.0, "cause": "link", "run": "r7", "detail": "64 B"}
    SuspectFile(tmp_path).path.write_text(json.dumps({"machines": {"i-one": [mark]}}))
    assert main(["nodes", "list", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("elastic: ") and "time of a mark of i-one is" in line


def test_a_file_that_is_no_record_is_one_line_of_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SuspectFile(tmp_path).path.write_text("[]")
    assert main(["nodes", "list", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("elastic: ") and "elastic nodes clear" in line


@pytest.mark.parametrize("verb", ["list", "clear"])
def test_a_path_that_holds_no_runs_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    assert main(["nodes", verb, str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err
    run = tmp_path / "run"
    run.mkdir()
    (run / "events.jsonl").touch()
    assert main(["nodes", verb, str(run)]) == 2
    assert f"the directory of one run, which has events.jsonl. Use {tmp_path}." in (
        capsys.readouterr().err
    )
    assert [path.name for path in run.iterdir()] == ["events.jsonl"]


def test_a_machine_that_is_not_known_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SuspectFile(tmp_path).add(
        "i-one", Mark(time=time.time(), weight=1.0, cause="link", run="r7", detail="64 B")
    )
    assert main(["nodes", "clear", str(tmp_path), "i-on"]) == 2
    assert "MACHINE = 'i-on': nothing is remembered of it" in capsys.readouterr().err
    assert SuspectFile(tmp_path).read().keys() == {"i-one"}


def test_verdicts_against_machines_are_exported_as_health_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fields and their kinds are those of NVSentinel's HealthEvents."""
    sign = Sign(
        name="gpu_lost",
        source="reading",
        role="root",
        cause="gpu_error",
        subject="gpu",
        detail="the driver cannot reach it any more",
        node="ab12",
        decisive=True,
        remedy="reboot",
    )
    known: list[events.Event] = [
        events.WorkerJoined(time=1.0, worker="w1", node="ab12", pid=1, born_ticks=None),
        events.WorkerJoined(time=1.0, worker="w2", node="cd34", pid=1, born_ticks=None),
        events.SignsChanged(time=1.5, node="ab12", names=["ip-10-0-0-9"], signs=[sign.to_json()]),
    ]
    crash = events.WorkerLost(
        time=500.0, worker="w2", node="cd34", pid=1, slot=None, cause=CRASH, detail="gone"
    )
    run = tmp_path / "run"
    run.mkdir()

    def exported(*more: events.Event) -> list[dict[str, Any]]:
        lines = [json.dumps(event.to_json()) for event in (*known, *more)]
        damaged = "\0" * 64  # as after a power loss
        (run / "events.jsonl").write_text("\n".join([damaged, *lines]) + "\n")
        (run / "steps.jsonl").write_text(damaged + "\n")
        assert main(["nodes", "export", str(run)]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["version"] == 1
        return list(told["events"])

    (one,) = exported(crash)  # of which no machine is to blame
    assert one == {
        "version": 1,
        "agent": "elastictrainer",
        "componentClass": "GPU",
        "checkName": "gpu_error",
        "isFatal": True,
        "isHealthy": False,
        "message": "the driver cannot reach it any more",
        "recommendedAction": "RESTART_VM",
        "errorCode": ["gpu_lost"],
        "entitiesImpacted": [{"entityType": "NODE", "entityValue": "ip-10-0-0-9"}],
        "metadata": {"run": "run", "step": "0", "ray_node": "ab12", "confidence": "certain"},
        "generatedTimestamp": "1970-01-01T00:08:20.000Z",
        "nodeName": "ip-10-0-0-9",
        "quarantineOverrides": None,
        "drainOverrides": None,
    }
    told = events.NodeReplacement(
        time=2.0, node="ab12", machine="i-0123", outcome="told", reason="", detail=""
    )
    (one,) = exported(told)
    assert one["nodeName"] == "i-0123", "as its provider knows it"


def test_an_export_of_what_is_no_run_is_one_line_of_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nodes", "export", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"elastic: RUN = {str(tmp_path)!r}: ") and "no run's directory" in line
