"""The numbers that a saved state has beside its tensors, without which no run goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpointing import CorruptError

_NUMBERS = ("optimizer_steps", "skipped_in_a_row")


def numbers_of(step: int, state: Mapping[str, Any]) -> tuple[int, int]:
    """Steps that reached the weights, and the latest that did not.

    Args:
        step: of the saved state.
        state: the training state in its record.

    Raises:
        CorruptError: the record does not say them. It may be whole all the same: another program's.
    """
    steps, skipped = told = [state.get(key) for key in _NUMBERS]
    if not (isinstance(steps, int) and isinstance(skipped, int)):
        raise CorruptError(
            f"the record of step {step}",
            f"its training state has no numbers under {' and '.join(_NUMBERS)}, but {told}",
        )
    return steps, skipped
