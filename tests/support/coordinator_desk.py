"""The coordinator's parts around a small roster, without Ray: for tests of one more part."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from checkpointing import CheckpointConfig
from elastic.config import HealthConfig
from elastic.coordinator.aside import Aside
from elastic.coordinator.config import CoordinatorConfig
from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.run_log import RunLog
from elastic.coordinator.snapshots import Snapshots
from elastic.coordinator.workers import Workers
from elastic.membership.decisions import GroupConfig
from elastic.membership.machine import Membership
from elastic.membership.progress import Progress
from elastic.protocol import events
from elastic.protocol.messages import Build, Identity, Report
from elastic.protocol.roster import Replica, Roster
from elastic.protocol.run_identity import RunIdentity
from elastic.protocol.run_paths import RunPaths
from elastic.reporting.event_log import read_events
from trainer.loop.samples import Ledger
from trainer.parallel.layout import ParallelDims


class Agents:
    """Notes whom they are to kill."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        self.answering: set[str] = set()
        """Nodes whose machines answer."""
        self.beating: set[str] = set()
        """Nodes whose agents beat."""

    def awake_s(self) -> float:
        return time.monotonic()

    def beats(self, node: str) -> bool:
        return node in self.beating

    async def machine_answers(self, node: str) -> bool:
        return node in self.answering

    async def signal(self, identity: Identity, number: int) -> None:
        assert number == signal.SIGKILL
        self.killed.append(identity.worker)


class CoordinatorDesk:
    """The coordinator's parts that have to do with it, and a roster of three replicas: a, b and c,
    or, where each has more workers, the next letters, too. Each is on a node of its own; `spares`
    wait on those that they are named after. While they are `building` there is no roster yet.
    `agents`: what stands for the nodes' agents."""

    def __init__(
        self,
        root: Path,
        *,
        least: int = 1,
        each: int = 1,
        spares: Sequence[str] = (),
        building: bool = False,
        health: HealthConfig | None = None,
        agents: Agents | None = None,
    ) -> None:
        groups = GroupConfig(
            max_replicas=3,
            min_replicas=least,
            dims=ParallelDims(shard=each),
            lanes=3,
            steps=30,
            start_workers=3 * each,
            max_regroups_without_progress=8,
        )
        self.paths = RunPaths(root=root)
        started = events.RunStarted(
            time=0.0, name="r", layout={}, steps=30, start_step=0, versions={}
        )
        self.config = config = CoordinatorConfig(
            groups=groups,
            paths=self.paths,
            identity=RunIdentity(id="r"),
            prefix="run/",
            health=health or HealthConfig(),
            checkpoint=CheckpointConfig(),
            generation=0,
            restore_step=0,
            snapshot=None,
            started=started,
            faults=(),
            ledger=Ledger(seed=0, global_batch=1, lanes=1, samples=1),
        )
        self.membership = Membership(groups, Progress())
        self.records = RunLog(config, self.membership)
        self.dispatcher = Dispatcher(self.membership, self.records, lambda effects: None)
        self.dispatcher.ready.set()
        self.agents = agents or Agents()
        node_agents: Any = self.agents
        no_holder: Any = None
        snapshots = Snapshots(
            self.paths,
            self.membership.progress,
            no_holder,
            self.records.note,
            versions={},
            found=None,
            timeout_s=1.0,
        )
        self.aside = Aside(self.membership, self.dispatcher)
        self.workers = Workers(
            config,
            self.membership,
            self.dispatcher,
            self.records,
            node_agents,
            snapshots,
            self.aside,
        )
        self.built: dict[str, int] = {}
        seated = ascii_lowercase[: 3 * each]
        for rank, worker in enumerate((*seated, *spares)):
            identity = Identity(worker=worker, rank=rank, node=worker[0].upper(), pid=rank)
            self.workers.started[worker] = identity
            self.join(worker)
        for worker in seated if not building else ():
            self.join(worker, built=self.built[worker])

    def lay_out(self, *replicas: str, nodes: Mapping[str, str]) -> None:
        """A roster of replicas of these workers, on these nodes."""
        self.membership.roster = Roster(
            generation=1,
            replicas=tuple(
                Replica(index=index, formed=index + 1, workers=tuple(replica.split()))
                for index, replica in enumerate(replicas)
            ),
            lanes={index: (index,) for index, _ in enumerate(replicas)},
        )
        for rank, (worker, node) in enumerate(nodes.items()):
            identity = Identity(worker=worker, rank=rank, node=node, pid=rank)
            self.membership.members[worker] = self.workers.started[worker] = identity

    def join(self, worker: str, built: int = 0, **state: Any) -> None:
        report = Report(identity=self.workers.started[worker], built=built, **state)
        self.membership.join(report)
        answers = self.membership.advance().answers
        self.built.update({w: a.formed for w, a in answers.items() if isinstance(a, Build)})

    def happened(self, kind: type[events.Event]) -> list[Any]:
        return [event for event in read_events(self.paths.events) if isinstance(event, kind)]
