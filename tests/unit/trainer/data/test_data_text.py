"""Documents out of files: formats, listing, and every complaint."""

from __future__ import annotations

import gzip
import json
import os
import random
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.config import DataConfig
from trainer.data.text import MOST_LINE_CHARS, PIECE_CHARS, check_text, find_files, read_documents
from trainer.errors import ConfigError


def texts_of(config: DataConfig) -> list[str]:
    return [document.text for document in read_documents(find_files(config), config.field)]


def config_for(*paths: Path | str, **settings: object) -> DataConfig:
    return DataConfig(paths=tuple(map(str, paths)), **settings)  # type: ignore[arg-type]


def write_jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_parquet(path: Path, **columns: list[object] | pa.Array) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_the_three_formats_by_suffix_in_path_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("plain")
    write_jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": ""}, {"text": "two", "id": 2})
    write_parquet(tmp_path / "c.parquet", text=["three", "", "four"], id=[1, 2, 3])
    assert texts_of(config_for(tmp_path)) == ["one", "two", "plain", "three", "four"]


@pytest.mark.parametrize(
    ("suffix", "codec"), [(".gz", "gzip"), (".zst", "zstd"), (".bz2", "bz2"), (".LZ4", "lz4")]
)
def test_compressed_files(tmp_path: Path, suffix: str, codec: str) -> None:
    for name, text in (("a.jsonl", '{"text": "one"}\n' * 2), ("b.txt", "caf\u00e9\n")):
        with pa.output_stream(str(tmp_path / (name + suffix)), compression=codec) as file:
            file.write(text.encode())
    config = config_for(tmp_path)
    check_text(find_files(config))
    assert texts_of(config) == ["one", "one", "caf\u00e9\n"]


def test_how_far_a_compressed_file_is_read_goes_by_its_own_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    lines = (json.dumps({"text": random.Random(n).randbytes(2**12).hex()}) for n in range(1000))
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    config = config_for(path)
    shares = [one.share for one in read_documents(find_files(config), config.field)]
    assert shares == sorted(shares) and shares[0] < 0.3 and shares[-1] == 1.0
    assert abs(shares[500] - 0.5) < 0.2


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    for name, content in ((b"a\xff.txt", b"one"), (b"b\xff.txt.gz", gzip.compress(b"two"))):
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))).write_bytes(content)
    config = config_for(tmp_path)
    check_text(find_files(config))
    assert texts_of(config) == ["one", "two"]


@pytest.mark.parametrize("content", [gzip.compress(bytes(range(200)))[:-30], b"not compressed"])
def test_a_compressed_file_that_is_cut_or_none_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        check_text(find_files(config_for(path)))
    assert_rejected(config_for(path), "train.task.data.paths", str(path), "cannot be read as jsonl")


def test_a_configured_format_beats_the_suffix(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{not json")
    assert texts_of(config_for(path, format="text")) == ["{not json"]


def test_another_field(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", {"body": "one"})
    write_parquet(tmp_path / "b.parquet", body=["two"])
    assert texts_of(config_for(tmp_path, field="body")) == ["one", "two"]


def test_each_file_is_found_once_whatever_the_order_of_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.py", "a.py", "sub/c.py", "sub/d.txt", ".hidden.py"):
        (tmp_path / name).write_text(name)
    files = find_files(
        config_for(tmp_path / "*.py", tmp_path, tmp_path / "b.py", pattern="**/*.py")
    )
    assert [file.path.relative_to(tmp_path).as_posix() for file in files] == [
        "a.py",
        "b.py",
        "sub/c.py",
    ]


def test_undecodable_bytes_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9\r\n")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "caf\xe9"}\n{"text": "\\ud800"}\n')
    assert texts_of(config_for(tmp_path)) == ["caf\ufffd\r\n", "caf\ufffd", "?"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffone\ufeff", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('\ufeff{"text": "two"}\n{"text": "three"}\n')
    (tmp_path / "c.txt").write_text("\ufeff", encoding="utf-8")
    config = config_for(tmp_path)
    check_text(find_files(config))
    assert texts_of(config) == ["one\ufeff", "two", "three"]


@pytest.mark.parametrize(
    "content",
    [
        b"\x7fELF\x02\x01\x01" + bytes(9),
        gzip.compress(b"text " * 9, mtime=0),
        "Texte in UTF-16".encode("utf-16"),
        "Текст в другой кодировке".encode("koi8-r"),
    ],
)
def test_a_file_that_holds_no_text_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.bin").write_bytes(content)
    with pytest.raises(ConfigError, match="it holds no text in UTF-8") as caught:
        check_text(find_files(config_for(tmp_path)))
    assert caught.value.value == str(tmp_path / "b.bin")
    assert "pattern" in caught.value.fix


def test_a_few_bad_bytes_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Grüße aus München, schöne Grüße".encode("latin-1") * 9)
    (tmp_path / "b.txt").write_bytes("…".encode() * 9999)  # cut inside a character
    (tmp_path / "c.txt").write_bytes(b"")
    write_parquet(tmp_path / "d.parquet", text=["binary, and read as what it is"])
    check_text(find_files(config_for(tmp_path)))


def test_a_long_text_file_is_cut_at_line_ends_and_loses_nothing(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(PIECE_CHARS // 3))
    (tmp_path / "a.txt").write_text(text)
    pieces = texts_of(config_for(tmp_path))
    assert len(pieces) > 2
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") and len(piece) < PIECE_CHARS + 100 for piece in pieces)


def test_a_text_without_line_ends_is_cut_and_loses_nothing(tmp_path: Path) -> None:
    text = "some words in a row " * (MOST_LINE_CHARS // 8) + "\nand a line\n"
    (tmp_path / "a.txt").write_text(text)
    config = config_for(tmp_path)
    found = list(read_documents(find_files(config), config.field))
    assert "".join(document.text for document in found) == text
    assert max(len(document.text) for document in found) == PIECE_CHARS + 1 + MOST_LINE_CHARS
    assert [document.source.rpartition(":")[2] for document in found] == ["1", "1", "1", "2"]
    assert found[-1].text == "and a line\n"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_the_line_of_a_piece_is_told_whatever_ends_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr("trainer.data.text.PIECE_CHARS", 4)
    (tmp_path / "a.txt").write_bytes(f"one{end}two{end}three{end}four{end}".encode())
    config = config_for(tmp_path)
    found = list(read_documents(find_files(config), config.field))
    assert len(found) > 1
    for document in found:
        line = int(document.source.rpartition(":")[2])
        assert document.text.startswith(("one", "two", "three", "four")[line - 1])


@given(
    lines=st.lists(st.sampled_from(["a", "bc", "\n", "\r\n", "word " * 30]), max_size=300),
    most=st.integers(1, 400),
)
def test_where_no_line_is_too_long_pieces_are_what_they_were(lines: list[str], most: int) -> None:
    """As `readlines` cuts them, which did it before."""
    text = "".join(lines)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        patch.setattr("trainer.data.text.PIECE_CHARS", most)
        path = Path(place) / "a.txt"
        path.write_bytes(text.encode())
        expected = []
        with path.open(newline="") as file:
            while piece := file.readlines(most):
                expected.append("".join(piece))
        if expected:
            assert texts_of(config_for(path)) == expected


def assert_rejected(config: DataConfig, field: str, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        texts_of(config)
    assert caught.value.field == field
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n"])
def test_no_text_is_rejected(tmp_path: Path, text: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", {"text": ""})
    (tmp_path / "b.jsonl").write_text(text)
    assert_rejected(config_for(tmp_path), "train.task.data.paths", "no text in 2 files", "a.jsonl")


def test_paths_that_lead_nowhere_are_rejected(tmp_path: Path) -> None:
    missing = "train.task.data.paths"
    assert_rejected(config_for(tmp_path / "none"), missing, str(tmp_path / "none"), "not exist")
    assert_rejected(config_for(tmp_path / "*.txt"), missing, "*.txt", "matches no file")
    assert_rejected(config_for(tmp_path, pattern="*.c"), missing, str(tmp_path), "'*.c'")
    assert_rejected(config_for("s3://bucket/text"), missing, "s3://bucket/text", "Mount the store")


def test_a_malformed_line_is_named_with_its_column(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n{"text": oops}\n')
    assert_rejected(config_for(path), "train.task.data.paths", str(path), "line 3, column 10")


@pytest.mark.parametrize(
    ("record", "fact"),
    [
        ({"body": "x"}, "['body']"),
        ({"text": 5}, "holds int"),
        ({"text": None}, "holds NoneType"),
    ],
)
def test_a_line_without_text_is_named(tmp_path: Path, record: object, fact: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"text": "fine"}, record)
    assert_rejected(config_for(path), "train.task.data.field", f"{path}, line 2", fact)


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    assert_rejected(config_for(path), "train.task.data.paths", str(path), "line 2", "recursion")


def test_a_parquet_column_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    ends = pa.array([0, 2, 6], pa.int32()).buffers()[1]
    latin = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"okcaf\xe9")])
    path = write_parquet(tmp_path / "a.parquet", text=latin)
    assert_rejected(config_for(path), "train.task.data.paths", str(path), "decode byte 0xe9")


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.json", [{"text": "an array of all"}])
    assert_rejected(
        config_for(path), "train.task.data.paths", str(path), "line 1 is list, not an obj"
    )


def test_a_parquet_file_without_text_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", body=["x"])
    assert_rejected(config_for(path), "train.task.data.field", str(path), "['body']")
    path = write_parquet(tmp_path / "b.parquet", text=["x"] * 300 + [None])
    assert_rejected(config_for(path), "train.task.data.field", f"{path}, row 301", "NoneType")


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_text("plain")
    assert_rejected(config_for(path), "train.task.data.paths", str(path), "parquet")
