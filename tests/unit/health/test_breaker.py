from __future__ import annotations

import pytest

from health.breaker import decide_hold

NOW = 1_000_000.0
HOUR_S = 3600.0


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
        machines=machines,
        suspected=[NOW - i for i in range(suspects)],
        replaced=[],
        now=NOW,
        most_per_hour=100,
    )
    assert (why is not None) is held
    assert why is None or f"{suspects} of {machines} machines" in why


def test_one_after_the_other_is_not_at_once() -> None:
    suspected = [NOW, NOW - HOUR_S, NOW - 2 * HOUR_S]
    common = {"machines": 3, "replaced": [], "now": NOW, "most_per_hour": 9}
    assert decide_hold(suspected=suspected, **common) is None
    assert decide_hold(suspected=[NOW, NOW - HOUR_S + 1], **common) is not None


@pytest.mark.parametrize(
    ("ago_s", "held"), [([1, 2, 3], True), ([1, 2], False), ([1, 2, 3600], False)]
)
def test_so_many_an_hour_and_no_more(ago_s: list[float], held: bool) -> None:
    why = decide_hold(
        machines=100,
        suspected=[NOW],
        replaced=[NOW - ago for ago in ago_s],
        now=NOW,
        most_per_hour=3,
    )
    expected = "3 replacements began within an hour (health.max_replacements_per_hour = 3)"
    assert why == (expected if held else None)
