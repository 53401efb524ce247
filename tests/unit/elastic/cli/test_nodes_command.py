from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from elastic.cli.main import main
from elastic.reporting.suspect_file import SuspectFile
from health.suspects import Mark


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


def test_a_file_that_is_no_record_is_one_line_of_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SuspectFile(tmp_path).path.write_text("[]")
    assert main(["nodes", "list", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("elastic: ") and "elastic nodes clear" in line


def test_a_storage_path_that_does_not_exist_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nodes", "clear", str(tmp_path / "nowhere"), "m"]) == 2
    assert "No such file or directory" in capsys.readouterr().err
