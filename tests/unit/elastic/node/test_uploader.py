"""A worker whose connection broke asks the same uploader again: the part is written once."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpointing import Attempt, Receipt, Written
from elastic.node.uploader import Uploader
from elastic.protocol.rpc import Remote
from elastic.protocol.run_paths import RunPaths
from elastic.protocol.saves import Upload
from tests.support.slice_tables import slice_table

DEADLINE_S = 30.0
UPLOAD = Upload(
    place="store",
    pid=1,
    fd=3,
    number=1,
    attempt=Attempt(rank=0, step=4, generation=1),
    writers=1,
    slices=(),
    training_state={},
    begun_at=0.0,
)


class Seen(dict[Any, "Future[Written | None]"]):
    """Tells when somebody finds a write under way."""

    def __init__(self) -> None:
        super().__init__()
        self.found = threading.Event()

    def get(self, key: Any, default: Any = None) -> Any:
        if key in self:
            self.found.set()
        return super().get(key, default)


class Gated(Uploader):
    """Writes nothing; a first write waits for a second call."""

    def __init__(self) -> None:
        super().__init__(Remote(None), RunPaths(root=Path("/none")), "node", 1)
        self._writing = self.seen = Seen()
        self.began = threading.Event()
        self.written: list[int] = []

    def _write(self, upload: Upload) -> Written | None:
        self.began.set()
        self.written.append(upload.attempt.step)
        if len(self.written) == 1:
            assert self.seen.found.wait(DEADLINE_S)
            if upload.writers == 0:
                raise ValueError("no writers")
        attempt = upload.attempt
        receipt = Receipt(
            rank=0,
            step=attempt.step,
            generation=1,
            attempt=0,
            slices=slice_table({}, []),
            segments=(),
        )
        return Written(receipt=receipt, parts={})


@pytest.fixture
def uploader(monkeypatch: pytest.MonkeyPatch) -> Gated:
    monkeypatch.setattr("os.nice", lambda _: 0)  # this process is to stay as it is
    monkeypatch.setattr("elastic.node.uploader.announce", lambda *_: None)  # nobody is there
    return Gated()


def test_two_calls_for_one_part_write_it_once(uploader: Gated) -> None:
    with ThreadPoolExecutor() as pool:
        first = pool.submit(uploader.write, UPLOAD)
        assert uploader.began.wait(DEADLINE_S)
        second = pool.submit(uploader.write, UPLOAD)
        assert second.result() is first.result() is not None
    assert uploader.written == [4]
    uploader.write(replace(UPLOAD, number=2))
    assert uploader.written == [4, 4], "another copy, and nothing is left of the first"


def test_who_waits_for_all_that_is_written_waits_for_what_has_begun(uploader: Gated) -> None:
    uploader.finish()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(uploader.write, UPLOAD)
        assert uploader.began.wait(DEADLINE_S)
        waiting = pool.submit(uploader.finish)
        assert wait([waiting], timeout=0.1).not_done
        uploader.seen.found.set()
        waiting.result(DEADLINE_S)
        assert first.done()


def test_both_callers_hear_of_an_error(uploader: Gated) -> None:
    broken = replace(UPLOAD, writers=0)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(uploader.write, broken)
        assert uploader.began.wait(DEADLINE_S)
        second = pool.submit(uploader.write, broken)
        for call in (first, second):
            with pytest.raises(ValueError, match="no writers"):
                call.result()
    assert not uploader.seen
