"""A proxy before an S3 server that does what S3 does on bad days, and checks what S3 checks.

    with FaultServer("http://127.0.0.1:5000") as faults:
        rule = faults.inject("slow_down", kind="part", times=2)
        ... a client with endpoint_url=faults.url ...
        assert rule.fired == 2 and faults.count("part", prefix="run/d/") == 5

It refuses bodies that do not match their CRC32 or MD5. What takes time waits for an event that the
test sets, not for a clock. Path-style addressing only.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import random
import re
import socket
import ssl
import struct
import threading
import time
import zlib
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

Kind = Literal[
    "put",
    "get",
    "head",
    "delete",
    "list",
    "create",
    "part",
    "complete",
    "abort",
    "uploads",
    "delete_many",
    "bucket",
]
Action = Literal[
    "slow_down",  # 503 before the body counts
    "error",  # any status, code and headers
    "truncate",  # the first half of the answer's body
    "flip",  # one bit of the answer's body
    "flip_request",  # one bit of the request's body, on its way
    "reset",  # RST before the request counts
    "drop_after_body",  # the server did it, the answer is lost
    "error_in_200",  # 200 with <Error> in the body, nothing done
    "delay",  # waits for `rule.gate`
    "trickle",  # headers and a byte, then waits for `rule.gate`
    "ignore_condition",  # as a server that does not know If-None-Match
    "fail_keys",  # DeleteObjects answers 200 and says that every key failed with `rule.code`
]

_HOP = {"connection", "transfer-encoding", "keep-alive", "expect", "content-length"}


@dataclass(kw_only=True)
class Rule:
    """Which requests to spoil, how, and how often."""

    action: Action
    kind: Kind | None = None
    prefix: str = ""
    times: int | None = 1
    chance: float = 1.0
    status: int = 500
    code: str = "InternalError"
    headers: dict[str, str] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    """Set when the request that waited has been carried out, or cut."""
    over: bool = False
    fired: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request that came in."""

    kind: Kind
    key: str
    status: int
    headers: dict[str, str]
    """As they came, with names in small letters."""


@dataclass(kw_only=True)
class _Bucket:
    tokens: float
    filled_s: float


class FaultServer:
    """The proxy, with its rules and its record of requests. Any thread may use it.

    Args:
        upstream: the server's URL.
        seed: of chance.
        tls: a file with the key and the certificate of a server that talks TLS; None: it does not.
    """

    def __init__(self, upstream: str, *, seed: int = 0, tls: Path | None = None) -> None:
        self.upstream = urlsplit(upstream).netloc
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._requests: list[Request] = []
        self._random = random.Random(seed)
        self._throttle: tuple[int, float, float] | None = None
        self._buckets: dict[str, _Bucket] = {}
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.faults = self
        self.port: int = self._server.server_address[1]
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    def __enter__(self) -> FaultServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """What a client takes as its endpoint."""
        return f"http://127.0.0.1:{self.port}"

    def inject(self, action: Action, **settings: object) -> Rule:
        """Adds a rule; the first one that applies to a request is used."""
        rule = Rule(action=action, **settings)  # type: ignore[arg-type]
        with self._lock:
            self._rules.append(rule)
        return rule

    def throttle(self, *, parts: int, per_s: float, burst: float) -> None:
        """503 for more than `per_s` requests to the keys with the same first `parts` parts."""
        self._throttle = (parts, per_s, burst)

    def clear(self) -> None:
        """Back to a plain server, with an empty record."""
        with self._lock:
            for rule in self._rules:
                rule.over = True
                rule.gate.set()
            self._rules, self._requests, self._buckets = [], [], {}
            self._throttle = None

    @property
    def requests(self) -> list[Request]:
        """Everything that was asked, in the order of its end."""
        with self._lock:
            return list(self._requests)

    def count(
        self, kind: Kind | None = None, *, prefix: str = "", status: int | None = None
    ) -> int:
        """Requests of a kind (None: of any), to keys with a prefix, answered with a status."""
        return sum(
            r.key.startswith(prefix) and kind in (None, r.kind) and status in (None, r.status)
            for r in self.requests
        )

    def headers(self, kind: Kind | None = None) -> list[dict[str, str]]:
        """Headers of the requests of a kind (None: of any)."""
        return [r.headers for r in self.requests if kind in (None, r.kind)]

    def rule_for(self, kind: Kind, key: str) -> Rule | None:
        """The rule to apply to a request, which counts as fired."""
        with self._lock:
            for rule in self._rules:
                if (
                    rule.kind in (None, kind)
                    and key.startswith(rule.prefix)
                    and (rule.times is None or rule.fired < rule.times)
                    and self._random.random() < rule.chance
                ):
                    rule.fired += 1
                    return rule
        return None

    def too_many(self, key: str) -> bool:
        """Whether the prefix of `key` has got more requests than it may."""
        if self._throttle is None:
            return False
        parts, per_s, burst = self._throttle
        prefix, now = "/".join(key.split("/")[:parts]), time.monotonic()
        with self._lock:
            bucket = self._buckets.setdefault(prefix, _Bucket(tokens=burst, filled_s=now))
            bucket.tokens = min(burst, bucket.tokens + (now - bucket.filled_s) * per_s)
            bucket.filled_s = now
            if bucket.tokens < 1:
                return True
            bucket.tokens -= 1
            return False

    def record(self, request: Request) -> None:
        """Notes a request that is about to be answered; status 0 where the connection is cut."""
        with self._lock:
            self._requests.append(request)


def kind_of(method: str, key: str, query: dict[str, list[str]]) -> Kind:
    """What a request asks for."""
    if not key:
        if method == "POST":
            return "delete_many"
        if method == "GET":
            return "uploads" if "uploads" in query else "list"
        return "bucket"
    if "uploads" in query:
        return "create"
    if "uploadId" in query:
        return {"PUT": "part", "POST": "complete", "DELETE": "abort"}[method]  # type: ignore[return-value]
    return method.lower()  # type: ignore[return-value]


class _Server(ThreadingHTTPServer):
    faults: FaultServer
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are part of the game."""


class _Cut(Exception):
    """The connection was cut on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        key = unquote(parts.path.lstrip("/").partition("/")[2])
        kind = kind_of(self.command, key, parse_qs(parts.query, keep_blank_values=True))
        key = key or parse_qs(parts.query).get("prefix", [""])[0]
        body = self._read_body()
        self._asked: tuple[Kind, str] = kind, key
        self._held: Rule | None = None
        try:
            self._answer(kind, key, body)
        except (_Cut, OSError):
            self.close_connection = True
        finally:
            if self._held is not None:
                self._held.left.set()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """The record is enough."""

    def _read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, kind: Kind, key: str, body: bytes) -> None:
        faults = self.server.faults
        if faults.too_many(key):
            return self._error(503, "SlowDown")
        rule = faults.rule_for(kind, key)
        action = rule.action if rule else None
        if rule and action == "delay":
            self._held = rule
            rule.entered.set()
            rule.gate.wait(60)
            if rule.over:  # the test has ended: whoever asked is gone
                raise _Cut
        if action == "slow_down":
            return self._error(503, "SlowDown")
        if rule and action == "error":
            return self._error(rule.status, rule.code, rule.headers)
        if action == "error_in_200":
            return self._error(200, "InternalError")
        if action == "reset":
            self._reset()
        if action == "flip_request":
            body = _flip(body)
        if action == "ignore_condition":
            del self.headers["If-None-Match"]
        if rule and action == "fail_keys":
            return self._fail_keys(body, rule.code)
        if not _digests_match(self.headers, body):
            return self._error(400, "BadDigest")
        status, headers, answer = self._forward(body)
        if action == "drop_after_body":
            self._reset()
        if action == "flip":
            answer = _flip(answer)
        if action == "truncate":
            self._send(status, headers, answer, len(answer) // 2)
            raise _Cut
        if rule and action == "trickle":
            self._send(status, headers, answer, 1)
            rule.entered.set()
            rule.gate.wait(60)
            raise _Cut
        self._send(status, headers, answer, len(answer))

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection(self.server.faults.upstream, timeout=60)
        try:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
            if body or self.command in ("PUT", "POST"):
                headers["Content-Length"] = str(len(body))
            upstream.request(self.command, self.path, body=body or None, headers=headers)
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def _send(
        self, status: int, headers: list[tuple[str, str]], body: bytes, sent_bytes: int
    ) -> None:
        self._note(status)
        self.send_response_only(status)
        kept = dict(headers)
        length = kept.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
        for name, value in headers:
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body[:sent_bytes])
        self.wfile.flush()

    def _error(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>"
        body = b"" if self.command == "HEAD" else f'<?xml version="1.0"?>{text}'.encode()
        self._send(status, list((headers or {}).items()), body, len(body))

    def _fail_keys(self, body: bytes, code: str) -> None:
        keys = re.findall("<Key>(.*?)</Key>", body.decode())
        entries = "".join(f"<Error><Key>{key}</Key><Code>{code}</Code></Error>" for key in keys)
        answer = f'<?xml version="1.0"?><DeleteResult>{entries}</DeleteResult>'.encode()
        self._send(200, [], answer, len(answer))

    def _note(self, status: int) -> None:
        """Before the answer, so that whoever has it finds the request in the record."""
        kind, key = self._asked
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.faults.record(Request(kind=kind, key=key, status=status, headers=headers))

    def _reset(self) -> None:
        """RST instead of FIN: the client sees ECONNRESET."""
        self._note(0)
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        raise _Cut


def _flip(body: bytes) -> bytes:
    if not body:
        return body
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]


def _digests_match(headers: Message[str, str], body: bytes) -> bool:
    """S3 checks these; moto does not."""
    found = {
        "x-amz-checksum-crc32": zlib.crc32(body).to_bytes(4, "big"),
        "content-md5": hashlib.md5(body).digest(),
    }
    return all(
        headers[name] in (None, base64.b64encode(digest).decode()) for name, digest in found.items()
    )
