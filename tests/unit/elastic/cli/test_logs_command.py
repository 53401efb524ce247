"""Whose output is where, by the run's records; and what is read on a node. A whole run's:
`tests/integration/test_user_errors.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.cli import logs
from elastic.cli.logs import plan_portions
from elastic.cli.main import main
from elastic.protocol.events import Event, ReplicaForming, WorkerJoined
from elastic.protocol.run_paths import RunPaths
from elastic.ray_compat.cluster import Failed
from elastic.reporting.event_log import EventLog
from elastic.reporting.outputs import Output, find_outputs, read_files, read_kept
from tests.support.rays_output import OWN, writes_beside

SIZES = 16 << 20, 64 << 10, 100 << 20

LOG = "/tmp/ray/session_x/logs/worker-{}-ffffffff-12.err"


def joined(worker: str, *logs: str) -> WorkerJoined:
    return WorkerJoined(
        time=1.0, worker=worker, node=f"node-of-{worker}", pid=12, born_ticks=3, logs=list(logs)
    )


def forms(replica: int, *workers: str) -> Event:
    return ReplicaForming(time=2.0, formed=1, replica=replica, workers=list(workers))


def test_the_slot_that_each_had_last() -> None:
    events = [
        *(joined(worker, LOG.format("0a")) for worker in ("w0", "w1", "w2", "w3", "w4")),
        forms(0, "w0", "w1"),
        forms(1, "w2", "w3"),
        forms(1, "w3", "w0"),
    ]
    found = [(one.slot, one.worker, one.node) for one in find_outputs(events)]
    assert found == [
        ("r0.1", "w1", "node-of-w1"),
        ("r1.0", "w2", "node-of-w2"),
        ("r1.0", "w3", "node-of-w3"),
        ("r1.1", "w0", "node-of-w0"),
        ("spare", "w4", "node-of-w4"),
    ]


def test_only_what_ray_has_written_is_read(tmp_path: Path) -> None:
    """Whoever can write to the run directory must not be shown other files of the nodes, by their
    names or by links."""
    log = tmp_path / "logs" / "worker-0a-ffffffff-12.err"
    elsewhere = tmp_path / "other" / "logs" / log.name
    elsewhere.parent.mkdir(parents=True)
    secret = tmp_path / "secret"
    for path in (secret, elsewhere):
        path.write_text("key")
    (one,) = find_outputs([joined("w0", str(log), str(secret), f"{log.parent}/../secret")])
    assert one.files == (str(log),)
    with writes_beside(log):
        log.write_text("one\ntwo\n")
        link = log.with_name("worker-0b-ffffffff-12.err")
        link.symlink_to(secret)
        asked = [str(log), str(secret), str(elsewhere), str(link)]
        assert read_files(asked, 100) == {str(log): "one\ntwo\n", str(link): ""}
        (log.parent / OWN).unlink()  # as who clears up does with files that have not changed lately
        assert read_files([str(log)], 5) == {str(log): "two\n"}


def test_a_node_sends_no_more_than_the_lines_that_speak_of_faults(tmp_path: Path) -> None:
    """Of thousands of workers the others are gigabytes."""
    log = tmp_path / "logs" / "worker-0a-ffffffff-12.err"
    fault = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    with writes_beside(log):
        log.write_text(f"one\n{fault}\ntwo\n{fault}\n")
        assert read_files([str(log)], 1000, True) == {str(log): f"{fault}\n{fault}"}
    elsewhere = f"/gone/{log.name}"
    assert read_kept(log.parent, [elsewhere], 1000, True) == {elsewhere: f"{fault}\n{fault}"}


def test_a_portion_is_as_much_as_can_be_held() -> None:
    def output(worker: int, files: int) -> Output:
        names = tuple(LOG.format(f"{worker}{file}") for file in range(files))
        return Output(worker=f"w{worker}", slot="spare", node="n", files=names)

    outputs = [output(worker, 2) for worker in range(5)]
    of_each = {bytes_: [len(p) for p in plan_portions(outputs, bytes_)] for bytes_ in SIZES}
    assert of_each == {16 << 20: [2, 2, 1], 64 << 10: [5], 100 << 20: [1] * 5}
    wordless = [output(worker, 0) for worker in range(5)]
    assert list(plan_portions(wordless, 100 << 20)) == [wordless]
    assert list(plan_portions([], 1)) == []


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(tmp_path)]) == 2
    assert f"{tmp_path} is no run's directory: it has no events.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("events", "more", "told"),
    [
        ([], [], "no worker of the run in"),
        (
            ["w0", "w1"],
            ["--worker", "w2"],
            r"--worker = 'w2': .* no such worker; it names w0, w1\. Use",
        ),
        (
            [f"w{n}-0a" for n in range(4000)],
            ["--worker", "w1234-0b"],
            r"of the 4000 that it names the nearest are w1234-0a(, \S+){4}\. Use",
        ),
    ],
)
def test_workers_that_are_not_there(
    tmp_path: Path,
    events: list[str],
    more: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with EventLog(RunPaths(root=tmp_path).events) as log:
        for worker in events:
            log.append(joined(worker, LOG.format("0a")))
    assert main(["logs", str(tmp_path), *more]) == 2
    assert re.search(told, capsys.readouterr().err)


def test_a_damaged_line_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """As after a power loss, when the output is wanted."""
    path = RunPaths(root=tmp_path).events
    path.write_bytes(b"\0" * 64 + b"\n")
    with EventLog(path) as log:
        log.append(joined("w0", LOG.format("0a")))
    assert main(["logs", str(tmp_path), "--worker", "w2"]) == 2
    assert "it names w0" in capsys.readouterr().err
    assert "line 1" in caplog.text


def test_a_node_that_falls_silent_half_way_is_not_told_of_as_one_that_never_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one with a former version of the package asked for what that does not know."""
    asked: list[tuple[object, ...]] = []

    def on_nodes(
        function: object, calls: Mapping[str, tuple[list[str], int]], *, timeout_s: float
    ) -> dict[str, object]:
        ((node, given),) = calls.items()
        asked.append(given)
        ((name,), _) = given
        return {node: {name: "its words"} if len(asked) == 1 else Failed(why="no answer")}

    monkeypatch.setattr("elastic.ray_compat.cluster.on_nodes", on_nodes)
    monkeypatch.setattr(logs, "_join", lambda *_: ({}, set()))
    monkeypatch.setattr(logs, "_PORTION_BYTES", 1)
    with EventLog(RunPaths(root=tmp_path).events) as log:
        for worker in ("w0", "w1"):
            log.append(replace(joined(worker, LOG.format(f"0{worker[1]}")), node="n" * 8))
    assert main(["logs", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert "w0 | its words" in told.out and len(asked) == 2
    assert told.err == "elastic: node nnnnnn: no answer, and nothing of the rest is kept\n"


@pytest.mark.parametrize("kib", ["0", "-1"])
def test_less_than_a_kib_is_refused(kib: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["logs", "run", "--kib", kib])
    assert f"--kib: {kib} is less than 1" in capsys.readouterr().err
