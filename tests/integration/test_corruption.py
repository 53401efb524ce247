"""A bit that flips in one replica's weights is found by a comparison, its worker is named, and the
run ends with the bits of one in which none did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpointing import CheckpointConfig
from elastic import HealthConfig
from elastic.protocol.events import (
    CheckpointCommitted,
    FaultFired,
    ReplicaHealed,
    ReplicasCompared,
    WentBack,
    WorkerLost,
)
from elastic.reporting.event_log import read_events
from tests.support.tiny import Outcome, fit, tiny_trainer

STEPS, EVERY, SAVES = 60, 6, 4
SLOW, SOAK = pytest.mark.slow, pytest.mark.soak
SIZES: dict[str, Any] = {"lanes": 3, "global_batch": 12, "steps": STEPS}


@pytest.fixture(scope="module")
def whole(cluster: None, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The outcome without a fault, of one replica."""
    return fit(tiny_trainer(text, tmp_path_factory.mktemp("whole"), replicas=1, **SIZES))


@pytest.mark.parametrize(
    ("replicas", "fault", "found_at"),
    [
        # In the gradients of steps 8 to 11, on all replicas.
        pytest.param(3, "flip@8.forward:1", 12, marks=SOAK),
        # No majority: step 8 comes to other gradients, done again.
        pytest.param(2, "flip@8.forward:0", 12, marks=SLOW),
        # In no gradient: the comparison shows it.
        pytest.param(2, f"flip@{STEPS - 1}.optimizer:1", STEPS, marks=SLOW),
    ],
)
def test_a_flipped_bit_is_found_named_and_healed(
    whole: Outcome,
    text: Path,
    tmp_path: Path,
    replicas: int,
    fault: str,
    found_at: int,
) -> None:
    broken = fit(
        tiny_trainer(
            text,
            tmp_path,
            replicas=replicas,
            spares=1,
            health=HealthConfig(compare_every=EVERY),
            checkpoint=CheckpointConfig(every_steps=SAVES),
            faults=fault,
            **SIZES,
        )
    )
    happened = read_events(tmp_path / "run" / "events.jsonl")
    culprit = fault[-1]
    (fired,) = [e for e in happened if isinstance(e, FaultFired)]
    (lost,) = [e for e in happened if isinstance(e, WorkerLost) and e.cause == "corruption"]
    assert lost.slot == f"replica {culprit} shard 0 tensor 0"
    assert lost.worker == fired.worker
    compared = [e for e in happened if isinstance(e, ReplicasCompared)]
    assert [e.step for e in compared if not e.equal] == [found_at]
    (back,) = [e for e in happened if isinstance(e, WentBack)]
    earlier = happened[: happened.index(back)]
    saved = [e.step for e in earlier if isinstance(e, CheckpointCommitted)]
    sound = [step for step in saved if step < found_at - EVERY]
    assert back.step == max(sound, default=0)
    assert found_at == STEPS or any(isinstance(e, ReplicaHealed) for e in happened)
    assert (broken.params, broken.samples) == (whole.params, whole.samples)
    assert broken.losses == whole.losses


@SOAK
def test_a_bit_that_flips_in_one_shard_is_undone_though_the_others_are_equal(
    cluster: None, text: Path, tmp_path: Path
) -> None:
    """The checkpoint of step 20 holds it. Slot 1 is shard 1 of the first replica, whose lead has
    shard 0 and finds it equal. Ten steps lie between two checkpoints: with fewer a busy machine is
    still writing one when the next is due, and skips that."""
    sizes: dict[str, Any] = {**SIZES, "steps": 30, "shard": 2, "lanes": 2, "global_batch": 8}
    sizes["wait_s"] = 240.0  # the first run's workers may still be ending
    whole = fit(tiny_trainer(text, tmp_path, name="whole", replicas=1, **sizes))
    broken = fit(
        tiny_trainer(
            text,
            tmp_path,
            replicas=2,
            health=HealthConfig(compare_every=12),
            checkpoint=CheckpointConfig(every_steps=10),
            faults="flip@15.forward:1",
            **sizes,
        )
    )
    happened = read_events(tmp_path / "run" / "events.jsonl")
    (back,) = [e for e in happened if isinstance(e, WentBack)]
    earlier = happened[: happened.index(back)]
    assert 20 in [e.step for e in earlier if isinstance(e, CheckpointCommitted)]
    assert back.step == 10
    lost = [e.slot for e in happened if isinstance(e, WorkerLost) and e.cause == "corruption"]
    assert lost and all(slot and slot.startswith("replica 0") for slot in lost)
    assert (broken.params, broken.losses) == (whole.params, whole.losses)


@pytest.mark.parametrize("replicas", [pytest.param(2, marks=SLOW), pytest.param(3, marks=SOAK)])
def test_a_gradient_that_is_wrong_before_the_sum_does_not_count(
    whole: Outcome, text: Path, tmp_path: Path, replicas: int
) -> None:
    """Slot 1's first lane in step 9 is the one that is drawn, or its own."""
    broken = fit(
        tiny_trainer(
            text,
            tmp_path,
            replicas=replicas,
            spares=1,
            health=HealthConfig(witness_every=5),
            faults="glitch@9.forward:1",
            **SIZES,
        )
    )
    happened = read_events(tmp_path / "run" / "events.jsonl")
    (fired,) = [e for e in happened if isinstance(e, FaultFired)]
    (lost,) = [e for e in happened if isinstance(e, WorkerLost) and e.cause == "corruption"]
    assert fired.step == 9 and lost.worker == fired.worker
    assert "in step 9" in lost.detail
    assert not [e for e in happened if isinstance(e, WentBack)], "nothing of it was applied"
    assert any(isinstance(e, ReplicaHealed) for e in happened)
    assert (broken.params, broken.samples) == (whole.params, whole.samples)
    assert broken.losses == whole.losses
