"""Several hosts on one Linux machine: network namespaces that a bridge joins, and a raylet in each.

    head    10.77.0.1        the bridge, the Ray head (without CPUs), the driver
    host K  10.77.0.(K + 2)  a raylet

The bridge lies in the head's namespace, so nothing of it shows outside, and several networks with
the same addresses work side by side. A host's link is a veth pair; set down, it is a partition: no
packet passes, and no socket hears that it is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.te_stand_in import STAND_INS

HEAD = -1
"""Number of the head, where a host is asked for."""
HEAD_IP, PORT = "10.77.0.1", 6399
OWN_IP = "ELASTIC_TEST_IP"
"""Environment variable: a program's own address. Ray cannot find it out where no route leads to the
Internet, and takes the head's."""
_CLONE_NEWNET = 0x40000000
_START_S, _END_S = 300.0, 20.0
_networks = itertools.count()


def why_no_hosts(*, lossy: bool = False) -> str | None:
    """What this machine lacks for hosts, and for `lossy` ones; None where it has all."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command `ip` (iproute2)"
    if lossy and shutil.which("nft") is None:
        return "the loss of packets needs the command `nft` (nftables)"
    name = f"et{os.getpid()}-probe"
    made = _run("ip", "netns", "add", name)
    if made.returncode == 0:
        made = _run("ip", "-n", name, "link", "add", "probe0", "type", "bridge")
        if made.returncode == 0:
            pair = ["type", "veth", "peer", "name", "probe2"]
            made = _run("ip", "-n", name, "link", "add", "probe1", *pair)
        _run("ip", "netns", "del", name)
    return None if made.returncode == 0 else f"no network namespaces here: {made.stderr.strip()}"


class Network:
    """Hosts without Ray. A context manager, whose end removes everything that it made.

    Args:
        count: hosts beside the head.
    """

    def __init__(self, count: int) -> None:
        head = f"et{os.getpid()}-{next(_networks)}"
        self._names = [*(f"{head}-{host}" for host in range(count)), head]  # [HEAD] is the head
        self.folder = Path(tempfile.mkdtemp(prefix="et", dir="/tmp"))  # sockets want short paths
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), STAND_INS]),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }

    def __enter__(self) -> Network:
        try:
            self._wire()
            self.begin()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def begin(self) -> None:
        """Starts what belongs on the hosts."""

    def namespace(self, host: int) -> str:
        """Name of the network namespace of a host."""
        return self._names[host]

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts' namespaces."""
        return self._names[:-1]

    def cut(self, host: int) -> None:
        """Cuts a host off: its link is down."""
        ip("-n", self._names[HEAD], "link", "set", f"port{host}", "down")

    def restore(self, host: int) -> None:
        """The link of a host is up again."""
        ip("-n", self._names[HEAD], "link", "set", f"port{host}", "up")

    def lose(self, host: int, what: str) -> None:
        """From now on packets that come in at a host are lost, without a word, if `what`, an
        nftables expression, is true of them. Needs the command `nft`."""
        table = ["netns", "exec", self._names[host], "nft"]
        ip(*table, "add table ip lost")
        ip(*table, "add chain ip lost input { type filter hook input priority 0; }")
        ip(*table, f"add rule ip lost input {what} drop")

    def lose_nothing(self, host: int) -> None:
        """Ends what `lose` began."""
        ip("netns", "exec", self._names[host], "nft", "delete table ip lost")

    def kill(self, host: int) -> None:
        """Ends all processes of a host: raylet, workers, node agent."""
        deadline = time.monotonic() + _END_S
        while (pids := self.processes(host)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def vanish(self, host: int) -> None:
        """A host beside the head loses its power: nothing of it says another word, so what others
        have open with it stays open."""
        self.cut(host)
        self.kill(host)

    def processes(self, host: int) -> set[int]:
        """Ids of the processes of a host."""
        return set(map(int, _run("ip", "netns", "pids", self._names[host]).stdout.split()))

    def host_of(self, pid: int) -> int:
        """The host that a process runs on; it lives."""
        (found,) = [h for h, _ in enumerate(self._names) if pid in self.processes(h)]
        return found

    def port_of(self, pid: int) -> int:
        """The TCP port that a process listens on at its host's own address."""
        host = self.host_of(pid)
        listening = _run("ip", "netns", "exec", self._names[host], "ss", "-ltnpH").stdout
        ours = [line.split()[3] for line in listening.splitlines() if f"pid={pid}," in line]
        (port,) = [int(a.split(":")[1]) for a in ours if a.startswith(f"{ip_of(host)}:")]
        return port

    def popen(self, host: int, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Starts a program on a host; what it prints goes to `log`."""
        with log.open("w") as out:
            return subprocess.Popen(
                ["ip", "netns", "exec", self._names[host], *command],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**self.environment, OWN_IP: ip_of(host)},
            )

    def remove(self) -> None:
        """Ends all processes and removes all namespaces, with the links in them."""
        for host, name in enumerate(self._names):
            self.kill(host)
            _run("ip", "netns", "del", name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wire(self) -> None:
        *hosts, head = self._names
        for name in self._names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", head, "link", "add", "bridge", "type", "bridge")
        ip("-n", head, "address", "add", f"{HEAD_IP}/24", "dev", "bridge")
        ip("-n", head, "link", "set", "bridge", "up")
        for host, name in enumerate(hosts):
            peer = ["type", "veth", "peer", "name", "uplink", "netns", name]
            ip("-n", head, "link", "add", f"port{host}", *peer)
            ip("-n", head, "link", "set", f"port{host}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"{ip_of(host)}/24", "dev", "uplink")
            ip("-n", name, "link", "set", "uplink", "up")


class Hosts(Network):
    """Hosts with a Ray cluster on them; see the module.

    Args:
        cpus: CPUs that Ray counts on each host; the head has none.
    """

    def __init__(self, cpus: Sequence[int]) -> None:
        super().__init__(len(cpus))
        self._cpus = cpus
        # What the head knows outlives its machine.
        self.environment["RAY_gcs_storage"] = "rocksdb"
        self.environment["RAY_gcs_storage_path"] = str(self.folder / "gcs")
        self.environment["RAY_AUTH_MODE"] = "disabled"
        self.environment.pop("RAY_ADDRESS", None)
        self.address = f"{HEAD_IP}:{PORT}"

    def __enter__(self) -> Hosts:
        super().__enter__()
        return self

    def begin(self) -> None:
        """See Network."""
        self.start(HEAD)
        joining = [(host, self._join(host)) for host in range(len(self._names) - 1)]
        for host, start in joining:
            self._await(host, start)

    def start(self, host: int) -> None:
        """Starts the raylet of a host that has none, or none any more; Ray's head with it. It is
        another machine: nothing lies on its disk."""
        shutil.rmtree(self.folder / str(host), ignore_errors=True)
        self._await(host, self._join(host))

    def given_up(self) -> bool:
        """Whether Ray has declared a host dead that did not answer."""
        log = self.folder / str(HEAD) / "session_latest" / "logs" / "gcs_server.out"
        return "Node is dead because the health check failed" in log.read_text()

    def _join(self, host: int) -> subprocess.Popen[bytes]:
        if host == HEAD:
            head = ["--head", f"--port={PORT}", "--num-cpus=0"]
            return self._ray_start(HEAD, *head, "--include-dashboard=false", "--no-monitor")
        here = f"--num-cpus={self._cpus[host]}"
        return self._ray_start(host, f"--address={self.address}", here)

    def _ray_start(self, host: int, *arguments: str) -> subprocess.Popen[bytes]:
        own = [f"--node-ip-address={ip_of(host)}", f"--temp-dir={self.folder / str(host)}"]
        spared = ["--disable-usage-stats", "--include-log-monitor=false"]
        command = ["ray", "start", *own, *spared, *arguments]
        return self.popen(host, command, self._log(host))

    def _await(self, host: int, start: subprocess.Popen[bytes]) -> None:
        """Waits until a raylet has started; nobody else's work on this machine should fail that."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = start.wait(_START_S)
        assert code == 0, f"exit {code}: {self._log(host).read_text()[-4000:]}"

    def _log(self, host: int) -> Path:
        return self.folder / f"{host}.log"


def enter(namespace: str) -> None:
    """This thread goes into a network namespace, for good."""
    with open(f"/run/netns/{namespace}", "rb") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def ip_of(host: int) -> str:
    """Address of a host, or of the head."""
    return HEAD_IP if host == HEAD else f"10.77.0.{host + 2}"


def ip(*arguments: str) -> None:
    """The command `ip`, which must do it."""
    done = _run("ip", *arguments)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


_why_not = why_no_hosts()
requires_hosts = pytest.mark.skipif(_why_not is not None, reason=str(_why_not))
"""Marks a test that needs hosts."""
