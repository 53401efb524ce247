"""What the kernel says of its clock. Asks no time server.

Source: adjtimex(2); linux/timex.h.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_ERROR = 5
_UNSYNCHRONISED, _IN_NANOSECONDS = 0x0040, 0x2000
_LONG, _INT = ctypes.c_long, ctypes.c_int


class _Timex(ctypes.Structure):
    _fields_ = [
        *(("modes", ctypes.c_uint), ("offset", _LONG), ("freq", _LONG), ("maxerror", _LONG)),
        *(("esterror", _LONG), ("status", _INT), ("constant", _LONG), ("precision", _LONG)),
        *(("tolerance", _LONG), ("time", _LONG * 2), ("tick", _LONG), ("ppsfreq", _LONG)),
        *(("jitter", _LONG), ("shift", _INT), ("stabil", _LONG), ("jitcnt", _LONG)),
        *(("calcnt", _LONG), ("errcnt", _LONG), ("stbcnt", _LONG), ("tai", _INT)),
        ("rest", _INT * 11),
    ]


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The kernel's clock, as the time daemon keeps it."""

    synchronised: bool
    """A daemon sets it."""
    offset_s: float
    """What it still lags behind, or is ahead."""


def read_clock() -> Clock | None:
    """None where the kernel does not tell: a sandbox may forbid the question."""
    asked = _Timex()
    state = ctypes.CDLL(None).adjtimex(ctypes.byref(asked))
    if state < 0:
        return None
    return Clock(
        synchronised=state != _ERROR and not asked.status & _UNSYNCHRONISED,
        offset_s=asked.offset / (1e9 if asked.status & _IN_NANOSECONDS else 1e6),
    )
