"""The collector rests while libraries are imported, and only then."""

from __future__ import annotations

import gc

import pytest

from elastic.imports import uncollected


def test_the_collector_rests_and_comes_back_after_an_error_too() -> None:
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), uncollected():
        raise ImportError("no such library")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
