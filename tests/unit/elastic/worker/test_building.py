"""A worker that makes its part of a new replica."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic.worker import worker as module
from elastic.worker.worker import Worker
from tests.support.member import small_task
from trainer.tasks.causal_lm import PreparedCausalLM
from trainer.tasks.task import PreparedTask

TEXT = PreparedCausalLM(config={}, seq_len=8, train_path="", eval_path="", pretrained=None, info={})


@pytest.mark.parametrize(
    ("task", "compiled", "kept", "expected"),
    [
        (TEXT, "on", "none", ["settled", "compile", "ahead"]),
        (TEXT, "on", "all", ["settled"]),
        (TEXT, "off", "none", ["settled"]),
        (small_task(), "on", "none", ["settled"]),
    ],
    ids=["text", "with state", "not compiled", "custom"],
)
def test_a_custom_loss_is_not_computed_with_weights_that_are_0(
    monkeypatch: pytest.MonkeyPatch,
    task: PreparedTask,
    compiled: str,
    kept: str,
    expected: list[str],
) -> None:
    """It may divide by their norm. What raises in a build ends the worker; in a rehearsal it is a
    warning."""
    did = list[str]()

    def compile_ahead(engine: Any, lanes: int) -> None:
        assert (engine, lanes) == ("engine", 2)
        did.append("ahead")

    monkeypatch.setattr(module, "compile_ahead", compile_ahead)
    worker: Any = SimpleNamespace(
        job=SimpleNamespace(train=SimpleNamespace(compile=compiled), task=task, lanes=2),
        engine=None,
        link=SimpleNamespace(
            at_step=lambda step, phase: did.extend(["compile"] * (phase == "compile")),
            leave_now=lambda: False,
        ),
        drop=lambda: None,
        close_beside=lambda: None,
        make_engine=lambda *_: "engine",
        settle_in=lambda *_: did.append("settled"),
    )
    answer: Any = SimpleNamespace(keep=False, kept=kept, step=3)
    Worker.build(worker, answer)
    assert did == expected
