"""Compiled blocks that tensor ranks share, and what torch cannot do of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch._functorch.config

from tests.support.small_llama import small_train
from trainer.config import TrainConfig
from trainer.dryrun.rank import dry_run
from trainer.errors import ConfigError
from trainer.parallel.compiled import MESHES_IN_GRAPHS
from trainer.tasks import causal_lm

pytestmark = pytest.mark.skipif(
    not hasattr(torch._functorch.config, MESHES_IN_GRAPHS),
    reason="this torch writes the mesh of tensor ranks into the graph",
)


def peak_bytes(train: TrainConfig) -> int:
    return dry_run(train, replicas=1, device="cpu").peak_bytes


@pytest.mark.parametrize("recompute", ["full", 2])
def test_blocks_that_are_computed_again_whole_are_refused(
    recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = small_train(tensor=2, compile="require", recompute=recompute)
    with pytest.raises(ConfigError, match="cannot compile blocks that are computed again whole"):
        peak_bytes(train)
    # Where this fails torch has mended it, and the refusal may go.
    monkeypatch.setattr(causal_lm, "check_compiled_tensor", lambda *_: None)
    with pytest.raises(AssertionError, match="to be Tensors"):
        peak_bytes(train)


def test_all_others_are_not() -> None:
    def peak(**changes: Any) -> int:
        return peak_bytes(small_train(tensor=2, global_batch=16, **changes))

    compiled = peak(compile="require")
    assert peak(compile="require", recompute=0.5) < compiled
    assert peak(compile="require", recompute="selective") < compiled
    assert peak(recompute="full") < compiled
