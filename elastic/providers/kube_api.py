"""Kubernetes' API as a pod's service account may call it: three verbs over HTTPS, JSON in and out.

What may pass is asked again for a while: a server that is started anew, or has too much to do, a
line that breaks. Each call may be made twice.

No client package: that of Kubernetes is 2 MB of generated code for what is here a request each.
Source: https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from elastic.errors import ProviderAwayError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 30.0
_CONFLICT, _TOO_MANY = 409, 429
_MOST_TRIES = 5
_FIRST_PAUSE_S, _PATIENCE_S = 1.0, 10.0
"""After a try of a call; no try begins later than this after the first one. Whoever makes the call
has few threads, and asks again by and by."""


class KubeApi:
    """Calls from within a pod. Any thread may use it.

    Args:
        account: where the pod has its service account: `token`, `ca.crt`, `namespace`.
    """

    def __init__(self, account: Path = SERVICE_ACCOUNT) -> None:
        self._account = account

    @property
    def namespace(self) -> str:
        """The pod's own."""
        return (self._account / "namespace").read_text(encoding="utf-8").strip()

    def get(self, path: str) -> dict[str, Any]:
        """Reads an object, or a list of them.

        Raises:
            urllib.error.HTTPError: by its `code`: 404 where there is none, 403 where the service
                account may not.
            ProviderAwayError: it is not served now, whatever was asked.
        """
        return self._call("GET", path)

    def merge(self, path: str, change: dict[str, Any]) -> None:
        """Changes the fields of an object that `change` has, and no other. Where somebody else
        changes it at that moment, again. Raises as `get` does."""
        for left in reversed(range(_MOST_TRIES)):
            try:
                self._call("PATCH", path, change)
                return
            except urllib.error.HTTPError as error:
                if error.code != _CONFLICT or not left:
                    raise

    def delete(self, path: str) -> None:
        """Deletes an object. Raises as `get` does."""
        self._call("DELETE", path)

    def _call(self, method: str, path: str, change: dict[str, Any] | None = None) -> dict[str, Any]:
        host = os.environ["KUBERNETES_SERVICE_HOST"]
        host = f"[{host}]" if ":" in host else host  # IPv6
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        # Kubernetes puts a new token there before the old one expires.
        token = (self._account / "token").read_text(encoding="utf-8").strip()
        request = urllib.request.Request(
            f"https://{host}:{port}{path}",
            method=method,
            data=None if change is None else json.dumps(change).encode(),
            headers={"Authorization": f"Bearer {token}"},
        )
        if change is not None:
            request.add_header("Content-Type", "application/merge-patch+json")
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(
                context=ssl.create_default_context(cafile=str(self._account / "ca.crt"))
            ),
        )
        answer: dict[str, Any] = json.loads(_ask(opener, request))
        return answer


def _ask(opener: urllib.request.OpenerDirector, request: urllib.request.Request) -> bytes:
    """What a request is answered, by and by."""
    began_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
    while True:
        try:
            with opener.open(request, timeout=_TIMEOUT_S) as answer:
                told: bytes = answer.read()
            return told
        except (OSError, http.client.HTTPException) as error:
            if not is_passing(error):
                raise
            wait_s = max(pause_s, retry_after_s(error))
            took_s = time.monotonic() - began_s
            if took_s + wait_s > _PATIENCE_S:
                raise ProviderAwayError(
                    f"{request.get_method()} {request.selector}",
                    f"{type(error).__name__}: {error}, after {took_s:.0f} s",
                    "Look at Kubernetes' API server",
                ) from error
        time.sleep(wait_s)
        pause_s *= 2


def is_passing(error: Exception) -> bool:
    """Whether a request that has failed so may be served later: it was too much, or the server or
    the way to it is out of order."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code == _TOO_MANY or error.code >= 500
    reason = getattr(error, "reason", error)
    return not isinstance(reason, ssl.SSLCertVerificationError)


def retry_after_s(error: Exception) -> float:
    """How long the server wants to be left alone; 0 where it does not say so in seconds."""
    if not isinstance(error, urllib.error.HTTPError):
        return 0.0
    told = error.headers.get("Retry-After", "")
    return float(told) if told.isdecimal() else 0.0
