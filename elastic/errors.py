"""Every error that this framework raises, in one place.

ElasticError
├── ResourcesError    the cluster has too little for the smallest layout
└── RunFailedError    the run ended with an error that no retry can mend

TrainerError (trainer/errors.py): ConfigError, NonFiniteError, …
CheckpointError (checkpointing/errors.py): CorruptError, MissingError, StoreUnavailableError, …
"""

from __future__ import annotations


class ElasticError(Exception):
    """Base of all errors of the `elastic` package."""


class ResourcesError(ElasticError):
    """The cluster has too little for the smallest layout."""

    def __init__(self, needed: str, there: str, waited_s: float, fix: str) -> None:
        super().__init__(needed, there, waited_s, fix)
        self.needed, self.there, self.waited_s, self.fix = needed, there, waited_s, fix

    def __str__(self) -> str:
        return (
            f"the smallest layout needs {self.needed}, but {self.there} "
            f"(waited {self.waited_s:g} s, scaling.wait_s). {self.fix}."
        )


class RunFailedError(ElasticError):
    """The run ended with an error that no retry can mend; the message says which."""
