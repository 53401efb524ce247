"""EC2 replaces instances: their Auto Scaling group does, or a launch template gives another.

    in a group ──► terminate in the group, or detach; its capacity stays, so it starts another
    in none ─────► start another from the template, subnet by subnet ──► terminate the old one

Without a group the new instance comes first: EC2 may give out again what was just given back. Only
where a capacity reservation or a quota is full does the old one go first, for it takes the new
one's place.

An instance without the cluster's tag is never touched; the policy in `examples/aws` has the same
condition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from elastic.errors import NoCapacityError, ProviderAwayError, ReplaceError
from elastic.node_config import Ec2Nodes
from elastic.providers.node_provider import NodeIdentity

KEPT_TAG, REPLACES_TAG = "elastictrainer:kept", "elastictrainer:replaces"
_GROUP_TAG = "aws:autoscaling:groupName"
"""EC2 sets it, and takes it away from an instance that is detached."""
_GOING = ("pending", "running")
_FULL = {
    "ReservationCapacityExceeded",
    "VcpuLimitExceeded",
    "InstanceLimitExceeded",
    "MaxSpotInstanceCountExceeded",
}
"""Codes after which there is room for another instance once the old one has ended."""
_NO_CAPACITY = _FULL | {
    "InsufficientInstanceCapacity",
    "InsufficientCapacity",
    "InsufficientHostCapacity",
    "InsufficientReservedInstanceCapacity",
    "SpotMaxPriceTooLow",
    "InsufficientFreeAddressesInSubnet",
    "Unsupported",
}
"""Codes after which another zone may have what this one has not. `Unsupported`: the zone does not
have this kind of instance at all.
Source: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html
"""
_TOO_MANY = 429
_NOT_NOW = {
    "EC2ThrottledException",
    "RequestLimitExceeded",
    "Throttling",
    "ThrottlingException",
    "ResourceContention",
    "ScalingActivityInProgress",
}
"""Codes after which the same call may pass later: there were too many calls, or the Auto Scaling
group is busy.
Source: https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_DetachInstances.html
"""
_NOT_FOUND = "InvalidInstanceID.NotFound"


@contextmanager
def _asked_again() -> Iterator[None]:
    """Calls of EC2 and Auto Scaling, each of which may be made twice.

    Raises:
        ProviderAwayError: one was not answered, or not served, after all tries of boto3's.
    """
    from botocore import exceptions

    try:
        yield
    except (
        exceptions.ClientError,
        exceptions.ConnectionError,
        exceptions.HTTPClientError,
    ) as error:
        if isinstance(error, exceptions.ClientError):
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            code = error.response["Error"]["Code"]
            if status < 500 and status != _TOO_MANY and code not in _NOT_NOW:
                raise
        raise ProviderAwayError(
            "EC2", f"{type(error).__name__}: {error}", "Look at the way there, and at its limits"
        ) from error


class Ec2Provider:
    """A `NodeProvider` for EC2 instances.

    Args:
        config: which instances, and where others come from.
    """

    def __init__(self, config: Ec2Nodes) -> None:
        self._config = config
        key, _, value = config.tag.partition("=")
        self._tag = {"Key": key, "Value": value}
        self._clients: dict[str, Any] = {}
        self._known: dict[str, dict[str, Any]] = {}
        """Instances found to be the cluster's: one that has ended loses its tags by and by, and is
        not shown for long."""

    def machine_of(self, node: NodeIdentity) -> str:
        """The id of the instance: Ray was told, or it is the one of the cluster with that address.

        Raises:
            ReplaceError: none of the cluster's instances has the address, or several have.
        """
        if node.instance.startswith("i-"):
            return node.instance
        filters = {
            "private-ip-address": node.address,
            f"tag:{self._tag['Key']}": self._tag["Value"],
        }
        found = [one["InstanceId"] for one in self._instances(filters, going=True)]
        if len(found) != 1:
            raise ReplaceError(
                node.address,
                f"{len(found)} instances with the tag {self._config.tag} have this address",
                "Look at health.replace_nodes.tag, and at the tags of the instances",
            )
        return str(found[0])

    @_asked_again()
    def replace(self, nodes: Sequence[NodeIdentity], machine: str, reason: str) -> str:
        instance = self._own(machine, reason)
        group = group_of(instance)
        if group is not None and instance["State"]["Name"] not in _GOING:
            return "it has ended already; its group starts another"
        if group is not None:
            return self._replace_in(group, machine, reason)
        new = self._successor_of(machine)
        if new is None and KEPT_TAG in tags_of(instance):  # by an earlier call
            return f"its group starts another; {machine} is kept, with the tag {KEPT_TAG}"
        if new is None:
            new = self._launch(instance)
        return f"instance {new} was started; {self._let_go(machine, reason)}"

    def reboot(self, nodes: Sequence[NodeIdentity], machine: str, reason: str) -> str | None:
        if not self._config.reboot:
            return None
        from botocore.exceptions import HTTPClientError

        with _asked_again():
            self._own(machine, reason)
            try:
                self._client("ec2").reboot_instances(InstanceIds=[machine])
            except HTTPClientError as error:  # sent; who hears of a failure may send it again
                lost = type(error).__name__
                return f"EC2 was asked to reboot it, and its answer was lost ({lost})"
        return "it was rebooted"

    def complaints(self) -> dict[str, str]:
        return {}

    # -- what is there -----------------------------------------------------------------------------

    def _own(self, machine: str, reason: str) -> dict[str, Any]:
        """An instance of the cluster.

        Raises:
            ReplaceError: it is not one.
        """
        found = next(iter(self._instances({"instance-id": machine})), None)
        ended = found is None or found["State"]["Name"] not in _GOING
        if ended and machine in self._known:
            found = {**self._known[machine], "State": {"Name": "terminated"}}
        if found is None or self._tag not in found.get("Tags", ()):
            raise ReplaceError(
                machine,
                f"no instance of this id has the tag {self._config.tag}, and it is left alone",
                f"Look at health.replace_nodes.tag; what speaks against it: {reason}",
            )
        self._known[machine] = found
        return found

    def _instances(
        self, filters: Mapping[str, str], *, going: bool = False
    ) -> list[dict[str, Any]]:
        wanted = [{"Name": name, "Values": [value]} for name, value in filters.items()]
        if going:
            wanted.append({"Name": "instance-state-name", "Values": list(_GOING)})
        answer = self._client("ec2").describe_instances(Filters=wanted)
        return [one for batch in answer["Reservations"] for one in batch["Instances"]]

    def _successor_of(self, machine: str) -> str | None:
        """What an earlier call has started for it."""
        filters = {f"tag:{REPLACES_TAG}": machine}
        return next((one["InstanceId"] for one in self._instances(filters, going=True)), None)

    # -- with a group ------------------------------------------------------------------------------

    def _replace_in(self, group: str, machine: str, reason: str) -> str:
        scaling = self._client("autoscaling")
        if not self._config.keep_for_inspection:
            scaling.terminate_instance_in_auto_scaling_group(
                InstanceId=machine, ShouldDecrementDesiredCapacity=False
            )
            return f"it was terminated; its group {group} starts another"
        kept = self._let_go(machine, reason)  # before it is in no group: who asks again finds that
        scaling.detach_instances(
            InstanceIds=[machine], AutoScalingGroupName=group, ShouldDecrementDesiredCapacity=False
        )
        return f"its group {group} starts another; {kept}"

    def _let_go(self, machine: str, reason: str) -> str:
        """What becomes of an instance that its group does not end. Returns it in words."""
        if not self._config.keep_for_inspection:
            return self._terminate(machine)
        kept = [{"Key": KEPT_TAG, "Value": reason[:256]}]
        self._client("ec2").create_tags(Resources=[machine], Tags=kept)
        return f"{machine} is kept, with the tag {KEPT_TAG}"

    def _terminate(self, machine: str) -> str:
        """Ends an instance. Returns it in words. EC2 forgets one within the hour: then it has
        ended."""
        from botocore.exceptions import ClientError

        try:
            self._client("ec2").terminate_instances(InstanceIds=[machine])
        except ClientError as error:
            if error.response["Error"]["Code"] != _NOT_FOUND:
                raise
            return f"{machine} is gone already"
        return f"{machine} was terminated"

    # -- without one -------------------------------------------------------------------------------

    def _launch(self, old: Mapping[str, Any]) -> str:
        """Starts another instance from the template. Returns its id.

        Raises:
            NoCapacityError: there is none in any subnet.
            ReplaceError: no template is named.
        """
        config, machine = self._config, str(old["InstanceId"])
        if config.launch_template is None:
            raise ReplaceError(
                machine,
                "it is in no Auto Scaling group, and no launch template is named",
                "Set health.replace_nodes.launch_template",
            )
        refused = self._launch_somewhere(config.launch_template, machine)
        if isinstance(refused, str):
            return refused
        if not _FULL.isdisjoint(refused.values()) and not config.keep_for_inspection:
            self._terminate(machine)
        said = ", ".join(f"{subnet}: {code}" for subnet, code in refused.items())
        raise NoCapacityError(
            machine,
            f"no capacity for {config.launch_template} ({said})",
            "Add subnets of other zones to health.replace_nodes.subnets, capacity, or a quota",
        )

    def _launch_somewhere(self, template: str, machine: str) -> str | dict[str, str]:
        """The new instance's id, or why each subnet has none."""
        from botocore.exceptions import ClientError

        name = "LaunchTemplateId" if template.startswith("lt-") else "LaunchTemplateName"
        tags = [self._tag, {"Key": REPLACES_TAG, "Value": machine}]
        wanted = {
            "LaunchTemplate": {name: template, "Version": "$Default"},
            "MinCount": 1,
            "MaxCount": 1,
            "TagSpecifications": [{"ResourceType": "instance", "Tags": tags}],
        }
        ec2, refused = self._client("ec2"), {}
        interfaces = self._interfaces(name, template) if self._config.subnets else []
        for subnet in self._config.subnets or (None,):
            place = {} if subnet is None else plan_place(interfaces, subnet)
            try:
                (new,) = ec2.run_instances(**wanted, **place)["Instances"]
            except ClientError as error:
                code = error.response["Error"]["Code"]
                if code not in _NO_CAPACITY:
                    raise
                refused[subnet or "the template's subnet"] = code
            else:
                return str(new["InstanceId"])
        return refused

    def _interfaces(self, name: str, template: str) -> list[dict[str, Any]]:
        """Those of the template."""
        answer = self._client("ec2").describe_launch_template_versions(
            **{name: template, "Versions": ["$Default"]}
        )
        (version,) = answer["LaunchTemplateVersions"]
        return list(version["LaunchTemplateData"].get("NetworkInterfaces", ()))

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            import boto3
            from botocore.config import Config

            retries: Any = {"mode": "standard", "max_attempts": 5}
            settings = Config(connect_timeout=5, read_timeout=30, retries=retries)
            session = boto3.session.Session(region_name=self._config.region)
            self._clients[service] = session.client(service, config=settings)
        return self._clients[service]


def group_of(instance: Mapping[str, Any]) -> str | None:
    """The Auto Scaling group of an instance."""
    return tags_of(instance).get(_GROUP_TAG)


def tags_of(instance: Mapping[str, Any]) -> dict[str, str]:
    """The tags of an instance by their keys."""
    return {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}


def plan_place(interfaces: Sequence[Mapping[str, Any]], subnet: str) -> dict[str, Any]:
    """What puts an instance of a template into `subnet`. EC2 takes no subnet for an instance whose
    template has interfaces: each of them, EFA or not, gets it.

    Args:
        interfaces: those of the template, all of its cards.
        subnet: its id.
    """
    if not interfaces:
        return {"SubnetId": subnet}
    return {"NetworkInterfaces": [{**one, "SubnetId": subnet} for one in interfaces]}
