"""What membership costs at the sizes where counting anew would show."""

from __future__ import annotations

import pickle
import time

from elastic.membership.decisions import Effects, GroupConfig
from elastic.membership.machine import Membership
from elastic.membership.progress import Progress
from elastic.protocol.messages import Build, Identity, Order, Report, Run
from trainer.parallel.layout import ParallelDims

WORKERS, NODE = 4_096, 8


def test_a_regroup_looks_at_each_worker_a_few_times_not_at_all_of_them_for_each() -> None:
    replicas = WORKERS // NODE
    config = GroupConfig(
        max_replicas=replicas,
        min_replicas=1,
        dims=ParallelDims(shard=NODE),
        lanes=replicas,
        steps=10,
        start_workers=WORKERS,
        max_regroups_without_progress=8,
    )
    membership = Membership(config, Progress())
    identities = [Identity(worker=f"w{i}", rank=i, node="n", pid=i) for i in range(WORKERS)]
    built: dict[str, int] = {}

    def join(report: Report) -> Effects:
        membership.join(report)
        effects = membership.advance()
        for worker, answer in effects.answers.items():
            if isinstance(answer, Build):
                built[worker] = answer.formed
        return effects

    began = time.process_time()
    for identity in identities:
        join(Report(identity=identity))
    for identity in identities:
        effects = join(Report(identity=identity, built=built[identity.worker]))
    assert effects.regrouped is not None and len(effects.answers) == WORKERS
    for identity in identities[:NODE]:
        membership.lose(identity.worker)
        membership.advance()
    for identity in identities[NODE:]:
        report = Report(
            identity=identity,
            built=built[identity.worker],
            generation=1,
            step=3,
            in_step=True,
        )
        effects = join(report)
    assert effects.regrouped is not None and len(effects.regrouped.roster.replicas) == replicas - 1
    messages = [pickle.dumps(answer) for answer in effects.answers.values()]
    spent_s = time.process_time() - began

    assert len(messages) == WORKERS - NODE
    assert spent_s < 3, "0.1 s when linear, over 10 s when each arrival counts everybody"


def test_an_order_is_pickled_once_and_each_part_of_it_arrives_whole() -> None:
    lanes = ((0, 1), (2,))
    order = Order(
        generation=1, lanes=lanes, step=0, commit=None, heals=(), followers=(0, 0),
        restore=True, source="store", recorded=0, until=9, skips=(), pause_s=0.0, meet=("", 0),
    )  # fmt: skip
    first = order.part(replica=0, rank=0, position=0, formed=1, serial=1)
    second = order.part(replica=4, rank=1, position=1, formed=2, serial=2)
    assert first.__reduce__()[1][0] is second.__reduce__()[1][0]
    assert first.lead and not second.lead
    there = pickle.loads(pickle.dumps(second))
    assert there == second == Run(
        generation=1, replica=4, rank=1, position=1, formed=2, lanes=lanes, step=0, commit=None,
        heals=(), followers=(0, 0), restore=True, source="store", recorded=0, until=9,
        pause_s=0.0, meet=("", 0), serial=2, skips=(),
    )  # fmt: skip
