from __future__ import annotations

from collections import Counter

from elastic.coordinator.witness_ring import MOST, WitnessRing
from trainer.backend.link_exchange import Address

OWN = "10.0.0.1"


def door(number: int) -> Address:
    return f"10.1.{number // 256}.{number % 256}", 7000 + number


def ring_of(count: int) -> WitnessRing:
    ring = WitnessRing(OWN)
    for number in range(count):
        ring.meet(f"n{number:04}", door(number))
    return ring


def test_a_node_may_ask_the_next_ones_and_is_asked_by_as_few() -> None:
    ring, count = ring_of(1000), 1000
    asked = Counter[Address]()
    for number in range(count):
        found = ring.meet(f"n{number:04}", door(number))
        assert found == [door((number + ahead) % count) for ahead in range(1, MOST + 1)]
        asked.update(found)
    assert set(asked.values()) == {MOST}


def test_where_there_are_few_nodes_it_may_ask_all_others() -> None:
    assert ring_of(1).meet("n0000", door(0)) == []
    assert ring_of(3).meet("n0001", door(1)) == [door(2), door(0)]


def test_the_machines_of_the_coordinator_and_of_the_node_itself_bear_no_witness() -> None:
    """Nor does any machine twice: Ray may have several nodes there."""
    ring = ring_of(2)
    ring.meet("n0002", (OWN, 1))
    ring.meet("n0003", (door(0)[0], 2))
    ring.meet("n0004", (door(1)[0], 3))
    assert ring.meet("n0000", door(0)) == [door(1)]
    assert ring.meet("n0003", (door(0)[0], 2)) == [(door(1)[0], 3)]
    assert ring.meet("n0002", (OWN, 1)) == [(door(0)[0], 2), (door(1)[0], 3)]


def test_who_is_gone_is_named_no_more_and_another_agent_by_its_own_port() -> None:
    ring = ring_of(3)
    ring.forget("n0002")
    ring.forget("n0002")
    assert ring.meet("n0001", door(1)) == [door(0)]
    ring.meet("n0002", (door(2)[0], 9))
    assert ring.meet("n0001", door(1)) == [(door(2)[0], 9), door(0)]
    ring.forget("n0001")
    assert ring.meet("n0000", door(0)) == [(door(2)[0], 9)], "however often it has told its door"
