"""EC2 announces a spot interruption on the machine itself, two minutes ahead."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import urllib.error
import urllib.request
from datetime import datetime
from http.client import HTTPException
from pathlib import Path

from elastic.providers.tell import Tell

log = logging.getLogger(__name__)

METADATA_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
"""Where the AWS SDKs, too, look for another address of the instance metadata service."""
_METADATA_URL = "http://169.254.169.254"
_VENDOR_FILES = ("/sys/class/dmi/id/sys_vendor", "/sys/class/dmi/id/bios_vendor")
_TOKEN_TTL_S = 21_600
_ANSWER_TIMEOUT_S = 1.0
_WARNED_AFTER = 10
_NO_TOKEN_HINT = (
    "; in a container that is not on its machine's network, set the instance's "
    "HttpPutResponseHopLimit to 2"
)
"""Source:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/configuring-instance-metadata-options.html"""


def watch_spot(node: str, tell: Tell) -> SpotWatch | None:
    """Watches for an interruption of this node, where it is an EC2 instance. A `Watcher`."""
    return SpotWatch(node, tell) if on_ec2() else None


def on_ec2(files: tuple[str, ...] = _VENDOR_FILES) -> bool:
    """Whether this machine is an EC2 instance, by its firmware, or is told to look at an endpoint.

    Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/identify_ec2_instances.html
    """
    if METADATA_VARIABLE in os.environ:
        return True
    for file in files:
        with contextlib.suppress(OSError):
            if Path(file).read_text(encoding="utf-8").startswith("Amazon EC2"):
                return True
    return False


class SpotWatch:
    """Asks this machine's metadata service (IMDSv2) for a spot interruption notice; tells of it
    once, and again where that fails. One per node.

    AWS advises to ask every five seconds; a notice comes two minutes ahead. A service that does not
    answer is asked on, and warned of once, at the tenth look.
    Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html

    Args:
        node: Ray's id of this node.
        tell: called from the watch's thread.
        interval_s: between two looks.
    """

    def __init__(self, node: str, tell: Tell, *, interval_s: float = 5.0) -> None:
        self._node, self._tell, self._interval_s = node, tell, interval_s
        self._url = os.environ.get(METADATA_VARIABLE, _METADATA_URL).rstrip("/")
        self._token: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spot-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the watch."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        failures = 0
        while True:
            try:
                notice, failures = self._look(), 0
            except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
                notice, failures = None, failures + 1
                log.debug("the instance metadata service does not answer: %s", error)
                if failures == _WARNED_AFTER:
                    log.warning(
                        "the instance metadata service has not answered %d times in a row (%s): "
                        "until it does, no spot interruption is heard%s",
                        *(failures, error, "" if self._token else _NO_TOKEN_HINT),
                    )
            if notice is not None and self._has_told(notice):
                return
            if self._over.wait(self._interval_s):
                return

    def _has_told(self, notice: tuple[float | None, str]) -> bool:
        try:
            self._tell(self._node, *notice)
        except Exception as error:  # Ray may be unreachable for a while
            log.warning("a spot interruption is told of again: %s", error)
            return False
        return True

    def _look(self) -> tuple[float | None, str] | None:
        """(deadline in s since the epoch, reason), or None where there is no notice."""
        try:
            if self._token is None:
                header = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
                self._token = self._ask("PUT", "/latest/api/token", header)
            header = {"X-aws-ec2-metadata-token": self._token}
            text = self._ask("GET", "/latest/meta-data/spot/instance-action", header)
        except urllib.error.HTTPError as error:
            if error.code == 401:  # the token has expired
                self._token = None
            if error.code in (401, 404):
                return None
            raise
        return _read_notice(text)

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(self._url + path, method=method, headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_ANSWER_TIMEOUT_S) as answer:
            return str(answer.read(4096).decode())


def _read_notice(text: str) -> tuple[float | None, str]:
    """Reads `{"action": "terminate", "time": "2017-09-18T08:22:00Z"}`."""
    notice = json.loads(text)
    at = datetime.fromisoformat(notice["time"].replace("Z", "+00:00"))
    return at.timestamp(), f"EC2 spot interruption: {notice['action']}"
