"""What the compiled kernel adds of gradients, while it adds it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainer.parallel import wide_sums


def record_sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on: how many numbers each call of the compiled kernel adds."""
    seen: list[int] = []
    make = wide_sums._compiled_add

    def recorded(required: bool) -> Callable[[torch.Tensor, torch.Tensor], None]:
        add = make(required)

        def call(sums: torch.Tensor, given: torch.Tensor) -> None:
            seen.append(sums.numel())
            add(sums, given)

        return call

    monkeypatch.setattr(wide_sums, "_compiled_add", recorded)
    return seen
