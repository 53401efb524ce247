"""The metrics of a run, by name: what each is, and its labels. In words: docs/monitoring.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RECENT_STEPS = 20
"""Speed is measured over so many steps, and the time since the last of them."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What is told of a metric."""

    help: str
    """What it is."""
    tags: tuple[str, ...] = ()
    """Its labels, beside the run's."""


METRICS: dict[str, Metric] = {
    "elastic_heartbeat_timestamp_seconds": Metric(
        help="When the coordinator told of the run last, in seconds since the epoch."
    ),
    "elastic_over": Metric(help="1 once this start of the run is over, else 0."),
    "elastic_step": Metric(help="Steps committed."),
    "elastic_planned_steps": Metric(help="Steps the run will have."),
    "elastic_step_timestamp_seconds": Metric(
        help="When the last step was committed, or else this start began."
    ),
    "elastic_loss": Metric(help="Training loss of the last step, nats per token."),
    "elastic_grad_norm": Metric(help="Gradient norm of the last step, before clipping."),
    "elastic_tokens_per_second": Metric(
        help=f"Tokens per second of the last {RECENT_STEPS} steps, stalls included."
    ),
    "elastic_mfu": Metric(
        help="Model FLOP/s over what the GPUs of the replicas can do, stalls included.",
        tags=("counting",),
    ),
    "elastic_replicas": Metric(help="Replicas that train."),
    "elastic_min_replicas": Metric(help="Fewest replicas that the run trains with."),
    "elastic_max_replicas": Metric(help="Replicas of the full layout."),
    "elastic_workers": Metric(help="Workers that live."),
    "elastic_spares": Metric(help="Workers that wait for a place."),
    "elastic_planned_spares": Metric(help="Spares that the run was to have."),
    "elastic_workers_lost": Metric(help="Workers lost in this start, by cause.", tags=("cause",)),
    "elastic_restarts": Metric(
        help="Losses in this start of workers with a place, those of one incident once, and of the "
        "coordinator."
    ),
    "elastic_regroups": Metric(help="Regroups called in this start, by reason.", tags=("reason",)),
    "elastic_lost_seconds": Metric(
        help="Seconds that losses of workers took from training, by phase of the recovery.",
        tags=("phase",),
    ),
    "elastic_lost_steps": Metric(help="Committed steps that had to be done again."),
    "elastic_skipped_steps": Metric(help="Steps with a loss or gradient that was not finite."),
    "elastic_saved_step": Metric(help="Steps in the newest checkpoint of this start."),
    "elastic_saved_timestamp_seconds": Metric(
        help="When the newest checkpoint was committed, or else this start began."
    ),
    "elastic_budget_spent": Metric(
        help="Share of a budget of HealthConfig that is used up since the last step.",
        tags=("budget",),
    ),
    "elastic_suspect_nodes": Metric(help="Machines that are suspect."),
    "elastic_node_signs": Metric(
        help="Signs of a fault that a node shows now.", tags=("node", "sign")
    ),
    "elastic_verdicts": Metric(
        help="Verdicts in this start, by cause, step of the ladder and what became of it.",
        tags=("cause", "step", "outcome"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A metric's value."""

    name: str
    """A key of `METRICS`."""
    value: float
    """It."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Its labels, beside the run's."""
