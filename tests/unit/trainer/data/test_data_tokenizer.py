"""The tokenizer: lossless, deterministic, and loaded from each kind of place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from trainer.data.text import Document
from trainer.data.tokenizer import (
    END_OF_TEXT,
    encode_documents,
    end_of_text_id,
    load_tokenizer,
    train_tokenizer,
    vocab_size_of,
)
from trainer.errors import ConfigError

TEXTS = ["def add(a, b):\n    return a + b\n" * 4, "the cat, the dog; the Häuschen"]


def documents(texts: list[str]) -> list[Document]:
    return [Document(source="test", text=text) for text in texts]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(documents(TEXTS), 280)


def test_training_is_deterministic_and_the_end_of_text_is_0(tokenizer: Tokenizer) -> None:
    again = train_tokenizer(documents(TEXTS), 280)
    assert again.to_str() == tokenizer.to_str()
    assert end_of_text_id(tokenizer, None) == 0
    assert vocab_size_of(tokenizer) == 280


@pytest.mark.parametrize("text", [*TEXTS, "日本\x00\r\n\t🙂 ", "a" + END_OF_TEXT + "b"])
def test_encoding_loses_nothing_and_ends_once(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = encode_documents(tokenizer, documents([text]), 0)
    assert ids[-1] == 0
    assert 0 not in ids[:-1]
    assert tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == text


def test_loads_a_file_and_a_directory(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer.no_truncation()
    for path in (tmp_path / "tokenizer.json", tmp_path):
        loaded = load_tokenizer(str(path))
        assert loaded.to_str() == tokenizer.to_str()


def test_loads_a_hugging_face_directory(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = json.loads(tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges)
    eos_token = {"__type": "AddedToken", "content": "!", "special": True}
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": eos_token}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.encode(TEXTS[0]).ids == tokenizer.encode(TEXTS[0]).ids
    assert end_of_text_id(loaded, str(tmp_path)) == tokenizer.token_to_id("!")


def assert_rejected(path: Path, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        end_of_text_id(load_tokenizer(str(path)), str(path))
    assert (caught.value.field, caught.value.value) == ("train.task.data.tokenizer", str(path))


def test_what_does_not_load_is_rejected(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert_rejected(tmp_path / "none", "does not exist")
    (tmp_path / "bad.json").write_text("{}")
    assert_rejected(tmp_path / "bad.json", "does not load")
    (tmp_path / "empty").mkdir()
    assert_rejected(tmp_path / "empty", "does not load")
    renamed = tokenizer.to_str().replace(END_OF_TEXT, "<stop>")
    (tmp_path / "other.json").write_text(renamed)
    assert_rejected(tmp_path / "other.json", "end-of-text")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert_rejected(tmp_path / "other.json", "tokenizer_config.json")
