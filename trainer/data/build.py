"""The making of a prepared directory: split, train a tokenizer if there is none, encode.

The text is streamed (its beginning to place the split, then to train the tokenizer, then to
encode), so memory does not grow with it. Everything in the directory follows from the `Recipe`
alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from checkpointing.whole_file import write_whole
from trainer.data.file_hashes import HashedFile, check_sizes, check_unchanged
from trainer.data.replaced import Replaced
from trainer.data.split import find_threshold, hash_of
from trainer.data.text import Document, SourceFile, read_documents
from trainer.data.tokenizer import (
    encode_documents,
    end_of_text_id,
    fingerprint_of,
    train_tokenizer,
    vocab_size_of,
)
from trainer.data.tokens import TokenWriter
from trainer.progress import Listener, present_listener

logger = logging.getLogger(__name__)

TRAIN_NAME, VAL_NAME, TOKENIZER_NAME = "train", "val", "tokenizer.json"

BATCH_CHARS = 2**22
"""Text encoded at once: enough to keep all cores busy, little enough to hold in memory."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a prepared directory is made from."""

    files: tuple[SourceFile, ...]
    """The files, in order."""

    hashed: tuple[HashedFile, ...]
    """What each was before it was read."""

    field: str
    """Key or column of the text."""

    holdout: float
    """Share of the documents to hold out."""

    tokenizer: Tokenizer | None
    """The tokenizer; None: train one."""

    tokenizer_path: str | None
    """Where it was loaded from."""

    vocab_size: int
    """Most tokens of the tokenizer to train."""

    file_tokens: int
    """Tokens per token file."""

    fingerprint: str
    """Of all the above."""

    def documents(self, doing: str) -> Iterator[Document]:
        """Streams the documents, and tells how far it is with what is being done with them."""
        return self._documents(doing, present_listener())  # tokenizers reads on a thread of its own

    def _documents(self, doing: str, tell: Listener) -> Iterator[Document]:
        sizes = {str(file.path): file.size_bytes for file in self.hashed}
        total, before, current = sum(sizes.values()), 0, ""
        tell(doing, 0, total)
        for document in read_documents(self.files, self.field):
            path = document.source.rpartition(":")[0]
            if path != current:
                before += sizes.get(current, 0)
                current = path
            tell(doing, before + int(document.share * sizes[path]), total)
            yield document


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How much a prepared directory holds."""

    vocab_size: int
    """Ids a model needs; every token is below it."""

    end_of_text_id: int
    """The token after every document."""

    train_tokens: int
    val_tokens: int
    train_documents: int
    val_documents: int


def build(directory: Path, recipe: Recipe) -> Counts:
    """Fill an empty directory: `train/`, `val/` and `tokenizer.json`.

    Raises:
        ConfigError: text that cannot be read, or that changed meanwhile.
    """
    started_s = time.monotonic()
    logger.info("preparing %d files in %s", len(recipe.files), directory)
    threshold = find_threshold(recipe.documents("splitting the text"), recipe.holdout)
    check_sizes(recipe.hashed)
    tokenizer = recipe.tokenizer
    if tokenizer is None:
        documents = recipe.documents("reading the text for a tokenizer")
        kept = (document for document in documents if hash_of(document) >= threshold)
        tokenizer = train_tokenizer(kept, recipe.vocab_size)
        check_sizes(recipe.hashed)
        logger.info("trained a tokenizer after %.1f s", time.monotonic() - started_s)
    write_whole(directory / TOKENIZER_NAME, tokenizer.to_str(pretty=True), durable=True)
    counts = _encode(directory, recipe, tokenizer, threshold)
    check_unchanged(recipe.hashed)
    logger.info("prepared in %.1f s: %s", time.monotonic() - started_s, counts)
    return counts


def _encode(directory: Path, recipe: Recipe, tokenizer: Tokenizer, threshold: int) -> Counts:
    end_id, vocab_size = end_of_text_id(tokenizer, recipe.tokenizer_path), vocab_size_of(tokenizer)
    tokenizer_fingerprint = fingerprint_of(tokenizer)
    train, val = (
        TokenWriter(
            directory / name,
            vocab_size=vocab_size,
            file_tokens=recipe.file_tokens,
            tokenizer=tokenizer_fingerprint,
            source=recipe.fingerprint,
        )
        for name in (TRAIN_NAME, VAL_NAME)
    )
    documents = {train: 0, val: 0}
    replaced = Replaced(recipe.files)
    with train, val:
        for batch in _batches(recipe.documents("encoding the text")):
            replaced.count(batch)
            encoded = encode_documents(tokenizer, batch, end_id)
            for document, ids in zip(batch, encoded, strict=True):
                side = val if hash_of(document) < threshold else train
                side.write(ids)
                documents[side] += 1
    if (told := replaced.told()) is not None:
        logger.warning("%s", told)
    return Counts(
        vocab_size=vocab_size,
        end_of_text_id=end_id,
        train_tokens=train.tokens,
        val_tokens=val.tokens,
        train_documents=documents[train],
        val_documents=documents[val],
    )


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += len(document.text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
