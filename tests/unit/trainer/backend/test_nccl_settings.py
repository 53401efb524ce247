"""What the cluster exports does not end a run at its first fault. Needs no GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from trainer.backend import nccl_settings
from trainer.backend.nccl_settings import AT_LEAST, NEEDED, settle


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
    ("there", "kept"), [("20000", True), ("2000", True), ("0", False), ("many", False)]
)
def test_the_flight_recorder_may_remember_more(there: str, kept: bool) -> None:
    environment = {"TORCH_FR_BUFFER_SIZE": there}
    settle(environment)
    assert environment["TORCH_FR_BUFFER_SIZE"] == (there if kept else "2000")
