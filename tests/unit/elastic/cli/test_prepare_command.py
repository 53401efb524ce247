from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from elastic.cli.main import main
from elastic.driver.preparing import prepare_task
from tests.support.tiny import tiny_train, write_text
from trainer.tasks.task import default_cache_dir

PROGRAM = """
from pathlib import Path
from tests.support.tiny import tiny_trainer

here = Path(__file__).parent
trainer = tiny_trainer(here / "text", here / "runs"{more})
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program, whose import is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)
    write_text(tmp_path / "text")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(more=', device="cuda"'))
    return path


def test_a_run_finds_what_was_prepared(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", str(file), "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    made = Path(found["task"]["train_path"])
    assert made.is_relative_to(file.parent / "runs" / ".data")
    assert "encoding the text\n" in told.err

    before = (made / "index.json").stat().st_mtime_ns
    assert main(["prepare", f"{file}:trainer"]) == 0
    told = capsys.readouterr()
    assert "encoding the text" not in told.err
    assert f"{found['samples']:,} samples in an epoch" in told.out
    assert f"{found['task']['train_tokens']:,} tokens" in told.out and str(made) in told.out

    cache = default_cache_dir(str(file.parent / "runs"))
    of_run = prepare_task(tiny_train(file.parent / "text"), cache)
    assert of_run.info == found["task"]
    assert (made / "index.json").stat().st_mtime_ns == before


def test_what_cannot_work_is_bad_input(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(PROGRAM.format(more=", tensor=3"))
    assert main(["prepare", str(file)]) == 2
    assert "train.parallel.tensor = 3: it does not divide" in capsys.readouterr().err
    assert not (file.parent / "runs").exists()
