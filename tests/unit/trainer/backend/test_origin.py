"""No exception is classed by its message."""

from __future__ import annotations

import errno

import pytest
import torch
import torch.distributed as dist

from trainer.backend import origin as origin_module
from trainer.backend.origin import Origin, origin_of
from trainer.backend.polling import LEFT, poll_until
from trainer.backend.silence import Connections
from trainer.errors import (
    CompilerFailed,
    ConfigError,
    DataStorageError,
    GroupError,
    NetworkError,
    StorageNotSeenError,
)


def of_cuda(code: int) -> torch.AcceleratorError:
    """As torch raises it."""
    error = torch.AcceleratorError("CUDA error: some other text")
    error.error_code = code  # type: ignore[attr-defined, unused-ignore]
    return error


@pytest.mark.parametrize(
    ("error", "origin"),
    [
        (GroupError("a peer did not come"), "group"),
        (dist.DistNetworkError("connection reset"), "group"),
        (dist.DistBackendError("an internal error"), "group"),
        (torch.OutOfMemoryError("CUDA out of memory"), "memory"),
        (MemoryError(), "memory"),
        (torch.AcceleratorError("an illegal memory access"), "device"),
        (of_cuda(700), "device"),
        (of_cuda(719), "device"),
        (of_cuda(1), "device"),
        (of_cuda(2), "memory"),
        (of_cuda(214), "ecc"),
        (of_cuda(710), "assert"),
        (NetworkError("p5.48xlarge", 32, (), "w0.log"), "network"),
        (StorageNotSeenError("train.task.data", "/tokens", "not there", "Mount it"), "storage"),
        (DataStorageError(7, 60.4), "data"),
        (OSError(errno.EIO, "Input/output error"), "code"),
        (ConfigError("train.task.data.paths", "/tokens", "not there", "Mount it"), "code"),
        (RuntimeError(f"[gloo] nccl: {LEFT}; a peer did not come; CUDA out of memory"), "code"),
        (CompilerFailed("the loss", "connection reset by peer"), "compiler"),
        (ValueError("connection reset by peer"), "code"),
    ],
)
def test_an_exception_s_type_says_where_it_comes_from(error: BaseException, origin: Origin) -> None:
    assert origin_of(error) == origin


def test_a_peer_that_does_not_come_is_no_user_s_error() -> None:
    """It ended the run as one: its message had none of the words that were looked for."""
    with pytest.raises(GroupError, match="did not come") as late:
        poll_until(lambda: False, lambda: False, 0.01)
    assert origin_of(late.value) == "group"


class OfTheUser(RuntimeError):
    """A type of the user's own."""


@pytest.mark.parametrize(
    ("error", "origin"),
    [(RuntimeError("a bare one"), "group"), (OfTheUser(), "code"), (NotImplementedError(), "code")],
)
def test_only_a_bare_one_is_gloo_s_where_a_connection_is_closed(
    monkeypatch: pytest.MonkeyPatch, error: Exception, origin: Origin
) -> None:
    """A connection that another thread opened while the group was made, and closed, counts, too."""
    monkeypatch.setattr(origin_module, "replica_connections", lambda: Connections({1}))
    assert origin_of(error) == origin


class LostGpu:
    """The current stream of a GPU that has failed; there is none here."""

    def __init__(self, code: int) -> None:
        self._code = code

    def query(self) -> bool:
        """As torch's."""
        raise of_cuda(self._code)


@pytest.mark.parametrize(("code", "origin"), [(700, "device"), (214, "ecc"), (710, "assert")])
@pytest.mark.parametrize(
    "error", [dist.DistBackendError("unhandled cuda error"), RuntimeError("CUBLAS_STATUS_FAILED")]
)
def test_where_the_gpu_has_failed_other_libraries_errors_are_its(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, origin: Origin
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: LostGpu(code))
    assert origin_of(error) == origin


def test_a_group_s_error_on_a_gpu_that_works_is_the_group_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Works:
        query = staticmethod(bool)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", Works)
    assert origin_of(dist.DistBackendError("a remote process exited")) == "group"
