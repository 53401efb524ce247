"""Storage of samples that falters is waited for, and for how long."""

from __future__ import annotations

import errno
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, ParamValidationError
from urllib3.exceptions import ReadTimeoutError

from trainer.errors import DataStorageError
from trainer.loop import faltering
from trainer.loop.faltering import may_pass, read_patiently
from trainer.loop.loader import read


def of_s3(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}}, "GetObject")


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError(errno.EIO, "Input/output error"), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (OSError(errno.ENOTCONN, "Transport endpoint is not connected"), True),
        (OSError(errno.EBUSY, "Please reduce your request rate."), True),
        (TimeoutError("timed out"), True),
        (ConnectionResetError("by peer"), True),
        (EndpointConnectionError(endpoint_url="http://store"), True),
        (ReadTimeoutError(None, "http://store", "Read timed out."), True),  # type: ignore[arg-type]
        (of_s3("SlowDown"), True),
        (of_s3("InternalError"), True),
        (of_s3("NoSuchKey"), False),
        (of_s3("AccessDenied"), False),
        (ParamValidationError(report="no bucket"), False),
        (OSError("image file is truncated (3 bytes not processed)"), False),
        (FileNotFoundError(errno.ENOENT, "No such file"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (OSError(errno.EMFILE, "Too many open files"), False),
        (ValueError("timed out"), False),
    ],
    ids=repr,
)
def test_what_may_pass_is_told_by_type_and_number(error: Exception, passes: bool) -> None:
    assert may_pass(error) == passes


def test_an_error_of_urllib3_is_known_where_nobody_has_loaded_botocore() -> None:
    """As in a worker whose run has nothing on S3."""
    program = """
import sys, urllib3
from trainer.loop.faltering import may_pass
assert "botocore" not in sys.modules
assert may_pass(urllib3.exceptions.ReadTimeoutError(None, "http://store", "Read timed out."))
"""
    subprocess.run([sys.executable, "-c", program], check=True)


class Falters:
    """A server that is away for the first few reads."""

    def __init__(self, times: float) -> None:
        self.left, self.reads = times, 0

    def __len__(self) -> int:
        return 1

    def batch(self, ids: Any) -> Any:
        self.reads += 1
        if self.left > 0:
            self.left -= 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return ids


def test_an_evaluation_s_read_is_tried_again() -> None:
    data = Falters(2)
    assert read(data, np.array([7])).tolist() == [7] and data.reads == 3


def test_it_is_waited_for_for_a_time_and_the_last_error_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faltering, "FALTERS_S", 0.3)
    data = Falters(float("inf"))
    with pytest.raises(DataStorageError, match="samples could not be read in") as caught:
        read_patiently(lambda: data.batch(0))
    error = caught.value
    assert error.seconds > 0.3 and error.tries == data.reads > 1
    assert isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ESTALE
