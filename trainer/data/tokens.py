"""Token sets: a long sequence of token ids in fixed-size files that are mapped, not read.

A `TokenWriter` streams into a new directory and writes the index last; a `TokenSet` opens it. Both
hold no more than a file handle or mappings: a set may be far larger than memory.
"""

from __future__ import annotations

import hashlib
import os
import resource
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from trainer.data.index import (
    TokenFile,
    TokenIndex,
    TokensCorruptError,
    dtype_for,
    file_name,
    read_index,
    write_index,
)

Tokens = np.ndarray[Any, np.dtype[Any]]

CHUNK_TOKENS = 2**20


class TokenWriter:
    """Writes a token set; the set exists once the `with` block ends without an error.

    Args:
        directory: made here; must not exist.
        vocab_size: every id must be below it; decides between uint16 and uint32.
        file_tokens: tokens per file.
        tokenizer: fingerprint of the tokenizer, for the index.
        source: fingerprint of the text, for the index.
    """

    def __init__(
        self, directory: Path, *, vocab_size: int, file_tokens: int, tokenizer: str, source: str
    ) -> None:
        self._directory = directory
        self._vocab_size, self._file_tokens = vocab_size, file_tokens
        self._tokenizer, self._source = tokenizer, source
        self._dtype = np.dtype(dtype_for(vocab_size)).newbyteorder("<")
        self._files: list[TokenFile] = []
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._tokens_in_file = 0
        self.tokens = 0
        directory.mkdir()

    def write(self, ids: Tokens) -> None:
        """Append token ids.

        Raises:
            ValueError: an id is not below the vocabulary size.
        """
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise ValueError(
                f"token ids {ids.min()}..{ids.max()} are not in a vocabulary of {self._vocab_size}"
            )
        self.tokens += len(ids)
        while len(ids):
            room = self._file_tokens - self._tokens_in_file
            self._append(ids[:room].astype(self._dtype).tobytes())
            self._tokens_in_file += min(room, len(ids))
            if self._tokens_in_file == self._file_tokens:
                self._finish_file()
            ids = ids[room:]

    def _append(self, data: bytes) -> None:
        if self._file is None:
            self._file = (self._directory / file_name(len(self._files))).open("xb")
        self._file.write(data)
        self._hash.update(data)

    def _finish_file(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._files.append(TokenFile(tokens=self._tokens_in_file, sha256=self._hash.hexdigest()))
        self._file, self._hash, self._tokens_in_file = None, hashlib.sha256(), 0

    def _finish(self) -> None:
        self._finish_file()
        index = TokenIndex(
            dtype=dtype_for(self._vocab_size),
            vocab_size=self._vocab_size,
            file_tokens=self._file_tokens,
            tokens=self.tokens,
            files=tuple(self._files),
            tokenizer=self._tokenizer,
            source=self._source,
        )
        write_index(self._directory, index)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._finish()
        elif self._file is not None:
            self._file.close()


class TokenSet:
    """A token set on disk, read through memory maps; make one with `TokenSet.open`."""

    def __init__(self, directory: Path, index: TokenIndex) -> None:
        self.directory, self.index = directory, index
        self._maps: dict[int, Tokens] = {}
        self._most_maps = most_maps(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    @classmethod
    def open(cls, path: str | Path, verify: bool = False) -> TokenSet:
        """Open a token set and check that every file has its size.

        Args:
            path: its directory.
            verify: also check every file's checksum, which reads it all.

        Raises:
            TokensCorruptError: a check failed; names the file and the check.
        """
        tokens = cls(Path(path), read_index(Path(path)))
        for number, file in enumerate(tokens.index.files):
            tokens._check_file(number, file, verify)
        return tokens

    def __len__(self) -> int:
        return self.index.tokens

    @property
    def sha256(self) -> str:
        """Of the tokens in their order, by the index: of what its files hold."""
        files = "".join(file.sha256 for file in self.index.files)
        return hashlib.sha256(files.encode()).hexdigest()

    def read(self, start: int, count: int) -> Tokens:
        """Copy the tokens at `start` to `start + count`, across files where need be.

        Shapes: returns (count,) in the stored type.

        Raises:
            IndexError: the range does not lie within the set.
            TokensCorruptError: a file has another size than it had, or an id that is none.
        """
        if not 0 <= start <= start + count <= len(self):
            raise IndexError(f"tokens {start}..{start + count} of a set of {len(self)}")
        out = np.empty(count, dtype=self.index.dtype)
        done = 0
        while done < count:
            number, offset = divmod(start + done, self.index.file_tokens)
            part = self._map(number)[offset : offset + count - done]
            out[done : done + len(part)] = part
            self._check_ids(number, out[done : done + len(part)])
            done += len(part)
        return out

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[Tokens]:
        """Stream the tokens from `start` to `stop` (default: the end) in pieces that fit memory."""
        stop = len(self) if stop is None else stop
        for position in range(start, stop, CHUNK_TOKENS):
            yield self.read(position, min(CHUNK_TOKENS, stop - position))

    def _map(self, number: int) -> Tokens:
        if number not in self._maps:
            if len(self._maps) >= self._most_maps:
                del self._maps[next(iter(self._maps))]
            path = self.directory / file_name(number)
            self._check_file(number, self.index.files[number], verify=False)  # long after `open`
            self._maps[number] = np.memmap(path, dtype=self.index.stored_dtype, mode="r")
        return self._maps[number]

    def _check_ids(self, number: int, ids: Tokens) -> None:
        """A GPU would say no more of an id that is too large than that an assertion failed."""
        if (largest := int(ids.max())) >= self.index.vocab_size:
            raise TokensCorruptError(
                str(self.directory / file_name(number)),
                f"id check: the index says that all are below {self.index.vocab_size}, it has "
                f"{largest}",
            )

    def _check_file(self, number: int, file: TokenFile, verify: bool) -> None:
        path = self.directory / file_name(number)
        expected_bytes = file.tokens * self.index.stored_dtype.itemsize
        found_bytes = path.stat().st_size if path.exists() else None
        if found_bytes != expected_bytes:
            found = "it is missing" if found_bytes is None else f"it has {found_bytes}"
            raise TokensCorruptError(
                str(path), f"size check: the index says {expected_bytes} bytes, {found}"
            )
        if verify and (found := sha256_of(path)) != file.sha256:
            raise TokensCorruptError(
                str(path), f"checksum: the index says sha256 {file.sha256}, it has {found}"
            )


@lru_cache(maxsize=8)
def open_once(path: str) -> TokenSet:
    """`TokenSet.open`, once for each path in a process. A regroup makes new loops while all stand
    still, and a look at each of thousands of files on a shared file system takes seconds."""
    return TokenSet.open(path)


def most_maps(open_files: int) -> int:
    """How many files of a set a process maps at once. Pure.

    Args:
        open_files: that it may have; a mapping holds one. Linux allows 65,530 mappings.
    """
    return 16384 if open_files == resource.RLIM_INFINITY else max(1, min(16384, open_files // 4))


def sha256_of(path: Path) -> str:
    """Hash a file's bytes, a piece at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()
