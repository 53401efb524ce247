"""A run whose newest checkpoint is damaged goes on from the one before, to the same weights; with
none left it ends, and says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpointing import CheckpointConfig
from elastic import ConfigError, ElasticTrainer
from elastic.errors import RunFailedError
from tests.support.tiny import Outcome, fit, tiny_trainer

pytestmark = pytest.mark.slow


def six_steps(text: Path, storage: Path) -> ElasticTrainer:
    keep_all = CheckpointConfig(every_steps=2, keep_last=10)
    return tiny_trainer(text, storage, steps=6, checkpoint=keep_all)


@pytest.fixture(scope="module")
def finished(
    cluster: None, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Outcome]:
    """A finished run with all its checkpoints, for tests to copy."""
    storage = tmp_path_factory.mktemp("finished")
    return storage, fit(six_steps(text, storage))


@pytest.fixture
def store(finished: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """The checkpoints of a copy of it, of step 2 and 6; that of 4 may have been skipped. It was
    killed before its end was written down: one that is over is not started again."""
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    events = tmp_path / "run" / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(line for line in lines if '"run_ended"' not in line))
    return tmp_path / "run" / "checkpoints"


def record(store: Path, step: int) -> Path:
    return store / "m" / f"{step:012}.json"


def steps_of(store: Path) -> list[int]:
    """Steps that have a commit record, the newest first."""
    return sorted((int(path.stem) for path in store.glob("m/*.json")), reverse=True)


def damage(store: Path, step: int) -> str:
    """Flips a bit of its data. Returns the segment's key."""
    segment = min(store.glob(f"d/*/*/{step:012}-*/*.safetensors"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    return str(segment.relative_to(store))


def happened(store: Path, *kinds: str) -> list[dict[str, Any]]:
    """Events of the last start of the run."""
    lines = (store.parent / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    start = max(i for i, event in enumerate(events) if event["kind"] == "run_started")
    return [event for event in events[start:] if event["kind"] in kinds]


def test_goes_on_from_the_checkpoint_before(
    finished: tuple[Path, Outcome], store: Path, text: Path, tmp_path: Path
) -> None:
    newest, before, *_ = steps_of(store)
    key, broken = damage(store, newest), record(store, newest).read_bytes()
    outcome = fit(six_steps(text, tmp_path))
    assert (outcome.params, outcome.losses) == (finished[1].params, finished[1].losses)
    assert outcome.samples == finished[1].samples
    (failed,) = happened(store, "checkpoint_failed")
    assert failed["step"] == newest == 6
    assert key in failed["reason"] and "CRC32" in failed["reason"]
    rosters = [(e["outcome"], e["step"]) for e in happened(store, "regroup_done")]
    assert rosters[:2] == [("start", newest), ("restore", before)]
    assert not happened(store, "worker_lost"), "no worker died, no budget was spent"
    assert record(store, newest).read_bytes() != broken, "the step was committed again"
    (checked,) = happened(store, "ledger_checked")
    assert checked["steps"] == newest - before


def test_with_none_left_it_ends_and_says_why(store: Path, text: Path, tmp_path: Path) -> None:
    steps = steps_of(store)
    keys = [damage(store, step) for step in steps]
    with pytest.raises(RunFailedError, match="There is no other saved state") as raised:
        fit(six_steps(text, tmp_path))
    assert keys[-1] in str(raised.value) and "CRC32" in str(raised.value)
    assert "resume='never'" in str(raised.value)
    assert [e["step"] for e in happened(store, "checkpoint_failed")] == steps
    assert record(store, steps[-1]).exists(), "or the next start would begin from the seed"


def test_a_start_does_not_take_damaged_records_for_none(
    store: Path, text: Path, tmp_path: Path
) -> None:
    for step in steps_of(store):
        record(store, step).write_bytes(b"{")
    with pytest.raises(ConfigError, match=r"can be read; there are m/0+2\.json: .*m/0+6\.json"):
        fit(six_steps(text, tmp_path))
