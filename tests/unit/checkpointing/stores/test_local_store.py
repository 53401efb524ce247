from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointing import CorruptError, MissingError, StoreError, StoreUnavailableError, open_store
from checkpointing.stores.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_delete_is_idempotent_and_leaves_no_empty_directory(store: LocalStore) -> None:
    store.put("d/a/x", [b"."])
    store.put("d/a/y", [b"."])
    store.delete("d/a/x")
    store.delete("d/a/x")
    assert store.list("d/") == ["d/a/y"]
    store.delete("d/a/y")
    assert not (store.root / "d" / "a").exists()
    store.delete("d/a/y")


def test_missing_is_its_own_error(store: LocalStore) -> None:
    for call in (store.get, store.size, lambda key: store.get_range(key, 0, 1)):
        with pytest.raises(MissingError, match="d/none") as caught:
            call("d/none")
        assert str(store.root) in str(caught.value)


def no_file_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))  # its path has 107 characters at most


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "put_there",
    [os.mkfifo, Path.mkdir, no_file_socket, lambda path: path.symlink_to("/dev/zero")],
)
def test_what_is_no_file_is_corrupt_and_not_waited_for(
    store: LocalStore,
    put_there: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.put("d/beside", [b"."])
    monkeypatch.chdir(store.root)
    put_there(store.root / "d" / "x")
    for read in (store.get, store.size, lambda key: store.get_range(key, 0, 4)):
        with pytest.raises(CorruptError, match="d/x is not a file"):
            read("d/x")


def test_path_below_a_file_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"not a directory")
    store = LocalStore(tmp_path / "file" / "run")
    calls = [
        lambda: store.put("d/x", [b"."]),
        lambda: store.put_if_absent("m/x", b"."),
        lambda: store.get("d/x"),
        lambda: store.list("d/"),
        lambda: store.delete("d/x"),
        store.check_writable,
    ]
    for call in calls:
        with pytest.raises(StoreUnavailableError, match=str(tmp_path / "file")) as caught:
            call()
        assert caught.value.errno == errno.ENOTDIR


def test_no_room_is_unavailable_and_leaves_nothing(store: LocalStore) -> None:
    store.check_writable()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # binds root too
    try:
        with pytest.raises(StoreUnavailableError, match=r"d/x") as caught:
            store.put("d/x", [bytes(1 << 20), b"one more"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert store.list("") == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK])
def test_a_file_system_without_hard_links_is_found_before_the_first_commit(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:  # none of this machine's file systems does
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.link", refuse)
    with pytest.raises(StoreUnavailableError, match="no hard links, which a commit") as caught:
        store.check_writable()
    assert caught.value.errno == number
    assert store.list("") == []


def test_a_file_system_whose_links_replace_files_is_found(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.link", os.replace)
    with pytest.raises(StoreError, match="two commits could both succeed"):
        store.check_writable()
    assert store.list("") == []


def test_a_link_whose_answer_was_lost_counts_as_made(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client sends it again, and is told that the name is taken: by itself."""
    link, sent = os.link, list[str]()

    def link_twice(part: Path, target: Path) -> None:
        sent.append(target.name)
        link(part, target)
        link(part, target)

    monkeypatch.setattr("os.link", link_twice)
    assert store.put_if_absent("m/7", b"first")
    assert sent == ["7"]
    monkeypatch.setattr("os.link", link)
    assert not store.put_if_absent("m/7", b"second"), "that one is another's"
    assert store.get("m/7") == b"first" and store.list("") == ["m/7"]


def test_open_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for where in (tmp_path / "a b", str(tmp_path / "a b"), f"file://{tmp_path}/a%20b", "a b"):
        store = open_store(where)
        assert isinstance(store, LocalStore)
        assert store.root == tmp_path / "a b"


@pytest.mark.parametrize("url", ["gs://b", "file://host/dir", "file://"])
def test_open_store_says_what_it_has(url: str) -> None:
    with pytest.raises(StoreError, match=r"write (s3://BUCKET/PREFIX, )?file:///DIR"):
        open_store(url)
