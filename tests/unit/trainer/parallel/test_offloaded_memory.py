"""What copies to and from the host wait for on CUDA. CUDA cannot be here: its streams are queues
that tell a diary in which order they are given work, and the copies are real ones."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from trainer.parallel import host_memory
from trainer.parallel.host_memory import StreamMemory

DEVICE = torch.device("cuda")


class Stream:
    """A queue of the device. An event is its name and how many copies it had been given."""

    def __init__(self, name: str, diary: list[str]) -> None:
        self._name, self._diary, self.copies = name, diary, 0

    def wait_stream(self, other: Stream) -> None:
        """See torch."""
        self._diary.append(f"{self._name} waits for {other._name}")

    def record_event(self) -> str:
        """See torch."""
        return f"{self._name} {self.copies}"

    def wait_event(self, event: str) -> None:
        """See torch."""
        self._diary.append(f"{self._name} waits for {event}")


class Told(torch.Tensor):
    """Tells the stream that it is copied from on."""

    current: Stream

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            assert kwargs == {"non_blocking": True}, "the host waits for the copy"
            stream = cls.current
            stream.copies += 1
            stream._diary.append(f"{stream._name} copies {stream.copies}")
        return super().__torch_function__(func, types, args, kwargs)


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of what the streams of a StreamMemory are given, in order."""
    told = list[str]()
    computing = Stream("computing", told)

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        Told.current = stream
        yield
        Told.current = computing

    monkeypatch.setattr(Told, "current", computing, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: computing)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(host_memory, "stream_for", lambda work, device: Stream(work, told))
    monkeypatch.setattr(
        StreamMemory, "_new", lambda self, size: torch.empty(size, dtype=torch.uint8)
    )
    return told


def numbers() -> torch.Tensor:
    return torch.arange(4.0).as_subclass(Told)


def test_a_copy_comes_after_what_was_computed_and_before_what_is(diary: list[str]) -> None:
    host = StreamMemory(DEVICE)
    block, values = host.take(16), numbers()
    out = host.store(block, values)
    assert diary == ["offload out waits for computing", "offload out copies 1"]
    out.wait()
    out.wait()  # once is enough
    back = torch.empty(4).as_subclass(Told)
    flight = host.load(back, block)
    flight.wait()
    assert diary[2:] == [
        "computing waits for offload out 1",
        "offload back waits for computing",
        "offload back copies 1",
        "computing waits for offload back 1",
    ]
    assert back.tolist() == values.tolist()


def test_a_block_whose_copy_was_dropped_is_written_after_it(diary: list[str]) -> None:
    """The computing stream is behind the copy, and the next copy behind that stream."""
    host = StreamMemory(DEVICE)
    block = host.take(16)
    host.load(torch.empty(4).as_subclass(Told), block).drop()
    host.give_back(block)
    again = host.take(12)  # of the same size, rounded up
    assert again is block
    host.store(again, numbers())
    assert diary == [
        "offload back waits for computing",
        "offload back copies 1",
        "computing waits for offload back 1",
        "offload out waits for computing",
        "offload out copies 1",
    ]


def test_both_ends_live_until_the_computing_stream_is_behind_the_copy(diary: list[str]) -> None:
    host = StreamMemory(DEVICE)
    values = numbers()
    there = weakref.ref(values)
    flight = host.store(host.take(16), values)
    del values
    assert there() is not None
    flight.drop()
    assert there() is None and diary[-1] == "computing waits for offload out 1"
