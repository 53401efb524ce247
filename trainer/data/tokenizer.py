"""The tokenizer: trained here as a byte-level BPE, or loaded from disk.

Text is encoded literally: a document that happens to spell `<|endoftext|>` gets ordinary tokens, so
the end-of-text id marks the end of a document and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.data.text import Document
from trainer.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
"""The end-of-text token of tokenizers trained here, and their only special one."""

END_OF_TEXT_ID = 0
"""Its id there."""

_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")


def train_tokenizer(documents: Iterable[Document], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE: lossless on any text, the same documents give the same tokenizer.

    Source: Sennrich et al. 2016 (arXiv:1508.07909); the byte alphabet and split are GPT-2's.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return tokenizer


def load_tokenizer(path: str) -> Tokenizer:
    """Load a tokenizer.json, a directory with one, or a Hugging Face tokenizer directory.

    Never reads from the network, never runs code that lies beside the tokenizer.

    Raises:
        ConfigError: nothing there, or nothing that loads.
    """
    place = Path(path).expanduser()
    file = place / "tokenizer.json" if place.is_dir() else place
    if not place.exists():
        raise _unusable(path, "does not exist")
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.exists() else _from_directory(place)
    except Exception as error:  # both libraries raise bare Exception and much else
        raise _unusable(path, f"does not load: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def end_of_text_id(tokenizer: Tokenizer, path: str | None) -> int:
    """Find the id that ends a document.

    Args:
        path: where the tokenizer was loaded from: the `eos_token` of a tokenizer_config.json there
            comes first, then the usual names. None for a tokenizer trained here.

    Raises:
        ConfigError: the tokenizer has no such token.
    """
    names = (*_configured_names(path), *_END_OF_TEXT_NAMES)
    ids = [found for name in names if (found := tokenizer.token_to_id(name)) is not None]
    if not ids:
        raise _unusable(path, f"has none of the end-of-text tokens {', '.join(names)}")
    return int(ids[0])


def vocab_size_of(tokenizer: Tokenizer) -> int:
    """Count the ids a model needs: one more than the largest, whatever gaps lie below."""
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values())) + 1


def fingerprint_of(tokenizer: Tokenizer) -> str:
    """Hash everything that determines how the tokenizer encodes."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def encode_documents(
    tokenizer: Tokenizer, documents: list[Document], end_id: int
) -> list[np.ndarray[Any, np.dtype[np.uint32]]]:
    """Encode documents on all cores, each to its token ids with `end_id` after them."""
    tokenizer.encode_special_tokens = True  # "encode them like any other text"
    texts = [document.text for document in documents]
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array([*encoding.ids, end_id], dtype=np.uint32) for encoding in encodings]


def _from_directory(directory: Path) -> Tokenizer:
    from transformers import AutoTokenizer  # takes seconds to import, and few runs need it

    loaded = AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
    )
    # Through its serialised form, because `loaded` goes on owning and changing its own.
    return Tokenizer.from_str(loaded.backend_tokenizer.to_str())


def _configured_names(path: str | None) -> tuple[str, ...]:
    if path is None:
        return ()
    place = Path(path).expanduser()
    config = (place if place.is_dir() else place.parent) / "tokenizer_config.json"
    if not config.exists():
        return ()
    try:
        token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise _unusable(path, f"has an unreadable {config.name}: {error}") from error
    name = token.get("content") if isinstance(token, dict) else token
    return (name,) if isinstance(name, str) else ()


def _unusable(path: str | None, fact: str) -> ConfigError:
    return ConfigError(
        "train.task.data.tokenizer",
        path,
        fact,
        "Name a tokenizer.json, a directory with one, or a Hugging Face tokenizer directory on "
        "this machine; or leave it None to train one",
    )
