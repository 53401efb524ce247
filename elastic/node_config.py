"""What the user writes about who replaces machines (`HealthConfig.replace_nodes`). Imports without
torch, Ray and boto3."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.errors import ConfigError, check_types

_FIELD = "health.replace_nodes"


@dataclass(frozen=True, kw_only=True)
class RayNodes:
    """Ray's node is ended once the run has left it. Its autoscaler brings another machine; where
    Ray has none, whoever runs the machines does."""

    def check(self) -> None:
        """There is nothing to check."""


@dataclass(frozen=True, kw_only=True)
class LocalNodes:
    """A Ray node on the machine of the run's coordinator takes the place of one that is ended: for
    laptops and tests."""

    cpus: int = 1
    """CPUs that the new node tells Ray of."""

    def __post_init__(self) -> None:
        check_types(self, _FIELD)

    def check(self) -> None:
        """Raises ConfigError where no worker could start on such a node."""
        if self.cpus < 1:
            raise ConfigError(f"{_FIELD}.cpus", self.cpus, "no worker could start", "Use 1 or more")


@dataclass(frozen=True, kw_only=True)
class Ec2Nodes:
    """EC2 replaces the instance: in its Auto Scaling group, or else by one from a launch template.
    Credentials come from boto3's default chain."""

    tag: str
    """KEY=VALUE that all instances of the cluster have. No other instance is touched."""
    region: str | None = None
    """Where they are; None: as boto3 finds it."""
    launch_template: str | None = None
    """Name or id (lt-...) of the template for instances without a group. Its default version has
    the EFA interfaces, the placement group and the capacity reservation."""
    subnets: tuple[str, ...] = ()
    """Subnets, each in its zone, in which a machine is asked for in this order; none: the
    template's own."""
    keep_for_inspection: bool = False
    """Take the old instance out of its group, tag it `elastictrainer:kept`, and let it run: it
    costs money until somebody ends it. Otherwise it is terminated."""
    reboot: bool = False
    """Reboot an instance where that is what its fault asks for, before it is replaced: its image
    starts Ray at every boot, not only at the first as user data do."""

    def __post_init__(self) -> None:
        check_types(self, _FIELD)

    def check(self) -> None:
        """Raises ConfigError where the instances or the template cannot be told."""
        if not all(self.tag.partition("=")[::2]):
            raise ConfigError(
                f"{_FIELD}.tag", self.tag, "not of the form KEY=VALUE", "Use cluster=NAME or so"
            )
        if self.subnets and self.launch_template is None:
            raise ConfigError(
                f"{_FIELD}.subnets",
                self.subnets,
                "an Auto Scaling group has its own, and launch_template is None",
                "Name the template, or leave the subnets out",
            )


@dataclass(frozen=True, kw_only=True)
class KubeNodes:
    """Kubernetes replaces the node that the pod of a Ray node runs on: HyperPod's health label
    where the node has one, else it is cordoned; the pod is deleted, and KubeRay makes another. Uses
    the service account of the coordinator's pod."""

    reboot: bool = False
    """On HyperPod: have machines rebooted, whatever their fault asks for. Whatever speaks against
    one within the day after has it replaced."""

    def __post_init__(self) -> None:
        check_types(self, _FIELD)

    def check(self) -> None:
        """There is nothing more to check."""


NodesConfig = RayNodes | LocalNodes | Ec2Nodes | KubeNodes
