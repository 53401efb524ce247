"""Ray nodes on this machine, by a program in the place of `ray start`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import ReplaceError
from elastic.node_config import LocalNodes
from elastic.providers import local_nodes
from elastic.providers.local_nodes import LocalProvider
from elastic.providers.node_provider import NodeIdentity
from health.oom_kills import RAY_MONITOR

RAY_START = """
import json, os, sys, threading
with open(os.environ["STARTS"], "a") as file:
    started = {"pid": os.getpid(), "asked": sys.argv[1:], "variables": dict(os.environ)}
    print(json.dumps(started), file=file)
how = os.environ["HOW"]
if how == "hangs":
    threading.Event().wait()
if how == "fails":
    print("no\\n  port is free")
    print("is another one there?", file=sys.stderr)
    sys.exit(3)
"""


class Desk:
    """Who has a node replaced, and what was done for it."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        scripts = root / "ray" / "scripts"
        scripts.mkdir(parents=True)
        for path in (root / "ray" / "__init__.py", scripts / "__init__.py"):
            path.touch()
        (scripts / "scripts.py").write_text(RAY_START)
        self._patch, self._starts = patch, root / "starts"
        self._starts.touch()
        patch.setenv("PYTHONPATH", str(root))
        patch.setenv("STARTS", str(self._starts))
        self.ended: list[str] = []

    def replace(self, how: str = "works") -> str:
        """Has two nodes replaced."""
        self._patch.setenv("HOW", how)
        nodes = [NodeIdentity(node=one, address="127.0.0.1", instance="") for one in ("ab", "cd")]
        provider = LocalProvider(LocalNodes(cpus=3), self.ended.append, lambda: "127.0.0.1:6379")
        assert provider.machine_of(nodes[0]) == "ab", "all share an address"
        assert provider.reboot(nodes, "ab", "reason") is None and provider.complaints() == {}
        return provider.replace(nodes, "ab", "reason")

    @property
    def starts(self) -> list[dict[str, Any]]:
        """What each start of a node was given."""
        return [json.loads(line) for line in self._starts.read_text().splitlines()]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tmp_path, monkeypatch)


def test_the_nodes_are_ended_and_each_call_starts_another(desk: Desk) -> None:
    said = desk.replace()
    assert said == "another Ray node with 3 CPUs was started on this machine"
    assert desk.ended == ["ab", "cd"]
    (start,) = desk.starts
    assert start["asked"] == ["start", "--address", "127.0.0.1:6379", "--num-cpus", "3"]
    desk.replace()
    assert len(desk.starts) == 2


def test_the_node_is_let_in_and_not_taken_for_this_process_of_rays(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
        "RAY_JOB_ID",
        "RAY_RAYLET_PID",
        "ARRAY_SIZE",
        RAY_MONITOR,
    ):
        monkeypatch.setenv(name, "set")
    desk.replace()
    (start,) = desk.starts
    given = {name for name in start["variables"] if "RAY_" in name}
    assert given == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "ARRAY_SIZE", RAY_MONITOR}


def test_a_start_that_fails_says_how(desk: Desk) -> None:
    with pytest.raises(ReplaceError) as caught:
        desk.replace("fails")
    assert str(caught.value) == (
        "ab: `ray start` ended with 3: no port is free is another one there?. Start a node by hand."
    )


def test_a_start_that_does_not_end_is_given_up_and_ended(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_nodes, "_START_TIMEOUT_S", 5.0)
    with pytest.raises(subprocess.TimeoutExpired, match="timed out after 5"):
        desk.replace("hangs")
    (start,) = desk.starts
    with pytest.raises(ProcessLookupError):
        os.kill(start["pid"], 0)
