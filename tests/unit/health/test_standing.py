from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from health.standing import MOST, Standing
from health.verdict import Sign, sign_from_json

READ = Sign(
    name="remap_failed",
    source="reading",
    role="root",
    cause="gpu_error",
    subject="gpu",
    detail="3 errors",
    of="0000:05:00",
)
LINE = replace(READ, name="xid_79", source="log", detail="a line")


def test_the_same_again_is_no_change_even_in_other_words() -> None:
    standing = Standing()
    assert standing.take([READ], 0.0)
    assert not standing.take([replace(READ, detail="4 errors", at_s=9.0)], 5.0)
    assert [sign.detail for sign in standing.signs] == ["4 errors"]
    assert standing.take([replace(READ, decisive=True)], 10.0)
    assert standing.take([READ, replace(READ, of="0000:06:00")], 15.0)


def test_a_reading_stands_for_a_minute_and_a_line_for_ten() -> None:
    standing = Standing()
    standing.take([READ, LINE], 0.0)
    assert not standing.take([], 59.0)
    assert standing.take([], 60.0)
    assert standing.signs == [LINE]
    assert not standing.take([], 599.0)
    assert standing.take([], 600.0)
    assert standing.signs == []


def test_a_line_and_a_reading_of_one_name_stand_beside_each_other() -> None:
    standing, read = Standing(), replace(LINE, source="reading", detail="read")
    assert standing.take([LINE], 0.0)
    assert standing.take([read], 5.0)
    assert standing.signs == [LINE, read]


def test_a_line_that_comes_again_is_repeated_once() -> None:
    standing = Standing()
    standing.take([LINE], 0.0)
    assert standing.take([LINE], 5.0)
    assert standing.signs == [replace(LINE, repeated=True)]
    assert not standing.take([LINE], 10.0)


def test_what_stands_in_a_storm_goes_on_standing_while_it_is_seen() -> None:
    standing = Standing()
    storm = [replace(READ, of=str(number)) for number in range(MOST)]
    standing.take(storm, 0.0)
    assert not standing.take(storm, 50.0)
    assert not standing.take([], 70.0)


def test_a_storm_is_cut_short() -> None:
    standing = Standing()
    standing.take([replace(LINE, of=str(number)) for number in range(10 * MOST)], 0.0)
    assert [sign.of for sign in standing.signs] == [str(number) for number in range(MOST)]


def test_what_is_decisive_is_heard_in_a_storm() -> None:
    standing = Standing()
    standing.take([replace(LINE, of=str(number)) for number in range(MOST)], 0.0)
    lost = replace(READ, name="gpu_lost", decisive=True)
    assert standing.take([READ, lost], 5.0)
    assert standing.signs[MOST:] == [lost]


@pytest.mark.parametrize(
    "storm",
    [
        {"name": "efa_retrans_pkts", "source": "reading", "role": "confirmation"},
        {"name": "efa_peer_unresponsive", "source": "log", "role": "root"},
    ],
)
def test_a_storm_of_the_network_hides_no_gpu(storm: dict[str, Any]) -> None:
    """As of 32 EFA devices that retransmit, with two counters each, and go on to; the kernel's line
    is read once."""
    standing = Standing()
    link = replace(READ, cause="link", subject="link", **storm)
    links = [replace(link, of=str(number), peer=str(number)) for number in range(64)]
    standing.take(links, 0.0)
    assert standing.take([*links, READ, LINE], 5.0)
    assert standing.signs[MOST:] == [READ, LINE]


def test_a_sign_goes_to_json_and_back_and_fields_of_other_versions_are_passed_by() -> None:
    sign = replace(LINE, worker="w1", repeated=True, remedy="reboot")
    data = sign.to_json()
    assert "peer" not in data and sign_from_json({**data, "later": 1}) == sign
    del data["cause"]
    assert sign_from_json(data) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", None),
        ("role", "bystander"),
        ("source", "rumour"),
        ("subject", "cable"),
        ("remedy", "zap"),
        ("remedy", 3),
        ("node", ["n1"]),
        ("at_s", "now"),
        ("decisive", "yes"),
    ],
)
def test_a_sign_with_a_value_that_this_version_does_not_know_is_passed_by(
    field: str, value: object
) -> None:
    data = LINE.to_json()
    assert sign_from_json({**data, "at_s": 5, "remedy": None}) == replace(LINE, at_s=5.0)
    assert sign_from_json({**data, field: value}) is None
