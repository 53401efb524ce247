"""S3 over TLS: a connection that breaks is made anew, a certificate that is not trusted is not."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointing import S3Config, StoreUnavailableError, open_store
from tests.support.bent_proxy import BentProxy
from tests.support.fakes.certificate import make_certificate
from tests.support.fakes.s3_faults import FaultServer
from tests.support.fakes.s3_server import forget_pace

DATA = bytes(range(256)) * (1 << 13)
_HANDSHAKE_BYTES = 16 << 10


class Line:
    """The way to a server: it flips a bit of what comes over it where it is told to."""

    def __init__(self) -> None:
        self.breaks: str | None = None
        self.broken: list[str] = []

    def bend(self, at: int, data: bytearray) -> None:
        """See `Bend`."""
        where = "handshake" if at == 0 else "body"
        if where != self.breaks or (where == "body" and at < _HANDSHAKE_BYTES):
            return
        data[len(data) // 2] ^= 1
        self.broken.append(where)
        self.breaks = None


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    return tmp_path / "ca.crt"


@pytest.fixture
def secure(
    s3_endpoint: str, config: S3Config, line: Line, authority: Path, tmp_path: Path
) -> Iterator[S3Config]:
    """The same store over TLS."""
    certificate, key = make_certificate()
    authority.write_bytes(certificate)
    server = tmp_path / "server.pem"
    server.write_bytes(key + certificate)
    with FaultServer(s3_endpoint, tls=server) as faults, BentProxy(faults.port, line.bend) as proxy:
        url = f"https://127.0.0.1:{proxy.port}"
        yield dataclasses.replace(config, endpoint_url=url, timeout_s=10)
        forget_pace(url)


@pytest.mark.parametrize("where", ["handshake", "body"])
def test_a_connection_that_breaks_is_made_anew(
    where: str, secure: S3Config, line: Line, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority))
    store = open_store(secure)
    if where == "handshake":
        line.breaks = where
        store.put("d/x", [DATA])
    else:
        store.put("d/x", [DATA])
        line.breaks = where
    assert store.get_range("d/x", 0, len(DATA)) == DATA
    assert line.broken == [where]


def test_a_certificate_that_is_not_trusted_is_told_at_once(secure: S3Config) -> None:
    began_s = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="its certificate is not trusted; set AWS_CA"):
        open_store(secure).list("")
    assert time.monotonic() - began_s < secure.timeout_s / 2
