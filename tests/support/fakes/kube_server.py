"""Kubernetes' API on this machine, over TLS, as far as nodes and pods go: merge patches, 404, 409,
401 without the token of the moment, 403 for what a role does not have, and what a server in trouble
answers.

    with kube_server(folder) as kube:
        kube.nodes["n1"] = {...}
        KubeApi(kube.account)
"""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support.fakes.certificate import make_certificate

NAMESPACE = "training"


class Kube:
    """The objects, and what a test does to the server."""

    def __init__(self, account: Path) -> None:
        self.account = account
        """Where a pod has its service account."""
        self.nodes: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        """Of the one namespace."""
        self.conflicts = 0
        """So many changes more end with 409."""
        self.refusals: list[tuple[str, int]] = []
        """Verb and status of answers to come, each once; 0: the line breaks."""
        self.retry_after: str | None = None
        """What these say in the header of that name."""
        self.forbidden: set[tuple[str, str]] = set()
        """Verb and kind that the role lacks, such as ("DELETE", "pods")."""
        self.calls: list[str] = []
        """What was asked, as "VERB path"."""
        self.new_token("token-1")

    def new_token(self, token: str) -> None:
        """Kubernetes renews the token of a pod; the old one is worth nothing any more."""
        self.token = token
        (self.account / "token").write_text(token)

    def add_node(self, name: str, **labels: str) -> None:
        """A healthy node."""
        self.nodes[name] = {
            "metadata": {"name": name, "labels": labels, "annotations": {"owner": "karpenter"}},
            "spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }

    def add_pod(self, name: str, node: str | None, address: str = "10.0.0.9") -> None:
        """A pod of KubeRay's."""
        where = {} if node is None else {"nodeName": node}
        self.pods[name] = {
            "metadata": {"name": name},
            "spec": where,
            "status": {"podIP": address},
        }


@contextmanager
def kube_server(folder: Path) -> Iterator[Kube]:
    """Runs a server of its own, with a service account in `folder`."""
    certificate, key = make_certificate()
    (folder / "ca.crt").write_bytes(certificate)
    (folder / "namespace").write_text(NAMESPACE)
    both = folder / "server.pem"
    both.write_bytes(key + certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.kube = kube = Kube(folder)  # type: ignore[attr-defined]
        patch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        patch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_port))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield kube
        finally:
            server.shutdown()
            thread.join()


def page_of(items: list[Any], query: Mapping[str, list[str]]) -> dict[str, Any]:
    """A list, or the part of it that `limit` and `continue` ask for."""
    begin, most = (int(query.get(name, ["0"])[0]) for name in ("continue", "limit"))
    end = begin + most if most else len(items)
    more = {"continue": str(end)} if end < len(items) else {}
    return {"kind": "List", "metadata": more, "items": items[begin:end]}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        kube: Kube = self.server.kube  # type: ignore[attr-defined]
        parts = urlsplit(self.path)
        kube.calls.append(f"{self.command} {parts.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers["Authorization"] != f"Bearer {kube.token}":
            return self._fail(401, "Unauthorized")
        if kube.refusals and kube.refusals[0][0] == self.command:
            _, code = kube.refusals.pop(0)
            return self._fail(code, "Refused") if code else None
        found = re.fullmatch(
            rf"/api/v1/(?:namespaces/{NAMESPACE}/(pods)|(nodes))(?:/([\w.-]+))?", parts.path
        )
        if found is None:
            return self._fail(404, "NotFound")
        kind, name = found[1] or found[2], found[3]
        if (self.command, kind) in kube.forbidden:
            return self._fail(403, "Forbidden")
        objects = kube.pods if kind == "pods" else kube.nodes
        if name is None:
            selector = parse_qs(parts.query).get("fieldSelector", [""])[0]
            _, _, address = selector.partition("status.podIP=")
            items = [
                one for one in objects.values() if not address or one["status"]["podIP"] == address
            ]
            return self._send(200, page_of(items, parse_qs(parts.query)))
        if name not in objects:
            return self._fail(404, "NotFound")
        if self.command == "PATCH":
            return self._patch(kube, objects, name, body)
        if self.command == "DELETE":
            return self._send(200, objects.pop(name))
        return self._send(200, objects[name])

    do_PATCH = do_DELETE = do_GET

    def _patch(self, kube: Kube, objects: dict[str, Any], name: str, body: bytes) -> None:
        if self.headers["Content-Type"] != "application/merge-patch+json":
            return self._fail(415, "UnsupportedMediaType")
        if kube.conflicts:
            kube.conflicts -= 1
            return self._fail(409, "Conflict")
        objects[name] = merged(objects[name], json.loads(body))
        return self._send(200, objects[name])

    def _fail(self, code: int, reason: str) -> None:
        self._send(code, {"kind": "Status", "status": "Failure", "reason": reason, "code": code})

    def _send(self, code: int, told: Mapping[str, Any]) -> None:
        body = json.dumps(told).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        retry_after: str | None = self.server.kube.retry_after  # type: ignore[attr-defined]
        if code in (429, 503) and retry_after is not None:
            self.send_header("Retry-After", retry_after)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """What is asked is noted in `calls`."""


def merged(there: Any, change: Any) -> Any:
    """A merge patch, by RFC 7396: null removes, lists are replaced whole."""
    if not isinstance(change, dict):
        return change
    result = dict(there) if isinstance(there, dict) else {}
    for name, value in change.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result
