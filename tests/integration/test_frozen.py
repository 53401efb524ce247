"""Frozen parameters: they stay as they are, and checkpoints hold them once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpointing import (
    CheckpointConfig,
    Keys,
    Manifest,
    Reader,
    Store,
    list_steps,
    load_manifest,
    open_store,
    run_of,
    verify_checkpoint,
)
from elastic import HealthConfig
from tests.support.data_plane import full_parameters, run_layout
from tests.support.frozen_model import FROZEN, TRAINED, frozen_train, initial
from tests.support.tiny import tiny_trainer

KEYS, SAVE, STEPS = Keys(), 3, 6
PATIENT = HealthConfig(freeze_timeout_s=120.0, node_timeout_s=60.0, compare_every=None)
"""Nothing is lost here, however busy the machine is; and no checkpoint stays because nothing newer
has been compared yet."""


def undisturbed(steps: int, *, shard: int = 1) -> dict[str, torch.Tensor]:
    """The parameters after a run of one replica without a cluster."""
    train = frozen_train(steps, shard=shard)
    workers = run_layout(train.task.prepare(train, ""), train, replicas=1, lanes=2)
    assert not [worker for worker in workers if isinstance(worker, Exception)], workers
    return full_parameters(workers)


def test_the_frozen_layers_stay_and_the_others_learn() -> None:
    before, after = initial(), undisturbed(3, shard=2)
    assert set(after) == {*FROZEN, *TRAINED}
    assert all(torch.equal(after[name], before[name]) for name in FROZEN)
    assert not any(torch.equal(after[name], before[name]) for name in TRAINED)


def segments_of(manifest: Manifest, names: tuple[str, ...]) -> set[str]:
    return {p.segment for n in names for p in manifest.parts_of(f"param/{n}")}


def assert_holds(store: Store, manifest: Manifest, expected: dict[str, torch.Tensor]) -> None:
    assert verify_checkpoint(store, KEYS, manifest.step, threads=1).findings == ()
    reader = Reader(store, manifest)
    for name, value in expected.items():
        assert torch.equal(reader.read_full(f"param/{name}"), value)


def fit(text: Path, storage: Path, steps: int) -> None:
    """A run that does not come to its last save before its first one is committed."""
    keep_one = CheckpointConfig(every_steps=SAVE, keep_last=1)
    first = storage / "run" / "checkpoints" / KEYS.commit(SAVE)
    train = frozen_train(steps, gate=first, late=SAVE + 1)
    tiny_trainer(text, storage, train=train, checkpoint=keep_one, health=PATIENT, wait_s=300).fit()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_their_bytes_are_written_once(cluster: None, text: Path, tmp_path: Path) -> None:
    fit(text, tmp_path, STEPS)
    store = open_store(tmp_path / "run" / "checkpoints")
    assert list_steps(store, KEYS) == [STEPS]
    manifest = load_manifest(store, KEYS, STEPS)
    frozen = segments_of(manifest, FROZEN)
    assert {KEYS.step_of(key) for key in frozen} == {SAVE}, "as the first save wrote them"
    assert {KEYS.step_of(key) for key in segments_of(manifest, TRAINED)} == {STEPS}
    kept = store.list("d/")
    assert {key for key in kept if KEYS.step_of(key) != STEPS} == frozen
    frozen_bytes = sum(store.size(key) for key in frozen)
    assert 4096 * 9 * 4 < frozen_bytes < 4096 * 9 * 4 + 2000
    assert not [name for name in manifest.tensors if name in ("exp_avg/0.weight", "exp_avg/0.bias")]
    assert_holds(store, manifest, undisturbed(STEPS))

    run = run_of(manifest)
    fit(text, tmp_path, STEPS + 2)
    assert list_steps(store, KEYS) == [STEPS + 2]
    manifest = load_manifest(store, KEYS, STEPS + 2)
    assert run_of(manifest) == run is not None
    assert_holds(store, manifest, {name: initial()[name] for name in FROZEN})
    assert {KEYS.step_of(key) for key in store.list("d/")} == {STEPS + 2}, "nobody knew the others"
