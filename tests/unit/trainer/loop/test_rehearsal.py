"""A worker's rehearsal: what it leaves to be done, and what it leaves behind. That the node's cache
has it for other processes: tests/integration/test_compile.py."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering

from tests.support.counting_backend import Counting
from tests.support.data_plane import make_engine
from tests.support.quiet_link import QuietLink
from tests.support.tiny import tiny_task, tiny_train
from trainer.backend.groups import leave_replica_group
from trainer.backend.origin import origin_of
from trainer.backend.rendezvous import Rendezvous
from trainer.config import OffloadConfig, ParallelConfig, TrainConfig
from trainer.errors import CompilerFailed, ConfigError, describe
from trainer.float8.config import Float8
from trainer.loop import compile_ahead as module
from trainer.loop.compile_ahead import compile_ahead, rehearse
from trainer.loop.link import LoopConfig, Progress
from trainer.loop.phases import Phase
from trainer.loop.steps import TrainLoop
from trainer.parallel import apply
from trainer.parallel.compiled import compile_blocks
from trainer.replication.replicas import CrossGroup
from trainer.tasks.task import PreparedTask


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    torch._dynamo.reset()
    counting = Counting()
    monkeypatch.setattr(apply, "compile_blocks", partial(compile_blocks, backend=counting))
    yield counting
    torch._dynamo.reset()


def rehearsed(task: PreparedTask, train: TrainConfig) -> None:
    rehearse(task, train, lanes=2, max_replicas=2, device="cpu")
    assert not dist.is_initialized()


@pytest.mark.parametrize("texts", ["joined", "apart"])
def test_the_first_replica_compiles_nothing_more(
    backend: Counting, text: Path, tmp_path: Path, port: int, texts: Any
) -> None:
    """With texts apart attention goes round a ring of one, whose name is in the graph."""
    learned = replace(tiny_task(text), texts=texts)
    train = tiny_train(text, compile="require", task=learned)
    task = train.task.prepare(train, str(tmp_path))
    rehearsed(task, train)
    assert backend.graphs == 1
    engine = make_engine(0, Rendezvous(host="127.0.0.1", port=port, timeout_s=60), task, train)
    compile_ahead(engine, 2)
    del engine
    leave_replica_group()
    assert backend.graphs == 1
    assert backend.calls == 2 * 2  # blocks, by engines


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forward is computed as it is, backward compiled by inductor, which fails as with a full
    disk."""

    def fail(*_: Any) -> None:
        raise OSError("no space left\nand more of it")

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=partial(compile_fx_inner, is_backward=True)
    )
    monkeypatch.setattr(GraphLowering, "run", fail)
    monkeypatch.setattr(apply, "compile_blocks", partial(compile_blocks, backend=backend))
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.usefixtures("broken")
def test_a_compiler_that_fails_in_backward_is_told_as_one(
    text: Path, tmp_path: Path, port: int, caplog: pytest.LogCaptureFixture, last: bool
) -> None:
    """torch compiles backward in its first run: ahead of the first step, or in it."""
    train = tiny_train(text, compile="on", lanes=1)
    task = replace(train.task.prepare(train, str(tmp_path)), compile="off")  # its loss: blocks are
    engine = make_engine(0, Rendezvous(host="127.0.0.1", port=port, timeout_s=60), task, train)
    engine.collect_in(engine.gradient)
    with pytest.raises(CompilerFailed, match=r"backward: OSError: no space left\. If") as failed:
        if last:
            batch = engine.take(task.train_data().batch(np.arange(4)))
            engine.backward_at_last(task.loss(engine.model, batch)[0], lambda _: None)
        else:
            compile_ahead(engine, 1)
    del engine
    leave_replica_group()
    assert origin_of(failed.value) == "compiler" and describe(failed.value) == str(failed.value)
    assert "and more of it" in caplog.text and "Traceback" in caplog.text


@pytest.mark.usefixtures("broken")
def test_a_rehearsal_tells_of_a_compiler_that_fails_in_backward(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = tiny_train(text, compile="on")
    rehearsed(replace(train.task.prepare(train, str(tmp_path)), compile="off"), train)
    assert "joins without: torch's compiler failed on" in caplog.text


@dataclass
class Noting(QuietLink):
    """Notes the phases that the worker enters."""

    phases: list[Phase] = field(default_factory=list)

    def at_step(self, step: int, phase: Phase) -> None:
        """See Link."""
        self.phases.append(phase)


@pytest.mark.parametrize(
    ("ahead", "first"), [(False, ["compile"]), (True, ["forward", "backward"])]
)
@pytest.mark.usefixtures("backend")
def test_a_first_micro_batch_is_in_compile_until_its_backward_ends(
    text: Path, tmp_path: Path, port: int, ahead: bool, first: list[Phase]
) -> None:
    """Backward is compiled in its first run, and no pace of steps bounds that."""
    train = tiny_train(text, compile="require", lanes=1, micro_batch=4, steps=1, eval_samples=0)
    task = train.task.prepare(train, str(tmp_path))
    meet, link = Rendezvous(host="127.0.0.1", port=port, timeout_s=60), Noting()
    engine = make_engine(0, meet, task, train)
    if ahead:
        compile_ahead(engine, 1)
        engine.initialize()
    cross = CrossGroup(
        meet,
        "cross",
        lanes=[(0,)],
        total_lanes=1,
        rank=0,
        device="cpu",
        leave_now=lambda: False,
    )
    loop = TrainLoop(
        engine,
        cross,
        engine.make_sums(1, 1),
        lanes=(0,),
        progress=Progress(),
        config=LoopConfig(
            lanes=1, save_every=None, compare_every=None, max_nonfinite_steps=1, until=1
        ),
        link=link,
    )
    assert loop.try_step() is not None
    assert link.phases[: link.phases.index("reduce")] == [
        "data",
        *first,
        "data",
        "forward",
        "backward",
    ]
    cross.close()
    assert loop.loader is not None
    loop.loader.close()
    loop.clock.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": ParallelConfig(shard=4, workers_per_node=2), "global_batch": 8},
        {"parallel": ParallelConfig(shard=2, tensor=2)},
        {"parallel": ParallelConfig(context=2)},
        {"parallel": ParallelConfig(shard=2), "converters": (Float8(gather=True),)},
        {"offload": OffloadConfig(horizon=1), "recompute": "full"},
    ],
    ids=["two levels", "tensor", "context", "float8", "offload"],
)
def test_every_layout_can_be_rehearsed_alone(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    train = tiny_train(text, **changes)
    with caplog.at_level(logging.WARNING):
        rehearsed(train.task.prepare(train, str(tmp_path)), train)
    assert "rehearsal" not in caplog.text


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_what_fails_in_it_is_told_and_leaves_nothing_behind(
    text: Path,
    tmp_path: Path,
    port: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    train = tiny_train(text)
    task = train.task.prepare(train, str(tmp_path))

    def fail(*_: Any) -> None:
        raise error("no space left")

    monkeypatch.setattr(module, "compile_ahead", fail)
    rehearsed(task, train)
    assert "rehearsal has failed" in caplog.text and "no space left" in caplog.text
    make_engine(0, Rendezvous(host="127.0.0.1", port=port, timeout_s=60), task, train)
    leave_replica_group()


def test_a_device_that_has_failed_for_good_is_no_failed_rehearsal(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes next on it would fail as well, and nobody would say for what."""
    train = tiny_train(text)
    task = train.task.prepare(train, str(tmp_path))
    lasting = torch.AcceleratorError("an illegal memory access")

    def fail(*_: Any) -> None:
        raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")

    monkeypatch.setattr(module, "compile_ahead", fail)
    monkeypatch.setattr(module, "lasting_device_error", lambda: lasting)
    with pytest.raises(torch.AcceleratorError) as raised:
        rehearsed(task, train)
    assert raised.value is lasting and "CUBLAS" in str(raised.value.__cause__)
    assert not dist.is_initialized()


def test_settings_that_cannot_work_are_told_without_a_traceback(
    text: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first build meets them, and the next one says them to the run."""
    train = tiny_train(text)
    task = train.task.prepare(train, str(tmp_path))

    def refuse(*_: Any) -> None:
        raise ConfigError("train.precision", "bfloat16", "this GPU is too old", "Use 'float32'")

    monkeypatch.setattr(module, "compile_ahead", refuse)
    rehearsed(task, train)
    assert "this GPU is too old. Use 'float32'." in caplog.text
    assert "Traceback" not in caplog.text
