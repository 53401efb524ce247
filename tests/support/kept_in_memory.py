"""What is kept for a run (`ray_compat/kept.py`), without Ray's head."""

from __future__ import annotations

import threading

import pytest

from elastic.ray_compat import kept


class KeptInMemory:
    """Stands for the key-value store of Ray's head, until the test is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.put = threading.Event()
        """Something was put there."""
        self._data: dict[bytes, bytes] = {}
        monkeypatch.setattr(kept, "_store", lambda: self)

    def internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, space: bytes) -> None:
        self._data[key] = value
        self.put.set()

    def internal_kv_get(self, key: bytes, space: bytes) -> bytes | None:
        return self._data.get(key)

    def internal_kv_del(self, key: bytes, by_prefix: bool, space: bytes) -> None:
        self._data = {one: data for one, data in self._data.items() if not one.startswith(key)}
