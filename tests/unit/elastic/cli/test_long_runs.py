"""A run of months and of thousands of workers has a million events. A command about it parses those
that it needs: of the others none here would come out of the parser."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path

import pytest

from elastic.cli.main import main
from elastic.protocol import events
from elastic.protocol.causes import CRASH
from elastic.protocol.run_paths import RunPaths
from health.verdict import Sign

OTHERS = [
    f'{{"kind": "{kind.kind}", "seconds": ' + "[" * 200_000
    for kind in (events.StepsTimed, events.SnapshotTaken)
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that goes on, with a disk that speaks of errors on one node, and one step."""
    now = time.time()
    sign = Sign(
        name="gpu_lost", source="reading", role="root", cause="gpu_error", subject="gpu",
        detail="it is away", node="n1", decisive=True,
    )  # fmt: skip
    happened: list[events.Event] = [
        events.RunStarted(
            time=now, name="r", layout={}, steps=50, start_step=0, versions={},
            store=f"file://{tmp_path}/elsewhere",
        ),
        *(
            events.WorkerJoined(time=now, worker=f"w{n}", node=f"n{n}", pid=1, born_ticks=1)
            for n in range(2)
        ),
        events.SignsChanged(time=now, node="n1", names=["machine-1"], signs=[sign.to_json()]),
        events.WorkerLost(
            time=now, worker="w0", node="n0", pid=1, slot=None, cause=CRASH, detail="gone"
        ),
    ]  # fmt: skip
    paths = RunPaths(root=tmp_path / "run")
    paths.root.mkdir()
    lines = [line for one in happened for line in (*OTHERS, json.dumps(one.to_json()))]
    paths.events.write_text("\n".join([*lines, *OTHERS]) + "\n")
    step = events.StepRecord(
        step=6, loss=1.0, grad_norm=1.0, lr=0.1, tokens=8, time=now, generation=1, replicas=2,
        sample_digests=[],
    )  # fmt: skip
    paths.steps.write_text(json.dumps(step.to_json()) + "\n")
    return paths.root


@pytest.mark.parametrize(
    ("command", "status", "told"),
    [
        (["watch", "--once"], 0, r"r\w*: it has not told of itself yet"),
        (["checkpoints", "list"], 2, r"nor in file://\S+/elsewhere, where they go by its records"),
        (["logs", "--worker", "w2"], 2, r"it names w0, w1"),
        (["nodes", "export"], 0, r'(?s)"step": "7".*"nodeName": "machine-1"'),
    ],
    ids=lambda one: "_".join(one) if isinstance(one, list) else "",
)
def test_a_command_parses_what_it_needs(
    command: list[str],
    status: int,
    told: str,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert main([*command, str(run)]) == status
    said = capsys.readouterr()
    assert re.search(told, said.out + said.err)
    assert not caplog.messages
