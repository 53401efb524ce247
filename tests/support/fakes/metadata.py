"""The instance metadata service of EC2, as far as spot interruptions go, on this machine."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator


class Metadata(http.server.BaseHTTPRequestHandler):
    """As IMDSv2 answers: no token, no answer; tokens expire; 404 until there is a notice; 503 where
    it is asked too often."""

    notice: bytes | None = None
    looks_before_notice = 0
    looks_throttled = 0
    """Of those with a token, after the first."""
    tokens_withheld = 0
    """Asked for, and without an answer: it goes no further than the hop limit. The last but one is
    told nonsense."""
    looks = tokens = 0

    def do_PUT(self) -> None:
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        if self.tokens_withheld:
            type(self).tokens_withheld -= 1
            self.close_connection = True
            if self.tokens_withheld == 1:
                self.wfile.write(b"nonsense\r\n")
            return
        type(self).tokens += 1
        self._answer(200, f"token-{self.tokens}".encode())

    def do_GET(self) -> None:
        cls = type(self)
        assert self.path == "/latest/meta-data/spot/instance-action"
        if self.headers["X-aws-ec2-metadata-token"] != "token-2":  # the first one has expired
            return self._answer(401, b"")
        cls.looks += 1
        if 1 < cls.looks <= 1 + cls.looks_throttled:
            return self._answer(503, b"")
        cls.looks_before_notice -= 1
        if cls.looks_before_notice >= 0 or cls.notice is None:
            return self._answer(404, b"")
        return self._answer(200, cls.notice)

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serve_metadata() -> Iterator[tuple[str, type[Metadata]]]:
    """A service of its own. Gives its address and what it says."""
    handler = type("OneMetadata", (Metadata,), {})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/", handler
        server.shutdown()
        thread.join()
