"""The index of a token set: `index.json`, written last, read first.

It says what lies in the files beside it (`00000.bin`, `00001.bin`, …: little-endian token ids) and
how to check that. Names of files follow from their number, so an index cannot point elsewhere.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.errors import TrainerError

SCHEMA = 1
INDEX_NAME = "index.json"

_MADE_ANEW = "Delete the prepared data, and it is made anew"
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class TokensCorruptError(TrainerError):
    """A file of prepared data is not what was written, or is not there.

    Args:
        file: path of the file.
        check: the check that failed, with the numbers.
        fix: what to do.
    """

    def __init__(self, file: str, check: str, fix: str = _MADE_ANEW) -> None:
        super().__init__(file, check, fix)
        self.file, self.check, self.fix = file, check, fix

    def __str__(self) -> str:
        return f"{self.file}: {self.check}. {self.fix}."


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One token file."""

    tokens: int
    """Tokens in it."""

    sha256: str
    """Of its bytes."""


@dataclass(frozen=True, kw_only=True)
class TokenIndex:
    """What a token set holds."""

    dtype: str
    """`"uint16"` or `"uint32"`."""

    vocab_size: int
    """Every id is below it."""

    file_tokens: int
    """Tokens in every file but the last."""

    tokens: int
    """Tokens in all files."""

    files: tuple[TokenFile, ...]
    """In order; file `i` is `file_name(i)`."""

    tokenizer: str
    """Fingerprint of the tokenizer."""

    source: str
    """Fingerprint of the text and of how it was split."""

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        return _DTYPES[self.dtype]


def file_name(number: int) -> str:
    """Name the token file with this number."""
    return f"{number:05d}.bin"


def dtype_for(vocab_size: int) -> str:
    """Choose the narrowest type that holds every id below `vocab_size`."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def write_index(directory: Path, index: TokenIndex) -> None:
    """Write the index so that it is on disk when this returns."""
    write_json(directory / INDEX_NAME, {"schema": SCHEMA, **asdict(index)})


def read_index(directory: Path) -> TokenIndex:
    """Read the index of the token set in `directory`.

    Raises:
        TokensCorruptError: there is none, it is of another schema, or its numbers do not agree.
    """
    path = directory / INDEX_NAME
    fields = read_json(path)
    if (schema := fields.pop("schema", None)) != SCHEMA:
        raise TokensCorruptError(str(path), f"schema is {schema}, this version reads {SCHEMA}")
    try:
        files = tuple(TokenFile(**file) for file in fields.pop("files"))
        index = TokenIndex(files=files, **fields)
        full = all(file.tokens == index.file_tokens for file in files[:-1])
        agrees = full and sum(file.tokens for file in files) == index.tokens
        known = index.dtype in _DTYPES
    except (KeyError, TypeError) as error:
        raise TokensCorruptError(str(path), f"not an index of tokens: {error}") from error
    if not (agrees and known):
        raise TokensCorruptError(
            str(path), f"dtype {index.dtype}, {index.tokens} tokens and the list of files disagree"
        )
    return index


def write_json(path: Path, value: object) -> None:
    """Write JSON so that it is on disk when this returns."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that this package wrote.

    Raises:
        TokensCorruptError: it is missing or no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TokensCorruptError(
            str(path),
            f"cannot be read: {error}",
            "Is the file system that it lies on mounted on this machine, at this path? Where it is "
            "mounted, delete the prepared data, and it is made anew",
        ) from error
    except ValueError as error:
        raise TokensCorruptError(str(path), f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokensCorruptError(str(path), f"holds {type(value).__name__}, not a JSON object")
    return value
