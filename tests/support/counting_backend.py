"""A backend of torch.compile for tests: no compiler, and a count of what it was given."""

from __future__ import annotations

from typing import Any

import torch


class Counting:
    """A backend of torch.compile that runs what it is given, and counts."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            self.calls += 1
            return graph(*arguments)

        return run
