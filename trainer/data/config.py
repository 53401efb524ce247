"""What the user says about the training text.

Imports neither torch nor tokenizers: a configuration is made on machines that have neither.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from trainer.errors import ConfigError, check_types

Format = Literal["auto", "text", "jsonl", "parquet"]

MIN_VOCAB_SIZE = 257
"""256 byte values and the end-of-text token: what a byte-level tokenizer cannot do without."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text to train on, and how it becomes tokens.

    Raises:
        ConfigError: a value that cannot work, under the field name `train.task.data.<field>`.
    """

    paths: tuple[str, ...]
    """Files, directories and globs. A list will do. Their order here does not matter."""

    format: Format = "auto"
    """How every file is read; `"auto"`: .jsonl and .json as one JSON object a line, .parquet as
    Parquet, everything else as plain text. With .gz, .zst, .bz2 or .lz4 after it, text and JSON are
    decompressed."""

    field: str = "text"
    """Key (JSONL) or column (Parquet) that holds a document's text."""

    pattern: str = "**/*"
    """Glob of the files to take inside a directory, e.g. `"**/*.py"`. Hidden ones are left out."""

    tokenizer: str | None = None
    """A tokenizer.json, or a directory with one, or a Hugging Face tokenizer directory; None: that
    of a pretrained model, otherwise a byte-level BPE is trained on the training text."""

    vocab_size: int = 4096
    """Most tokens that the tokenizer to train may have; a short text yields fewer."""

    holdout: float = 0.01
    """Share of the documents kept out for validation. A hash of its text decides on which side a
    document falls. Above 0, at least one document falls on each side; 0: no validation set."""

    cache_dir: str | None = None
    """Where prepared data is kept; None: the caller's default."""

    file_tokens: int = 2**24
    """Tokens per token file."""

    def __post_init__(self) -> None:
        if isinstance(self.paths, str | os.PathLike):
            object.__setattr__(self, "paths", (self.paths,))
        check_types(self, "train.task.data")
        self._require("paths", len(self.paths) > 0, "nothing to read", "Name a file or a directory")
        self._require(
            "vocab_size",
            self.vocab_size >= MIN_VOCAB_SIZE,
            f"a byte-level tokenizer has at least {MIN_VOCAB_SIZE} tokens",
            f"Use {MIN_VOCAB_SIZE} or more",
        )
        self._require(
            "holdout",
            0 <= self.holdout < 1,
            "the held-out share is outside [0, 1)",
            "Use for example 0.01, or 0 for no validation set",
        )
        self._require(
            "file_tokens", self.file_tokens >= 1, "a file holds a token or more", "Use 2**24"
        )

    def _require(self, field: str, holds: bool, fact: str, fix: str) -> None:
        if not holds:
            raise ConfigError(f"train.task.data.{field}", getattr(self, field), fact, fix)
