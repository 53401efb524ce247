"""Commit records that are wrong from the start, with a seal that is right."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def unsealed(record: bytes) -> dict[str, Any]:
    """What a record says."""
    body: dict[str, Any] = json.loads(record)
    del body["sha256"]
    return body


def seal(body: Mapping[str, Any]) -> bytes:
    """A record that says so."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return text[:-1] + f',"sha256":"{hashlib.sha256(text[:-1]).hexdigest()}"}}'.encode()
