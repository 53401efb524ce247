"""Replicas read a saved state once for all, and give up together one that cannot be read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from checkpointing import Keys, Reader, load_manifest, open_store
from tests.support.restore_plane import (
    SHARD,
    STEPS,
    Scenario,
    Tried,
    full_state,
    run_scenarios,
    task,
    write_checkpoint,
    write_checkpoints,
)
from trainer.backend.groups import leave_replica_group, make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.config import TrainConfig
from trainer.engine.engine import Engine
from trainer.parallel.layout import ParallelDims, Slot
from trainer.recovery.shared_restore import plan_readers, read_together
from trainer.replication.replicas import CrossGroup

Results = Callable[[str], dict[tuple[int, int], list[Tried]]]


@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_a_share_is_tried_by_another_one_that_can_read(read: list[bool]) -> None:
    for position, reader in enumerate(plan_readers(read)):
        if read[position]:
            assert reader == position
        elif any(read):
            assert read[reader]
        else:
            assert reader != position or len(read) == 1


def flip(root: Path, step: int) -> str:
    """Changes one bit in the middle of a segment. Returns its key."""
    (segment, *_) = sorted(root.glob(f"d/*/*/{step:012}-*/00001.safetensors"))
    with open(segment, "r+b") as file:
        file.seek(os.path.getsize(segment) // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    return str(segment.relative_to(root))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Sound checkpoints, and the bytes of the tensors of one."""
    root = tmp_path_factory.mktemp("sound")
    return root, write_checkpoints(root)


@pytest.fixture(scope="module")
def damaged(sound: tuple[Path, int], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The newest one has a flipped bit in the named segment."""
    root = tmp_path_factory.mktemp("damaged")
    shutil.copytree(sound[0], root, dirs_exist_ok=True)
    return root, flip(root, STEPS[0])


@pytest.fixture(scope="module")
def stray(sound: tuple[Path, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newest one has another content, and is sound."""
    root = tmp_path_factory.mktemp("stray")
    shutil.copytree(sound[0], root, dirs_exist_ok=True)
    (root / Keys().commit(STEPS[0])).unlink()
    write_checkpoint(root, STEPS[0], full_state(99))
    return root


@pytest.fixture(scope="module")
def foreign(sound: tuple[Path, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newest one is whole, and its record lacks one of two numbers."""
    root = tmp_path_factory.mktemp("foreign")
    shutil.copytree(sound[0], root, dirs_exist_ok=True)
    (root / Keys().commit(STEPS[0])).unlink()
    write_checkpoint(root, STEPS[0], full_state(STEPS[0]), {"optimizer_steps": 7})
    return root


@pytest.fixture(scope="module")
def results(
    sound: tuple[Path, int], damaged: tuple[Path, str], stray: Path, foreign: Path
) -> Results:
    good, bad, other = str(sound[0]), str(damaged[0]), str(stray)
    return run_scenarios(
        [
            *(Scenario(name=f"sound {r}", root=good, replicas=r) for r in (1, 2, 3)),
            *(Scenario(name=f"damaged {r}", root=bad, replicas=r) for r in (1, 2, 3)),
            *(Scenario(name=f"foreign {r}", root=str(foreign), replicas=r) for r in (1, 2)),
            Scenario(name="blind", root=good, replicas=3, blind=(1, 0)),
            Scenario(name="without record", root=good, replicas=2, without_record=(0, 1)),
            *(
                Scenario(name=f"stray {r}", root=good, replicas=r, stray=(0, 1), stray_root=other)
                for r in (1, 2, 3)
            ),
            Scenario(name="killed", root=good, replicas=3, killed=(1, 0)),
        ]
    )


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_each_byte_is_read_once(results: Results, sound: tuple[Path, int], replicas: int) -> None:
    workers = results(f"sound {replicas}")
    assert len(workers) == replicas * SHARD
    assert {(t.step, t.outcome, t.equal) for (t,) in workers.values()} == {
        (STEPS[0], "Restored", True)
    }
    read = [tried.bytes_read for (tried,) in workers.values()]
    assert sound[1] <= sum(read) <= 1.05 * sound[1]
    assert max(read) <= 1.1 * sound[1] / len(workers), "not dealt out evenly"


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_one_bit_flipped_at_rest_sends_all_to_the_checkpoint_before(
    results: Results, damaged: tuple[Path, str], replicas: int
) -> None:
    workers = results(f"damaged {replicas}")
    for tried in workers.values():
        assert [(t.step, t.outcome) for t in tried] == [
            (STEPS[0], "Unreadable"),
            (STEPS[1], "Restored"),
        ]
        assert tried[0].untouched and tried[1].equal
    reasons = [tried[0].error for tried in workers.values() if tried[0].error]
    assert len(reasons) == min(2, replicas), "its own reader, and one more"
    for reason in reasons:
        assert damaged[1] in reason and "CRC32 differed twice" in reason


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_record_that_lacks_a_number_sends_all_to_the_checkpoint_before(
    results: Results, replicas: int
) -> None:
    workers = results(f"foreign {replicas}")
    assert len(workers) == replicas * SHARD
    for first, second in workers.values():
        assert (first.outcome, first.untouched) == ("Unreadable", True)
        assert first.error == (
            "the record of step 20: its training state has no numbers under optimizer_steps and "
            "skipped_in_a_row, but [7, None]."
        )
        assert (second.step, second.outcome, second.equal) == (STEPS[1], "Restored", True)


def test_a_flip_that_one_reader_sees_is_cured_by_another_source(results: Results) -> None:
    workers = results("blind")
    assert {(t.step, t.outcome, t.equal) for (t,) in workers.values()} == {
        (STEPS[0], "Restored", True)
    }
    alone = max(t.bytes_read for (t,) in results("sound 3").values())
    (second,) = workers[2, 0]
    assert second.bytes_read > 1.8 * alone, "it read its own share and the blind one's"


def test_who_cannot_read_the_record_has_all_from_the_others(results: Results) -> None:
    workers = results("without record")
    assert {(t.step, t.outcome, t.equal) for (t,) in workers.values()} == {
        (STEPS[0], "Restored", True)
    }
    assert (
        workers[0, 1][0].bytes_read == 0 < workers[1, 0][0].bytes_read < workers[1, 1][0].bytes_read
    )


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_two_checkpoints_of_a_step_are_not_mixed(
    results: Results, sound: tuple[Path, int], stray: Path, replicas: int
) -> None:
    """Below a mount that is missing on one node lies what was there before."""
    workers = results(f"stray {replicas}")
    for first, second in workers.values():
        assert (first.outcome, first.untouched) == ("Unreadable", True)
        assert (second.step, second.outcome, second.equal) == (STEPS[1], "Restored", True)
    right, other = (
        load_manifest(open_store(root), Keys(), STEPS[0]).sha256 for root in (sound[0], stray)
    )
    told = {place: first.sha256 for place, (first, _) in workers.items() if first.sha256}
    assert told.pop((0, 1)) == other
    assert set(told.values()) == {right} and len(told) == max(1, replicas - 1), "its peers"


def test_who_is_called_away_reads_nothing(sound: tuple[Path, int]) -> None:
    store, asked = open_store(sound[0]), []
    manifest = load_manifest(store, Keys(), STEPS[0])

    class Asked:
        def get_range(self, key: str, start: int, length: int) -> bytes:
            asked.append(key)
            return store.get_range(key, start, length)

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=server.port, timeout_s=60)
    mesh = make_replica_group(meet, "replica", rank=0, dims=ParallelDims(), device="cpu")
    train = TrainConfig(task=task(), steps=30, global_batch=1)
    slot = Slot(replica=0, rank=0, dims=ParallelDims())
    engine = Engine(task(), train, slot=slot, mesh=mesh, device="cpu", max_replicas=1)
    cross = CrossGroup(
        meet,
        "cross",
        lanes=[(0,)],
        total_lanes=1,
        rank=0,
        device="cpu",
        leave_now=lambda: True,
    )
    saved = Reader(Asked(), manifest), manifest.training_state
    try:
        assert read_together(engine, cross, lambda: saved) is None
        assert not asked
    finally:
        leave_replica_group()


def test_a_death_while_it_is_shared_leaves_no_trace_and_the_rest_begin_again(
    results: Results,
) -> None:
    workers = results("killed")
    assert set(workers) == {(r, s) for r in range(3) for s in range(SHARD)} - {(1, 0)}
    (peer,) = workers.pop((1, 1))
    assert peer.outcome == "RuntimeError" and peer.untouched, "its own replica is broken"
    for first, second in workers.values():
        assert (first.outcome, first.untouched) == ("NoneType", True)
        assert (second.step, second.outcome, second.equal) == (STEPS[0], "Restored", True)
    assert {second.position for _, second in workers.values()} == {0, 1}
