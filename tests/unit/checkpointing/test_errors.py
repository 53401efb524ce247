from __future__ import annotations

import pickle

import pytest

from checkpointing import errors

ALL = [
    errors.CheckpointConfigError("checkpoint.keep_last", 0, "too few", "Write 1 or more"),
    errors.StoreError("s3://b", "no such scheme"),
    errors.MissingError("d/x", "no such object in /r"),
    errors.StoreUnavailableError("/r/d/x", 28, "No space left on device"),
    errors.StoreUnavailableError("s3://b/d/x", None, "access denied"),
    errors.CorruptError("d/x", "its CRC32 differed twice", 3, (12, 16)),
    errors.CorruptError("m/x", "not a manifest"),
    errors.SliceError("w", "a gap"),
    errors.NotCommittedError(7, "no record"),
    errors.AlreadyCommittedError(7, "by generation 2"),
    errors.StaleGenerationError(7, 1, 9, 2),
    errors.ProtectedError(7, "it is pinned", "Unpin it first"),
    errors.IncompatibleError("w", "absent", 3),
    errors.OtherRecordError(7, "ab" * 32),
]


@pytest.mark.parametrize("error", ALL, ids=lambda e: type(e).__name__)
def test_survives_pickling(error: errors.CheckpointError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert back.args == error.args
    assert back.__dict__ == error.__dict__
    assert str(back) == str(error)


def test_all_of_the_tree_is_tried() -> None:
    tree = {c for c in vars(errors).values() if isinstance(c, type)} - {errors.CheckpointError}
    assert {type(error) for error in ALL} == tree
    assert all(issubclass(cls, errors.CheckpointError) for cls in tree)
    assert issubclass(errors.MissingError, errors.StoreError)
    assert issubclass(errors.StoreUnavailableError, errors.StoreError)


def test_corrupt_error_names_key_block_and_bytes() -> None:
    text = str(errors.CorruptError("d/x", "its CRC32 differed twice", 3, (12, 16)))
    assert all(part in text for part in ("d/x", "block 3", "bytes 12 to 16"))
