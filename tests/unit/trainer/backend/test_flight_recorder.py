"""What torch records of groups on Gloo, one of them made by hand: looked at, as it is documented
nowhere."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from health.absence import find_absences
from health.flight import LATEST, NO_NAME, find_pending, latest_of
from tests.support.watching import wait_until
from trainer.backend.flight_recorder import read_flight_recorder
from trainer.backend.groups import make_cross_groups, make_replica_group
from trainer.backend.rendezvous import Rendezvous
from trainer.parallel.layout import ParallelDims

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
    found = find_pending(read_flight_recorder("cpu").decode())
    return [one for one in found if one["sizes"] in ([[3]], [[5]])]


def test_the_latest_entries_are_kept() -> None:
    entries = [{"record_id": number, "pg_id": 0} for number in range(LATEST + 3)]
    kept = json.loads(latest_of(json.dumps({"version": "2.10", "entries": entries})))
    assert kept["version"] == "2.10" and kept["entries"] == entries[3:]


def test_what_is_no_recording_is_kept_and_tells_nothing() -> None:
    assert latest_of("ValueError: no") == "ValueError: no"
    assert find_pending("") == find_pending("ValueError: no") == find_pending("{}") == []


def wait_for_the_last(rank: int, port: int) -> None:
    """Each of 2 x 2, that meet across replicas as well, waits for rank 3, or for one that does."""
    store = dist.TCPStore("127.0.0.1", port)
    meet = Rendezvous(host="127.0.0.1", port=port, timeout_s=LONG.total_seconds())
    mesh = make_replica_group(
        meet, "replica/3", rank=rank, dims=ParallelDims(shard=2, tensor=2), device="cpu"
    )
    assert mesh.tensor is not None
    fsdp, tensor = mesh.fsdp.get_group(), mesh.tensor.get_group()
    cross, _ = make_cross_groups(meet, "cross/7/0", rank=rank, size=4, device="cpu", leave_now=bool)
    for _ in range(2):
        for group in (fsdp, tensor):
            dist.all_reduce(torch.ones(3), group=group)
    cross.allreduce([torch.ones(3)]).wait()
    both = torch.empty(2)
    works = {
        0: lambda: [dist.all_reduce(torch.ones(3), group=fsdp, async_op=True)],
        1: lambda: [dist.all_reduce(torch.ones(3), async_op=True)],
        2: lambda: [
            dist.all_gather_into_tensor(both, torch.ones(1), group=tensor, async_op=True),
            cross.allreduce([torch.ones(3)]),
        ],
    }.get(rank, list)()
    store.set(f"{rank} waits", "")
    store.wait([f"{each} waits" for each in range(4)], LONG)
    wait_until(lambda: len(find_pending(read_flight_recorder("cpu").decode())) == len(works), 5.0)
    store.set(f"recording of {rank}", read_flight_recorder("cpu").decode())
    store.wait(["over"], LONG)
    os._exit(0)  # what it waits in does not end


def test_recordings_of_real_groups_tell_who_has_not_arrived_where() -> None:
    """Along both dimensions of a mesh, in all of a replica, and in a group made by hand."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    running = mp.start_processes(
        wait_for_the_last,
        args=(store.port,),
        nprocs=4,
        join=False,
        start_method="forkserver",
    )
    names = [f"recording of {rank}" for rank in range(4)]
    while not store.check(names):
        assert not running.join(timeout=0.1), "one has failed"
    recordings = {f"w{rank}": store.get(name).decode() for rank, name in enumerate(names)}
    store.set("over", "")
    while not running.join():
        pass
    workers = tuple(recordings)
    found = find_absences(recordings, {"replica/3": workers, "cross/7/0": workers})
    assert {str(one) for one in found} == {
        "w2 has not begun all_reduce 3 of fsdp, in which w0 waits",
        "w0, w2 and w3 have not begun all_reduce 1 of the replica, in which w1 waits",
        "w3 has not begun all_gather 3 of tensor, in which w2 waits",
        "w0, w1 and w3 have not begun all_reduce 2 of the group across replicas, in which w2 waits",
    }
