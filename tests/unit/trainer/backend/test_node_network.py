"""A worker sets NCCL's environment and holds NCCL to its word. NCCL's log is the file that NCCL
would open; its lines are those of `test_nccl_log.py`."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tests.unit.trainer.backend.test_nccl_log import EFA_DIRECT, NO_PROVIDER
from trainer.backend.efa_facts import EfaFacts
from trainer.backend.node_network import NodeNetwork
from trainer.errors import NetworkError

P5 = EfaFacts(instance="p5.48xlarge", devices=("rdmap79s0", "rdmap80s0"))


def make(
    log: Path, environment: dict[str, str], *, facts: EfaFacts = P5, allow_tcp: bool = False
) -> NodeNetwork:
    return NodeNetwork(log, allow_tcp=allow_tcp, facts=facts, environment=environment)


def says(environment: dict[str, str], text: str, mode: str = "w") -> None:
    """As NCCL opens it: once, and anew."""
    with Path(environment["NCCL_DEBUG_FILE"]).open(mode) as file:
        file.write(text)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "nccl" / "w0.log"


def test_the_environment_is_set_and_the_log_asked_for(log: Path) -> None:
    environment = {"FI_EFA_USE_HUGE_PAGE": "1"}
    network = make(log, environment)
    written = os.stat(environment.pop("NCCL_DEBUG_FILE"))
    assert (written.st_size, written.st_nlink) == (0, 0), "it ends with this process"
    network.check()
    assert environment == {
        "FI_EFA_USE_HUGE_PAGE": "1",
        "NCCL_SOCKET_IFNAME": "^lo,docker,veth,eni,pod-id-link",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
    }


def test_a_machine_without_efa_is_left_alone(log: Path) -> None:
    environment: dict[str, str] = {}
    make(log, environment, facts=EfaFacts(instance="KVM")).check()
    assert environment == {} and not log.parent.exists()


def test_efa_passes_without_a_word(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    environment: dict[str, str] = {}
    network = make(log, environment)
    network.check()  # nothing is written yet
    says(environment, EFA_DIRECT)
    network.check()
    assert caplog.records == []
    assert not log.exists()


def test_tcp_is_an_error_that_tells_why(log: Path) -> None:
    environment: dict[str, str] = {}
    network = make(log, environment)
    says(environment, NO_PROVIDER)
    with pytest.raises(NetworkError) as raised:
        network.check()
    assert str(raised.value) == (
        "NCCL goes over TCP on p5.48xlarge with 2 EFA devices, 10 to 100 times slower. It said: "
        "NET/OFI No eligible providers were found; NET/OFI aws-ofi-nccl initialization failed "
        f"({log}). Run `elastic doctor` on the machine, or set scaling.allow_tcp to train all the "
        "same."
    )
    assert NO_PROVIDER in log.read_text()


def test_what_later_groups_say_is_read_once_beside_what_the_first_said(
    log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each group adds lines, for as long as the worker lives."""
    environment: dict[str, str] = {}
    network = make(log, environment)
    says(environment, EFA_DIRECT)
    network.check()
    for _ in range(3):
        says(environment, EFA_DIRECT.replace("GDRDMA", "HOST"), "a")
        says(environment, "n:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] via NET/X/0\n", "a")
        network.check()
    assert [r.getMessage()[:16] for r in caplog.records] == ["NCCL goes over e"] * 3
    assert log.read_text().count("via NET/X/0") == 1


def test_tcp_that_is_allowed_is_told(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    environment: dict[str, str] = {}
    network = make(log, environment, allow_tcp=True)
    says(environment, NO_PROVIDER)
    network.check()
    (record,) = caplog.records
    assert record.getMessage().startswith("NCCL goes over TCP, GPUDirect RDMA is off; ")


def test_a_log_that_cannot_be_kept_costs_the_log_alone(
    log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log.parent.touch()
    environment: dict[str, str] = {}
    network = make(log, environment, allow_tcp=True)
    says(environment, NO_PROVIDER)
    network.check()
    lost, told = (record.getMessage() for record in caplog.records)
    assert lost.startswith(f"what NCCL said is not kept in {log}: ")
    assert told.startswith("NCCL goes over TCP")


def test_bytes_through_the_hosts_memory_are_told(
    log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment: dict[str, str] = {}
    network = make(log, environment)
    channel = "n:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] via NET/Libfabric/0\n"
    says(environment, EFA_DIRECT + channel)
    network.check()
    (record,) = caplog.records
    assert record.getMessage().startswith("NCCL goes over efa, GPUDirect RDMA is off; ")


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"])
def test_a_users_log_stays_theirs_and_nothing_is_checked(
    name: str, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {name: "theirs"}
    make(log, environment).check()
    assert {key for key in environment if key.startswith("NCCL_DEBUG")} == {name}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and name in record.getMessage()


def test_harm_is_warned_of(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(log, {"NCCL_NET": "Socket"})
    (record,) = caplog.records
    assert "NCCL_NET=Socket" in record.getMessage()
