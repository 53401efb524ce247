"""Faults that a run injects into itself, to show and to test recovery.

A fault is placed by step and phase (trainer/loop/phases.py) and hits workers by the number of their
slot. In words: `KIND@STEP[.PHASE][:WORKER[+WORKER...]]` or `KIND@STEP:spare`, several with commas.

    kill@60                  the last slot is killed in the backward pass of step 60, or, where a
                             recovery is going on then, of the first step after it
    freeze@6.in_commit:1     slot 1 is stopped in the middle of the commit of step 6
    kill@6.reduce:0+1        slots 0 and 1 are killed at once
    kill@6:1,raise@6.heal_source:0    the second one hits the recovery from the first
    kill@6:spare             a worker without a slot is killed once step 6 is committed
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

from trainer.errors import ConfigError
from trainer.loop.phases import PHASES, STEP_PHASES, Phase

if TYPE_CHECKING:
    from trainer.engine.engine import Engine

Kind = Literal["kill", "freeze", "raise", "flip", "glitch", "loop"]
"""SIGKILL; SIGSTOP; an exception; one bit of the worker's weights changed, for the replicas to
find; the same for one micro-batch only, whose gradient is wrong then, and nothing else; an endless
loop."""

HARMLESS: frozenset[Kind] = frozenset({"flip", "glitch"})
"""No worker is lost by it at once."""

SPARE = "spare"

RECOVERY_PHASES: frozenset[Phase] = frozenset({"build", "regroup", "heal_source", "heal_target"})
"""A fault here may hit the recovery from the fault before it."""

_NO_SLOT = -1


class InjectedError(RuntimeError):
    """The exception of a `raise` fault."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to one worker, or to several at once. It fires once for each."""

    kind: Kind = "kill"
    """What happens."""
    step: int
    """The step, 0-based: the one in progress, or, between steps, the number of steps done."""
    phase: Phase = "backward"
    """Where in the step or in the life round it."""
    workers: tuple[int, ...] = ()
    """Numbers of their slots, replica by replica; none: the last one of the full layout."""
    spare: bool = False
    """It hits a worker without a slot instead, when `step` is committed."""

    def __str__(self) -> str:
        phase = "" if self.phase == "backward" else f".{self.phase}"
        targets = SPARE if self.spare else "+".join(map(str, self.workers))
        return f"{self.kind}@{self.step}{phase}" + (f":{targets}" if targets else "")

    def targets(self, slots: int) -> tuple[int, ...]:
        """The slots it hits, in a layout of so many `slots`."""
        return () if self.spare else self.workers or (slots - 1,)

    def due(self, step: int, phase: Phase) -> bool:
        """Whether a worker that enters `phase` of `step` has come to its place, or past it."""
        return phase == self.phase and step >= self.step and not self.spare


_FORM = re.compile(
    rf"(?P<kind>{'|'.join(get_args(Kind))})@(?P<step>\d+)(?:\.(?P<phase>[a-z_]+))?"
    rf"(?::(?P<targets>{SPARE}|\d+(?:\+\d+)*))?"
)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Reads `none`, or faults separated by commas; see the module for their form.

    Raises:
        ConfigError: for anything else.
    """
    if text == "none":
        return ()
    return tuple(_parse(text, part.strip()) for part in text.split(","))


def _parse(text: str, part: str) -> Fault:
    match = _FORM.fullmatch(part)
    if match is None:
        raise ConfigError(
            "fault",
            text,
            f"{part!r} is not understood",
            f"Write none or KIND@STEP[.PHASE][:WORKER[+WORKER] or :spare], with KIND one of "
            f"{', '.join(get_args(Kind))}",
        )
    phase = match["phase"] or "backward"
    if phase not in PHASES:
        takes = ", ".join(phase for phase in PHASES if phase != "wait")
        raise ConfigError("fault", text, f"there is no phase {phase!r}", f"Write one of {takes}")
    targets = match["targets"] or ""
    spare = targets == SPARE
    return Fault(
        kind=cast(Kind, match["kind"]),
        step=int(match["step"]),
        phase=cast(Phase, phase),
        workers=() if spare or not targets else tuple(map(int, targets.split("+"))),
        spare=spare,
    )


def check_faults(faults: Sequence[Fault], *, steps: int, slots: int) -> None:
    """Raises ConfigError for a fault that could never fire in a run of `steps` and `slots`."""
    for fault in faults:
        last = steps - 1 if fault.phase in STEP_PHASES else steps
        if not 0 <= fault.step <= last:
            raise ConfigError(
                "fault", str(fault), f"the run has steps 0 to {steps - 1}", "Name one of them"
            )
        if not all(0 <= slot < slots for slot in fault.targets(slots)):
            raise ConfigError(
                "fault", str(fault), f"the layout has workers 0 to {slots - 1}", "Name one of them"
            )
        if fault.kind == "glitch" and fault.phase != "forward":
            raise ConfigError(
                "fault", str(fault), "a glitch is of one forward and backward", "Use .forward"
            )
        if fault.phase == "wait":
            raise ConfigError(
                "fault", str(fault), "a worker that waits has no slot", "Write kill@STEP:spare"
            )
        if fault.spare and fault.kind not in ("kill", "freeze"):
            raise ConfigError(
                "fault", str(fault), "a spare has no code to disturb", "Use kill or freeze"
            )


def flip_bit(engine: Engine) -> None:
    """Changes one bit of a worker's weights, in a number's mantissa: not the last one, which the
    next update may round away."""
    import torch  # a driver without torch can still read and check faults

    engine.state.await_copy()
    weights = next(t for t in engine.state.tensors().values() if t.numel())
    word, bit = (torch.int32, 12) if weights.itemsize == 4 else (torch.int16, 4)
    weights.view(-1)[:1].view(word).bitwise_xor_(1 << bit)


class FaultPlan:
    """Which injected fault fires when. Pure; the coordinator asks it on the workers' behalf.

    A fault waits for the ones before it in the list that are ordered for the same step, and, in a
    step, for the recovery from whatever fired before: so `kill@6:0,kill@6:1` are two recoveries,
    one after the other, and `kill@6:0+1` is one from a loss of both.

    Args:
        faults: in order; a fault is known by its place in it.
        slots: workers of the full layout.
    """

    def __init__(self, faults: Sequence[Fault], slots: int) -> None:
        self.faults, self._slots = tuple(faults), slots
        self._fired: list[dict[int, int]] = [{} for _ in faults]

    def claim(self, index: int, slot: int, generation: int, *, settled: bool = True) -> bool:
        """Whether fault `index` hits the worker in `slot` now; it then counts as fired there.

        Args:
            index: place of the fault in the list.
            slot: of the worker that asks.
            generation: of the roster.
            settled: whether everybody in it has state and nobody is called away.
        """
        begun = bool(self._fired[index])
        if slot in self._fired[index] or not (begun or self._may_fire(index, generation, settled)):
            return False
        self._fired[index][slot] = generation
        return True

    def fired(self, index: int) -> bool:
        """Whether the fault has hit all its workers."""
        slots = self.faults[index].targets(self._slots) or (_NO_SLOT,)
        return set(slots) <= self._fired[index].keys()

    def count_as_fired(self, names: Sequence[str]) -> None:
        """Counts faults, as they were ordered, as having hit all their workers."""
        for index, fault in enumerate(self.faults):
            if str(fault) in names:
                slots = fault.targets(self._slots) or (_NO_SLOT,)
                self._fired[index].update(dict.fromkeys(slots, _NO_SLOT))

    def claim_for_spares(self, committed: int) -> list[Fault]:
        """Faults for spares that are due with so many steps `committed`; they count as fired."""
        due = [
            index
            for index, fault in enumerate(self.faults)
            if fault.spare and fault.step < committed and not self.fired(index)
        ]
        for index in due:
            self._fired[index][_NO_SLOT] = _NO_SLOT
        return [self.faults[index] for index in due]

    def _may_fire(self, index: int, generation: int, settled: bool) -> bool:
        fault = self.faults[index]
        before = [i for i in range(index) if self.faults[i].step == fault.step]
        if not all(self.fired(i) for i in before):
            return False
        others = {
            hit
            for i, other in enumerate(self.faults)
            if i != index and other.phase in STEP_PHASES and other.kind not in HARMLESS
            for hit in self._fired[i].values()
        }
        recovered = settled and generation not in others
        return fault.phase not in STEP_PHASES or recovered
