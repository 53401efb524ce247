"""A run with an optimizer and a schedule of its own goes through a heal and a restore with the same
bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointing import CheckpointConfig, Keys, newest, open_store
from tests.support.lion import InverseRoot, Lion
from tests.support.tiny import Outcome, fit, tiny_trainer
from tests.support.watching import check_replicas_equal

STEPS, SAVE, KILL = 40, 10, 25
LION = Lion(schedule=InverseRoot(lr=3e-3), weight_decay=0.1, clip_norm=0.5)


@pytest.fixture(scope="module")
def whole(cluster: None, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    storage = tmp_path_factory.mktemp("whole")
    return fit(tiny_trainer(text, storage, shard=2, optimizer=LION, steps=STEPS))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("faults", "restored"),
    [(f"kill@{KILL}:1", False), (f"kill@{KILL}:0+2", True)],
    ids=["healed", "restored"],
)
def test_kills_change_no_bit(
    whole: Outcome, text: Path, tmp_path: Path, faults: str, restored: bool
) -> None:
    """Of one replica, which heals; of the same shard of both, so that nobody has it any more."""
    broken = fit(
        tiny_trainer(
            text,
            tmp_path,
            shard=2,
            optimizer=LION,
            steps=STEPS,
            min_replicas=2,
            spares=2,
            faults=faults,
            checkpoint=CheckpointConfig(every_steps=SAVE),
        )
    )
    assert broken.report["faults_fired"] == len(faults.split("+"))
    lost = broken.report["lost_steps"]
    assert 0 < lost < KILL if restored else lost == 0
    check_replicas_equal(broken.report, tmp_path / "run")
    assert (broken.samples, broken.losses) == (whole.samples, whole.losses)
    assert broken.params == whole.params
    manifest = newest(open_store(tmp_path / "run" / "checkpoints"), Keys())
    assert manifest is not None
    assert {name.split("/")[0] for name in manifest.tensors} == {"param", "momentum"}
    assert manifest.training_state["optimizer"]["schedule"] == {"lr": 3e-3}
