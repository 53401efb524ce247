"""Every error that this framework raises, in one place.

ElasticError
├── ResourcesError    the cluster has too little for the smallest layout
├── RunFailedError    the run ended with an error
├── RunStoppedError   somebody else has stopped the run
├── SuspectFileError  the record of suspect machines cannot be read
├── ProviderAwayError a provider's platform does not serve a call now
├── WebhookError      news of a run did not reach whom they were meant for
│   └── WebhookRefusedError  and no later try will help
├── RunGoesOnError    a run of this name is going on (a ConfigError, too)
└── ReplaceError      a machine was not replaced
    └── NoCapacityError  there is none to be had now

TrainerError (trainer/errors.py): ConfigError, NonFiniteError, …
CheckpointError (checkpointing/errors.py): CorruptError, MissingError, StoreUnavailableError, …
"""

from __future__ import annotations

import trainer.errors


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
    """The run ended with an error.

    Args:
        error: which.
        cause: name of what came back, whatever was tried against it; None where it was something
            else, and the run may well get further when it is started again.
    """

    def __init__(self, error: str, cause: str | None = None) -> None:
        super().__init__(error, cause)
        self.error, self.cause = error, cause

    def __str__(self) -> str:
        return self.error


class RunStoppedError(ElasticError):
    """Somebody else than this program has stopped the run before its last step.

    Args:
        run: its directory.
        outcome: "stopped", with a checkpoint, or "interrupted", at once.
        step: steps done.
    """

    def __init__(self, run: str, outcome: str, step: int) -> None:
        super().__init__(run, outcome, step)
        self.run, self.outcome, self.step = run, outcome, step

    def __str__(self) -> str:
        return (
            f"the run in {self.run} was {self.outcome} by somebody else after {self.step} steps. "
            f"The same command goes on with it, unless it has resume='never'."
        )


class SuspectFileError(ElasticError):
    """The record of suspect machines cannot be read."""

    def __init__(self, path: str, fact: str) -> None:
        super().__init__(path, fact)
        self.path, self.fact = path, fact

    def __str__(self) -> str:
        return (
            f"{self.path} is no record of suspect machines: {self.fact}. "
            f"`elastic nodes clear {self.path.rpartition('/')[0]}` removes it."
        )


class WebhookError(ElasticError):
    """News of a run did not reach whom they were meant for.

    Args:
        whom: without the URL, which may be a secret.
        fact: why not.
        fix: what to do.
    """

    def __init__(self, whom: str, fact: str, fix: str) -> None:
        super().__init__(whom, fact, fix)
        self.whom, self.fact, self.fix = whom, fact, fix

    def __str__(self) -> str:
        return f"{self.whom}: {self.fact}. {self.fix}."


class WebhookRefusedError(WebhookError):
    """Who was there does not take them, and will not take them later."""


class RunGoesOnError(ElasticError, trainer.errors.ConfigError):
    """A run of this name is going on. No setting is wrong: once it has ended, or can be attached
    to, the same command works."""


class ProviderAwayError(ElasticError):
    """A provider's platform does not serve a call now; the same call may pass later.

    Args:
        call: which.
        fact: what it was answered, with the numbers.
        fix: what to do.
    """

    def __init__(self, call: str, fact: str, fix: str) -> None:
        super().__init__(call, fact, fix)
        self.call, self.fact, self.fix = call, fact, fix

    def __str__(self) -> str:
        return f"{self.call}: {self.fact}. {self.fix}."


class ReplaceError(ElasticError):
    """A machine was not replaced: its provider refused, or is not what it was taken for.

    Args:
        machine: which.
        fact: why not, with the numbers.
        fix: what to do.
    """

    def __init__(self, machine: str, fact: str, fix: str) -> None:
        super().__init__(machine, fact, fix)
        self.machine, self.fact, self.fix = machine, fact, fix

    def __str__(self) -> str:
        return f"{self.machine}: {self.fact}. {self.fix}."


class NoCapacityError(ReplaceError):
    """The provider has no machine to give now, in none of the places that it was asked for."""
