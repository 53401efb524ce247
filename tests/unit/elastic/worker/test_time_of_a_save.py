"""How long a save took is measured on a clock that nobody sets."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointing import CheckpointConfig
from checkpointing.write.incremental import Written
from elastic.worker import saver
from elastic.worker.save_schedule import SaveSchedule
from elastic.worker.saver import Saver
from trainer.engine.host_copy import Share


def test_a_clock_that_is_set_forward_during_an_upload_puts_off_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the next one would come after as long as the clock was set."""
    wall = [1000.0]
    clocks = SimpleNamespace(time=lambda: wall[0], monotonic=time.monotonic)
    monkeypatch.setattr(saver, "time", clocks)
    config = CheckpointConfig(
        every_steps="auto", auto_least_s=20.0, auto_most_s=3600.0, auto_mtbf_s=50.0
    )
    nothing: Any = None
    job: Any = SimpleNamespace(
        checkpoint=config,
        coordinator=SimpleNamespace(call=lambda method: None),
        paths=SimpleNamespace(root=SimpleNamespace(name="run")),
        identity=SimpleNamespace(id="1"),
        train=SimpleNamespace(parallel=SimpleNamespace(workers=1)),
        attempt=0,
    )
    state = SimpleNamespace(
        share=lambda *_: Share([]), copy_to=lambda buffer, share: buffer.copy(share)
    )
    engine: Any = SimpleNamespace(state=state, device=torch.device("cpu"), rank=0)
    outbox: Any = SimpleNamespace(flush=lambda: None)
    identity: Any = SimpleNamespace(pid=1, node="n")
    schedule = SaveSchedule(config)
    saves: Any = Saver(job, identity, outbox, schedule, lambda: False)
    run: Any = SimpleNamespace(position=0, savers=1, generation=1)

    def upload(what: object) -> Written:
        wall[0] += 3600.0
        return Written(receipt=nothing, parts={})

    saves._upload = upload
    saves.save(run, 3, engine, {}, ["store"])
    assert saves.wait() and wall == [4600.0] and saves.hand_in_again is not None
    assert schedule.interval_s() == 20.0
