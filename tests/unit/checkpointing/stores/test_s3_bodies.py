"""What goes to the socket: the caller's own memory, hashed by nobody, from its beginning again
after a try that failed."""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Iterator

import pytest

from checkpointing import CorruptError, S3Config, Store, open_store
from checkpointing.stores.s3.upload import Part, gather
from tests.support.fakes.s3_faults import FaultServer, Kind

MIB = 1 << 20


def test_parts_are_views_of_what_was_given() -> None:
    memory = bytearray(range(256)) * 40
    chunks = [memoryview(memory)[:3], memoryview(memory)[3:9000], memoryview(memory)[9000:]]
    parts = list(gather(chunks, 4096))
    assert [len(part) for part in parts] == [4096, 4096, 2048]
    for number, part in enumerate(parts):
        expected = bytes(memory[number * 4096 : (number + 1) * 4096])
        assert part.crc32 == zlib.crc32(expected)
        for _ in range(2):  # two tries
            part.seek(0)
            assert b"".join(iter(part.read, b"")) == expected
    memory[8192] ^= 1
    parts[2].seek(0)
    assert bytes(parts[2].read(1))[0] == memory[8192], "nothing was copied"


class Told:
    """A stream that knows the CRC32 of everything, rightly or not."""

    def __init__(self, data: bytes, wrong: int) -> None:
        self._data, self._wrong, self.whole_bytes = data, wrong, len(data)

    def __iter__(self) -> Iterator[bytes]:
        yield self._data

    def crc32_between(self, start: int, stop: int) -> int:
        return zlib.crc32(self._data[start:stop]) ^ self._wrong


@pytest.mark.parametrize("size", [MIB, 12 * MIB], ids=["put", "part"])
def test_crcs_that_the_stream_knows_are_what_s3_checks(config: S3Config, size: int) -> None:
    store = open_store(dataclasses.replace(config, timeout_s=0.3))
    data = bytes(range(256)) * (size // 256)
    assert store.put("x", Told(data, 0)) == size and store.get("x") == data
    with pytest.raises(CorruptError):
        store.put("x", Told(data, 1))


def test_a_part_is_sent_from_its_beginning_only() -> None:
    with pytest.raises(OSError, match="beginning"):
        Part().seek(3)


@pytest.mark.parametrize("size", [MIB, 12 * MIB], ids=["put", "part"])
def test_bodies_carry_our_crc_and_no_hash(s3: Store, faults: FaultServer, size: int) -> None:
    data = bytes(range(256)) * (size // 256)
    kind: Kind = "put" if size == MIB else "part"
    spoiled = faults.inject("reset", kind=kind)
    pieces = [memoryview(data)[: MIB // 3], memoryview(data)[MIB // 3 :]]
    assert s3.put("x", pieces) == size
    assert spoiled.fired == 1 and s3.get("x") == data
    headers = faults.headers(kind)
    assert {h["x-amz-content-sha256"] for h in headers} == {"UNSIGNED-PAYLOAD"}
    if kind == "put":
        crc = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
        assert {h["x-amz-checksum-crc32"] for h in headers} == {crc}
