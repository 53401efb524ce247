"""A bit that flips in one replica's weights is found by the comparison, and the worker leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic import HealthConfig
from elastic.protocol.events import ReplicasCompared, WorkerLost
from elastic.reporting.event_log import read_events
from tests.support.tiny import fit, tiny_trainer

STEPS, EVERY = 60, 5


@pytest.mark.slow
def test_a_flipped_bit_is_found_before_it_spreads(
    cluster: None, text: Path, tmp_path: Path
) -> None:
    """It flips between the reduction of a step and the comparison after it: no gradient is computed
    with it, and the run ends with the same bits."""
    sizes: dict[str, Any] = {"lanes": 3, "global_batch": 12, "steps": STEPS}
    whole = fit(tiny_trainer(text, tmp_path, name="whole", replicas=1, **sizes))
    broken = fit(
        tiny_trainer(
            text,
            tmp_path,
            replicas=3,
            spares=1,
            health=HealthConfig(compare_every=EVERY),
            faults=f"flip@{2 * EVERY - 1}.optimizer:1",
            **sizes,
        )
    )
    happened = read_events(tmp_path / "run" / "events.jsonl")
    (lost,) = [e for e in happened if isinstance(e, WorkerLost)]
    assert (lost.cause, lost.slot) == ("corruption", "replica 1 shard 0 tensor 0")
    compared = [e for e in happened if isinstance(e, ReplicasCompared)]
    assert [e.step for e in compared if not e.equal] == [2 * EVERY]
    assert sum(e.equal for e in compared) >= STEPS // EVERY - 1
    assert (broken.params, broken.samples) == (whole.params, whole.samples)
    assert broken.losses == whole.losses
