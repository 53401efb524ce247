"""A worker says whether its part of a checkpoint is being written, and when that has ended."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from checkpointing import Attempt
from elastic.protocol.messages import Identity, Report, Standing
from elastic.protocol.saves import Upload
from elastic.worker.coordinator_link import CoordinatorLink
from elastic.worker.saver import Saver

IDENTITY = Identity(worker="w0", rank=0, node="n1", pid=1)
PATIENCE_S = 20.0


class Coordinator:
    """Notes what is told to it."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def send(self, method: Any, *args: Any) -> None:
        self.told.append((method.__name__, args[0]))

    call = send


def upload(place: Any) -> Upload:
    return Upload(
        place=place,
        pid=1,
        fd=1,
        number=1,
        attempt=Attempt(rank=0, step=4, generation=1),
        writers=1,
        slices=(),
        still=frozenset(),
        training_state={},
        begun_at=0.0,
    )


class Copy:
    """One that fails once it may."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def wait(self) -> None:
        self.goes_on.wait(PATIENCE_S)
        raise OSError("the device is lost")


def test_the_end_of_a_save_is_told_however_it_ends() -> None:
    copy: Any
    coordinator, copy = Coordinator(), Copy()
    job: Any = SimpleNamespace(
        coordinator=coordinator,
        paths=SimpleNamespace(root=SimpleNamespace(name="r")),
        identity=SimpleNamespace(id="r"),
    )
    unused: Any = None
    saver = Saver(job, IDENTITY, unused, unused, unused)
    saver._begin(upload("memory"), unused, copy)
    assert not saver.writing, "what lies in memory goes with its machine anyway"
    saver._begin(upload("store"), unused, copy)
    assert saver.writing and coordinator.told == []
    copy.goes_on.set()
    for thread, _ in saver._writing.values():
        thread.join(PATIENCE_S)
    assert not saver.writing
    assert ("save_ended", "w0") in coordinator.told
    assert len(coordinator.told) == 3, "two have failed, and one of them is a checkpoint's"


def test_who_joins_or_says_where_it_stands_says_what_is_being_written() -> None:
    coordinator, saves = Coordinator(), SimpleNamespace(writing=True)
    link: Any = SimpleNamespace(
        _coordinator=coordinator,
        saves=saves,
        _standing=Standing(identity=IDENTITY),
        _settled=0,
        _called={"fault": 0, "boundary": 0},
    )
    for saves.writing in (True, False):
        CoordinatorLink._join(link, Report(identity=IDENTITY))
        CoordinatorLink._resume(link)
    assert [(call, said.saving) for call, said in coordinator.told] == [
        ("join", True),
        ("resume", True),
        ("join", False),
        ("resume", False),
    ]
