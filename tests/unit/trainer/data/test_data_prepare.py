"""Preparation: the right tokens on the right side, once, and never half-made."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from trainer.data.config import DataConfig
from trainer.data.index import TokensCorruptError
from trainer.data.prepare import HASHES_NAME, LOCK_NAME, PreparedData, prepare
from trainer.data.split import find_threshold, hash_of, plan_threshold
from trainer.data.text import Document
from trainer.data.tokens import TokenSet
from trainer.errors import ConfigError
from trainer.progress import listening

TEXTS = [f"def f{number}(x):\n    return x + {number}\n" for number in range(40)]


def write_corpus(directory: Path, texts: list[str]) -> Path:
    directory.mkdir(parents=True)
    for number, text in enumerate(texts):
        (directory / f"{number:03d}.py").write_text(text)
    return directory


def config_for(path: Path, **settings: object) -> DataConfig:
    given = {"paths": (str(path),), "vocab_size": 300, "holdout": 0.2, "file_tokens": 64}
    return DataConfig(**(given | settings))  # type: ignore[arg-type]


def documents_of(prepared: PreparedData, side: str) -> list[str]:
    ids = TokenSet.open(side, verify=True)
    tokenizer = Tokenizer.from_file(prepared.tokenizer)
    documents: list[list[int]] = [[]]
    for token in ids.read(0, len(ids)).tolist():
        if token == prepared.end_of_text_id:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == []
    return [tokenizer.decode(document) for document in documents]


def kept_in(cache: Path) -> list[Path]:
    """What is there beside the lock and the hashes of the source files, which are kept once they
    are settled."""
    own = (HASHES_NAME, LOCK_NAME)
    return [path for path in cache.iterdir() if path.name not in own] if cache.exists() else []


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", TEXTS)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_every_document_is_on_one_side_in_order(corpus: Path, cache: Path) -> None:
    prepared = prepare(config_for(corpus), str(cache))
    train = documents_of(prepared, prepared.train)
    val = documents_of(prepared, prepared.val)
    assert train == [text for text in TEXTS if text in train]
    assert val == [text for text in TEXTS if text not in train]
    assert (len(train), len(val)) == (prepared.train_documents, prepared.val_documents)
    assert 1 <= len(val) <= 20
    assert prepared.train_tokens == len(TokenSet.open(prepared.train))
    assert prepared.val_tokens == len(TokenSet.open(prepared.val))
    assert len(TokenSet.open(prepared.train).index.files) > 1
    assert prepared.vocab_size == Tokenizer.from_file(prepared.tokenizer).get_vocab_size()


def test_the_tokenizer_has_not_seen_the_held_out_text(tmp_path: Path, cache: Path) -> None:
    words = [f"{chr(97 + number) * 9}\n" for number in range(26)]
    prepared = prepare(config_for(write_corpus(tmp_path / "words", words)), str(cache))
    vocabulary = Tokenizer.from_file(prepared.tokenizer).get_vocab()
    train, val = (documents_of(prepared, side) for side in (prepared.train, prepared.val))
    assert all(word[:2] in vocabulary for word in train)
    assert not any(word[:2] in vocabulary for word in val)


def test_the_split_does_not_depend_on_order_or_on_other_documents(
    corpus: Path, cache: Path, tmp_path: Path
) -> None:
    prepared = prepare(config_for(corpus), str(cache))
    held_out = set(documents_of(prepared, prepared.val))
    reordered = write_corpus(tmp_path / "reordered", ["x = 1\n", *TEXTS[::-1]])
    other = prepare(config_for(reordered), str(cache))
    assert set(documents_of(other, other.val)) - {"x = 1\n"} == held_out


def test_the_three_formats_give_the_same_documents(tmp_path: Path, cache: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "a.jsonl").write_text(lines)
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet")
    places = [write_corpus(tmp_path / "a", TEXTS), tmp_path / "a.jsonl", tmp_path / "a.parquet"]
    results = [prepare(config_for(place), str(cache)) for place in places]
    assert len({result.train for result in results}) == 3
    sets = [TokenSet.open(result.train) for result in results]
    assert len({tokens.read(0, len(tokens)).tobytes() for tokens in sets}) == 1


def test_a_result_is_reused_until_what_determines_it_changes(corpus: Path, cache: Path) -> None:
    first = prepare(config_for(corpus), str(cache))
    made = (Path(first.train) / "index.json").stat().st_mtime_ns
    moved = corpus.rename(corpus.parent / "moved")
    assert prepare(config_for(moved, cache_dir=str(cache)), "/nowhere") == first
    assert (Path(first.train) / "index.json").stat().st_mtime_ns == made
    for settings in ({"holdout": 0.3}, {"vocab_size": 290}, {"tokenizer": first.tokenizer}):
        assert prepare(config_for(moved, **settings), str(cache)).train != first.train
    (moved / "000.py").write_text(TEXTS[0].replace("f0", "g0"))
    assert prepare(config_for(moved), str(cache)).train != first.train


def test_a_given_tokenizer_is_used(corpus: Path, cache: Path, tmp_path: Path) -> None:
    trained = prepare(config_for(corpus), str(cache))
    other = write_corpus(tmp_path / "other", ["cats and dogs\n", "dogs and cats\n"])
    prepared = prepare(config_for(other, tokenizer=trained.tokenizer), str(cache))
    assert Path(prepared.tokenizer).read_bytes() == Path(trained.tokenizer).read_bytes()
    index = TokenSet.open(prepared.train).index
    assert index.tokenizer == TokenSet.open(trained.train).index.tokenizer


def test_no_holdout_gives_an_empty_validation_set(
    corpus: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    prepared = prepare(config_for(corpus, holdout=0), str(cache))
    assert (prepared.val_tokens, prepared.val_documents) == (0, 0)
    assert documents_of(prepared, prepared.train) == TEXTS
    assert not caplog.records


@pytest.mark.parametrize("texts", [["one\n"], ["same\n", "same\n"]])
def test_one_text_cannot_be_split(tmp_path: Path, cache: Path, texts: list[str]) -> None:
    corpus = write_corpus(tmp_path / "corpus", texts)
    with pytest.raises(ConfigError, match=rf"all documents \({len(texts)}\) have the") as caught:
        prepare(config_for(corpus), str(cache))
    assert caught.value.field == "train.task.data.holdout"
    assert kept_in(cache) == []


@given(
    hashes=st.sets(st.integers(0, 2**64 - 1), min_size=2, max_size=5),
    holdout=st.floats(0, 1, exclude_max=True, exclude_min=True),
)
def test_the_threshold_leaves_a_document_on_each_side(hashes: set[int], holdout: float) -> None:
    threshold = plan_threshold(min(hashes), max(hashes), holdout)
    below = {value for value in hashes if value < threshold}
    wanted = {value for value in hashes if value / 2**64 < holdout}
    assert below
    assert below != hashes
    if 0 < len(wanted) < len(hashes) and below != wanted:
        # Only rounding may tell the two apart.
        assert all(abs(value / 2**64 - holdout) < 1e-15 for value in below ^ wanted)


@given(texts=st.sets(st.text(min_size=1), min_size=2, max_size=8), holdout=st.floats(0.01, 0.99))
def test_the_threshold_is_known_before_all_is_read(texts: set[str], holdout: float) -> None:
    documents = [Document(source="a:1", text=text) for text in texts]
    hashes = [hash_of(document) for document in documents]
    found = find_threshold(documents, holdout)
    assert found == plan_threshold(min(hashes), max(hashes), holdout)
    for count in range(2, len(documents)):
        below = [value < found for value in hashes[:count]]
        if found == int(holdout * 2**64) and any(below) and not all(below):
            unread = iter(documents)
            assert find_threshold(unread, holdout) == found
            assert len(list(unread)) >= len(documents) - count
            return


def test_an_error_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\nbroken\n')
    with pytest.raises(ConfigError, match="line 2, column 1"):
        prepare(config_for(path), str(cache))
    assert kept_in(cache) == []


def test_all_is_on_disk_before_it_has_its_name(
    corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, unsynced = set[int](), list[str]()
    fsync, rename = os.fsync, os.rename

    def note(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def look(source: Path, target: Path) -> None:
        there = (source, *source.rglob("*"))
        unsynced.extend(path.name for path in there if path.stat().st_ino not in synced)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", look)
    prepared = prepare(config_for(corpus), str(cache))
    assert synced and unsynced == []
    assert kept_in(cache) == [Path(prepared.train).parent]


@pytest.mark.parametrize(
    ("answer", "is_kept"),
    [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False), (errno.ENOSPC, False)],
)
def test_names_that_a_failing_disk_may_lose_are_not_kept(
    corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, answer: int, is_kept: bool
) -> None:
    """A file system that cannot sync directories is no failing disk."""
    fsync, refused = os.fsync, list[int]()

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            refused.append(descriptor)
            raise OSError(answer, os.strerror(answer))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    if is_kept:
        prepared = prepare(config_for(corpus), str(cache))
        assert kept_in(cache) == [Path(prepared.train).parent]
    else:
        with pytest.raises(OSError, match=r"\.building-") as raised:
            prepare(config_for(corpus), str(cache))
        assert raised.value.errno == answer and kept_in(cache) == []
    assert refused


CRASH = """
import logging, os, sys
from trainer.data.config import DataConfig
from trainer.data.prepare import prepare
class Crash(logging.Handler):
    def emit(self, record):
        if "trained" in record.msg:
            os._exit(9)
log = logging.getLogger("trainer.data.build")
log.addHandler(Crash())
log.setLevel("INFO")
prepare(DataConfig(paths=(sys.argv[1],), vocab_size=300, holdout=0.2, file_tokens=64), sys.argv[2])
"""


def test_what_a_crash_half_way_has_left_counts_for_nothing_and_goes(
    corpus: Path, cache: Path
) -> None:
    done = subprocess.run([sys.executable, "-c", CRASH, str(corpus), str(cache)], check=False)
    assert done.returncode == 9
    (leftover,) = kept_in(cache)
    assert leftover.name.startswith(".building-")
    prepared = prepare(config_for(corpus), str(cache))
    assert len(documents_of(prepared, prepared.train)) == prepared.train_documents
    assert kept_in(cache) == [Path(prepared.train).parent]


class OnFirstRecord(logging.Handler):
    """Does something in the middle of a build: at the first line it logs."""

    def __init__(self, action: Callable[[], PreparedData]) -> None:
        super().__init__()
        self.action = action
        self.result: PreparedData | None = None

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("trainer.data.build").removeHandler(self)
        self.result = self.action()


def test_of_two_at_once_the_first_to_finish_wins(
    corpus: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainer.data.build")
    rival = OnFirstRecord(lambda: prepare(config_for(corpus), str(cache)))
    logging.getLogger("trainer.data.build").addHandler(rival)
    prepared = prepare(config_for(corpus), str(cache))
    assert rival.result == prepared
    assert sum("prepared in" in message for message in caplog.messages) == 2
    assert [path.name for path in kept_in(cache)] == [Path(prepared.train).parent.name]


def test_who_reads_text_otherwise_makes_its_tokens_beside_and_the_former_ones_are_read_still(
    corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package was upgraded, and a run goes on with what it has; its workers start anew."""
    monkeypatch.setattr("trainer.data.prepare.READING", 1)
    before = prepare(config_for(corpus), str(cache))
    monkeypatch.undo()
    after = prepare(config_for(corpus), str(cache))
    assert after.train != before.train and len(kept_in(cache)) == 2
    assert documents_of(before, before.train) == documents_of(after, after.train)


def test_text_in_another_encoding_is_prepared_with_a_warning(
    corpus: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (corpus / "a.txt").write_bytes(("x" * 99 + "\n").encode() * 5 + "für\n".encode("latin-1"))
    (corpus / "b.txt").write_bytes("schöne Grüße aus Köln\n".encode("latin-1"))
    (corpus / "c.jsonl").write_bytes('{"text": "schöne Grüße"}\n{"text": ""}\n'.encode())
    prepare(config_for(corpus), str(cache))
    assert warnings_of(caplog) == [
        f"{corpus / 'b.txt'}: 4 of 22 characters (18.18%) are U+FFFD, as which bytes that are no "
        "UTF-8 are read, at least 0.1% in 1 more. It may be text in another encoding. Convert it "
        "only where its bytes, unpacked, are no UTF-8: iconv -f utf-8 ends with an error there"
    ]


def test_signs_of_replacement_that_a_sound_text_has_itself_are_no_warning(
    corpus: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A crawl has some; in Parquet, bytes that are no UTF-8 would have raised."""
    lost = "K\ufffdln"
    (corpus / "a.jsonl").write_text(json.dumps({"text": "x" * 5000 + lost}))
    pq.write_table(pa.table({"text": [lost]}), corpus / "b.parquet")
    prepare(config_for(corpus), str(cache))
    assert warnings_of(caplog) == []


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]


@pytest.mark.parametrize("doing", ["splitting", "reading", "encoding"])
@pytest.mark.parametrize(
    "text", [TEXTS[-1] + "y = 1\n", TEXTS[-1].replace("+", "-")], ids=["longer", "as long"]
)
def test_text_that_changes_while_it_is_read_is_not_kept_under_its_former_hash(
    corpus: Path, cache: Path, doing: str, text: str
) -> None:
    last = corpus / "039.py"

    def write(what: str, done: int, total: int) -> None:
        if what.startswith(doing) and last.read_text() != text:
            last.write_text(text)

    with (
        listening(write),
        pytest.raises(
            ConfigError, match=r"it changed while it was read: it had 30 bytes"
        ) as caught,
    ):
        prepare(config_for(corpus), str(cache))
    assert caught.value.value == str(last) and last.read_text() == text
    assert kept_in(cache) == []


@pytest.mark.parametrize("doing", ["splitting", "reading"])
def test_text_that_grows_is_refused_before_more_is_done_with_it(
    corpus: Path, cache: Path, doing: str
) -> None:
    last, told = corpus / "039.py", list[str]()

    def write(what: str, done: int, total: int) -> None:
        if what.startswith(doing) and doing not in told:
            last.write_text("y = 1\n" + TEXTS[-1])
        told.append(what.split()[0])

    with listening(write), pytest.raises(ConfigError, match="it changed while it was read"):
        prepare(config_for(corpus), str(cache))
    assert told[-1] == doing


def test_text_of_which_only_the_times_change_meanwhile_is_kept(corpus: Path, cache: Path) -> None:
    with listening(lambda *_: (corpus / "039.py").touch()):
        prepared = prepare(config_for(corpus), str(cache))
    assert kept_in(cache) == [Path(prepared.train).parent]


@pytest.mark.parametrize("damage", ["{", "[]", '{"val_tokens": 1}'])
def test_a_damaged_record_is_named(corpus: Path, cache: Path, damage: str) -> None:
    prepared = prepare(config_for(corpus), str(cache))
    record = Path(prepared.train).parent / "prepared.json"
    record.write_text(damage)
    with pytest.raises(TokensCorruptError) as caught:
        prepare(config_for(corpus), str(cache))
    assert caught.value.file == str(record)


def test_what_is_done_is_told_and_how_far_it_is(corpus: Path, cache: Path) -> None:
    told: list[tuple[str, int, int]] = []
    with listening(lambda *what: told.append(what)):
        prepare(config_for(corpus), str(cache))
    size = sum(path.stat().st_size for path in corpus.iterdir())
    doing = list(dict.fromkeys(what for what, _, _ in told))
    assert [what.split()[0] for what in doing] == [
        "looking", "hashing", "splitting", "reading", "encoding",
    ]  # fmt: skip
    for what in doing[1:]:
        parts = [(done, total) for other, done, total in told if other == what]
        assert parts[0] == (0, size)
        assert parts == sorted(parts)
        assert parts[-1][0] > 0.9 * size or "splitting" in what  # which ends where it is decided
    told.clear()
    prepare(config_for(corpus), str(cache))
    assert told == []  # nobody listens any more
