"""EC2 and Auto Scaling on this machine (moto, over real HTTP), which can run out of capacity.

with ec2_server() as cloud:
    cloud.refuse[SUBNET] = "InsufficientInstanceCapacity"   # RunInstances there, until removed
"""

from __future__ import annotations

import http.client
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit
from urllib.request import Request, urlopen

import boto3
import pytest
from moto.server import ThreadedMotoServer

from elastic.providers.ec2_nodes import REPLACES_TAG
from tests.support.fakes.s3_server import CREDENTIALS

_NEVER = "i-00000000000000000"
"""Of an instance that there never was."""

TAG = {"Key": "cluster", "Value": "llama"}


class Cloud:
    """What a test asks and sets. `boto3` finds the server by its environment; what the test itself
    asks goes past it to moto, and is not noted.

    Args:
        moto: its address.
    """

    def __init__(self, moto: str) -> None:
        self.refuse: dict[str, str] = {}
        """Subnet, or "" for requests without one -> error code of RunInstances there."""
        self.forgotten: set[str] = set()
        """Instances that have ended so long ago that EC2 knows nothing of them any more."""
        self.unanswered: set[str] = set()
        """Actions that are carried out, and whose answers are lost: the line breaks."""
        self.failing: dict[str, tuple[int, str]] = {}
        """Action -> HTTP status and error code that it gets, and is not carried out."""
        self.launches: list[dict[str, str]] = []
        """The parameters of every RunInstances, as they came."""
        self.reboots: list[str] = []
        """The instance of every RebootInstances."""
        self.calls: set[str] = set()
        """What was asked for, as policies have it: "ec2:RunInstances"."""
        self.ec2: Any = boto3.client("ec2", endpoint_url=moto)
        self.scaling: Any = boto3.client("autoscaling", endpoint_url=moto)
        (self.image, *_) = (one["ImageId"] for one in self.ec2.describe_images()["Images"])
        self.subnets: list[str] = [
            one["SubnetId"] for one in self.ec2.describe_subnets()["Subnets"]
        ]

    def template(self, name: str, **data: Any) -> str:
        """A launch template. Returns its id."""
        settings = {"ImageId": self.image, "InstanceType": "p5.48xlarge", **data}
        made = self.ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=settings)
        return str(made["LaunchTemplate"]["LaunchTemplateId"])

    def instance(self, *, tagged: bool = True) -> dict[str, Any]:
        """An instance in no group."""
        tags = [{"ResourceType": "instance", "Tags": [TAG]}] if tagged else []
        made = self.ec2.run_instances(
            ImageId=self.image, MinCount=1, MaxCount=1, TagSpecifications=tags
        )
        found: dict[str, Any] = made["Instances"][0]
        return found

    def group(self, name: str, size: int) -> list[str]:
        """An Auto Scaling group. Returns its instances."""
        template = self.template(f"{name}-template")
        self.scaling.create_auto_scaling_group(
            AutoScalingGroupName=name,
            LaunchTemplate={"LaunchTemplateId": template},
            MinSize=0,
            MaxSize=size,
            DesiredCapacity=size,
            VPCZoneIdentifier=self.subnets[0],
            Tags=[{**TAG, "PropagateAtLaunch": True}],
        )
        return self.members(name)

    def members(self, group: str) -> list[str]:
        """The instances of a group."""
        (found,) = self.scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[group])[
            "AutoScalingGroups"
        ]
        return [one["InstanceId"] for one in found["Instances"]]

    def look(self, instance: str) -> dict[str, Any]:
        """An instance as EC2 describes it."""
        (batch,) = self.ec2.describe_instances(InstanceIds=[instance])["Reservations"]
        found: dict[str, Any] = batch["Instances"][0]
        return found

    def successors(self, instance: str) -> list[dict[str, Any]]:
        """The instances that have the tag that they replace it."""
        found = self.ec2.describe_instances(
            Filters=[{"Name": f"tag:{REPLACES_TAG}", "Values": [instance]}]
        )
        return [one for batch in found["Reservations"] for one in batch["Instances"]]

    def state(self, instance: str) -> str:
        """Its state."""
        return str(self.look(instance)["State"]["Name"])


@contextmanager
def ec2_server() -> Iterator[Cloud]:
    """Runs the servers and sets credentials and endpoint."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as proxy,
        pytest.MonkeyPatch.context() as patch,
    ):
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
        try:
            proxy.upstream = f"{host}:{port}"  # type: ignore[attr-defined]
            proxy.cloud = cloud = Cloud(f"http://{host}:{port}")  # type: ignore[attr-defined]
            yield cloud
        finally:
            proxy.shutdown()
            thread.join()
            # What it holds belongs to the process, not to the server.
            reset = Request(f"http://{host}:{port}/moto-api/reset", method="POST")
            urlopen(reset, timeout=10).close()
            moto.stop()


class _Handler(BaseHTTPRequestHandler):
    """Passes requests on, but for those that are refused."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for instance in server.cloud.forgotten:
            body = body.replace(instance.encode(), _NEVER.encode())
        asked = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        server.cloud.calls.add(f"{_service(self.headers['Authorization'])}:{asked['Action']}")
        if asked["Action"] in server.cloud.failing:
            return self._refuse(*server.cloud.failing[asked["Action"]])
        if asked["Action"] == "RunInstances":
            server.cloud.launches.append(asked)
            subnet = asked.get("SubnetId") or asked.get("NetworkInterface.1.SubnetId", "")
            if subnet in server.cloud.refuse:
                return self._refuse(400, server.cloud.refuse[subnet])
        if asked["Action"] == "RebootInstances":
            server.cloud.reboots.append(asked["InstanceId.1"])
        upstream = http.client.HTTPConnection(server.upstream, timeout=60)
        headers = {**self.headers, "Content-Length": str(len(body))}
        upstream.request("POST", urlsplit(self.path).path, body, headers)
        answer = upstream.getresponse()
        told = answer.read()
        upstream.close()
        if asked["Action"] in server.cloud.unanswered:
            self.close_connection = True
            return
        self._send(answer.status, told)

    def _refuse(self, status: int, code: str) -> None:
        """As EC2 says it, or Auto Scaling."""
        error = f"<Error><Code>{code}</Code><Message>injected</Message></Error>"
        if _service(self.headers["Authorization"]) == "ec2":
            error = f"<Errors>{error}</Errors>"
        self._send(status, f"<Response>{error}</Response>".encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """What is asked is noted in `calls` and `launches`."""


def _service(authorization: str) -> str:
    """That a request is signed for: "... Credential=KEY/DATE/REGION/SERVICE/aws4_request, ..."."""
    _, _, credential = authorization.partition("Credential=")
    return credential.split("/")[3]
