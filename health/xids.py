"""NVIDIA's Xid errors: what each one asks for. The table is `xids.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from health.verdict import Role, Step

_FILE = Path(__file__).with_name("xids.json")


@dataclass(frozen=True, kw_only=True)
class Xid:
    """What is known of a number."""

    action: str
    """What NVIDIA's catalogue says to do; "UNKNOWN" where it lacks the number."""
    remedy: Step | None
    """The step that this is; None where it is none."""
    fatal: bool
    """Amazon's agent takes it for fatal."""

    @property
    def role(self) -> Role | None:
        """Its part in the story; None where it has none. 45 follows upon other errors. What a new
        process mends is mostly the program's fault, so it accuses no GPU."""
        if self.action == "WORKFLOW_XID_45":
            return "cascade"
        if self.remedy is None:
            return "confirmation" if self.fatal else None
        return "confirmation" if self.remedy == "new_process" else "root"


@cache
def known_xids() -> dict[int, Xid]:
    """Number -> what is known of it."""
    table = json.loads(_FILE.read_text(encoding="utf-8"))
    actions = {number: action for action, xids in table["xids"].items() for number in xids}
    fatal = set(table["fatal"])
    return {
        number: Xid(
            action=actions.get(number, "UNKNOWN"),
            remedy=table["steps"].get(actions.get(number)),
            fatal=number in fatal,
        )
        for number in actions.keys() | fatal
    }


_RECOVERY_ACTIONS: dict[str, Step | None] = {
    "None": None,
    "GPU Reset Required": "reset_gpu",
    "Node Reboot Required": "reboot",
    "Drain P2P": "other_seat",
    "Drain and Reset": "reset_gpu",
}
"""What the driver asks for, by its number in Xid 154 and in NVML's field `GET_GPU_RECOVERY_ACTION`:
this order. Its names there differ by the driver's release."""


def recovery_of(number: int) -> tuple[str, Step | None]:
    """What the driver asks for, by its number, in words and as a step. Later drivers have more of
    them than the table: whatever it is, a reboot is the most that they ask for so far."""
    known = dict(enumerate(_RECOVERY_ACTIONS.items()))
    return known.get(number, (f"action {number}", "reboot"))
