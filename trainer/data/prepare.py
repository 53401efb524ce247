"""Text in, token sets out: once for each text and setting, then reused.

    find_files → fingerprint ─ there? ─► reuse
                      └─ build() ─► .building-…/ ─ rename ─► <fingerprint>/

The result is a directory named by a fingerprint of everything that determines it: the files' bytes
in order (not their names), and the settings. Only files that are new or changed are read
(`file_hashes.py`). It is built under a name of its own and renamed into place when complete, if the
files still are what they were. So a crash leaves nothing half-made under the final name; of two
processes at once the first to finish wins and the other uses its result, which is the same. What a
killed process leaves in a `.building-` directory is never looked at, and deleted by the next one
that builds, unless another one builds as well.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import tokenizers

from checkpointing.named_directory import named_directory
from checkpointing.whole_file import sync
from trainer.data.build import TOKENIZER_NAME, TRAIN_NAME, VAL_NAME, Counts, Recipe, build
from trainer.data.config import DataConfig
from trainer.data.file_hashes import hash_files
from trainer.data.index import SCHEMA, TokensCorruptError, read_json, write_json
from trainer.data.text import READING, check_text, find_files
from trainer.data.tokenizer import end_of_text_id, fingerprint_of, load_tokenizer
from trainer.data.tokens import TokenSet
from trainer.progress import tell

RECORD_NAME, HASHES_NAME, LOCK_NAME = "prepared.json", "hashes.json", ".building.lock"

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""What file systems answer that cannot sync a directory, as some over the network."""


@dataclass(frozen=True, kw_only=True)
class PreparedData(Counts):
    """Where the prepared data is, and how much there is of it."""

    train: str
    """Directory of the training token set."""

    val: str
    """Directory of the held-out token set; it has no tokens when nothing was held out."""

    tokenizer: str
    """Path of the tokenizer.json."""


def prepare(config: DataConfig, default_cache_dir: str) -> PreparedData:
    """Turn the text of `config` into token sets, or find them already made.

    Called by one process before the workers start, or by any number at once.

    Args:
        config: what to read and how.
        default_cache_dir: where to keep the result if `config.cache_dir` is None.

    Raises:
        ConfigError: text, tokenizer or settings that cannot work.
        TokensCorruptError: the result is there, but damaged.
    """
    cache = named_directory(config.cache_dir or default_cache_dir)
    recipe = _plan_recipe(config, cache / HASHES_NAME)
    final = cache / recipe.fingerprint[:24]
    if not final.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with _one_of_the_builders(cache):
            _build_and_rename(final, recipe)
    return _read_record(final)


def _plan_recipe(config: DataConfig, memory: Path) -> Recipe:
    tell("looking for the text")
    files = find_files(config)
    check_text(files)
    tokenizer, how = None, (config.vocab_size, tokenizers.__version__)
    if config.tokenizer is not None:
        tokenizer = load_tokenizer(config.tokenizer)
        how = (end_of_text_id(tokenizer, config.tokenizer), fingerprint_of(tokenizer))
    hashed = hash_files([file.path for file in files], memory)
    facts = {
        "schema": SCHEMA,
        "reading": READING,
        "files": [
            (file.format, found.size_bytes, found.sha256)
            for file, found in zip(files, hashed, strict=True)
        ],
        "field": config.field,
        "holdout": config.holdout,
        "file_tokens": config.file_tokens,
        "tokenizer": how,
    }
    return Recipe(
        files=files,
        hashed=tuple(hashed),
        field=config.field,
        holdout=config.holdout,
        tokenizer=tokenizer,
        tokenizer_path=config.tokenizer,
        vocab_size=config.vocab_size,
        file_tokens=config.file_tokens,
        fingerprint=hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest(),
    )


@contextmanager
def _one_of_the_builders(cache: Path) -> Iterator[None]:
    """Deletes what builders have left, where there is none now. Nobody else does in the block. On a
    file system without locks nothing is deleted."""
    with (cache / LOCK_NAME).open("a+b") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in cache.glob(".building-*"):
                shutil.rmtree(left, ignore_errors=True)
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _build_and_rename(final: Path, recipe: Recipe) -> None:
    building = final.parent / f".building-{uuid.uuid4().hex}"
    building.mkdir()
    try:
        write_json(building / RECORD_NAME, asdict(build(building, recipe)))
        for directory in (building / TRAIN_NAME, building / VAL_NAME, building):
            _sync(directory)
        os.rename(building, final)
    except OSError:
        # A directory is not renamed onto one that has files: another process was first.
        if not final.exists():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _sync(directory: Path) -> None:
    """So that a power cut leaves the names in it, where its file system can do that. Raises OSError
    where the disk fails: what is not on it gets no final name."""
    try:
        sync(directory)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def _read_record(directory: Path) -> PreparedData:
    record = directory / RECORD_NAME
    fields = read_json(record)
    for field, name in (("train", TRAIN_NAME), ("val", VAL_NAME), ("tokenizer", TOKENIZER_NAME)):
        fields[field] = str(directory / name)
    try:
        prepared = PreparedData(**fields)
    except TypeError as error:
        raise TokensCorruptError(str(record), f"not a record of prepared data: {error}") from error
    TokenSet.open(prepared.train)
    TokenSet.open(prepared.val)
    return prepared
