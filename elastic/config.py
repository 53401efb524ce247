"""What the user writes about machines and health. Imports without torch and Ray."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from elastic.node_config import NodesConfig
from elastic.training_config import TrainingHealthConfig
from health.questions import ANSWER_S
from trainer.config import ParallelConfig
from trainer.errors import ConfigError, check_types

_SUPERVISOR_RENEWALS = 4
"""Times that the supervisor is heard within the shortest `supervisor_timeout_s`."""


@dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    """How many replicas a run may have, and what a worker needs."""

    max_replicas: int = 1
    """Replicas the run works with when all its machines are there."""
    min_replicas: int = 1
    """Fewer than these, and the run keeps its state in memory and waits."""
    spares: int = 0
    """Live workers without a slot, ready to take a lost one's."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What a worker computes on: one CPU slot or one GPU."""
    cpus_per_worker: float = 1.0
    """CPUs that Ray reserves for a worker."""
    gpus_per_worker: float = 1.0
    """GPUs that Ray reserves for a worker, with device="cuda": it uses one, or shares one with
    others (0.5), never parts of two: with 0.8 a GPU holds one worker. Ranks that share one need an
    `NCCL_HOSTID` each, and are slow: for tests."""
    allow_tcp: bool = False
    """On machines with EFA devices, NCCL may go over TCP. Without it a worker there fails when its
    first group is made, as TCP is 10 to 100 times slower."""
    wait_s: float = 60.0
    """How long to wait at the start for the resources of the smallest layout. Ray's autoscaler is
    asked for them meanwhile; its machines take minutes. A run that another one forestalls, as both
    are about to take the same machines, waits as long again, a minute at least."""

    def __post_init__(self) -> None:
        check_types(self, "scaling")

    def check(self, parallel: ParallelConfig) -> None:
        """Raises ConfigError where the numbers contradict each other."""
        if self.max_replicas < 1:
            raise ConfigError(
                "scaling.max_replicas", self.max_replicas, "a run needs a replica", "Use 1 or more"
            )
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ConfigError(
                "scaling.min_replicas",
                self.min_replicas,
                f"not between 1 and max_replicas = {self.max_replicas}",
                f"Use 1 to {self.max_replicas}",
            )
        if self.spares < 0:
            raise ConfigError("scaling.spares", self.spares, "negative", "Use 0 or more")
        if not self.cpus_per_worker >= 0 or (self.cpus_per_worker == 0 and self.device == "cpu"):
            raise ConfigError(
                "scaling.cpus_per_worker", self.cpus_per_worker, "no CPU", "Use a positive number"
            )
        if not self.wait_s >= 0:
            raise ConfigError("scaling.wait_s", self.wait_s, "no time", "Use 0 or more")
        if not 0 < self.gpus_per_worker <= 1:
            raise ConfigError(
                "scaling.gpus_per_worker",
                self.gpus_per_worker,
                "a worker computes on one GPU, or shares one",
                "Use more than 0, 1 at most",
            )
        parallel.layout(self.max_replicas)

    def slots(self, parallel: ParallelConfig) -> int:
        """Workers of the full layout, spares not counted."""
        return self.max_replicas * parallel.workers

    @property
    def resources_per_worker(self) -> dict[str, float]:
        """What Ray reserves for one worker."""
        gpus = {"GPU": self.gpus_per_worker} if self.device == "cuda" else {}
        return {"CPU": self.cpus_per_worker, **gpus}


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """How long to wait for whom, and how much to put up with."""

    collective_timeout_s: float = 300.0
    """Bound on a collective, on a block of a heal and on making a process group: the last net, for
    what heartbeats do not see. A replica waits in a collective for those that compute more lanes,
    so this must be longer than that takes."""
    regroup_timeout_s: float = 300.0
    """A worker that does not follow a call to regroup within this time, and has been in one phase
    of its work for as long, is killed. It first ends its step, so this must be longer than one."""
    max_nonfinite_steps: int = 5
    """Steps in a row with a non-finite loss or gradient that end the run, or, as
    `training.on_nonfinite` says, send it back or are told of; each one is skipped."""
    training: TrainingHealthConfig = field(default_factory=TrainingHealthConfig)
    """What counts as trouble in losses and gradient norms, and what is done then."""
    max_crashes: int = 50
    """Incidents of crashes, errors or lost nodes, with no step committed in between, that end the
    run. Workers lost within 10 s are one incident, here and below; spares count."""
    max_hangs: int = 10
    """Incidents of workers killed because they were frozen or stuck, or because their connections
    failed, with no step committed in between, that end the run."""
    max_preemptions: int = 200
    """Incidents of workers taken away with notice before they could leave, with no step committed
    in between, that end the run."""
    max_regroups_without_progress: int = 8
    """Regroups in a row after faults, with no step committed and no worker lost in between, that
    end the run: collectives across replicas fail and nobody dies, as on a link that drops packets
    of one size, and nobody can be taken out for it. Connections are tried from the second on."""
    max_same_step_errors: int = 2
    """The run ends where so many replicas, or the same one formed anew, raise in user code, run out
    of memory, fail an assertion on the device or cannot be compiled at one step."""
    heal_bytes_per_s: float | None = None
    """Bound on what a worker sends to all that it heals together, for networks on which heals slow
    the steps; None: no bound."""
    compare_every: int | None = 100
    """Steps between comparisons of the replicas' states, by a checksum; None: at the end only."""
    witness_every: int | None = 250
    """Every so many steps one lane, drawn by the seed, is also computed by one or two other
    replicas, and the gradients are compared before the step counts. It takes as long as a lane, so
    1 / 250 of the time where a replica has one lane, and less where it has more. Only with
    determinism "strict"; None: never. Use None where replicas run on GPUs of different kinds, whose
    bits differ."""
    freeze_timeout_s: float = 10.0
    """A worker whose heartbeat stands still for this long is killed. Code that holds the
    interpreter's lock without a break stops the heartbeat, so this must be longer than any such
    code takes; ten times this holds while a worker starts (libraries, CUDA), a replica is built,
    also beside the steps, a model is compiled or a profile is written. A worker that a signal has
    stopped is killed within half a second."""
    progress_timeout_s: float | None = 4.0
    """With no step committed for the longest of this time, three median steps, and twice the
    longest that a worker was in one phase of a step before: the workers that the others wait for
    are found, by the collectives that they have begun and where they are, and killed. It counts
    from a worker's third step on, and from the third batch of its evaluations, without the time in
    which it had no core. Before that, in saves, and where most replicas stand still,
    `regroup_timeout_s` counts in its place. None: only that and `collective_timeout_s` count."""
    node_beat_s: float = 1.0
    """How often a node says that it is there. A death is told at once, whatever this is."""
    node_timeout_s: float = 5.0
    """A node that was not heard for this long, more than twice `node_beat_s`, is lost; cut off from
    the coordinator for as long, it ends its workers itself."""
    supervisor_timeout_s: float = 600.0
    """A run whose supervisor was not heard for this long ends itself. A supervisor is heard every
    5 s, so 20 is the least. Where it is lost, Ray starts another, once its head node is there to do
    it, so this must be longer than that takes: a minute and a half where a machine vanishes."""
    preflight: bool | Literal["full"] = True
    """Each machine is looked at before its workers get a place, while they start: the quick checks
    of `elastic doctor`. On one with a GPU that has failed none gets any, and it is suspect; all
    else is told in the report. "full": each is also loaded, once, before its first worker gets a
    place: a matrix burn with a checked result, copies between host and GPU, an all-reduce in the
    node. It takes a minute or so, five at most, in which the others of a run that goes on train;
    a wrong number counts as a GPU that has failed. False: none is looked at."""
    replace_nodes: Literal["tell"] | NodesConfig = "tell"
    """Who replaces a machine that is found at fault: `RayNodes`, `Ec2Nodes`, `KubeNodes` or
    `LocalNodes`. With one of them the run takes the other steps of the ladder, too: it lets workers
    go, gives them other seats, and ends where nothing helps. "tell": nobody; the records say what
    would have been done."""
    move_slow: bool = False
    """Whether the run acts on workers that stay slower than the others, as `replace_nodes` has it
    act on verdicts: they get seats on other machines, or their machine is replaced. False: it is
    told, in records and report."""
    max_replacements_per_hour: int = 4
    """Replacements that may begin within an hour. None begins either while more than one machine,
    and more than a fifth of them, are suspect and not done with, or became so within ten
    minutes."""

    def __post_init__(self) -> None:
        check_types(self, "health")

    def check(self) -> None:
        """Raises ConfigError where a bound is not positive, or two contradict each other."""
        for name, value in vars(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and not value > 0:  # nor NaN
                raise ConfigError(f"health.{name}", value, "not positive", "Use a positive number")
            if number and name.endswith("_timeout_s") and math.isinf(value):
                none = "None for no bound, or " if name == "progress_timeout_s" else ""
                fix = f"Use {none}a number of seconds: 86400 is a day"
                raise ConfigError(f"health.{name}", value, "torch and Ray cannot wait so long", fix)
        if self.node_timeout_s <= 2 * self.node_beat_s:
            raise ConfigError(
                "health.node_timeout_s",
                self.node_timeout_s,
                f"one late beat of node_beat_s = {self.node_beat_s:g} would lose a node",
                f"Use more than {2 * self.node_beat_s:g}",
            )
        least_s = _SUPERVISOR_RENEWALS * ANSWER_S
        if self.supervisor_timeout_s < least_s:
            raise ConfigError(
                "health.supervisor_timeout_s",
                self.supervisor_timeout_s,
                f"a supervisor that lives is heard every {ANSWER_S:g} s, or somewhat later",
                f"Use {least_s:g} or more",
            )
        self.training.check(self.max_nonfinite_steps)
        if self.replace_nodes != "tell":
            self.replace_nodes.check()

    @property
    def fatal_nonfinite_steps(self) -> int | None:
        """Steps in a row that are not finite with which a worker ends the run; None: none do."""
        return self.max_nonfinite_steps if self.training.on_nonfinite == "stop" else None


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """How many workers a run starts with."""

    replicas: int
    """Whole replicas."""
    spares: int
    """Workers beyond them."""

    def workers(self, parallel: ParallelConfig) -> int:
        """All of them, with replicas of `parallel`."""
        return self.replicas * parallel.workers + self.spares


def plan_workers(
    scaling: ScalingConfig, parallel: ParallelConfig, fitting: int
) -> WorkerPlan | None:
    """The largest start that fits: replicas first, then spares; None where not even the least does.

    Args:
        scaling: what the user allows.
        parallel: how large a replica is.
        fitting: workers that the cluster has room for now.
    """
    replicas = min(scaling.max_replicas, fitting // parallel.workers)
    if replicas < scaling.min_replicas:
        return None
    return WorkerPlan(
        replicas=replicas, spares=min(scaling.spares, fitting - replicas * parallel.workers)
    )
