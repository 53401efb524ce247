"""Instances that are replaced, against moto's EC2 and Auto Scaling over HTTP."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from botocore.retries.standard import ExponentialBackoff

import elastic.providers.ec2_nodes
from elastic.errors import NoCapacityError, ProviderAwayError, ReplaceError
from elastic.node_config import Ec2Nodes
from elastic.providers.ec2_nodes import KEPT_TAG, REPLACES_TAG, Ec2Provider, plan_place
from elastic.providers.node_provider import NodeIdentity
from tests.support import ROOT
from tests.support.fakes.ec2_server import TAG, Cloud, ec2_server

NO_CAPACITY = "InsufficientInstanceCapacity"
REASON = "its state was not that of the others"
_POLICY_FILE = ROOT / "examples" / "aws" / "replace-instances-policy.json"
POLICY: list[dict[str, Any]] = json.loads(_POLICY_FILE.read_text())["Statement"]


@pytest.fixture(scope="module")
def server() -> Iterator[Cloud]:
    with ec2_server() as cloud:
        yield cloud


@pytest.fixture
def cloud(server: Cloud) -> Cloud:
    server.refuse.clear()
    server.forgotten.clear()
    server.launches.clear()
    server.reboots.clear()
    server.unanswered.clear()
    server.failing.clear()
    server.calls.clear()
    return server


@pytest.fixture
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3 makes its tries without waiting."""
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.0)


def provider(**settings: Any) -> Ec2Provider:
    config = Ec2Nodes(tag="cluster=llama", **settings)
    config.check()
    return Ec2Provider(config)


def node(address: str = "10.0.0.9", instance: str = "") -> NodeIdentity:
    return NodeIdentity(node="ab12", address=address, instance=instance)


def tags(instance: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}


def test_an_instance_is_found_by_its_address_and_the_clusters_tag(cloud: Cloud) -> None:
    ours, other = cloud.instance(), cloud.instance(tagged=False)
    assert provider().machine_of(node(ours["PrivateIpAddress"])) == ours["InstanceId"]
    with pytest.raises(ReplaceError, match="0 instances with the tag cluster=llama"):
        provider().machine_of(node(other["PrivateIpAddress"]))
    assert provider().machine_of(node(instance="i-0123")) == "i-0123", "Ray was told"


def test_one_without_the_tag_is_left_alone(cloud: Cloud) -> None:
    cloud.template("wrong-tag")
    other = cloud.instance(tagged=False)["InstanceId"]
    for settings in ({}, {"launch_template": "wrong-tag"}, {"keep_for_inspection": True}):
        with pytest.raises(ReplaceError, match="tag cluster=llama, and it is left alone") as caught:
            provider(**settings).replace([node()], other, REASON)
        assert REASON in str(caught.value)
    assert cloud.state(other) == "running" and not tags(cloud.look(other))
    assert not cloud.launches


def test_one_is_rebooted_where_its_image_starts_ray_and_it_has_the_tag(cloud: Cloud) -> None:
    ours, other = cloud.instance()["InstanceId"], cloud.instance(tagged=False)["InstanceId"]
    assert provider().reboot([node()], ours, REASON) is None, "it would not come back"
    assert provider(reboot=True).reboot([node()], ours, REASON) == "it was rebooted"
    assert cloud.reboots == [ours] and cloud.state(ours) == "running"
    with pytest.raises(ReplaceError, match="tag cluster=llama, and it is left alone"):
        provider(reboot=True).reboot([node()], other, REASON)
    assert cloud.reboots == [ours]


@pytest.mark.usefixtures("_no_pauses")
def test_a_reboot_whose_answer_is_lost_counts_as_asked_for(
    cloud: Cloud,
) -> None:
    ours = cloud.instance()["InstanceId"]
    cloud.unanswered.add("RebootInstances")
    said = provider(reboot=True).reboot([node()], ours, REASON)
    assert said == "EC2 was asked to reboot it, and its answer was lost (ConnectionClosedError)"
    assert set(cloud.reboots) == {ours}


def test_a_group_replaces_its_instance_at_the_same_size(cloud: Cloud) -> None:
    bad, good = cloud.group("workers", 2)
    said = provider().replace([node()], bad, REASON)
    assert said == "it was terminated; its group workers starts another"
    after = cloud.members("workers")
    assert len(after) == 2 and good in after and bad not in after
    assert cloud.state(bad) == "terminated"
    # Unlike moto, EC2 leaves it the name of its group.
    named = [{"Key": "aws:autoscaling:groupName", "Value": "workers"}]
    cloud.ec2.create_tags(Resources=[bad], Tags=named)
    again = provider().replace([node()], bad, REASON)
    assert again == "it has ended already; its group starts another"
    assert cloud.members("workers") == after


def test_one_that_is_kept_leaves_its_group_and_runs_on(cloud: Cloud) -> None:
    bad, good = cloud.group("keepers", 2)
    provider(keep_for_inspection=True).replace([node()], bad, REASON)
    after = cloud.members("keepers")
    assert len(after) == 2 and good in after and bad not in after
    assert cloud.state(bad) == "running" and tags(cloud.look(bad))[KEPT_TAG] == REASON


def test_one_that_is_kept_already_is_not_replaced_a_second_time(cloud: Cloud) -> None:
    """As by a coordinator that was started anew: it is in no group any more, which looks as if the
    template were to start another."""
    cloud.template("beside-a-group")
    bad, _ = cloud.group("kept-once", 2)
    keeping = provider(keep_for_inspection=True, launch_template="beside-a-group")
    keeping.replace([node()], bad, REASON)
    after = cloud.members("kept-once")
    said = keeping.replace([node()], bad, REASON)
    assert said == f"its group starts another; {bad} is kept, with the tag {KEPT_TAG}"
    assert cloud.members("kept-once") == after and not cloud.launches


def test_without_capacity_the_next_zone_is_asked_with_all_interfaces(cloud: Cloud) -> None:
    cards = [
        {"DeviceIndex": int(card > 0), "NetworkCardIndex": card, "InterfaceType": "efa"}
        for card in range(4)
    ]
    cloud.template("with-efa", NetworkInterfaces=cards)
    bad = cloud.instance()["InstanceId"]
    first, second, third = cloud.subnets[:3]
    cloud.refuse.update({first: NO_CAPACITY, third: NO_CAPACITY})
    replaced = provider(launch_template="with-efa", subnets=(first, second, third))
    said = replaced.replace([node()], bad, REASON)
    assert [one["NetworkInterface.1.SubnetId"] for one in cloud.launches] == [first, second]
    asked = cloud.launches[-1]
    for card in range(4):
        interface = f"NetworkInterface.{card + 1}"
        assert asked[f"{interface}.NetworkCardIndex"] == str(card)
        assert asked[f"{interface}.InterfaceType"] == "efa"
        assert asked[f"{interface}.SubnetId"] == second
    (new,) = cloud.successors(bad)
    assert said == f"instance {new['InstanceId']} was started; {bad} was terminated"
    assert tags(new).items() >= {TAG["Key"]: TAG["Value"], REPLACES_TAG: bad}.items()
    assert new["SubnetId"] == second and cloud.state(bad) == "terminated"


def test_without_capacity_anywhere_the_old_one_stays_until_there_is(cloud: Cloud) -> None:
    cloud.template("scarce")
    bad = cloud.instance()["InstanceId"]
    first, second = cloud.subnets[:2]
    cloud.refuse.update({first: NO_CAPACITY, second: "Unsupported"})
    replacing = provider(launch_template="scarce", subnets=(first, second))
    with pytest.raises(NoCapacityError) as caught:
        replacing.replace([node()], bad, REASON)
    told = f"no capacity for scarce ({first}: {NO_CAPACITY}, {second}: Unsupported)"
    assert told in str(caught.value)
    assert cloud.state(bad) == "running"
    cloud.refuse.clear()
    replacing.replace([node()], bad, REASON)
    assert cloud.state(bad) == "terminated"
    assert [one["SubnetId"] for one in cloud.launches] == [first, second, first]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    "code",
    [
        "ReservationCapacityExceeded",
        "VcpuLimitExceeded",
        "InstanceLimitExceeded",
        "MaxSpotInstanceCountExceeded",
    ],
)
def test_a_full_reservation_or_quota_gets_the_old_ones_place(
    cloud: Cloud, code: str, keep: bool
) -> None:
    """But not the place of one that is to be looked at."""
    cloud.template(f"{code}-{keep}")
    bad = cloud.instance()["InstanceId"]
    cloud.refuse[""] = code
    replacing = provider(launch_template=f"{code}-{keep}", keep_for_inspection=keep)
    with pytest.raises(NoCapacityError):
        replacing.replace([node()], bad, REASON)
    assert cloud.state(bad) == ("running" if keep else "terminated")
    cloud.refuse.clear()
    replacing.replace([node()], bad, REASON)
    assert len(cloud.launches) == 2


@pytest.mark.parametrize("grouped", [False, True])
def test_one_that_has_ended_is_known_without_its_tags(cloud: Cloud, grouped: bool) -> None:
    """EC2 takes them from it by and by, before it forgets it."""
    template = f"untagged-{grouped}"
    cloud.template(template)
    bad = cloud.group("untagged", 1)[0] if grouped else cloud.instance()["InstanceId"]
    replacing = provider(launch_template=template)
    cloud.refuse[""] = "ReservationCapacityExceeded"
    if grouped:
        replacing.replace([node()], bad, REASON)
    else:
        with pytest.raises(NoCapacityError):
            replacing.replace([node()], bad, REASON)
    cloud.ec2.delete_tags(Resources=[bad], Tags=[TAG])
    assert cloud.state(bad) == "terminated" and TAG["Key"] not in tags(cloud.look(bad))
    cloud.refuse.clear()
    said = replacing.replace([node()], bad, REASON)
    assert said.endswith("its group starts another" if grouped else f"{bad} was terminated")
    assert len(cloud.launches) == (0 if grouped else 2)


def test_one_that_ec2_has_forgotten_counts_as_terminated(cloud: Cloud) -> None:
    """As where its reservation's place was lost to another, and comes back an hour later."""
    cloud.template("lost")
    bad = cloud.instance()["InstanceId"]
    cloud.refuse[""] = "ReservationCapacityExceeded"
    replacing = provider(launch_template="lost")
    with pytest.raises(NoCapacityError):
        replacing.replace([node()], bad, REASON)
    cloud.forgotten.add(bad)
    with pytest.raises(NoCapacityError):
        replacing.replace([node()], bad, REASON)
    cloud.refuse.clear()
    said = replacing.replace([node()], bad, REASON)
    assert said.startswith("instance i-") and said.endswith(f"was started; {bad} is gone already")
    assert len(cloud.launches) == 3


@pytest.mark.usefixtures("_no_pauses")
@pytest.mark.parametrize("lost", ["DescribeInstances", "RunInstances", "TerminateInstances"])
def test_where_an_answer_is_lost_the_next_call_goes_on(cloud: Cloud, lost: str) -> None:
    cloud.template(f"goes-on-{lost}")
    bad = cloud.instance()["InstanceId"]
    replacing = provider(launch_template=f"goes-on-{lost}")
    cloud.unanswered.add(lost)
    with pytest.raises(ProviderAwayError, match="EC2: ConnectionClosedError"):
        replacing.replace([node()], bad, REASON)
    cloud.unanswered.clear()
    said = replacing.replace([node()], bad, REASON)
    assert said.endswith(f"was started; {bad} was terminated") and cloud.state(bad) == "terminated"
    tokens = {one["ClientToken"] for one in cloud.launches}
    assert len(tokens) == 1, "by which EC2, unlike moto, knows one launch that is asked for again"


@pytest.mark.usefixtures("_no_pauses")
@pytest.mark.parametrize(
    ("action", "status", "code"),
    [
        ("DescribeInstances", 503, "RequestLimitExceeded"),
        ("RunInstances", 500, "InternalError"),
        ("TerminateInstances", 400, "Throttling"),
        ("TerminateInstances", 429, "SomethingNew"),
    ],
)
def test_a_call_that_is_not_served_now_is_asked_for_again(
    cloud: Cloud, action: str, status: int, code: str
) -> None:
    cloud.template(f"busy-{code}")
    bad = cloud.instance()["InstanceId"]
    replacing = provider(launch_template=f"busy-{code}")
    cloud.failing[action] = status, code
    with pytest.raises(ProviderAwayError, match=code):
        replacing.replace([node()], bad, REASON)
    assert cloud.state(bad) == "running"
    cloud.failing.clear()
    replacing.replace([node()], bad, REASON)
    assert cloud.state(bad) == "terminated" and len(cloud.successors(bad)) == 1


@pytest.mark.usefixtures("_no_pauses")
@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "RequestLimitExceeded"), (400, "Throttling"), (429, "SomethingNew")],
)
def test_so_is_a_reboot_that_is_not_served_now(cloud: Cloud, status: int, code: str) -> None:
    ours = cloud.instance()["InstanceId"]
    rebooting = provider(reboot=True)
    cloud.failing["RebootInstances"] = status, code
    with pytest.raises(ProviderAwayError, match=code):
        rebooting.reboot([node()], ours, REASON)
    cloud.failing["RebootInstances"] = 403, "UnauthorizedOperation"
    with pytest.raises(ClientError, match="UnauthorizedOperation"):
        rebooting.reboot([node()], ours, REASON)
    assert cloud.reboots == []
    cloud.failing.clear()
    assert rebooting.reboot([node()], ours, REASON) == "it was rebooted"


@pytest.mark.usefixtures("_no_pauses")
def test_so_is_one_that_cannot_be_sent(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """EC2 is gone once it has said whose the instance is."""
    ours = cloud.instance()["InstanceId"]
    rebooting = provider(reboot=True)
    own = rebooting._own

    def own_and_gone(machine: str, reason: str) -> dict[str, Any]:
        found = own(machine, reason)
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        rebooting._clients.clear()
        return found

    monkeypatch.setattr(rebooting, "_own", own_and_gone)
    with pytest.raises(ProviderAwayError, match="EC2: EndpointConnectionError"):
        rebooting.reboot([node()], ours, REASON)
    assert cloud.reboots == []


@pytest.mark.usefixtures("_no_pauses")
@pytest.mark.parametrize("code", ["ScalingActivityInProgress", "ResourceContention"])
@pytest.mark.parametrize(
    ("action", "keep"),
    [("TerminateInstanceInAutoScalingGroup", False), ("DetachInstances", True)],
)
def test_a_group_that_is_busy_is_asked_again(
    cloud: Cloud, code: str, action: str, keep: bool
) -> None:
    bad, good = cloud.group(f"busy-{code}-{keep}", 2)
    replacing = provider(keep_for_inspection=keep)
    cloud.failing[action] = 400, code
    with pytest.raises(ProviderAwayError, match=code):
        replacing.replace([node()], bad, REASON)
    assert bad in cloud.members(f"busy-{code}-{keep}")
    cloud.failing.clear()
    replacing.replace([node()], bad, REASON)
    after = cloud.members(f"busy-{code}-{keep}")
    assert len(after) == 2 and good in after and bad not in after


@pytest.mark.usefixtures("_no_pauses")
def test_where_nobody_listens_it_is_asked_again(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = cloud.instance()["InstanceId"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(ProviderAwayError, match="EC2: EndpointConnectionError"):
        provider().replace([node()], bad, REASON)
    with pytest.raises(ProviderAwayError, match="EC2: EndpointConnectionError"):
        provider(reboot=True).reboot([node()], bad, REASON)


def test_what_was_started_before_is_not_started_again(cloud: Cloud) -> None:
    cloud.template("once")
    bad = cloud.instance()["InstanceId"]
    keeping = provider(launch_template="once", keep_for_inspection=True)
    first = keeping.replace([node()], bad, REASON)
    assert keeping.replace([node()], bad, REASON) == first and len(cloud.launches) == 1


def test_another_error_of_a_launch_is_none_of_capacity(cloud: Cloud) -> None:
    cloud.template("forbidden")
    bad = cloud.instance()["InstanceId"]
    cloud.refuse[""] = "UnauthorizedOperation"
    with pytest.raises(Exception, match="UnauthorizedOperation") as caught:
        provider(launch_template="forbidden").replace([node()], bad, REASON)
    assert not isinstance(caught.value, ReplaceError) and len(cloud.launches) == 1
    assert cloud.state(bad) == "running"


def test_without_group_and_template_it_says_what_is_missing(cloud: Cloud) -> None:
    bad = cloud.instance()["InstanceId"]
    with pytest.raises(ReplaceError, match=r"Set health\.replace_nodes\.launch_template"):
        provider().replace([node()], bad, REASON)
    assert cloud.state(bad) == "running"
    cloud.ec2.terminate_instances(InstanceIds=[bad])  # as where EC2 takes back a spot instance
    with pytest.raises(ReplaceError, match=r"Set health\.replace_nodes\.launch_template"):
        provider().replace([node()], bad, REASON)


def test_each_interface_gets_the_subnet() -> None:
    cards: list[dict[str, Any]] = [
        {"NetworkCardIndex": 0},
        {"NetworkCardIndex": 1, "InterfaceType": "efa-only"},
    ]
    place = plan_place(cards, "subnet-1")
    assert place == {"NetworkInterfaces": [{**card, "SubnetId": "subnet-1"} for card in cards]}
    assert plan_place([], "subnet-1") == {"SubnetId": "subnet-1"}


def test_the_policy_allows_what_is_called_and_nothing_else(cloud: Cloud) -> None:
    ours = cloud.instance()
    assert provider().machine_of(node(ours["PrivateIpAddress"])) == ours["InstanceId"]
    provider(reboot=True).reboot([node()], ours["InstanceId"], REASON)
    cloud.template("allowed")
    started = provider(launch_template="allowed", subnets=(cloud.subnets[0],))
    started.replace([node()], ours["InstanceId"], REASON)
    ended, kept = cloud.group("allowed-group", 2)
    provider().replace([node()], ended, REASON)
    provider(keep_for_inspection=True).replace([node()], kept, REASON)

    assert {call.partition(":")[2] for call in cloud.calls} == operations(cloud), "all were tried"
    allowed = {action for one in POLICY for action in as_list(one["Action"])}
    assert allowed == cloud.calls | {"iam:PassRole"}  # EC2 asks for that where the template has one


def test_each_right_of_the_policy_is_bound() -> None:
    """By the cluster's tag, or by the template; what a launch names itself by the tag and the type,
    or by the VPC."""
    bounds = {
        one["Sid"]: {k for keys in one.get("Condition", {}).values() for k in keys}
        for one in POLICY
    }
    assert bounds == {
        "Look": set(),
        "ReplaceInTheGroupsOfTheCluster": {"aws:ResourceTag/KEY"},
        "LetGoOfInstancesOfTheCluster": {"aws:ResourceTag/KEY"},
        "MarkWhatIsKept": {"aws:ResourceTag/KEY", "aws:TagKeys"},
        "StartFromTemplate": {"ec2:LaunchTemplate", "aws:RequestTag/KEY", "ec2:InstanceType"},
        "WithWhatTheTemplateNames": {"ec2:LaunchTemplate", "ec2:IsLaunchTemplateResource"},
        "InAnotherSubnet": {"ec2:LaunchTemplate", "ec2:Vpc"},
        "TagWhatIsStarted": {"ec2:CreateAction", "aws:RequestTag/KEY"},
        "GiveInstancesTheirRole": {"iam:PassedToService"},
    }
    assert [one["Sid"] for one in POLICY if one.get("Resource") == "*"] == ["Look"]
    launches = [one for one in POLICY if one["Action"] == "ec2:RunInstances"]
    named = {each for one in launches for each in as_list(one.get("Resource", []))}
    (excepted,) = (one["NotResource"] for one in launches if "NotResource" in one)
    assert set(excepted) == named


def as_list(one: str | list[str]) -> list[str]:
    """A policy may leave out the brackets of a single one."""
    return [one] if isinstance(one, str) else one


def operations(cloud: Cloud) -> set[str]:
    """Those of EC2 and Auto Scaling that the code has calls of."""
    known = cloud.ec2.meta.method_to_api_mapping | cloud.scaling.meta.method_to_api_mapping
    tree = ast.parse(Path(elastic.providers.ec2_nodes.__file__).read_text())
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {known[name] for name in called & known.keys()}
