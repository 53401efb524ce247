"""A GPU that is too old for what is asked is refused when its worker builds the model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from elastic import Float8
from tests.support.small_llama import small_train
from trainer.dryrun.shape import prepare_shape
from trainer.engine.build import build_model
from trainer.errors import ConfigError

FLOAT8: dict[str, Any] = {"converters": (Float8(),)}
BFLOAT16: dict[str, Any] = {"precision": "bfloat16"}


def refused(fact: str) -> AbstractContextManager[Any]:
    return pytest.raises(ConfigError, match=f"A GPU has compute capability {fact}")


@pytest.mark.parametrize(
    ("capability", "asked", "outcome"),
    [
        ((7, 5), {}, nullcontext()),
        ((7, 5), BFLOAT16, refused(r"7\.5, and bfloat16 needs 8\.0 or more")),
        ((8, 0), BFLOAT16, nullcontext()),
        ((8, 0), FLOAT8, refused(r"8\.0, and an 8-bit product needs 8\.9 or more")),
        ((8, 9), FLOAT8, nullcontext()),
        ((9, 0), {**FLOAT8, **BFLOAT16}, nullcontext()),
    ],
)
def test_a_gpu_that_is_too_old_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    asked: dict[str, Any],
    outcome: AbstractContextManager[Any],
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    train = small_train(**asked)
    with outcome:
        build_model(prepare_shape(train), train, torch.device("cuda"))
