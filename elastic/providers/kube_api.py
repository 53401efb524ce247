"""Kubernetes' API as a pod's service account may call it: three verbs over HTTPS, JSON in and out.

No client package: that of Kubernetes is 2 MB of generated code for what is here a request each.
Source: https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/
"""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 30.0
_CONFLICT = 409
_MOST_TRIES = 5


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
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            told: dict[str, Any] = json.load(answer)
        return told
