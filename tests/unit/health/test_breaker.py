from __future__ import annotations

import pytest

from health.breaker import decide_hold

NOW = 1_000_000.0


@pytest.mark.parametrize(
    ("machines", "suspects", "held"),
    [
        (1, 1, False),  # a single one, however few there are
        (2, 1, False),
        (2, 2, True),
        (9, 2, True),  # 22 %
        (10, 2, False),  # 20 %: not more
        (100, 20, False),
        (100, 21, True),
    ],
)
def test_many_suspects_at_once_hold_all_of_them(machines: int, suspects: int, held: bool) -> None:
    why = decide_hold(
        machines=machines, suspects=suspects, settled=[], begun=[], now=NOW, most_per_hour=100
    )
    assert (why is not None) is held
    assert why is None or f"{suspects} of {machines} machines are suspect at once" in why


@pytest.mark.parametrize(("ago_s", "held"), [(0, True), (599, True), (600, False)])
def test_one_that_was_just_replaced_counts_on_for_ten_minutes(ago_s: float, held: bool) -> None:
    why = decide_hold(
        machines=3, suspects=1, settled=[NOW - ago_s], begun=[], now=NOW, most_per_hour=100
    )
    assert (why is not None) is held


@pytest.mark.parametrize(
    ("ago_s", "held"), [([1, 2, 3], True), ([1, 2], False), ([1, 2, 3600], False)]
)
def test_so_many_an_hour_and_no_more(ago_s: list[float], held: bool) -> None:
    begun = [NOW - ago for ago in ago_s]
    why = decide_hold(machines=100, suspects=1, settled=[], begun=begun, now=NOW, most_per_hour=3)
    expected = "3 replacements began within an hour (health.max_replacements_per_hour = 3)"
    assert why == (expected if held else None)
