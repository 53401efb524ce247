"""The environment for EFA by machine and versions. What is expected stands in AWS's documents:
aws/aws-ofi-nccl, doc/efa-env-var.md, and awsome-distributed-training, efa-cheatsheet.md."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.backend.efa_facts import EfaFacts
from trainer.backend.efa_settings import INSTANCES, LEFT_ALONE, EfaPlan, plan_efa

MODERN = EfaFacts(
    instance="p5.48xlarge",
    devices=("rdmap79s0",),
    kernel=(6, 8, 0),
    installer=(1, 45, 0),
    libfabric=(2, 3, 1),
    plugin=(1, 17, 1),
    nccl=(2, 29, 3),
)
ALWAYS = {
    "FI_EFA_USE_HUGE_PAGE": "0",
    "NCCL_SOCKET_IFNAME": "^lo,docker,veth,eni,pod-id-link",
}


@pytest.mark.parametrize("instance", INSTANCES)
def test_modern_libraries_need_two_variables(instance: str) -> None:
    plan = plan_efa(replace(MODERN, instance=instance), {})
    assert plan.missing == ALWAYS and plan.harms == ()


@pytest.mark.parametrize("instance", ["p5.4xlarge", "g5.48xlarge", "p6-b200.24xlarge", "KVM", None])
def test_an_unknown_machine_gets_nothing(instance: str | None) -> None:
    plan = plan_efa(replace(MODERN, instance=instance), {"NCCL_NET": "Socket"})
    assert plan == EfaPlan()


def test_a_machine_without_devices_gets_nothing() -> None:
    assert plan_efa(replace(MODERN, devices=()), {"NCCL_NET": "Socket"}).settings == ()


def test_versions_that_nothing_tells_are_taken_for_new() -> None:
    facts = EfaFacts(instance="p5.48xlarge", devices=("efa_0",))
    assert plan_efa(facts, {}).missing == ALWAYS


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"plugin": (1, 7, 0)}, {}),
        ({"libfabric": (1, 18, 0)}, {}),
        ({"libfabric": (1, 17, 3)}, {"FI_EFA_USE_DEVICE_RDMA": "1"}),
        ({"plugin": (1, 6, 0)}, {"FI_EFA_USE_DEVICE_RDMA": "1"}),
        (
            {"plugin": (1, 5, 0)},
            {"FI_EFA_USE_DEVICE_RDMA": "1", "FI_PROVIDER": "efa", "NCCL_PROTO": "simple"},
        ),
        ({"installer": (1, 29, 1)}, {}),
        ({"installer": (1, 29, 0)}, {"FI_EFA_SET_CUDA_SYNC_MEMOPS": "0"}),
        ({"installer": (1, 29, 0), "nccl": (2, 18, 5)}, {}),
        ({"plugin": (1, 15, 0), "tuner_path": "/t.so"}, {"NCCL_TUNER_PLUGIN": "/t.so"}),
        ({"plugin": (1, 15, 0)}, {}),
        ({"plugin": (1, 15, 0), "tuner_path": "/t.so", "nccl": (2, 20, 5)}, {}),
        ({"plugin": (1, 16, 0), "tuner_path": "/t.so"}, {}),
    ],
)
def test_older_libraries_need_more(changes: dict[str, object], more: dict[str, str]) -> None:
    assert plan_efa(replace(MODERN, **changes), {}).missing == ALWAYS | more  # type: ignore[arg-type]


def test_what_the_user_has_set_stays_and_is_shown() -> None:
    plan = plan_efa(MODERN, {"NCCL_SOCKET_IFNAME": "ens32"})
    assert "NCCL_SOCKET_IFNAME" not in plan.missing and plan.harms == ()
    (one,) = [one for one in plan.settings if one.name == "NCCL_SOCKET_IFNAME"]
    assert (one.value, one.yours) == (ALWAYS["NCCL_SOCKET_IFNAME"], "ens32")


def test_every_setting_says_why_and_who_says_so() -> None:
    old = replace(
        MODERN, plugin=(1, 5, 0), installer=(1, 20, 0), libfabric=(1, 16, 0), tuner_path="/t.so"
    )
    plan = plan_efa(old, {})
    assert len(plan.settings) == 7 and all(one.reason and one.source for one in plan.settings)
    assert all(LEFT_ALONE.values())


@pytest.mark.parametrize(
    ("name", "value", "changes"),
    [
        ("NCCL_NET", "Socket", {}),
        ("NCCL_NET_PLUGIN", "none", {}),
        ("FI_PROVIDER", "tcp", {}),
        ("FI_EFA_USE_DEVICE_RDMA", "0", {}),
        ("OFI_NCCL_DISABLE_GDR_REQUIRED_CHECK", "1", {}),
        ("FI_EFA_FORK_SAFE", "0", {"kernel": (5, 10, 0)}),
        ("RDMAV_FORK_SAFE", "1", {}),
        ("NCCL_PROTO", "LL128", {}),
        ("NCCL_PROTO", "simple", {}),
        ("NCCL_PROTO", "LL", {"plugin": (1, 5, 0)}),
        ("NCCL_SOCKET_IFNAME", "lo", {}),
        ("NCCL_SOCKET_IFNAME", "=docker0,ens32", {}),
        ("NCCL_IB_DISABLE", "1", {}),
    ],
)
def test_what_does_harm_is_warned_of(name: str, value: str, changes: dict[str, object]) -> None:
    facts = replace(MODERN, **changes)  # type: ignore[arg-type]
    (harm,) = plan_efa(facts, {name: value}).harms
    assert (harm.name, harm.value) == (name, value)
    assert str(harm).startswith(f"{name}={value}: ")
    assert name not in plan_efa(facts, {name: value}).missing


@pytest.mark.parametrize(
    ("name", "value", "changes"),
    [
        ("NCCL_NET", "AWS Libfabric", {}),
        ("NCCL_NET_PLUGIN", "ofi", {}),
        ("FI_PROVIDER", "efa", {}),
        ("FI_EFA_USE_DEVICE_RDMA", "1", {}),
        ("FI_EFA_FORK_SAFE", "0", {}),
        ("FI_EFA_FORK_SAFE", "1", {"kernel": (5, 10, 0)}),
        ("NCCL_PROTO", "Simple", {"plugin": (1, 5, 0)}),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", {}),
        ("NCCL_SOCKET_IFNAME", "en", {}),
        ("NCCL_DEBUG", "INFO", {}),
    ],
)
def test_what_does_none_is_not(name: str, value: str, changes: dict[str, object]) -> None:
    assert plan_efa(replace(MODERN, **changes), {name: value}).harms == ()  # type: ignore[arg-type]
