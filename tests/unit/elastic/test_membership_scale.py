"""What membership costs at the sizes where counting anew would show."""

from __future__ import annotations

import pickle
import time

from elastic.membership import Effects, GroupConfig, Membership
from elastic.messages import Build, Identity, Packed, Report, Run

WORKERS, NODE = 4_096, 8


def test_a_regroup_looks_at_each_worker_a_few_times_not_at_all_of_them_for_each() -> None:
    replicas = WORKERS // NODE
    config = GroupConfig(
        max_replicas=replicas,
        min_replicas=1,
        workers_per_replica=NODE,
        tensor=1,
        lanes=replicas,
        steps=10,
        start_workers=WORKERS,
    )
    membership = Membership(config, generation=0, restore_step=0)
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
        report = Report(identity=identity, built=built[identity.worker], step=3, in_step=True)
        effects = join(report)
    assert effects.regrouped is not None and len(effects.regrouped.roster.replicas) == replicas - 1
    messages = [pickle.dumps(answer) for answer in effects.answers.values()]
    spent_s = time.process_time() - began

    assert len(messages) == WORKERS - NODE
    assert spent_s < 3, "0.1 s when linear, over 10 s when each arrival counts everybody"


def test_a_packed_tuple_is_pickled_once_and_arrives_as_a_plain_one() -> None:
    lanes = Packed(((0, 1), (2,)))
    assert lanes == ((0, 1), (2,)) and lanes.__reduce__()[1][0] is lanes.__reduce__()[1][0]
    run = Run(
        generation=1, replica=0, rank=0, position=0, lanes=lanes, step=0, commit=None, heals=(),
        restore=True, source="store", lead=True, recorded=0, meet=("", 0), serial=0,
    )  # fmt: skip
    there = pickle.loads(pickle.dumps(run))
    assert there == run and type(there.lanes) is tuple
