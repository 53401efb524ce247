"""What the cluster exports does not end a run at its first fault. Needs no GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer.backend import groups, nccl_settings
from trainer.backend.groups import leave_replica_group, make_replica_group
from trainer.backend.nccl_settings import AT_LEAST, NEEDED, settle
from trainer.backend.rendezvous import Rendezvous
from trainer.parallel.layout import ParallelDims


@pytest.fixture(autouse=True)
def nothing_told() -> Iterator[None]:
    nccl_settings._told.clear()
    yield
    nccl_settings._told.clear()


def test_an_empty_environment_gets_them_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    environment: dict[str, str] = {}
    settle(environment)
    settle(environment)
    assert environment == {**NEEDED, **{name: str(least) for name, least in AT_LEAST.items()}}
    assert caplog.records == []


@pytest.mark.parametrize("name", NEEDED)
def test_what_the_cluster_exports_is_overruled_and_said_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {name: "1", "NCCL_DEBUG": "INFO"}
    with caplog.at_level(logging.WARNING):
        settle(environment)
        settle({name: "1"})
    assert environment[name] == NEEDED[name] and environment["NCCL_DEBUG"] == "INFO"
    (record,) = caplog.records
    assert f"{name}=1 is set to {NEEDED[name]}" in record.message


@pytest.mark.parametrize(
    ("name", "there", "kept"),
    [
        ("TORCH_FR_BUFFER_SIZE", "20000", True),
        ("TORCH_FR_BUFFER_SIZE", "2000", True),
        ("TORCH_FR_BUFFER_SIZE", "0", False),
        ("TORCH_FR_BUFFER_SIZE", "many", False),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", True),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", False),
    ],
)
def test_more_may_be_asked_for_and_less_is_overruled(
    name: str, there: str, kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {name: there}
    settle(environment)
    assert environment[name] == (there if kept else str(AT_LEAST[name]))
    assert len(caplog.records) == (not kept)


def test_it_is_there_when_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reads its environment once, when the worker asks what its GPU is called."""
    at_start: dict[str, str] = {}
    for name in (*NEEDED, *AT_LEAST):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: at_start.update(os.environ))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert groups.device_name("cuda") == "a GPU"
    assert {name: at_start[name] for name in NEEDED} == NEEDED
    assert at_start["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_debugging_does_not_turn_the_handling_of_errors_on_again() -> None:
    """c10d takes its debugging of collectives out of step for a wish to end with an error."""
    environment = {"TORCH_NCCL_DESYNC_DEBUG": "1"}
    settle(environment)
    assert environment["TORCH_NCCL_DESYNC_DEBUG"] == "0"


@pytest.fixture
def debug_level() -> Iterator[None]:
    """Put back at the end, after what the test has set."""
    before = dist.get_debug_level()
    yield
    dist.set_debug_level(before)


@pytest.mark.parametrize(("asked", "told"), [("detail", True), ("DETAIL", True), ("INFO", False)])
@pytest.mark.usefixtures("debug_level")
def test_no_group_is_wrapped_in_one_that_hears_no_call(
    asked: str,
    told: bool,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", asked)
    dist.set_debug_level_from_env()  # as when torch is imported
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=60)
    with caplog.at_level(logging.WARNING):
        make_replica_group(meet, "replica", rank=0, dims=ParallelDims(), device="cpu")
    world: Any = dist.group.WORLD
    assert isinstance(world._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    assert dist.get_debug_level() == dist.DebugLevel.INFO
    assert os.environ["TORCH_DISTRIBUTED_DEBUG"] == "INFO"
    found = f"TORCH_DISTRIBUTED_DEBUG={asked} is set to INFO" in caplog.text
    assert found == told
    leave_replica_group()
