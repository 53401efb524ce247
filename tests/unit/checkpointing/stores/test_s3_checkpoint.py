"""A whole checkpoint on S3: written, committed, read in another layout, retired, on a bad day."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import torch

from checkpointing import (
    AlreadyCommittedError,
    CorruptError,
    Keys,
    Manifest,
    MissingError,
    NotCommittedError,
    Reader,
    S3Config,
    Store,
    StoreUnavailableError,
    Surveyor,
    TensorSlice,
    delete_checkpoint,
    list_steps,
    newest,
    open_store,
)
from checkpointing.retention.retire import sweep_uncommitted
from tests.support.fakes.s3_faults import FaultServer
from tests.support.tiny_checkpoint import commit_shares

KEYS = Keys()
PUT = ("put", 200)
RANKS, ROWS, COLUMNS = 4, 480, 2048  # 1 MB of float32 a rank, in segments of 256 KiB


def state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(ROWS, COLUMNS, generator=generator),
        "bias": torch.randn(ROWS, generator=generator),
    }


def share(tensor: torch.Tensor, name: str, rank: int) -> tuple[TensorSlice, torch.Tensor]:
    rows = ROWS // RANKS
    part = tensor[rank * rows : (rank + 1) * rows]
    offsets = (rank * rows, *[0] * (tensor.dim() - 1))
    return TensorSlice(name, tuple(tensor.shape), "float32", offsets, tuple(part.shape)), part


def save(store: Store, step: int, generation: int = 1) -> Manifest:
    shares = [
        [share(tensor, name, rank) for name, tensor in state(step).items()] for rank in range(RANKS)
    ]
    return commit_shares(
        store,
        shares,
        step=step,
        generation=generation,
        state={"step": step},
        segment_bytes=256 << 10,
        block_bytes=64 << 10,
    )


def test_a_save_and_a_load_in_another_layout_at_20_percent_503(
    s3: Store, config: S3Config, faults: FaultServer
) -> None:
    rule = faults.inject("slow_down", times=None, chance=0.2)
    manifest = save(s3, 10)
    assert newest(s3, KEYS) == manifest
    wanted = [("weight", (column, 0), (160, COLUMNS)) for column in range(0, ROWS, 160)]
    rows = Reader(s3, manifest).read_many(wanted)
    assert torch.equal(torch.cat(rows), state(10)["weight"])
    assert torch.equal(Reader(s3, manifest).read_full("bias"), state(10)["bias"])
    assert rule.fired > 0 and faults.count(status=503) >= rule.fired
    sent = [r.key.removeprefix(config.prefix) for r in faults.requests if (r.kind, r.status) == PUT]
    assert sorted(sent) == sorted([*manifest.segments, KEYS.commit(10)])  # each object once
    hashes = [hashlib.sha256(str(rank).encode()).hexdigest()[:2] for rank in range(RANKS)]
    assert {key.partition("/0000")[0] for key in manifest.segments} == {
        f"d/{spread}/r{rank:05}" for rank, spread in enumerate(hashes)
    }


def test_what_is_fetched_for_a_part_is_that_part(s3: Store, faults: FaultServer) -> None:
    manifest = save(s3, 10)
    faults.clear()
    read = Reader(s3, manifest).read("weight", (130, 0), (8, COLUMNS))
    assert torch.equal(read, state(10)["weight"][130:138])
    assert faults.count() == faults.count("get") == 1
    first, last = faults.headers("get")[0]["range"].removeprefix("bytes=").split("-")
    assert int(last) - int(first) + 1 <= 2 * (64 << 10)  # 64 KiB, and the rest of its blocks


def test_a_flip_on_the_way_is_read_again_and_one_at_rest_is_found(
    s3: Store, config: S3Config, faults: FaultServer
) -> None:
    manifest = save(s3, 10)
    faults.clear()
    rule = faults.inject("flip", kind="get")
    assert torch.equal(Reader(s3, manifest).read_full("bias"), state(10)["bias"])
    assert rule.fired == 1 and faults.count("get") == RANKS + 1
    key = manifest.parts_of("bias")[2].segment
    data = bytearray(s3.get(key))
    data[manifest.segments[key].checked_bytes - 1] ^= 1
    s3.put(key, [bytes(data)])
    with pytest.raises(CorruptError, match=r"r00002.*CRC32 differed twice"):
        Reader(s3, manifest).read_full("bias")
        Reader(s3, manifest).read_full("weight")
    s3.put(key, [bytes(data[: len(data) // 2])])
    with pytest.raises(CorruptError, match="r00002"):
        Reader(s3, manifest).read_full("bias")
        Reader(s3, manifest).read_full("weight")
    s3.delete(key)
    with pytest.raises(MissingError, match=r"r00002.*rank 2: no such object"):
        Reader(s3, manifest).read_full("bias")
        Reader(s3, manifest).read_full("weight")


def test_a_commit_is_published_once(s3: Store, faults: FaultServer) -> None:
    faults.inject("drop_after_body", kind="put", prefix=_commits(s3))
    first = save(s3, 10)
    assert save(s3, 10) == first  # the same again
    with pytest.raises(AlreadyCommittedError, match="generation 1"):
        save(s3, 10, generation=2)
    assert newest(s3, KEYS) == first


def test_what_fails_before_the_commit_leaves_the_previous_checkpoint(
    config: S3Config, s3: Store, faults: FaultServer
) -> None:
    before = save(s3, 10)
    impatient = open_store(dataclasses.replace(config, timeout_s=0.3))
    for prefix in (f"{config.prefix}d/", _commits(s3)):
        faults.clear()
        faults.inject("reset", kind="put", prefix=prefix, times=None)
        with pytest.raises(StoreUnavailableError, match="connection failed"):
            save(impatient, 20)
        faults.clear()
        assert newest(s3, KEYS) == before
    save(s3, 30)
    swept = sweep_uncommitted(Surveyor(store=s3, keys=KEYS), 30)
    assert swept and all("/000000000020-" in key for key in swept)


def test_a_checkpoint_retires_record_first(s3: Store, faults: FaultServer) -> None:
    manifest = save(s3, 10)
    save(s3, 20)
    faults.clear()
    delete_checkpoint(s3, KEYS, 10)
    deletions = [r for r in faults.requests if r.kind in ("delete", "delete_many")]
    record = next(i for i, r in enumerate(deletions) if r.key.endswith(KEYS.commit(10)))
    data = [i for i, r in enumerate(deletions) if r.kind == "delete_many"]
    assert len(data) == 1 and record < data[0] and len(manifest.segments) > 1
    assert not {KEYS.step_of(key) for key in s3.list("")} - {20}
    with pytest.raises(NotCommittedError):
        delete_checkpoint(s3, KEYS, 10)
    assert list_steps(s3, KEYS) == [20]


def _commits(store: Store) -> str:
    config: S3Config = store.config  # type: ignore[attr-defined]
    return f"{config.prefix}m/"
