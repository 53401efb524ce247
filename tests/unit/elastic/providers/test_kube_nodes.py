"""Nodes that Kubernetes replaces, against an API over TLS that keeps its semantics."""

from __future__ import annotations

import copy
import json
import re
import ssl
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.errors import ProviderAwayError, ReplaceError
from elastic.providers import kube_api
from elastic.providers.kube_api import KubeApi
from elastic.providers.kube_nodes import (
    CONDITIONS,
    HEALTH_LABEL,
    REASON_NOTE,
    KubeProvider,
    find_complaints,
)
from elastic.providers.node_provider import NodeIdentity
from tests.support import ROOT
from tests.support.fakes.kube_server import NAMESPACE, Kube, kube_server

POD = NodeIdentity(node="ab12", address="10.0.0.9", instance="ray-worker-7")
REASON = "large messages did not pass"


@pytest.fixture
def kube(tmp_path: Path) -> Iterator[Kube]:
    with kube_server(tmp_path) as kube:
        kube.add_node("n1")
        kube.add_node("n2")
        kube.add_pod("ray-worker-7", "n1")
        kube.add_pod("ray-worker-8", "n2", "10.0.0.10")
        yield kube


def provider(kube: Kube) -> KubeProvider:
    return KubeProvider(KubeApi(kube.account))


def test_the_machine_is_the_node_below_the_pod(kube: Kube) -> None:
    assert provider(kube).machine_of(POD) == "n1"
    unnamed = NodeIdentity(node="ab12", address="10.0.0.10", instance="")
    assert provider(kube).machine_of(unnamed) == "n2"
    kube.add_pod("ray-worker-7", None)
    with pytest.raises(ReplaceError, match="ray-worker-7: namespace training has no such pod"):
        provider(kube).machine_of(POD)
    del kube.pods["ray-worker-7"]
    with pytest.raises(ReplaceError, match="ray-worker-7: namespace training has no such pod"):
        provider(kube).machine_of(POD)


def test_a_node_is_cordoned_and_its_pod_deleted_and_nothing_else(kube: Kube) -> None:
    before, other = copy.deepcopy(kube.nodes["n1"]), copy.deepcopy(kube.nodes["n2"])
    said = provider(kube).replace([POD], "n1", REASON)
    assert said == "the node was cordoned; pod ray-worker-7 was deleted"
    before["spec"]["unschedulable"] = True
    before["metadata"]["annotations"][REASON_NOTE] = REASON
    assert kube.nodes == {"n1": before, "n2": other} and kube.pods.keys() == {"ray-worker-8"}
    again = provider(kube).replace([POD], "n1", REASON)
    assert again == "the node was cordoned; its pod is gone already"


def test_hyperpod_is_asked_by_its_label(kube: Kube) -> None:
    kube.add_node("n1", **{HEALTH_LABEL: "Schedulable", "zone": "a"})
    said = provider(kube).replace([POD], "n1", REASON)
    status = "UnschedulablePendingReplacement"
    assert said == f"HyperPod was asked for {status}; pod ray-worker-7 was deleted"
    assert kube.nodes["n1"]["metadata"]["labels"] == {HEALTH_LABEL: status, "zone": "a"}
    assert kube.nodes["n1"]["spec"]["unschedulable"] is True


def test_only_hyperpod_reboots_a_node_where_that_is_due(kube: Kube) -> None:
    before = copy.deepcopy(kube.nodes["n1"])
    assert provider(kube).reboot([POD], "n1", REASON) is None
    assert kube.nodes["n1"] == before and "ray-worker-7" in kube.pods
    kube.add_node("n1", **{HEALTH_LABEL: "Schedulable"})
    said = provider(kube).reboot([POD], "n1", REASON)
    assert said == "HyperPod was asked for UnschedulablePendingReboot; pod ray-worker-7 was deleted"
    assert kube.nodes["n1"]["metadata"]["labels"] == {HEALTH_LABEL: "UnschedulablePendingReboot"}
    assert "unschedulable" not in kube.nodes["n1"]["spec"]
    del kube.nodes["n1"]
    assert provider(kube).reboot([POD], "n1", REASON) is None


@pytest.mark.parametrize("status", [403, 503])
def test_a_reboot_that_was_asked_for_counts_though_its_pods_are_not_deleted(
    kube: Kube, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """They go with the node. An error would have it asked for again."""
    monkeypatch.setattr(kube_api, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(kube_api, "_PATIENCE_S", 0.02)
    kube.add_node("n1", **{HEALTH_LABEL: "Schedulable"})
    kube.refusals = [("DELETE", status)] * 10
    said = provider(kube).reboot([POD], "n1", REASON)
    assert said is not None and len(kube.refusals) < 10
    assert said.startswith("HyperPod was asked for UnschedulablePendingReboot; pods are left: ")
    assert f"HTTP Error {status}" in said and "ray-worker-7" in kube.pods
    assert kube.nodes["n1"]["metadata"]["labels"] == {HEALTH_LABEL: "UnschedulablePendingReboot"}


def test_all_pods_of_the_cluster_on_a_node_are_deleted(kube: Kube) -> None:
    kube.add_pod("ray-worker-9", "n1", "10.0.0.11")
    other = NodeIdentity(node="cd34", address="10.0.0.11", instance="ray-worker-9")
    said = provider(kube).replace([POD, other], "n1", REASON)
    done = "pod ray-worker-7 was deleted; pod ray-worker-9 was deleted"
    assert said == f"the node was cordoned; {done}" and kube.pods.keys() == {"ray-worker-8"}


def test_a_node_that_is_gone_counts_as_taken_out(kube: Kube) -> None:
    del kube.nodes["n1"]
    said = provider(kube).replace([POD], "n1", REASON)
    assert said == "the node is gone already; pod ray-worker-7 was deleted"


def test_a_pod_elsewhere_that_got_the_address_is_not_deleted(kube: Kube) -> None:
    unnamed = NodeIdentity(node="ab12", address="10.0.0.10", instance="")
    provider(kube).replace([unnamed], "n1", REASON)
    assert kube.pods.keys() == {"ray-worker-7", "ray-worker-8"}


def test_a_change_meets_others_and_is_made_again(kube: Kube) -> None:
    kube.conflicts = 2
    provider(kube).replace([POD], "n1", REASON)
    assert kube.nodes["n1"]["spec"]["unschedulable"] is True
    assert kube.calls.count("PATCH /api/v1/nodes/n1") == 3
    kube.conflicts = 100
    with pytest.raises(urllib.error.HTTPError, match="409"):
        provider(kube).replace([POD], "n1", REASON)


@pytest.mark.parametrize("status", [0, 429, 500, 503])
@pytest.mark.parametrize("verb", ["GET", "PATCH", "DELETE"])
def test_what_passes_is_asked_again(
    kube: Kube, monkeypatch: pytest.MonkeyPatch, verb: str, status: int
) -> None:
    """0: the line breaks."""
    monkeypatch.setattr(kube_api, "_FIRST_PAUSE_S", 0.01)
    kube.refusals = [(verb, status)] * 2
    said = provider(kube).replace([POD], "n1", REASON)
    assert said == "the node was cordoned; pod ray-worker-7 was deleted"
    assert not kube.refusals and kube.nodes["n1"]["spec"]["unschedulable"] is True
    assert kube.pods.keys() == {"ray-worker-8"}


def test_a_server_is_left_alone_for_as_long_as_it_asks(
    kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_api, "_FIRST_PAUSE_S", 0.01)
    kube.refusals, kube.retry_after = [("PATCH", 429)], "1"
    began_s = time.monotonic()
    provider(kube).replace([POD], "n1", REASON)
    assert time.monotonic() - began_s >= 1.0
    kube.refusals, kube.retry_after = [("PATCH", 429)], "3600"
    with pytest.raises(ProviderAwayError, match="429"):
        provider(kube).replace([POD], "n1", REASON)


def test_what_does_not_pass_can_be_asked_for_later(
    kube: Kube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_api, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(kube_api, "_PATIENCE_S", 0.4)
    kube.refusals = [("DELETE", 503)] * 100
    told = "DELETE /api/v1/namespaces/training/pods/ray-worker-7: HTTPError: HTTP Error 503"
    with pytest.raises(ProviderAwayError, match=told) as caught:
        provider(kube).replace([POD], "n1", REASON)
    assert 100 - len(kube.refusals) <= 4, "0.05, 0.1 and 0.2 s apart, and no more"
    assert isinstance(caught.value.__cause__, urllib.error.HTTPError)
    kube.refusals.clear()
    said = provider(kube).replace([POD], "n1", REASON)
    assert said == "the node was cordoned; pod ray-worker-7 was deleted"


def test_the_token_is_read_anew(kube: Kube) -> None:
    replacing = provider(kube)
    assert replacing.machine_of(POD) == "n1"
    kube.new_token("token-2")
    assert replacing.machine_of(POD) == "n1"
    (kube.account / "token").write_text("another's")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        replacing.machine_of(POD)


def test_a_server_of_another_authority_gets_no_token(kube: Kube, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with kube_server(tmp_path / "other") as other, pytest.raises(urllib.error.URLError) as caught:
        (other.account / "ca.crt").write_bytes((kube.account / "ca.crt").read_bytes())
        provider(other).machine_of(POD)
    assert isinstance(caught.value.reason, ssl.SSLCertVerificationError) and not other.calls


@pytest.mark.parametrize(("verb", "kind"), [("PATCH", "nodes"), ("DELETE", "pods")])
def test_what_the_role_lacks_is_an_error(kube: Kube, verb: str, kind: str) -> None:
    kube.forbidden.add((verb, kind))
    with pytest.raises(urllib.error.HTTPError, match="403"):
        provider(kube).replace([POD], "n1", REASON)
    assert "ray-worker-7" in kube.pods


def condition(kind: str, status: str) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": "NvidiaXID79Error", "message": "fell off"}


def test_conditions_of_the_monitoring_agent_speak_against_a_node(kube: Kube) -> None:
    """As EKS's agent sets them: True is good, and a fault is False."""
    assert provider(kube).complaints() == {}
    conditions = kube.nodes["n2"]["status"]["conditions"]
    conditions += [condition(kind, "True") for kind in CONDITIONS]
    conditions += [condition("MemoryPressure", "False"), condition("Ready", "False")]
    assert provider(kube).complaints() == {}
    conditions += [condition("AcceleratedHardwareReady", "False")]
    told = "AcceleratedHardwareReady: NvidiaXID79Error fell off"
    assert provider(kube).complaints() == {"n2": told}


@pytest.mark.parametrize("kind", CONDITIONS)
@pytest.mark.parametrize(("status", "bad"), [("True", False), ("Unknown", False), ("False", True)])
def test_only_what_is_known_to_be_bad_counts(kind: str, status: str, bad: bool) -> None:
    found = find_complaints({"status": {"conditions": [condition(kind, status)]}})
    assert (found is not None) is bad


def test_many_nodes_are_asked_for_in_pages(kube: Kube) -> None:
    for number in range(250):
        kube.add_node(f"more-{number}")
    fault = {"type": "KernelReady", "status": "False", "reason": "Soft lockup"}
    kube.nodes["more-249"]["status"]["conditions"].append(fault)
    assert provider(kube).complaints() == {"more-249": "KernelReady: Soft lockup"}
    assert kube.calls.count("GET /api/v1/nodes") == 3  # of 252, 100 each


def test_the_role_allows_what_is_called_and_nothing_else(kube: Kube) -> None:
    kube.add_node("n1", **{HEALTH_LABEL: "Schedulable"})
    assert provider(kube).machine_of(POD) == "n1"
    assert provider(kube).machine_of(NodeIdentity(node="x", address="10.0.0.10", instance=""))
    assert provider(kube).reboot([POD], "n1", REASON)
    kube.add_pod("ray-worker-7", "n1")
    assert provider(kube).replace([POD], "n1", REASON)
    assert provider(kube).complaints() == {}

    called = {allowance_of(*call.split(" ")) for call in kube.calls}
    text = (ROOT / "examples" / "kubernetes" / "replace-nodes-rbac.yaml").read_text()
    allowed = {
        (kind, resource, verb)
        for document in text.split("\n---\n")
        for kind in re.findall(r"^kind: (Role|ClusterRole)$", document, re.MULTILINE)
        for resources, verbs in re.findall(r"resources: (\[.*\])\n +verbs: (\[.*\])", document)
        for resource in json.loads(resources)
        for verb in json.loads(verbs)
    }
    assert called == allowed


def allowance_of(method: str, path: str) -> tuple[str, str, str]:
    """Kind of role, resource and verb that a request needs.
    Source: https://kubernetes.io/docs/reference/access-authn-authz/authorization/
    """
    rest = path.removeprefix("/api/v1/")
    inside = rest.removeprefix(f"namespaces/{NAMESPACE}/")
    resource, _, name = inside.partition("/")
    reads = "get" if name else "list"
    verb = {"GET": reads, "PATCH": "patch", "DELETE": "delete"}[method]
    return "ClusterRole" if inside == rest else "Role", resource, verb
