"""Faults that a run injects into itself, to show and to test recovery."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Fault:
    """SIGKILL of one worker in the middle of one step. It fires once, whoever holds the slot
    then."""

    step: int
    """The step, 0-based, in whose backward pass the worker dies."""
    worker: int | None = None
    """Number of the slot, replica by replica; None: the last one of the full layout."""

    def __str__(self) -> str:
        return f"kill@{self.step}" + ("" if self.worker is None else f":{self.worker}")

    def slot_number(self, slots: int) -> int:
        """The slot that dies, in a layout of so many `slots`."""
        return slots - 1 if self.worker is None else self.worker


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Reads `none`, or `kill@STEP[:WORKER]` once or several times, separated by commas.

    Raises:
        ConfigError: for anything else.
    """
    if text == "none":
        return ()
    faults = []
    for part in text.split(","):
        match = re.fullmatch(r"kill@(\d+)(?::(\d+))?", part.strip())
        if match is None:
            raise ConfigError(
                "fault", text, f"{part!r} is not understood", "Write none or kill@STEP[:WORKER]"
            )
        worker = None if match[2] is None else int(match[2])
        faults.append(Fault(step=int(match[1]), worker=worker))
    return tuple(faults)


def check_faults(faults: tuple[Fault, ...], *, steps: int, slots: int) -> None:
    """Raises ConfigError for a fault that could never fire in a run of `steps` and `slots`."""
    for fault in faults:
        if not 0 <= fault.step < steps:
            raise ConfigError(
                "fault", str(fault), f"the run has steps 0 to {steps - 1}", "Name one of them"
            )
        if not 0 <= fault.slot_number(slots) < slots:
            raise ConfigError(
                "fault", str(fault), f"the layout has workers 0 to {slots - 1}", "Name one of them"
            )
