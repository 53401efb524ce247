from __future__ import annotations

import json
from pathlib import Path

import pytest

import health
from health.verdict import STEPS
from health.xids import known_xids


@pytest.mark.parametrize(
    ("number", "action", "remedy", "role"),
    [
        (13, "RESTART_APP", "new_process", "confirmation"),
        (43, "IGNORE", None, None),
        (45, "WORKFLOW_XID_45", None, "cascade"),
        (63, "IGNORE", None, "confirmation"),  # NVIDIA ignores it; Amazon takes it for fatal
        (64, "RESET_GPU", "reset_gpu", "root"),
        (79, "RESTART_BM", "reboot", "root"),
        (142, "UNKNOWN", None, "confirmation"),  # Amazon alone has it
        (149, "WORKFLOW_NVLINK5_ERR", "reset_gpu", "root"),
    ],
)
def test_what_an_xid_asks_for(
    number: int, action: str, remedy: str | None, role: str | None
) -> None:
    xid = known_xids()[number]
    assert (xid.action, xid.remedy, xid.role) == (action, remedy, role)


def test_every_number_has_one_action_and_every_action_a_step_or_none() -> None:
    table = json.loads((Path(health.__file__).parent / "xids.json").read_text())
    numbers = [number for xids in table["xids"].values() for number in xids]
    assert len(numbers) == len(set(numbers)) > 100
    assert table["xids"].keys() <= table["steps"].keys()
    assert {xid.remedy for xid in known_xids().values()} <= {None, *STEPS}
