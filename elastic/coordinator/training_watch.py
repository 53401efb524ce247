"""Losses and gradient norms that stand out: warns, ends the run, or goes back and passes over data.

Decided here, from the steps as they are recorded, and told to all workers by the next roster. So
nobody need agree on anything, a newcomer needs no history, and no step waits. That the run is some
steps further by then changes no bit: the finding depends on the steps before it alone, and those
after it are done again. Decision: docs/decisions/052.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from elastic.coordinator.dispatcher import Dispatcher
from elastic.coordinator.receipts import Receipts
from elastic.coordinator.replay import Replay
from elastic.coordinator.retreat import Retreat
from elastic.coordinator.run_log import RunLog
from elastic.membership.machine import Membership
from elastic.protocol import events
from elastic.protocol.causes import USER_ERROR
from elastic.reporting.event_log import recent_steps
from elastic.training_config import Action, TrainingHealthConfig
from health.training import Finding, Limits, StepFacts, find_trouble
from trainer.loop.samples import Skip

_MOST_UNTOLD = 1000
"""Steps whose findings may be missing from the records: as many as a worker reports in one call.
None of a later one is taken before those are told."""


class TrainingWatch:
    """Looks at each step that is recorded.

    Args:
        config: what counts as trouble, and what is done then.
        max_nonfinite_steps: as in `HealthConfig`.
        membership: told which data to pass over.
        dispatcher: ends the run.
        records: where it is written down.
        receipts: told which checkpoint to keep.
        retreat: takes the run back.
    """

    def __init__(
        self,
        config: TrainingHealthConfig,
        max_nonfinite_steps: int,
        *,
        membership: Membership,
        dispatcher: Dispatcher,
        records: RunLog,
        receipts: Receipts,
        retreat: Retreat,
    ) -> None:
        self._config, self._limits = config, config.limits(max_nonfinite_steps)
        self._membership, self._dispatcher = membership, dispatcher
        self._records, self._receipts, self._retreat = records, receipts, retreat
        self._history: list[StepFacts] = []
        self._goes_back = False
        """What is recorded until then will be done again."""
        self._untold: list[Finding] = []
        """What a coordinator before this one would have told next."""
        records.followers.append(self._hear)

    def go_on_from(self, step: int) -> None:
        """So many steps are recorded: at the start, and after a restore. Reads some of them."""
        self._read(step, self._limits.history_steps)
        self._keep(step)

    def _read(self, step: int, count: int) -> list[events.StepRecord]:
        steps = recent_steps(self._records.steps_path, step, count)
        history = steps[-self._limits.history_steps :]
        self._history, self._goes_back = [_facts(record) for record in history], False
        return steps

    def replay(self, replayed: Replay) -> None:
        """As `go_on_from`, in the middle of the run. A step may be in the records, and what it
        shows not: the coordinator was lost between the two lines, or its machine with one of
        them."""
        count = self._limits.history_steps + _MOST_UNTOLD
        steps = self._read(replayed.recorded, count)
        self._untold = find_untold(steps, self._limits, replayed)
        self._keep(min((found.last for found in self._untold), default=replayed.recorded))

    def _keep(self, recorded: int) -> None:
        """The first step of a finding that is still to come may be so far back, and by the time
        that it comes any number of checkpoints may have been committed."""
        if self._config.skips_data:
            self._receipts.keep(max(0, recorded + 1 - self._limits.streak_steps), by="training")

    def _hear(self, event: events.Event) -> None:
        if isinstance(event, events.RegroupDone) and event.outcome == "restore":
            self.go_on_from(event.step)

    def take(self, steps: Sequence[events.StepRecord]) -> None:
        """Steps were recorded."""
        for record in steps:
            if self._goes_back:
                return
            self._history = [*self._history, _facts(record)][-self._limits.history_steps :]
            for finding in find_trouble(self._history, self._limits):
                if not self._goes_back:
                    self._meet(finding)
            if not self._goes_back:
                self._keep(record.step + 1)

    def take_up(self, troubles: Sequence[events.TrainingTrouble]) -> None:
        """Does what is due by the records, and a coordinator before this one had no time for; then
        tells what it did not tell. To be called when the run is known."""
        for trouble in troubles:
            if trouble.action != "warn" and not self._goes_back:
                self._keep(trouble.last)
                self._act(trouble)
        for finding in self._untold:
            going_back = self._goes_back or self._membership.progress.going_back
            if self._membership.stopped is None and not going_back:
                self._meet(finding)

    def _action(self, finding: Finding) -> Action:
        config = self._config
        actions: dict[str, Action] = {
            "nonfinite": config.on_nonfinite,
            "loss_spike": config.on_loss_spike,
            "norm_spike": config.on_norm_spike,
            "no_progress": config.on_no_progress,
        }
        return actions[finding.kind]

    def _meet(self, finding: Finding) -> None:
        trouble = events.TrainingTrouble(
            time=time.time(),
            trouble=finding.kind,
            first=finding.first,
            last=finding.last,
            detail=finding.detail,
            action=self._action(finding),
        )
        self._records.note(trouble)
        self._act(trouble)

    def _act(self, trouble: events.TrainingTrouble) -> None:
        if trouble.trouble == "nonfinite" and trouble.action == "stop":
            return  # the workers end it, and name the samples
        error = f"step {trouble.last}: {trouble.detail}"
        if trouble.action == "stop":
            self._dispatcher.spawn(
                self._dispatcher.stop(
                    f"{error} (health.training.on_{trouble.trouble} is 'stop')", USER_ERROR
                )
            )
        elif trouble.action == "skip_data":
            self._skip(trouble.first, error)

    def _skip(self, first: int, error: str) -> None:
        config, skips = self._config, self._membership.skips
        if len(skips) >= config.max_skips:
            self._dispatcher.spawn(
                self._dispatcher.stop(
                    f"{error}; data were passed over {len(skips)} times before "
                    f"(health.training.max_skips). Lower train.optimizer.lr, or look at the data",
                    USER_ERROR,
                )
            )
            return
        self._goes_back = True
        skip = Skip(first, config.skip_steps)
        self._dispatcher.spawn(self._retreat.go_back(at_most=first, reason=error, skip=skip))


def find_untold(
    steps: Sequence[events.StepRecord], limits: Limits, replayed: Replay
) -> list[Finding]:
    """What some steps show, and the records do not tell. Of steps that were done since the run
    began, or went back, alone: before it was held against other limits, or is void.

    Args:
        steps: the last `limits.history_steps` and `_MOST_UNTOLD` that count; fewer where there are.
        limits: what is put up with.
        replayed: what the records say.
    """
    told = {(trouble.trouble, trouble.last) for trouble in replayed.troubles}
    facts, found = [_facts(record) for record in steps], list[Finding]()
    for end, record in list(enumerate(steps, 1))[-_MOST_UNTOLD:]:
        if 0 < replayed.restored <= record.generation:
            history = facts[max(0, end - limits.history_steps) : end]
            found += [f for f in find_trouble(history, limits) if (f.kind, f.last) not in told]
    return found


def _facts(record: events.StepRecord) -> StepFacts:
    return StepFacts(step=record.step, loss=record.loss, grad_norm=record.grad_norm)
