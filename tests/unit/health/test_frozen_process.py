from __future__ import annotations

from health.frozen import History, Sample, decide_frozen, observe
from health.heartbeat import Record
from health.verdict import Verdict

TIMEOUT_S = 10.0


def record(beat_s: float) -> Record:
    return Record(
        serial=5, step=3, phase=2, phase_s=0.0, beat_s=beat_s, collectives=0, thread=1, left=0
    )


def history_of(*samples: tuple[float, str, float | None]) -> History:
    """From (awake time, state, beat); a beat of None: there is no heartbeat to be read."""
    history = None
    for awake_s, state, beat_s in samples:
        shown = None if beat_s is None else record(beat_s)
        history = observe(history, Sample(awake_s=awake_s, state=state, record=shown))
    assert history is not None
    return history


def verdict(*samples: tuple[float, str, float | None]) -> Verdict | None:
    return decide_frozen("w1", history_of(*samples), TIMEOUT_S)


def test_stopped_in_two_samples_in_a_row_is_frozen() -> None:
    assert verdict((0.0, "S", 1.0), (0.2, "T", 1.0), (0.4, "T", 1.0)) == Verdict(
        cause="hang",
        workers=("w1",),
        evidence=("stopped by a signal (state T in 2 samples)",),
        confidence="certain",
    )


def test_stopped_without_a_heartbeat_is_frozen_too() -> None:
    assert verdict((0.0, "T", None), (0.2, "T", None)) is not None


def test_stopped_for_a_moment_is_not() -> None:
    assert verdict((0.0, "S", 1.0), (0.2, "T", 1.0)) is None
    assert verdict((0.0, "T", 1.0), (0.2, "R", 1.2), (0.4, "T", 1.3)) is None


def test_a_heartbeat_that_stands_still_is_frozen_after_the_bound_and_not_before() -> None:
    for state in "RSD":
        assert verdict((0.0, state, 7.0), (10.0, state, 7.0)) is None
        found = verdict((0.0, state, 7.0), (9.9, state, 7.0), (10.2, state, 7.0))
        assert found == Verdict(
            cause="hang",
            workers=("w1",),
            evidence=(
                f"no heartbeat for 10.2 s, where 10 s are too long (health.freeze_timeout_s), "
                f"process in state {state}",
            ),
            confidence="certain",
        )


def test_every_new_beat_starts_the_count_again() -> None:
    assert verdict((0.0, "R", 1.0), (9.0, "R", 2.0), (18.0, "R", 2.0)) is None
    assert verdict((0.0, "R", 1.0), (9.0, "R", 2.0), (19.2, "R", 2.0)) is not None


def test_a_process_in_a_debugger_is_not_frozen_and_has_all_its_time_afterwards() -> None:
    held = [(float(second), "t", 1.0) for second in range(100)]
    assert verdict(*held) is None
    assert verdict(*held, (105.0, "S", 1.0)) is None
    assert verdict(*held, (110.0, "S", 1.0)) is not None


def test_without_a_heartbeat_silence_proves_nothing() -> None:
    assert verdict((0.0, "S", None), (1000.0, "S", None)) is None
