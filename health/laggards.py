"""From the places of workers in their work to a verdict: who of them is stuck? Pure.

A worker that is called away and does not come may be at work that takes long: an evaluation, an
upload, the first step of a model that is compiled. It enters a new phase of it now and then. One
that is stuck does not; nor does one that waits for either in a collective: of a replica, one that
has begun more of them than a mate that does not come either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from health.progress import Place


def find_stuck(
    places: Mapping[str, Place | None],
    timeout_s: float,
    *,
    replicas: Iterable[Iterable[str]] = (),
) -> tuple[list[str], float]:
    """Who is stuck of the workers that were called more than `timeout_s` ago and have not come.

    While one of them enters new phases, the others may be waiting for it. When none does, those who
    do not wait for anybody are to blame; where there is no such one, all who do not wait for mates.

    Args:
        places: worker -> where it is; None where nobody can tell.
        timeout_s: how long one phase may take.
        replicas: workers, of whom each has begun collectives with the others.

    Returns:
        Those who are stuck, and otherwise the seconds to wait before the next look.
    """
    in_phase_s = [timeout_s if p is None else p.in_phase_s for p in places.values()]
    left_s = max((timeout_s - seconds for seconds in in_phase_s), default=0.0)
    if left_s > 0:
        return [], left_s
    left = dict(places)
    for replica in replicas:
        begun = {w: p.collectives for w in replica if (p := places.get(w)) and p.collectives}
        for worker, count in begun.items():
            if count > min(begun.values()):
                del left[worker]  # it waits for a mate
    busy = [worker for worker, p in left.items() if p is None or not p.waits]
    return busy or list(left), 0.0
