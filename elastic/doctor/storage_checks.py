"""Checks of where runs write, which do what a run does there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from elastic.doctor.bounded import Outcome, Program, run_programs
from elastic.doctor.finding import Finding
from elastic.doctor.machine import Machine
from health.digits import three_digits

_BOUND_S = 90.0

LEAST_DISK_BYTES_PER_S = 50e6
LEAST_STORE_BYTES_PER_S = 20e6
"""Below, a save takes minutes. Both invented."""

RIGHTS = {
    "put": "s3:PutObject",
    "put in parts": "s3:PutObject, s3:AbortMultipartUpload",
    "put if absent": "s3:PutObject, and a server that honours If-None-Match",
    "get": "s3:GetObject",
    "get a range": "s3:GetObject",
    "list": "s3:ListBucket",
    "list unfinished uploads": "s3:ListBucketMultipartUploads",
    "delete": "s3:DeleteObject",
}
"""What a run does -> what it needs on S3."""


def check_folders(machine: Machine) -> Finding:
    """How fast the folders are where runs write."""
    module = "elastic.doctor.loads.disk"
    programs = [Program(module=module, arguments=(str(one),)) for one in machine.folders]
    outcomes = run_programs(programs, _BOUND_S)
    return judge_folders(dict(zip(map(str, machine.folders), outcomes, strict=True)))


def judge_folders(outcomes: Mapping[str, Outcome]) -> Finding:
    """As `check_folders`. `outcomes`: folder -> what `loads/disk.py` found."""
    check = "disk speed"
    if silent := {folder: one for folder, one in outcomes.items() if one.trouble}:
        return Finding(
            check=check,
            result="; ".join(f"{folder}: {one.trouble}" for folder, one in silent.items()),
            severity="RESET",
            meaning="a save there fails, or hangs",
            fix="Look at the mount (mount, df -h), its rights, and the server behind it",
        )
    if wrong := [folder for folder, one in outcomes.items() if one.found["wrong"]]:
        return Finding(
            check=check,
            result=f"{', '.join(wrong)}: what was read is not what was written",
            severity="ISOLATE",
            meaning="checkpoints are damaged there",
            fix="Replace the disk, or the machine",
        )
    result = ", ".join(f"{folder}: {_show_speed(one)}" for folder, one in outcomes.items())
    if all(one.found["write"] >= LEAST_DISK_BYTES_PER_S for one in outcomes.values()):
        return Finding(check=check, result=result)
    return Finding(
        check=check,
        result=result,
        severity="MONITOR",
        meaning="saves take long there",
        fix="Put storage_path on a faster disk, or checkpoints on S3 (CheckpointConfig.store)",
    )


def check_store(url: str, _machine: Machine) -> Finding:
    """Rights and speed of a store."""
    program = Program(module="elastic.doctor.loads.store", arguments=(url,))
    return judge_store(url, *run_programs([program], _BOUND_S))


def judge_store(url: str, outcome: Outcome) -> Finding:
    """As `check_store`, of what `loads/store.py` found."""
    check = f"store {url}"
    if outcome.trouble:
        return Finding(
            check=check,
            result=outcome.trouble,
            severity="RESET",
            meaning="no checkpoint is written there",
            fix="Look at the URL, the credentials (aws sts get-caller-identity), the region and "
            "the way there: a VPC endpoint, or NAT",
        )
    failed: Mapping[str, str] = outcome.found["failed"]
    if failed:
        needs = dict.fromkeys(RIGHTS[name] for name in failed)
        return Finding(
            check=check,
            result="; ".join(f"{name}: {why}" for name, why in failed.items()),
            severity="RESET",
            meaning="runs fail there, or leave behind what they cannot delete",
            fix=f"Allow {'; '.join(needs)} below the prefix",
        )
    result = f"all rights, {_show_speed(outcome)}"
    if min(outcome.found["write"], outcome.found["read"]) >= LEAST_STORE_BYTES_PER_S:
        return Finding(check=check, result=result)
    return Finding(
        check=check,
        result=result,
        severity="MONITOR",
        meaning="saves and restores take long",
        fix="Use a bucket of this region, by a gateway endpoint of the VPC",
    )


def _show_speed(outcome: Outcome) -> str:
    write, read = (three_digits(outcome.found[what] / 1e6) for what in ("write", "read"))
    return f"write {write}, read {read} MB/s"


def store_checks(urls: tuple[str, ...]) -> dict[str, Callable[[Machine], Finding]]:
    """A check for each of the stores that are no directories."""
    return {f"store {url}": partial(check_store, url) for url in urls}
