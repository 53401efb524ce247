"""What torch records of groups on Gloo, one of them made by hand: looked at, as it is documented
nowhere."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from health.flight import LATEST, NO_NAME, find_pending, latest_of
from tests.support.watching import wait_until
from trainer.backend.flight_recorder import read_flight_recorder

LONG = timedelta(seconds=60)


def test_a_group_made_by_hand_is_recorded_and_what_has_not_ended_is_told() -> None:
    store = dist.HashStore()

    def make(rank: int) -> Any:
        return dist.ProcessGroupGloo(dist.PrefixStore("flight", store), rank, 2, LONG)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(make, range(2))
    both = [group.allreduce([torch.ones(3)]) for group in (first, second)]
    for work in both:
        work.wait()
    wait_until(lambda: not ours(), 5.0)  # a thread of torch's marks what has ended
    waiting = first.allreduce([torch.ones(5)])
    (pending,) = ours()
    assert pending["group"] == NO_NAME and pending["sizes"] == [[5]]
    assert (pending["what"], pending["number"]) == ("gloo:all_reduce", 2)
    second.allreduce([torch.ones(5)]).wait()
    waiting.wait()
    wait_until(lambda: not ours(), 5.0)


def ours() -> list[dict[str, Any]]:
    """Those of other tests have been left in the middle, perhaps."""
    found = find_pending(read_flight_recorder().decode())
    return [one for one in found if one["sizes"] in ([[3]], [[5]])]


def test_the_latest_entries_are_kept() -> None:
    import json

    entries = [{"record_id": number} for number in range(LATEST + 3)]
    kept = json.loads(latest_of(json.dumps({"version": "2.10", "entries": entries})))
    assert kept["version"] == "2.10" and kept["entries"] == entries[3:]


def test_what_is_no_recording_is_kept_and_tells_nothing() -> None:
    assert latest_of("ValueError: no") == "ValueError: no"
    assert find_pending("") == find_pending("ValueError: no") == find_pending("{}") == []
