from __future__ import annotations

import hashlib

import pytest

from checkpointing import Keys


def test_keys_have_the_documented_form() -> None:
    hh = hashlib.sha256(b"12").hexdigest()[:2]
    keys = Keys(prefix="base/run")
    key = keys.segment(rank=12, step=340, generation=5, attempt=1, index=2)
    assert key == f"base/run/d/{hh}/r00012/000000000340-5-1/00002.safetensors"
    assert keys.commit(340) == "base/run/m/000000000340.json"
    assert Keys().commit(340) == "m/000000000340.json"


@pytest.mark.parametrize("prefix", ["", "base/run"])
def test_step_of_inverts(prefix: str) -> None:
    keys = Keys(prefix=prefix)
    segment = keys.segment(rank=123456, step=9, generation=0, attempt=0, index=0)
    assert keys.step_of(segment) == 9
    assert keys.step_of(segment + ".abc.part") == 9
    assert keys.step_of(keys.commit(10**13)) == 10**13
    assert keys.step_of(keys.claim(7)) == keys.step_of(keys.verified(7)) == 7
    assert keys.step_of("other/run/m/000000000001.json") is None
    assert keys.step_of(f"{keys.root}notes.txt") is None


def test_generation_of_inverts() -> None:
    keys = Keys(prefix="base/run")
    segment = keys.segment(rank=123456, step=9, generation=41, attempt=3, index=0)
    assert keys.generation_of(segment) == keys.generation_of(segment + ".abc.part") == 41
    others = (keys.commit(9), keys.claim(9), "other/run/" + segment, "base/run/d/notes.txt")
    assert {keys.generation_of(key) for key in others} == {None}


def test_ranks_spread_over_prefixes() -> None:
    segments = (
        Keys().segment(rank=r, step=1, generation=0, attempt=0, index=0) for r in range(512)
    )
    assert len({key[:5] for key in segments}) > 200
