"""Lines of logs that speak of faults: which line says what, and of whom. Pure.

The table is `signatures.json`: for each entry what it looks like, its part in the story, whom it
blames, and where that is known from. A line is evidence and no more: whoever can write one must not
be able to have a machine replaced by it (`diagnosis.py`).

What is looked at is bounded, so that no line costs much: a line's first `LINE_LENGTH` characters;
an expression is tried only where its `needle` is in them; and each of its repetitions is bounded
and none is inside another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from health.verdict import Role, Sign, Step, Subject
from health.xids import known_xids, recovery_of

LINE_LENGTH = 2000
"""Characters of a line that are looked at."""

_FILE = Path(__file__).with_name("signatures.json")

Log = Literal["kernel", "raylet", "worker"]
"""Where a line comes from: the kernel, Ray on the node, or what a worker said. None can speak for
another."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What a kind of line looks like and means."""

    name: str
    """Of the sign that it is; an Xid adds its number."""
    log: Log
    """Whose lines."""
    needle: str
    """A part that each such line has."""
    regex: re.Pattern[str]
    """Found anywhere in it. Groups: `of` (which device), `pid`, `peer`, `xid`, `action`."""
    role: Role
    """Its part in the story."""
    cause: str
    """The cause that it speaks for."""
    subject: Subject
    """What it speaks about."""
    blames: Literal["reporter", "peer", "nobody"]
    """Whose fault: of the machine that wrote it, or of the one that it names."""
    source: str
    """Where this is known from."""
    invented: bool
    """Nobody has seen it yet."""
    remedy: Step | None = None
    """The least that helps, where it is known."""


@cache
def known_signatures() -> tuple[Signature, ...]:
    """The table, in its order: of several that fit a line the first one counts."""
    entries = json.loads(_FILE.read_text(encoding="utf-8"))
    return tuple(Signature(**{**e, "regex": re.compile(e["regex"])}) for e in entries)


@cache
def _of_log(log: Log) -> tuple[Signature, ...]:
    return tuple(s for s in known_signatures() if s.log == log)


def find_sign(
    line: str,
    log: Log,
    node: str,
    at_s: float,
    pids: Mapping[int, str] | None,
    writer: str | None = None,
) -> Sign | None:
    """What a line of `log` says, if anything.

    Args:
        line: without its end.
        log: whose it is.
        node: where it was written.
        at_s: when, in seconds since the epoch.
        pids: process -> worker, on that node. A line about another process says nothing. None
            where the log has other numbers for them, as in a container: then such a line is about
            the node, and only strengthens what else is seen there.
        writer: the worker that wrote it, which is blamed where the line blames its reporter.
    """
    line = line[:LINE_LENGTH]
    for signature in _of_log(log):
        found = signature.regex.search(line) if signature.needle in line else None
        if found is not None:
            sign = _sign(signature, found, line, node, at_s, pids)
            if sign is None or writer is None or signature.blames != "reporter":
                return sign
            return replace(sign, worker=writer)
    return None


def find_signs(lines: Iterable[str], log: Log, node: str, at_s: float) -> list[Sign]:
    """The signs in some lines that name no process, each name once."""
    found = (find_sign(line, log, node, at_s, {}) for line in lines)
    return list({sign.name: sign for sign in found if sign is not None}.values())


def _sign(
    signature: Signature,
    found: re.Match[str],
    line: str,
    node: str,
    at_s: float,
    pids: Mapping[int, str] | None,
) -> Sign | None:
    groups = {key: text for key, text in found.groupdict().items() if text is not None}
    worker = None
    name, role, remedy = signature.name, signature.role, signature.remedy
    if "pid" in groups and pids is not None:
        worker = pids.get(int(groups["pid"]))
        if worker is None:
            return None
    elif "pid" in groups:
        role = "confirmation"
    if "xid" in groups:
        xid = known_xids().get(int(groups["xid"]))
        if xid is None or xid.role is None:
            return None
        name, role, remedy = f"xid_{groups['xid']}", xid.role, xid.remedy
    if "action" in groups:
        _, remedy = recovery_of(int(groups["action"], 16))
        if remedy is None:
            return None
    return Sign(
        name=name,
        source="log",
        role=role,
        cause=signature.cause,
        subject=signature.subject,
        detail=line,
        of=groups.get("of", ""),
        worker=worker,
        node=node,
        peer=groups.get("peer") if signature.blames == "peer" else None,
        at_s=at_s,
        remedy=remedy,
    )
