"""News of a run, sent to a URL. The URL may be a secret: no message here has more of it than its
host."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from elastic.errors import WebhookError, WebhookRefusedError

TRIES, FIRST_PAUSE_S, TIMEOUT_S = 3, 1.0, 10.0
_AGAIN = (408, 429)
"""Statuses below 500 after which it is tried again."""


def _host_of(url: str) -> str | None:
    """None where it is no URL of a web server."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
        (host or "").encode("idna")
        (parts.path + parts.query).encode("ascii")
    except ValueError:
        return None
    return host if parts.scheme in ("http", "https") else None


class _NoRedirects(HTTPRedirectHandler):
    """What is sent goes to whom it is meant for."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Webhook:
    """Sends JSON objects by POST.

    Args:
        url: `https://…`, or `http://…`.

    Raises:
        WebhookError: it is no such URL.
    """

    def __init__(self, url: str) -> None:
        host = _host_of(url)
        if host is None:
            fact = "it is not https:// or http://, a host, and what follows in ASCII"
            raise WebhookError("the webhook's URL", fact, "Look at ELASTIC_WEBHOOK or --webhook")
        self._url, self._host = url, host
        self._opener = build_opener(_NoRedirects)

    def send(self, data: Mapping[str, Any]) -> None:
        """Sends `data`. Waits for up to half a minute where nobody answers.

        Raises:
            WebhookError: it was not taken, after `TRIES`; WebhookRefusedError, at once, where no
                later try will help.
        """
        for tried in range(1, TRIES + 1):
            refusal, again = self._try(json.dumps(data).encode())
            if refusal is None:
                return
            if not again or tried == TRIES:
                raise (WebhookError if again else WebhookRefusedError)(
                    f"the webhook at {self._host}",
                    f"{refusal}, in try {tried} of {TRIES}",
                    "Look at its URL, and at who answers there",
                )
            time.sleep(FIRST_PAUSE_S * 2 ** (tried - 1))

    def _try(self, body: bytes) -> tuple[str | None, bool]:
        """Why it was refused, None where it was not; and whether to try again."""
        headers = {"Content-Type": "application/json"}
        try:
            self._opener.open(Request(self._url, body, headers), timeout=TIMEOUT_S).close()
        except HTTPError as error:
            error.close()
            return f"HTTP status {error.code}", error.code >= 500 or error.code in _AGAIN
        except URLError as error:
            reason = error.reason
            return reason if isinstance(reason, str) else type(reason).__name__, True
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__, True
        return None, False
