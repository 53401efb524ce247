"""A worker whose device fails for good before it has a place says so, and exits."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.protocol.causes import GPU_ERROR, GPU_MEMORY, Cause
from elastic.worker import worker as module
from elastic.worker.worker import OWN_FAULT_EXIT_CODE, Worker


class EndedError(Exception):
    """The process would have ended."""


def rehearsing() -> tuple[Any, list[Any]]:
    """A worker that compiles, and what it tells the coordinator."""
    told: list[Any] = []

    def trouble(step: int | None, detail: str, cause: Cause) -> bool:
        told.append((step, detail.splitlines()[-1], cause))
        return False

    worker = object.__new__(Worker)
    worker.job = SimpleNamespace(  # type: ignore[assignment]
        task=None,
        train=SimpleNamespace(compile="on"),
        scaling=SimpleNamespace(device="cpu", max_replicas=2),
        lanes=1,
    )
    worker.identity = SimpleNamespace(worker="w0")  # type: ignore[assignment]
    worker.link = SimpleNamespace(  # type: ignore[assignment]
        at_step=lambda step, phase: None, mark=lambda step, phase: None, trouble=trouble
    )
    worker.progress = None
    return worker, told


def of_cuda(code: int) -> torch.AcceleratorError:
    """As torch raises it."""
    error = torch.AcceleratorError("CUDA error")
    error.error_code = code  # type: ignore[attr-defined, unused-ignore]
    return error


@pytest.mark.parametrize(("code", "cause"), [(700, GPU_ERROR), (214, GPU_MEMORY)])
def test_a_device_s_lasting_error_has_its_cause(
    code: int, cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise of_cuda(code)

    def end(status: int) -> None:
        assert status == OWN_FAULT_EXIT_CODE
        raise EndedError

    monkeypatch.setattr(module, "rehearse", fail)
    monkeypatch.setattr(os, "_exit", end)
    worker, told = rehearsing()
    with pytest.raises(EndedError):
        worker.rehearse()
    ((step, detail, told_cause),) = told
    assert (step, told_cause) == (None, cause) and "AcceleratorError: CUDA error" in detail


@pytest.mark.parametrize("error", [ValueError("a mistake"), of_cuda(2), MemoryError()])
def test_what_may_pass_is_raised(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends with it, as any that fails before it takes part."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(module, "rehearse", fail)
    worker, told = rehearsing()
    with pytest.raises(type(error)):
        worker.rehearse()
    assert told == []
