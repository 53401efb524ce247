"""Kubernetes replaces the node below a pod of KubeRay's.

    any node ──────► cordoned: nothing lands there; an autoscaler removes it when it is empty
    HyperPod's ────► its health label, too: HyperPod replaces it, and nobody needs rights in EC2
    then ──────────► the cluster's pods there are deleted; KubeRay makes others, elsewhere

Source:
https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-resiliency-manual.html
"""

from __future__ import annotations

import urllib.error
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from elastic.errors import ReplaceError
from elastic.providers.kube_api import KubeApi
from elastic.providers.node_provider import NodeIdentity

HEALTH_LABEL = "sagemaker.amazonaws.com/node-health-status"
REPLACE, REBOOT = "UnschedulablePendingReplacement", "UnschedulablePendingReboot"
REASON_NOTE = "elastictrainer/replaced-for"
_NOT_FOUND = 404

_PAGE = 100
"""Nodes in an answer: some MB of JSON, which the coordinator's process parses in one go."""

CONDITIONS = (
    "AcceleratedHardwareReady",
    "ContainerRuntimeReady",
    "KernelReady",
    "NetworkingReady",
    "StorageReady",
)
"""Of the EKS node-monitoring agent: "False" where its checks have found a fatal fault. `Ready` is
not among them: a node that is lost shows here by its own silence, and sooner.
Source: https://docs.aws.amazon.com/eks/latest/userguide/node-health.html
"""


class KubeProvider:
    """A `NodeProvider` for nodes of Kubernetes.

    Args:
        api: Kubernetes.
    """

    def __init__(self, api: KubeApi | None = None) -> None:
        self._api = api or KubeApi()

    def machine_of(self, node: NodeIdentity) -> str:
        """The Kubernetes node that the pod runs on.

        Raises:
            ReplaceError: there is no such pod, or it runs nowhere yet.
        """
        pod = self._pod_of(node)
        where = None if pod is None else pod["spec"].get("nodeName")
        if where is None:
            raise ReplaceError(
                node.name,
                f"namespace {self._api.namespace} has no such pod that runs on a node",
                "The coordinator must run in the namespace of the Ray cluster",
            )
        return str(where)

    def replace(self, nodes: Sequence[NodeIdentity], machine: str, reason: str) -> str:
        path = f"/api/v1/nodes/{quote(machine)}"
        try:
            done = self._take_out(path, self._api.get(path), reason)
        except urllib.error.HTTPError as error:
            if error.code != _NOT_FOUND:
                raise
            done = "the node is gone already"
        return f"{done}; {self._delete_pods(nodes, machine)}"

    def reboot(self, nodes: Sequence[NodeIdentity], machine: str, reason: str) -> str | None:
        path = f"/api/v1/nodes/{quote(machine)}"
        try:
            found = self._api.get(path)
        except urllib.error.HTTPError as error:
            if error.code != _NOT_FOUND:
                raise
            return None
        if HEALTH_LABEL not in found["metadata"].get("labels", {}):
            return None  # nobody in a plain cluster reboots a node
        done = self._ask_hyperpod(path, REBOOT, reason)
        try:
            return f"{done}; {self._delete_pods(nodes, machine)}"
        except Exception as error:  # who hears of a failure asks for the reboot again
            return f"{done}; pods are left: {type(error).__name__}: {error}"

    def complaints(self) -> dict[str, str]:
        found: dict[str, str] = {}
        asked = {"limit": str(_PAGE)}
        while True:
            page = self._api.get(f"/api/v1/nodes?{urlencode(asked)}")
            for node in page["items"]:
                if (told := find_complaints(node)) is not None:
                    found[str(node["metadata"]["name"])] = told
            more = page.get("metadata", {}).get("continue")
            if not more:
                return found
            asked["continue"] = more

    def _take_out(self, path: str, found: Mapping[str, Any], reason: str) -> str:
        if HEALTH_LABEL in found["metadata"].get("labels", {}):
            return self._ask_hyperpod(path, REPLACE, reason)
        self._api.merge(path, _note(reason) | {"spec": {"unschedulable": True}})
        return "the node was cordoned"

    def _ask_hyperpod(self, path: str, wanted: str, reason: str) -> str:
        change = _note(reason)
        change["metadata"]["labels"] = {HEALTH_LABEL: wanted}
        if wanted != REBOOT:  # it comes back, and nobody would lift the cordon
            change["spec"] = {"unschedulable": True}
        self._api.merge(path, change)
        return f"HyperPod was asked for {wanted}"

    def _delete_pods(self, nodes: Sequence[NodeIdentity], machine: str) -> str:
        return "; ".join(self._delete_pod(node, machine) for node in nodes)

    def _delete_pod(self, node: NodeIdentity, machine: str) -> str:
        """An address may have gone to another pod meanwhile, which runs elsewhere."""
        pod = self._pod_of(node)
        if pod is None or pod["spec"].get("nodeName") != machine:
            return "its pod is gone already"
        name = str(pod["metadata"]["name"])
        try:
            self._api.delete(f"{self._pods}/{quote(name)}")
        except urllib.error.HTTPError as error:
            if error.code != _NOT_FOUND:
                raise
        return f"pod {name} was deleted"

    def _pod_of(self, node: NodeIdentity) -> dict[str, Any] | None:
        """KubeRay tells Ray the pod's name. Otherwise it is the one with the node's address."""
        if node.instance:
            try:
                return self._api.get(f"{self._pods}/{quote(node.instance)}")
            except urllib.error.HTTPError as error:
                if error.code != _NOT_FOUND:
                    raise
                return None
        query = urlencode({"fieldSelector": f"status.podIP={node.address}"})
        pods = self._api.get(f"{self._pods}?{query}")["items"]
        return pods[0] if len(pods) == 1 else None

    @property
    def _pods(self) -> str:
        return f"/api/v1/namespaces/{quote(self._api.namespace)}/pods"


def _note(reason: str) -> dict[str, Any]:
    return {"metadata": {"annotations": {REASON_NOTE: reason}}}


def find_complaints(node: Mapping[str, Any]) -> str | None:
    """What the EKS node-monitoring agent has against a node, in words; None: nothing.

    Args:
        node: as the API has it.
    """
    bad = [
        f"{one['type']}: {one.get('reason', '')} {one.get('message', '')}".strip()
        for one in node.get("status", {}).get("conditions", ())
        if one["type"] in CONDITIONS and one["status"] == "False"
    ]
    return "; ".join(bad) or None
