"""No exception is classed by its message."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from trainer.backend.origin import Origin, origin_of
from trainer.backend.polling import LEFT, poll_until
from trainer.errors import GroupError


@pytest.mark.parametrize(
    ("error", "origin"),
    [
        (GroupError("a peer did not come"), "group"),
        (dist.DistNetworkError("connection reset"), "group"),
        (dist.DistBackendError("an internal error"), "group"),
        (torch.OutOfMemoryError("CUDA out of memory"), "memory"),
        (MemoryError(), "memory"),
        (torch.AcceleratorError("an illegal memory access"), "device"),
        (RuntimeError(f"[gloo] nccl: {LEFT}; a peer did not come; CUDA out of memory"), "code"),
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
