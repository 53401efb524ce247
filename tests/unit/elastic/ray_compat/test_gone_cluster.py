"""A cluster that is gone, whose address Ray still has."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from elastic.ray_compat.cluster import warn_of_silence


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Ray keeps the address of the last cluster on this machine."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


def test_who_waits_for_a_cluster_that_is_gone_is_told_why(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_silence()  # no cluster was ever started here
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        file.write_text(address)
        warn_of_silence()
    assert caplog.text == ""
    warn_of_silence()
    assert f"waiting for the Ray cluster at {address}, which does not answer" in caplog.text
    assert f"{file}: if it has ended, remove that file" in caplog.text
    caplog.clear()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # Ray does not look at the file
    warn_of_silence()
    assert caplog.text == ""
