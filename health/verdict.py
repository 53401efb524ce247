"""The words of a diagnosis: signs, which are what was seen, and verdicts, which are what follows.

Signs come from everywhere: a process that ended, a lease that ran out, a line in a log, a reading
of a GPU. `diagnosis.py` makes verdicts of them, and `ladder.py` says what to do.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

Role = Literal["root", "cascade", "confirmation"]
"""Of a sign: the fault itself; what a fault elsewhere brings about; what strengthens others."""

Source = Literal["loss", "log", "reading"]
"""Who says it: the run, which has lost a worker; a line of text; an instrument. Two sources that
agree are worth more than one that says it twice."""

Subject = Literal["worker", "gpu", "link", "node", "storage"]
"""What a sign speaks about."""

Confidence = Literal["weak", "likely", "certain"]
"""Of a verdict. Nothing is done for a weak one."""

Step = Literal["retry", "new_process", "other_seat", "reset_gpu", "reboot", "replace_node", "stop"]
"""What may be done, from the least to the most (`ladder.py`). `retry`: the same processes go on."""

STEPS: tuple[Step, ...] = get_args(Step)


@dataclass(frozen=True, kw_only=True)
class Sign:
    """One thing that was seen."""

    name: str
    """What it is, such as "xid_79" or "remap_failed"."""
    source: Source
    """Who says it."""
    role: Role
    """Its part in the story."""
    cause: str
    """The cause that it speaks for, as in the table of causes; "" where it speaks for none."""
    subject: Subject
    """What it speaks about."""
    detail: str
    """The evidence: the line, or the numbers."""
    of: str = ""
    """Which one of these: a GPU's bus address (`reading.UNREACHED` with its number where that
    is not known), a device; "" where there is but one."""
    worker: str | None = None
    """The worker that it blames, where it is about one."""
    node: str | None = None
    """The node that it blames or was seen on; None where that is not known."""
    peer: str | None = None
    """What it calls the other machine that it blames, in place of the one where it was seen."""
    at_s: float = 0.0
    """When it was seen, in seconds since the epoch."""
    decisive: bool = False
    """It is enough by itself."""
    repeated: bool = False
    """It was seen more than once within its window."""
    remedy: Step | None = None
    """The least that helps, where the sign itself says so."""

    def to_json(self) -> dict[str, Any]:
        """The sign as a plain JSON object, without what it leaves at its default."""
        defaults = {f.name: f.default for f in fields(self)}
        return {k: v for k, v in asdict(self).items() if v != defaults[k]}


_KINDS = get_type_hints(Sign)
"""Field of a sign -> its type."""


def sign_from_json(data: dict[str, Any]) -> Sign | None:
    """The sign that `data` describes; None where another version has written what this one cannot
    read: fields are missing, or hold what it does not know."""
    known = {name: value for name, value in data.items() if name in _KINDS}
    if not all(_fits(value, _KINDS[name]) for name, value in known.items()):
        return None
    try:
        return Sign(**known)
    except TypeError:
        return None


def _fits(value: object, kind: Any) -> bool:
    """Whether a value of JSON is of a field's type."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return value in parts
    if parts:
        return any(_fits(value, part) for part in parts)
    return isinstance(value, int | float if kind is float else kind)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is wrong, and with whom."""

    cause: str
    """Name of a cause, as in the table of causes."""
    workers: tuple[str, ...] = ()
    """The workers at fault; of a group of which it cannot be told, all."""
    nodes: tuple[str, ...] = ()
    """The machines at fault, where it is them."""
    links: tuple[str, ...] = ()
    """The connections or devices of these that are."""
    evidence: tuple[str, ...]
    """What shows it, in words, the strongest first."""
    confidence: Confidence
    """How sure that is."""
    signs: tuple[str, ...] = ()
    """Names of the signs that it rests on."""
    remedy: Step | None = None
    """The least that helps, where the evidence says so."""

    @property
    def fingerprint(self) -> str:
        """Tells a fault from others, wherever it comes up again: on another machine, too."""
        return ":".join((self.cause, *sorted(set(self.signs))))
