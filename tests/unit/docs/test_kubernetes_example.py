"""The cluster of examples/kubernetes is one that this project runs on."""

from __future__ import annotations

import re
from typing import Any

import ray
import yaml

from tests.support import ROOT
from trainer.backend.efa_settings import INSTANCES

EXAMPLES = ROOT / "examples" / "kubernetes"
CLUSTER = yaml.safe_load((EXAMPLES / "raycluster.yaml").read_text())["spec"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]


def pods() -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in (CLUSTER["headGroupSpec"], WORKERS)]


def test_it_has_the_ray_that_is_pinned() -> None:
    assert CLUSTER["rayVersion"] == ray.__version__


def test_workers_have_all_gpus_and_all_efa_devices_of_their_machine() -> None:
    pod = pods()[1]
    machine = INSTANCES[pod["nodeSelector"]["node.kubernetes.io/instance-type"]]
    for resources in pod["containers"][0]["resources"].values():
        assert int(resources["nvidia.com/gpu"]) == machine.gpus
        assert int(resources["vpc.amazonaws.com/efa"]) == machine.devices


def test_all_pods_see_the_storage_at_one_path_and_have_the_rights_of_the_example() -> None:
    rights = yaml.safe_load_all((EXAMPLES / "replace-nodes-rbac.yaml").read_text())
    account = next(each for each in rights if each["kind"] == "ServiceAccount")
    for pod in pods():
        assert pod["serviceAccountName"] == account["metadata"]["name"]
        mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
        assert mounts == {"data": "/data", "shm": "/dev/shm"}
        assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()


def test_the_image_has_all_that_is_installed() -> None:
    dockerfile = (EXAMPLES / "Dockerfile").read_text()
    packages = re.findall(r'"(\w+)\*"', (ROOT / "pyproject.toml").read_text())
    assert len(packages) == 4
    for source in (*packages, "pyproject.toml", "constraints.txt", "LICENSE"):
        assert re.search(rf"^COPY .*\b{re.escape(source)}\b", dockerfile, flags=re.MULTILINE), (
            source
        )
        assert (ROOT / source).exists()
