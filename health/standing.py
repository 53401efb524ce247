"""Which signs stand: those seen now, and for a while those seen before. Pure.

A sign that comes and goes is told once, not each time. A line in a log is seen once, and stands for
as long as it may still explain something.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from health.judgement import WINDOW_S
from health.verdict import Sign

_HOLD_S = 60.0
"""How long a reading's sign stands after it was seen last."""

MOST = 50
"""Signs of one role and one cause that stand at once; the first ones count: what comes after is
mostly their echo. So a storm of the network's hides no GPU. What is decisive always counts."""


@dataclass
class _Held:
    sign: Sign
    until_s: float


class Standing:
    """What stands on a node."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str, str, str | None, str | None], _Held] = {}

    @property
    def signs(self) -> list[Sign]:
        """All of them."""
        return [held.sign for held in self._held.values()]

    def take(self, signs: Iterable[Sign], now_s: float) -> bool:
        """Takes in what is seen at `now_s` of the monotonic clock. Returns whether what stands has
        changed: a time or a number in the words of a sign is no change."""
        before = self._told()
        for key in [key for key, held in self._held.items() if held.until_s <= now_s]:
            del self._held[key]
        for sign in signs:
            self._take(sign, now_s)
        return self._told() != before

    def _take(self, sign: Sign, now_s: float) -> None:
        key = (sign.name, sign.source, sign.of, sign.worker, sign.peer)
        held = self._held.get(key)
        if held is None and not sign.decisive and self._alike(sign) >= MOST:
            return
        if held is not None and sign.source == "log":
            sign = replace(sign, repeated=True)
        stays_s = WINDOW_S if sign.source == "log" else _HOLD_S
        self._held[key] = _Held(sign=sign, until_s=now_s + stays_s)

    def _alike(self, sign: Sign) -> int:
        alike = (sign.role, sign.cause)
        return sum((held.sign.role, held.sign.cause) == alike for held in self._held.values())

    def _told(self) -> set[tuple[object, ...]]:
        return {
            (*key, held.sign.decisive, held.sign.repeated, held.sign.remedy)
            for key, held in self._held.items()
        }
