"""The trainer's features with each other through kills: the bits of one replica that nothing
happened to, without all that is promised to change none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.covering import Case
from tests.support.matrix import FEATURES, bare, cases, layout_of, train_of
from tests.support.tiny import fit, tiny_trainer, write_text
from tests.support.watching import check_replicas_equal

MANY: Case = {
    "strategy": "SHARD_GRAD_OP",
    "tensor": "1",
    "context": "2",
    "recompute": "every second",
    "offload": "horizon 1",
    "texts": "apart",
    "precision": "8 bits gathered",
    "state": "bfloat16",
    "head": "in chunks",
    "gather ahead": "2",
}
"""As much at once as replicas of two workers can have. On two quiet cores it takes 145 s, and
beside the unit tests more than 300."""


STRATEGIES = [name for name in FEATURES["strategy"] if name != "FULL_SHARD"]
"""In two replicas full sharding is HYBRID_SHARD."""

OTHERS = cases(1, only={"strategy": STRATEGIES}, replicas=2)
"""Every value once."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(MANY, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        *(
            pytest.param(case, id=f"every value {index}", marks=pytest.mark.soak)
            for index, case in enumerate(OTHERS)
        ),
    ],
)
def test_kills_do_not_change_a_bit(cluster: None, tmp_path: Path, case: Case) -> None:
    """A worker of the second replica in forward, one of the first in backward, and one in the
    reduction: the others of its replica follow, and a spare heals."""
    text = write_text(tmp_path / "text", documents=300, words=6)
    train, size = train_of(case, text, steps=12), layout_of(case)[0].workers
    whole = fit(tiny_trainer(text, tmp_path, name="whole", train=bare(train), replicas=1))
    broken = fit(
        tiny_trainer(
            text,
            tmp_path,
            name="broken",
            train=train,
            min_replicas=2,
            spares=1,
            faults=f"kill@3.forward:{size},kill@6.backward:{size - 1},kill@9.reduce:{size}",
        )
    )
    assert broken.report["faults_fired"] == 3
    assert broken.report["lost_steps"] == 0
    check_replicas_equal(broken.report, tmp_path / "broken")
    assert (broken.params, broken.samples) == (whole.params, whole.samples)
    assert broken.losses == whole.losses
