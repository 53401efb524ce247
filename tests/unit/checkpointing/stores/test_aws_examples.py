"""The policy allows exactly what the code asks for, and both files are what AWS takes."""

from __future__ import annotations

import ast
import json
from typing import Any

import boto3

from elastic.providers.ec2_nodes import KEPT_TAG
from tests.support import ROOT
from tests.support.fakes.s3_server import BUCKET

AWS = ROOT / "examples" / "aws"

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-with-s3-policy-actions.html
NEEDS = {
    "head_bucket": "s3:ListBucket",
    "list_objects_v2": "s3:ListBucket",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "put_object": "s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "complete_multipart_upload": "s3:PutObject",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "delete_object": "s3:DeleteObject",
    "delete_objects": "s3:DeleteObject",
}
KMS = {"kms:GenerateDataKey", "kms:Decrypt"}  # for multipart uploads and reads under SSE-KMS


def operations() -> set[str]:
    """Names of operations of boto3's S3 client among the strings in the code."""
    known = set(boto3.client("s3", region_name="us-east-1").meta.method_to_api_mapping)
    files = (ROOT / "checkpointing" / "stores").rglob("*.py")
    strings = {
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return strings & known


def policy() -> list[dict[str, Any]]:
    statements: list[dict[str, Any]]
    statements = json.loads((AWS / "iam-policy.json").read_text())["Statement"]
    return statements


def test_the_policy_names_the_actions_that_the_code_calls() -> None:
    assert operations() == set(NEEDS)
    allowed = {action for statement in policy() for action in statement["Action"]}
    assert allowed == set(NEEDS.values()) | KMS


def test_the_policy_is_narrow() -> None:
    for statement in policy():
        assert statement["Effect"] == "Allow"
        assert statement["Resource"] not in ("*", "arn:aws:s3:::*")
        about_objects = statement["Resource"].endswith("BUCKET/PREFIX/*")
        assert about_objects or "Condition" in statement


def test_s3_takes_the_lifecycle(s3_endpoint: str) -> None:
    client = boto3.client("s3", endpoint_url=s3_endpoint)
    rules = json.loads((AWS / "lifecycle.json").read_text())
    client.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration=rules)
    taken = client.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"]
    assert {rule["ID"] for rule in taken} == {rule["ID"] for rule in rules["Rules"]}
    assert [r["AbortIncompleteMultipartUpload"] for r in taken if "Abort" in str(r)] == [
        {"DaysAfterInitiation": 1}
    ]


def test_an_instance_that_is_there_gets_no_tag_but_ours() -> None:
    """Others decide by tags, too, who may do what to it."""
    text = (AWS / "replace-instances-policy.json").read_text()
    tags = [one for one in json.loads(text)["Statement"] if "ec2:CreateTags" in one["Action"]]
    of_new = [one for one in tags if "ec2:CreateAction" in one["Condition"]["StringEquals"]]
    (of_others,) = [one for one in tags if one not in of_new]
    assert of_others["Action"] == "ec2:CreateTags"
    assert of_others["Condition"] == {
        "StringEquals": {"aws:ResourceTag/KEY": "VALUE"},
        "ForAllValues:StringEquals": {"aws:TagKeys": [KEPT_TAG]},
    }


def test_what_may_be_started_is_the_templates_and_has_the_tag() -> None:
    """An instance of any type, image or tag could be started otherwise, by whoever has the role."""
    text = (AWS / "replace-instances-policy.json").read_text()
    starts = [one for one in json.loads(text)["Statement"] if one["Action"] == "ec2:RunInstances"]
    assert all("launch-template/TEMPLATE" in str(one["Condition"]["ArnLike"]) for one in starts)
    instance = "arn:aws:ec2:REGION:ACCOUNT:instance/*"
    (of_instances,) = [one for one in starts if one.get("Resource") == instance]
    assert of_instances["Condition"]["StringEquals"] == {
        "aws:RequestTag/KEY": "VALUE",
        "ec2:InstanceType": "TYPE",
    }
    (of_template,) = [one for one in starts if "NotResource" in one]
    assert of_template["Condition"]["Bool"] == {"ec2:IsLaunchTemplateResource": "true"}
    (placed,) = [one for one in starts if isinstance(one.get("Resource"), list)]
    assert {*of_template["NotResource"]} == {instance, *placed["Resource"]}
