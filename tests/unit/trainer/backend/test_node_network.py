"""A worker sets NCCL's environment and holds NCCL to its word. NCCL's log is a real file; its lines
are those of `test_nccl_log.py`."""

from __future__ import annotations

import logging
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


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "nccl" / "w0.log"


def test_the_environment_is_set_and_the_log_asked_for(log: Path) -> None:
    environment = {"FI_EFA_USE_HUGE_PAGE": "1"}
    make(log, environment)
    assert environment == {
        "FI_EFA_USE_HUGE_PAGE": "1",
        "NCCL_SOCKET_IFNAME": "^lo,docker,veth,eni,pod-id-link",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": str(log),
    }
    assert log.parent.is_dir()


def test_a_machine_without_efa_is_left_alone(log: Path) -> None:
    environment: dict[str, str] = {}
    make(log, environment, facts=EfaFacts(instance="KVM")).check()
    assert environment == {} and not log.parent.exists()


def test_efa_passes_without_a_word(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    network = make(log, {})
    network.check()  # nothing is written yet
    log.write_text(EFA_DIRECT)
    network.check()
    assert caplog.records == []


def test_tcp_is_an_error_that_tells_why(log: Path) -> None:
    network = make(log, {})
    log.write_text(NO_PROVIDER)
    with pytest.raises(NetworkError) as raised:
        network.check()
    assert str(raised.value) == (
        "NCCL goes over TCP on p5.48xlarge with 2 EFA devices, 10 to 100 times slower. It said: "
        "NET/OFI No eligible providers were found; NET/OFI aws-ofi-nccl initialization failed "
        f"({log}). Run `elastic doctor` on the machine, or set scaling.allow_tcp to train all the "
        "same."
    )


def test_tcp_that_is_allowed_is_told(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    network = make(log, {}, allow_tcp=True)
    log.write_text(NO_PROVIDER)
    network.check()
    (record,) = caplog.records
    assert record.getMessage().startswith("NCCL goes over TCP, GPUDirect RDMA is off; ")


def test_bytes_through_the_hosts_memory_are_told(
    log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = make(log, {})
    log.write_text(
        f"{EFA_DIRECT}n:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] via NET/Libfabric/0\n"
    )
    network.check()
    (record,) = caplog.records
    assert record.getMessage().startswith("NCCL goes over efa, GPUDirect RDMA is off; ")


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"])
def test_a_users_log_stays_theirs_and_nothing_is_checked(
    name: str, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {name: "theirs"}
    network = make(log, environment)
    log.parent.mkdir()
    log.write_text(NO_PROVIDER)
    network.check()
    assert {key for key in environment if key.startswith("NCCL_DEBUG")} == {name}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and name in record.getMessage()


def test_harm_is_warned_of(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(log, {"NCCL_NET": "Socket"})
    (record,) = caplog.records
    assert "NCCL_NET=Socket" in record.getMessage()
