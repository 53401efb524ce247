"""A profiler may stop while a collective across replicas is in flight on Gloo: then nothing of the
collective may be among its records, which one of Gloo's threads would write to after that."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.support.cross_pair import join_pair
from trainer.backend.rendezvous import Rendezvous

TIMEOUT_S = 30.0


def test_a_profile_holds_no_collective_of_gloos_across_replicas() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet = Rendezvous(host="127.0.0.1", port=store.port, timeout_s=TIMEOUT_S)
    with ThreadPoolExecutor() as threads:
        ours, theirs = threads.map(partial(join_pair, meet), range(2))
        mine, others = torch.ones(4), torch.ones(4)
        with profile(activities=[ProfilerActivity.CPU]) as running:
            theirs_ends = threads.submit(theirs.sum, others)
            ours.sum(mine)
            theirs_ends.result()
            mine + 1
        names = {event.name for event in running.events() or ()}
        assert "aten::add" in names and not [name for name in names if name.startswith("gloo:")]
        assert mine.tolist() == others.tolist() == [2.0] * 4
        for group in (ours, theirs):
            group.close()
