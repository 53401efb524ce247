"""A read of samples is tried again where storage falters: a file server that starts anew, a network
that is gone for some seconds. All replicas meet it at one step, as they would a bug of the dataset
(docs/decisions/069).
"""

from __future__ import annotations

import errno
import logging
import random
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from checkpointing.errors import AWAY
from checkpointing.stores.s3.pace import plan_pause
from trainer.errors import DataStorageError

log = logging.getLogger(__name__)

FALTERS_S = 60.0
"""No try begins later than this after the first. Mates wait in a collective meanwhile; a call to
regroup waits up to `regroup_timeout_s`, as for any slow read. Raising at the call would lose each
worker that waits, and perhaps all copies of the state."""

_PASSING = AWAY | {errno.EIO, errno.EAGAIN, errno.EBUSY}
"""EIO: a soft NFS mount says it, too; of a checkpoint it is damage. EBUSY: s3fs has it for S3's
SlowDown."""

_JITTER = random.Random()
"""Not the generator of all: a dataset may have seeded it."""

_Read = TypeVar("_Read")


def read_patiently(attempt: Callable[[], _Read], again: Callable[[], object] = bool) -> _Read:
    """What `attempt` returns. Where storage falters in it, it is tried again after a pause.

    Args:
        attempt: reads.
        again: called before each further try.

    Raises:
        DataStorageError: it still faltered after `FALTERS_S`.
        Exception: whatever else `attempt` raised.
    """
    began_s, tries = time.monotonic(), 0
    while True:
        tries += 1
        try:
            return attempt()
        except Exception as error:
            if not may_pass(error):
                raise
            time.sleep(plan_pause(tries, _JITTER.random()))
            elapsed_s = time.monotonic() - began_s
            if elapsed_s > FALTERS_S:
                raise DataStorageError(tries, elapsed_s) from error
            if tries == 1:
                log.warning("samples are read again for up to %g s: %r", FALTERS_S, error)
        again()


def may_pass(error: Exception) -> bool:
    """Whether an error of a read is one of storage that may come back: by its type and number,
    never by its words. An `OSError` without a number is none, as of a picture that is cut off."""
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    if isinstance(error, OSError):
        return error.errno in _PASSING
    if not {"botocore", "urllib3"} & sys.modules.keys():  # whose errors these are has imported it
        return False
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    from checkpointing.stores.s3.errors import read_failure

    of_requests = isinstance(error, BotoCoreError | ClientError | HTTPError)
    return of_requests and read_failure(error).answer != "refused"
