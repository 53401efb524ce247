"""A line of the kernel in the middle of a run: it is recorded, it stands in the report, and nobody
is lost for it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from health.kernel_log import KMSG
from tests.support.gated_run import gated_trainer
from tests.support.watching import events_of, wait_until

XID = "NVRM: Xid (PCI:0000:05:00): 79, pid=1, GPU has fallen off the bus."


@pytest.mark.slow
@pytest.mark.skipif(not os.access(KMSG, os.R_OK | os.W_OK), reason="may not write to /dev/kmsg")
def test_a_line_of_the_kernel_takes_nobody(cluster: None, tmp_path: Path) -> None:
    root, gate = tmp_path / "gated", tmp_path / "gate"

    def shown() -> list[str]:
        return [s["name"] for e in events_of(root, "signs_changed") for s in e["signs"]]

    def write() -> None:
        try:
            wait_until(lambda: events_of(root, "regroup_done"))
            KMSG.write_text(f"{XID}\n")
            wait_until(lambda: "xid_79" in shown(), 60.0)
        finally:
            gate.touch()

    writer = threading.Thread(target=write)
    writer.start()
    gated_trainer(str(tmp_path), str(gate), 2).fit()
    writer.join()
    assert not events_of(root, "worker_lost")
    (one,) = json.loads((root / "report.json").read_text())["verdicts"]
    assert (one["verdict"]["cause"], one["verdict"]["confidence"]) == ("gpu_error", "weak")
    assert one["verdict"]["evidence"] == [XID] and one["remedy"] is None
