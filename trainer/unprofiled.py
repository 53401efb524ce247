"""What torch's profiler must not see: collectives of Gloo's that may be given up under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._C._autograd import _enable_record_function


@contextmanager
def unprofiled() -> Iterator[None]:
    """Within, torch's profiler takes no note of what this thread begins. Not to be nested.

    One of Gloo's threads writes the end of a collective into the profiler's records. These are
    freed when the profiler stops, which it does as a generation ends, whatever is in flight: the
    process died of it. NCCL's collectives are recorded when they are begun.
    """
    _enable_record_function(False)
    try:
        yield
    finally:
        _enable_record_function(True)
