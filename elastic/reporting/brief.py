"""An error that may hold a traceback, in a line. Pure."""

from __future__ import annotations

_HEAD = "Traceback (most recent call last):"


def brief(text: str) -> str:
    """The first and the last line of a text: of an error the fact, and the exception that a
    traceback ends with. Of a traceback alone the latter; empty lines do not count."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines[1:] and lines[0] == _HEAD:
        return lines[-1]
    return " … ".join(dict.fromkeys((*lines[:1], *lines[-1:])))
