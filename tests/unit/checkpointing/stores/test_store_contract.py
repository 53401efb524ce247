"""What every store promises, by the same cases."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from moto.s3.models import s3_backends

from checkpointing import MissingError, S3Config, Store, StoreError, open_store

MIB = 1 << 20


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        return request.getfixturevalue("s3")
    return open_store(tmp_path / "store")


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [b""],
        [b"abc", memoryview(b"defg")],
        [bytes(range(256)) * 4096] * 5,  # exactly a part
        [memoryview(bytes(range(251)) * 4001)] * 11,  # three parts, across their borders
    ],
    ids=["nothing", "empty", "small", "a part", "parts"],
)
def test_what_was_put_is_got(store: Store, chunks: list[bytes]) -> None:
    data = b"".join(chunks)
    assert store.put("d/a/x", iter(chunks)) == len(data)
    assert store.get("d/a/x") == data
    assert store.size("d/a/x") == len(data)


def test_ranges(store: Store) -> None:
    store.put("x", [b"abcdefg"])
    for start, length in [(0, 7), (2, 3), (5, 10), (7, 1), (9, 4), (3, 0)]:
        assert store.get_range("x", start, length) == b"abcdefg"[start : start + length]


def test_put_replaces(store: Store) -> None:
    store.put("x", [b"old and long"])
    store.put("x", [b"new"])
    assert store.get("x") == b"new"


def test_a_stream_of_pieces_that_fit_nothing(store: Store) -> None:
    pieces = [bytes([value]) * (MIB + value) for value in range(1, 8)]
    assert store.put("x", map(memoryview, pieces)) == sum(map(len, pieces))
    assert store.get("x") == b"".join(pieces)


@pytest.mark.parametrize("before", [1, 7 * MIB], ids=["small", "parts"])
def test_a_stream_that_fails_leaves_nothing(store: Store, before: int) -> None:
    def broken() -> Iterator[bytes]:
        yield bytes(before)
        raise RuntimeError("the source died")

    store.put("d/x", [b"old"])
    with pytest.raises(RuntimeError, match="the source died"):
        store.put("d/x", broken())
    assert store.list("") == ["d/x"]
    assert store.get("d/x") == b"old"
    assert store.abort_unfinished() == []


def test_list_takes_a_string_prefix(store: Store) -> None:
    assert store.list("") == []
    for key in ("d/b/2", "d/a/1", "d/ab", "m/1", "top", "d/a b+c%é"):
        store.put(key, [b"."])
    assert store.list("d/") == ["d/a b+c%é", "d/a/1", "d/ab", "d/b/2"]
    assert store.list("d/a") == ["d/a b+c%é", "d/a/1", "d/ab"]
    assert len(store.list("")) == 6
    assert store.list("absent/") == []
    assert store.get("d/a b+c%é") == b"."


def test_delete_is_idempotent(store: Store) -> None:
    for key in ("d/x", "d/y", "d/z", "m/1"):
        store.put(key, [b"."])
    store.delete("d/x")
    store.delete("d/x")
    store.delete_many(["d/y", "d/x", "d/z"])
    store.delete_many([])
    assert store.list("") == ["m/1"]


def test_missing_is_its_own_error(store: Store) -> None:
    calls: list[Callable[[str], object]] = [
        store.get,
        store.size,
        lambda key: store.get_range(key, 0, 1),
        lambda key: store.get_range(key, 0, 0),
    ]
    for call in calls:
        with pytest.raises(MissingError, match="d/none"):
            call("d/none")


@pytest.mark.parametrize("key", ["", "../x", "d/../../x", "/etc/passwd", "d//x", "d/./x", "d/\0"])
def test_keys_cannot_leave_the_store(store: Store, key: str) -> None:
    for call in (
        lambda: store.put(key, [b"."]),
        lambda: store.put_if_absent(key, b"."),
        lambda: store.get(key),
        lambda: store.delete(key),
    ):
        with pytest.raises(StoreError, match="not a key"):
            call()


def test_put_if_absent_has_exactly_one_winner(store: Store) -> None:
    for turn in range(5):
        gate = threading.Barrier(4)
        won: list[bytes] = []

        def race(data: bytes, key: str, gate: threading.Barrier, won: list[bytes]) -> None:
            gate.wait()
            if store.put_if_absent(key, data):
                won.append(data)

        threads = [
            threading.Thread(target=race, args=(str(n).encode(), f"m/{turn}", gate, won))
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert won == [store.get(f"m/{turn}")]


def test_check_writable_leaves_nothing(store: Store) -> None:
    store.check_writable()
    assert store.list("") == []


def test_unfinished_writes_are_ended_below_a_prefix(tmp_path: Path, config: S3Config) -> None:
    client = boto3.client("s3", endpoint_url=config.endpoint_url)
    for key in ("d/x", "d/y", "m/z"):
        full = config.prefix + key
        client.create_multipart_upload(Bucket=config.bucket, Key=full)
        path = tmp_path / "store" / f"{key}.0f.part"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    stranger = {"Bucket": config.bucket, "Key": "another/run/d/x"}
    upload = client.create_multipart_upload(**stranger)["UploadId"]
    for store in (open_store(config), open_store(tmp_path / "store")):
        assert store.abort_unfinished("d/") == ["d/x", "d/y"]
        assert store.abort_unfinished() == ["m/z"]
        assert store.abort_unfinished() == []
    left = client.list_multipart_uploads(Bucket=config.bucket)["Uploads"]
    assert [(entry["Key"], entry["UploadId"]) for entry in left] == [("another/run/d/x", upload)]
    client.abort_multipart_upload(**stranger, UploadId=upload)


def test_long_listings_and_deletions_take_pages(s3: Store, config: S3Config) -> None:
    backend = s3_backends["123456789012"]["aws"]
    keys = [f"d/{number:05}" for number in range(2345)]
    for key in keys:
        backend.put_object(config.bucket, config.prefix + key, b".")
    assert s3.list("") == keys
    s3.delete_many(keys[:-1])
    assert s3.list("") == keys[-1:]
