"""Documents out of plain text, JSONL (both compressed or not) and Parquet files.

`find_files` says which files a configuration means, in sorted order; `read_documents` streams their
documents, again and again in the same order. Empty documents and byte order marks are left out. A
plain text file longer than `PIECE_CHARS` is several documents, cut at line ends, and within a line
of more than `MOST_LINE_CHARS`: so memory stays bounded, one large file can be encoded on
every core, and part of it can be held out.
"""

from __future__ import annotations

import glob
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.config import DataConfig
from trainer.errors import ConfigError

READING = 2
"""Counts the ways in which files were made documents: by another one, the same files may be other
samples."""

PIECE_CHARS = 2**16
MOST_LINE_CHARS = 2**20
PARQUET_ROWS = 256

_HEAD_BYTES = 2**13
_MOST_BAD = 0.3
"""Share of characters of a text that may be no UTF-8; text in an 8-bit encoding has fewer where its
language is written in Latin letters."""

_FORMAT_BY_SUFFIX = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_COMPRESSION_BY_SUFFIX = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file to read."""

    path: Path
    """Absolute path."""

    format: str
    """`"text"`, `"jsonl"` or `"parquet"`."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document: never empty, always encodable as UTF-8."""

    source: str
    """Where it came from: the file, and the line or row."""

    text: str

    share: float = 1.0
    """Part of its file that is read by now, in bytes as they lie there: 0 to 1. What was read ahead
    counts."""


def find_files(config: DataConfig) -> tuple[SourceFile, ...]:
    """List the files that `config.paths` mean, each once, sorted by absolute path.

    Raises:
        ConfigError: a path that does not exist, or a directory or glob that matches no file.
    """
    found: dict[str, Path] = {}
    for path in config.paths:
        for file in _expand(path, config.pattern):
            found.setdefault(os.path.realpath(file), Path(os.path.abspath(file)))
    return tuple(
        SourceFile(path=path, format=_format_of(path, config.format))
        for path in sorted(found.values(), key=Path.as_posix)
    )


def check_text(files: Iterable[SourceFile]) -> None:
    """Looks at the beginning of files that are read as plain text or JSONL.

    Raises:
        ConfigError: one cannot be read, or holds something else.
    """
    for file in files:
        if file.format == "parquet":
            continue
        try:
            with file.path.open("rb") as raw, _unpacked(raw, file.path) as opened:
                head = opened.read(_HEAD_BYTES)
        except OSError as error:
            raise unreadable(file.path, error) from error
        text = head.decode("utf-8", "replace")
        bad = text.count("\ufffd")
        if b"\0" in head or bad > _MOST_BAD * len(text):
            raise ConfigError(
                "train.task.data.paths",
                str(file.path),
                f"it holds no text in UTF-8: of its first {len(head)} bytes, {head.count(0)} are "
                f"zero and {bad} no characters",
                "Leave it out, by train.task.data.pattern for one, or set train.task.data.format",
            )


def unreadable(path: Path, error: OSError) -> ConfigError:
    """What to raise for a file that cannot be read."""
    return ConfigError(
        "train.task.data.paths", str(path), f"cannot be read: {error}", "Leave the file out"
    )


def read_documents(files: Sequence[SourceFile], field: str) -> Iterator[Document]:
    """Stream the non-empty documents of `files` in order.

    Args:
        field: key or column that holds the text in JSONL and Parquet files.

    Raises:
        ConfigError: a file that cannot be read, a line or row without text (names both), or no text
            in any file.
    """
    found = False
    for file in files:
        try:
            for document in _read(file, field):
                found = True
                yield document
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise ConfigError(
                "train.task.data.paths",
                str(file.path),
                f"cannot be read as {file.format}: {error}",
                "Leave the file out, or set train.task.data.format",
            ) from error
    if not found:
        raise ConfigError(
            "train.task.data.paths",
            [str(file.path) for file in files[:8]],
            f"no text in {len(files)} files",
            "Name files with text",
        )


def _expand(path: str, pattern: str) -> list[str]:
    if "://" in path:
        raise ConfigError(
            "train.task.data.paths",
            path,
            "text is read from files",
            "Mount the store (FSx for Lustre, Mountpoint for Amazon S3), or copy the text to a "
            "disk of the driver's machine",
        )
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        return _files_inside(path, pattern)
    if os.path.exists(path):
        return [path]
    files = [match for match in glob.glob(path, recursive=True) if os.path.isfile(match)]
    if not files:
        fact = "matches no file" if glob.has_magic(path) else "does not exist"
        raise ConfigError("train.task.data.paths", path, fact, "Correct the path")
    return files


def _files_inside(directory: str, pattern: str) -> list[str]:
    matches = glob.glob(pattern, root_dir=directory, recursive=True)
    files = [path for name in matches if os.path.isfile(path := os.path.join(directory, name))]
    if not files:
        raise ConfigError(
            "train.task.data.paths",
            directory,
            f"no file in this directory matches the pattern {pattern!r}",
            "Correct the path or train.task.data.pattern",
        )
    return files


def _format_of(path: Path, configured: str) -> str:
    if configured != "auto":
        return configured
    if _compression_of(path) is not None:
        path = path.with_suffix("")
    return _FORMAT_BY_SUFFIX.get(path.suffix.lower(), "text")


def _compression_of(path: Path) -> str | None:
    return _COMPRESSION_BY_SUFFIX.get(path.suffix.lower())


def _unpacked(raw: BinaryIO, path: Path) -> BinaryIO:
    """A file's bytes, decompressed where its name says that it is compressed."""
    codec = _compression_of(path)
    return raw if codec is None else io.BufferedReader(pa.CompressedInputStream(raw, codec), 2**20)


def _size(raw: BinaryIO) -> int:
    """Bytes of an open file as they lie there, to tell how far it is read; 1 of an empty one."""
    return max(1, os.fstat(raw.fileno()).st_size)


def _read(file: SourceFile, field: str) -> Iterator[Document]:
    if file.format == "text":
        return _read_text(file.path)
    if file.format == "jsonl":
        return _read_jsonl(file.path, field)
    return _read_parquet(file.path, field)


def _read_text(path: Path) -> Iterator[Document]:
    line = 1
    with (
        path.open("rb") as raw,
        io.TextIOWrapper(_unpacked(raw, path), "utf-8-sig", errors="replace", newline="") as file,
    ):
        size = _size(raw)
        while piece := _read_piece(file):
            yield Document(source=f"{path}:{line}", text=piece, share=raw.tell() / size)
            line += piece.count("\n") + piece.count("\r") - piece.count("\r\n")


def _read_piece(file: io.TextIOWrapper) -> str:
    """A little more than `PIECE_CHARS`, up to the end of the line that this lies in."""
    piece = file.read(PIECE_CHARS + 1)
    return piece if piece.endswith("\n") else piece + file.readline(MOST_LINE_CHARS)


def _read_jsonl(path: Path, field: str) -> Iterator[Document]:
    with path.open("rb") as stored, _unpacked(stored, path) as file:
        size = _size(stored)
        for number, raw in enumerate(file, start=1):
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8", errors="replace")
            if not line.strip():
                continue
            # JSON may escape half a surrogate pair, which is no text that UTF-8 can hold.
            text = _field_of_line(path, number, line, field).encode("utf-8", "replace").decode()
            if text:
                yield Document(source=f"{path}:{number}", text=text, share=stored.tell() / size)


def _field_of_line(path: Path, number: int, line: str, field: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # nested too deeply
        raise ConfigError(
            "train.task.data.paths",
            str(path),
            f"line {number}, column {getattr(error, 'colno', 1)} is not JSON: {error}",
            'Write one JSON object a line, or set train.task.data.format = "text"',
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            "train.task.data.paths",
            str(path),
            f"line {number} is {type(value).__name__}, not an object",
            "Write one JSON object a line",
        )
    if field not in value:
        raise ConfigError(
            "train.task.data.field",
            field,
            f"{path}, line {number} has no such key; it has {sorted(value)}",
            "Set train.task.data.field to the key that holds the text",
        )
    return _require_text(value[field], f"{path}, line {number}, column", field)


def _read_parquet(path: Path, field: str) -> Iterator[Document]:
    with pq.ParquetFile(path) as file:
        columns = file.schema_arrow.names
        if field not in columns:
            raise ConfigError(
                "train.task.data.field",
                field,
                f"{path} has no such column; it has {columns}",
                "Set train.task.data.field to the column that holds the text",
            )
        rows = file.metadata.num_rows
        batches = file.iter_batches(batch_size=PARQUET_ROWS, columns=[field])
        values = (value for batch in batches for value in batch.column(0).to_pylist())
        for row, value in enumerate(values, start=1):
            if text := _require_text(value, f"{path}, row {row}, column", field):
                yield Document(source=f"{path}:{row}", text=text, share=row / rows)


def _require_text(value: object, place: str, field: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(
            "train.task.data.field",
            field,
            f"{place} {field!r} holds {type(value).__name__}, not text",
            "Name a field of text, or drop this record",
        )
    return value
